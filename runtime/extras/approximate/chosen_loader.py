"""Load chosen rows of stored prefixes, for requests that allow a share of the rows.

Drives row sources, stage by stage. Knows prompts by name, not which rows are chosen. If anything is missing, wrong,
late, or not clearly faster, the request is sent back, to be served from exact pages. Each request has its own rows.
They are shared with no other request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from weakref import WeakSet

from ...artifact.manifest import PAGE_SIZE
from ...cache.prefix_cache import PrefixCache
from ...engine.request_options import RequestOptions
from ...errors import OutOfPages, SparseSpanError
from ...prefix.disk_index import DiskIndex
from ...prefix.disk_reader import DiskReader, EngineThread, Read
from ...prefix.loaded_prefix import LoadedRows, PrefixLookup
from ...prefix.rates import Rates
from .chosen_rows import ChosenCounts, RowSource, RowSources, TransferRefused, WantedRows

_LOGGER = logging.getLogger(__name__)

MAX_STAGED_BYTES = 256 << 20  # of rows that requests wait for, or hold; beyond it requests are served exactly
MAX_SOURCES = 16  # each can have a file open for each run of its prefix
_SLACK_S = 0.05


@dataclass(eq=False)
class _Transfer:
    """The load of one request's rows."""

    wanted: PrefixLookup
    namespace: bytes
    source: RowSource
    num_bytes: int  # approximate bytes of all rows
    deadline: float
    read: Read | None = None
    is_over: bool = False


class ChosenLoader:
    """The `RowOffers` of a tier: `begin` tells whether a request must wait.

    Args:
        ready: called when the rows of a request are loaded.
        send_back: called when a request must be served from exact pages.
        ended: called when a transfer has ended.

    Attributes:
        counts: outcomes of the requests.
    """

    def __init__(
        self,
        sources: RowSources,
        cache: PrefixCache,
        index: DiskIndex,
        reader: DiskReader,
        rates: Rates,
        queue: EngineThread,
        *,
        clock: Callable[[], float],
        ready: Callable[[PrefixLookup, LoadedRows], None],
        send_back: Callable[[PrefixLookup], None],
        ended: Callable[[], None],
    ) -> None:
        self._sources, self._cache, self._index, self._reader, self._rates = sources, cache, index, reader, rates
        self._queue, self._clock = queue, clock
        self._ready, self._send_back, self._ended = ready, send_back, ended
        self.counts = ChosenCounts()
        self._transfers: dict[str, _Transfer] = {}  # by the request's name
        self._closing: list[_Transfer] = []  # ended, while their read still runs
        self._staged: WeakSet[LoadedRows] = WeakSet()  # until they are in the pool
        self._has_computed = False  # a forward ran since the last step

    def begin(self, wanted: PrefixLookup) -> bool:
        """Load the requested share of the rows that are on disk and not in memory, or the least share that is enough,
        if that may be worth it. Return whether the request must wait.
        """
        share = max(_allowed_share(wanted), self._sources.least_share)
        memory, match = wanted.find(self._cache), wanted.find(self._index.cache)
        stop = len(match.pages)
        if share >= 1 or stop * PAGE_SIZE <= memory.num_tokens:
            return False
        assert match.namespace is not None, "it has pages"
        start = len(self._cache.tree.find(match.namespace, match.prompt_ids[: stop * PAGE_SIZE]).pages)
        compute_s = self._rates.compute_s(start * PAGE_SIZE, stop * PAGE_SIZE)
        num_bytes = int(share * (stop - start) * self._reader.page_bytes)
        source = None
        if compute_s is not None and self._has_room(num_bytes):
            prefix = self._index.prefix(match.namespace, match.prompt_ids, stop)
            source = self._sources.source(WantedRows(match, prefix, start, share))
        if source is None or compute_s is None:
            self.counts.num_refused += 1
            return False
        deadline = self._clock() + compute_s + _SLACK_S
        transfer = self._transfers[wanted.name] = _Transfer(wanted, match.namespace, source, num_bytes, deadline)
        self._read_next_stage(transfer)
        self._queue.at(deadline, partial(self._end_late, transfer))
        return True

    def abandon(self, name: str) -> None:
        """Stop loading for a request that has ended."""
        if (transfer := self._transfers.get(name)) is not None:
            self._end(transfer)

    def end(self, namespace: bytes | None = None) -> None:
        """Send the requests of a namespace, or all, back before the next step, and drop cached data of runs."""
        self._sources.forget(namespace)
        for transfer in list(self._transfers.values()):
            if namespace is None or transfer.namespace == namespace:
                self._end_without_rows(transfer)

    def read_ahead(self) -> None:
        """Read something for later requests, if the disk is idle and no request waits for rows."""
        if not self._transfers and not self._reader.queued_bytes:
            self._sources.read_ahead()

    def close(self) -> None:
        """Close all sources; the reader must have ended."""
        for transfer in [*self._transfers.values(), *self._closing]:
            transfer.source.close()
        self._sources.close()

    def _has_room(self, num_bytes: int) -> bool:
        """Return whether there is room for one more source, with rows of `num_bytes`."""
        staged = sum(transfer.num_bytes for transfer in self._transfers.values())
        staged += sum(rows.pages.nbytes for rows in self._staged)
        num_sources = len(self._transfers) + len(self._closing)
        return staged + num_bytes <= MAX_STAGED_BYTES and num_sources < MAX_SOURCES

    def _read_next_stage(self, transfer: _Transfer) -> None:
        """Start to read the next stage of a transfer; after the last one, the request continues with the rows."""
        if (stage := transfer.source.next_stage()) is not None:
            transfer.read = self._reader.run(
                stage.run, partial(self._handle_stage, transfer), num_bytes=stage.num_bytes
            )
            return
        rows = transfer.source.rows()
        self._staged.add(rows)
        self.counts.num_loaded += 1
        self.counts.num_tokens += rows.span.stop - rows.span.start
        self.counts.num_missing_bytes += rows.span.num_missing * self._reader.page_bytes // PAGE_SIZE
        self._end(transfer)
        self._ready(transfer.wanted, rows)

    def _handle_stage(self, transfer: _Transfer, read: Read) -> None:
        """Handle a stage that was read: go on, or end the transfer if its data is wrong or exact pages are as fast.

        A stage that needs a forward afterwards waits for the next step if this step had one already.
        """
        if transfer.is_over:
            self._close_source(transfer)
            return
        if read.is_right and transfer.source.computes_next:
            if self._clock() >= transfer.deadline:  # the deadline ends it, before the forward
                return
            if self._has_computed:
                self._queue.post(partial(self._handle_stage, transfer, read))  # after the next step
                return
            self._has_computed = True
            self._queue.post(self._allow_forward)
        try:
            if read.is_right:
                self._read_next_stage(transfer)
                return
            self.counts.num_disagreed += transfer.source.is_not_enough
            self.counts.num_broken += not transfer.source.is_not_enough
        except TransferRefused:
            self.counts.num_refused += 1
        except (OutOfPages, SparseSpanError):
            self.counts.num_broken += 1
        except Exception:  # the request must continue
            _LOGGER.exception("the rows that %s waits for could not be loaded", transfer.wanted.name)
            self.counts.num_broken += 1
        self._end_without_rows(transfer)

    def _allow_forward(self) -> None:
        """Allow one more forward of a probe, because a step has passed."""
        self._has_computed = False

    def _end_late(self, transfer: _Transfer) -> None:
        """End a transfer whose deadline has passed."""
        if not transfer.is_over:
            self.counts.num_late += 1
            transfer.source.late()
            self._end_without_rows(transfer)

    def _end_without_rows(self, transfer: _Transfer) -> None:
        """End a transfer without rows; its request goes on before anything is read ahead."""
        self._queue.post(partial(self._send_back, transfer.wanted))
        self._end(transfer)

    def _end(self, transfer: _Transfer) -> None:
        """Forget a transfer; its source is closed once the reader has finished with it."""
        del self._transfers[transfer.wanted.name]
        transfer.is_over = True
        assert transfer.read is not None
        self._reader.cancel([transfer.read])
        self._closing.append(transfer)
        if transfer.read.is_done:
            self._close_source(transfer)
        self._ended()

    def _close_source(self, transfer: _Transfer) -> None:
        """Close the source of an ended transfer, once."""
        if transfer in self._closing:
            self._closing.remove(transfer)
            transfer.source.close()


def _allowed_share(wanted: PrefixLookup) -> float:
    """Return the share of the rows that the request allows, above 0 and at most 1."""
    options = wanted.options
    return options.kv_budget or 1.0 if isinstance(options, RequestOptions) else 1.0
