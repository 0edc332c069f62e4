"""Load pruned prefixes for requests that said which share of the rows is enough.

Knows requests by name. Whatever is missing, wrong, late, or not clearly quicker sends a request back, to be served
exactly. Each request has its own rows, which are shared with no other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakSet

from ..artifact.manifest import PAGE_SIZE
from ..cache.prefix_cache import PrefixCache
from ..errors import OutOfPages, SparseSpanError
from ..prefix.chosen_rows import Stage, TransferRefused, WantedRows
from ..prefix.disk_index import DiskIndex
from ..prefix.disk_reader import EngineThread, Read
from ..prefix.loaded_rows import LoadedRows
from ..prefix.prefix_loader import FindPrefix
from .pruned_source import PrunedReads, PrunedSource, PruningCounts

_LOGGER = logging.getLogger(__name__)

MAX_STAGED_BYTES = 256 << 20  # of rows that requests wait for, or with; beyond it requests are served exactly
MAX_SOURCES = 16  # each has one file open for each run of its prefix
_SLACK_S = 0.05


@dataclass(eq=False)
class _Waiting:
    """A request that waits, and the read that runs for it."""

    find: FindPrefix
    num_tokens_ahead: int | None
    namespace: bytes
    source: PrunedSource
    num_bytes: int  # of its rows, about
    deadline: float
    work: Read
    is_forgotten: bool = False  # with all that is kept of its namespace's runs


@dataclass
class PrunedLoader:
    """`begin` for each request that allows pruning; `advance` names those that go on, and those that are sent back.

    Args:
        post_advance: has `advance` called.
    """

    cache: PrefixCache
    index: DiskIndex
    reads: PrunedReads
    queue: EngineThread
    post_advance: Callable[[], None]
    _waiting: dict[str, _Waiting] = field(default_factory=dict)  # by the request's name
    _ended: list[_Waiting] = field(default_factory=list)  # the reader may have their files in use
    _sent_back: dict[str, tuple[FindPrefix, int | None]] = field(default_factory=dict)
    _loaded: dict[str, LoadedRows] = field(default_factory=dict)
    _staged: WeakSet[LoadedRows] = field(default_factory=WeakSet)  # until they are in the pool

    @property
    def counts(self) -> PruningCounts:
        """What became of the requests."""
        return self.reads.counts

    @property
    def is_ready(self) -> bool:
        """Whether `advance` would do anything now."""
        is_read = any(each.work.is_done for each in [*self._waiting.values(), *self._ended])
        return bool(self._sent_back) or is_read or self._may_prefetch

    def begin(self, name: str, find: FindPrefix, budget: float, *, num_tokens_ahead: int | None = None) -> bool:
        """Start to load the share `budget` of the rows that the disk has and memory has not, if that may be worth it.
        Returns whether the request waits.

        Args:
            num_tokens_ahead: returned with the request if it is sent back.
        """
        memory, match = find(self.cache), find(self.index.cache)
        stop = len(match.pages)
        if stop * PAGE_SIZE <= memory.num_tokens:
            return False
        assert match.namespace is not None, "it has pages"
        start = len(self.cache.tree.find(match.namespace, match.prompt_ids[: stop * PAGE_SIZE]).pages)
        compute_s = self.reads.rates.compute_s(start * PAGE_SIZE, stop * PAGE_SIZE)
        is_short = len(match.prompt_ids) - stop * PAGE_SIZE <= self.reads.probe.max_num_tokens
        num_bytes = int(budget * (stop - start) * self.reads.page_bytes)
        if compute_s is None or not is_short or not self._has_room(num_bytes):
            self.counts.num_refused += 1
            return False
        prefix = self.index.prefix(match.namespace, match.prompt_ids, stop)
        source = PrunedSource(WantedRows(match, prefix, start, budget), self.reads)
        deadline = self.reads.clock() + compute_s + _SLACK_S
        work = self._submit(source)
        assert work is not None
        self.queue.at(deadline, self.post_advance)
        self._waiting[name] = _Waiting(find, num_tokens_ahead, match.namespace, source, num_bytes, deadline, work)
        return True

    def advance(self) -> tuple[list[str], dict[str, tuple[FindPrefix, int | None]]]:
        """Go on with what was read. Returns the names of the requests whose rows are there, and those that are sent
        back, with what `begin` was told."""
        self._close_ended()
        self.reads.prefetch.advance(is_idle=not self._waiting)
        ready, has_probed = [], False
        for name, waiting in [(name, each) for name, each in self._waiting.items() if each.work.is_done]:
            if waiting.source.probes_next and waiting.work.is_right:
                if has_probed or waiting.deadline <= self.reads.clock():
                    continue  # one probe between two steps, and none for a request that is too late
                has_probed = True
            if self._go_on(name, waiting):
                ready.append(name)
        now = self.reads.clock()
        for name, waiting in [(name, each) for name, each in self._waiting.items() if each.deadline <= now]:
            self.counts.num_late += 1
            waiting.source.late()
            self._send_back(name)
        sent_back, self._sent_back = self._sent_back, {}
        return ready, sent_back

    def loaded(self, name: str) -> LoadedRows | None:
        """The rows of a request that `advance` named; asked once."""
        return self._loaded.pop(name, None)

    def abandon(self, name: str) -> None:
        """Forget a request."""
        self._loaded.pop(name, None)
        self._sent_back.pop(name, None)
        if name in self._waiting:
            self._end(name)

    def end(self, namespace: bytes | None = None) -> None:
        """Send the requests of a namespace back, or all, and forget what memory keeps of its runs."""
        for each in [*self._waiting.values(), *self._ended]:
            each.is_forgotten |= namespace is None or each.namespace == namespace  # the reader may still note something
        for name in [name for name, each in self._waiting.items() if each.is_forgotten]:
            self._send_back(name)
        self.reads.prefetch.discard(namespace)
        self.reads.known.discard(namespace)

    def start_over(self) -> None:
        """Forget all requests; files that the reader has in use are closed later."""
        self.end()
        self._sent_back.clear()
        self._loaded.clear()

    def close(self) -> None:
        """Close all files; the reader has ended."""
        for each in [*self._waiting.values(), *self._ended]:
            each.source.close()
        self.reads.prefetch.close()

    @property
    def _may_prefetch(self) -> bool:
        return self.reads.prefetch.is_ready(is_idle=not self._waiting)

    def _has_room(self, num_bytes: int) -> bool:
        """Whether there is room for one more source, of so many bytes of rows."""
        staged = sum(each.num_bytes for each in self._waiting.values())
        staged += sum(rows.pages.nbytes for rows in self._staged)
        return staged + num_bytes <= MAX_STAGED_BYTES and len(self._waiting) + len(self._ended) < MAX_SOURCES

    def _submit(self, source: PrunedSource) -> Read | None:
        """Have the reader run the source's next stage; None: there is none."""
        stage = source.next_stage()
        return None if stage is None else self._run(stage)

    def _run(self, stage: Stage) -> Read:
        return self.reads.reader.run(stage.run, lambda _: self.post_advance(), num_bytes=stage.num_bytes)

    def _go_on(self, name: str, waiting: _Waiting) -> bool:
        """Have the next stage of a request read. Returns whether all is read."""
        source = waiting.source
        try:
            if not waiting.work.is_right:
                self.counts.num_disagreed += source.drops_too_much
                self.counts.num_broken += not source.drops_too_much
            elif (work := self._submit(source)) is not None:
                waiting.work = work
                return False
            else:
                rows = self._loaded[name] = source.rows()
                self._staged.add(rows)
                self.counts.num_pruned += 1
                self._end(name)
                return True
        except TransferRefused:
            self.counts.num_refused += 1
        except (OutOfPages, SparseSpanError):
            self.counts.num_broken += 1
        except Exception:  # the request must go on
            _LOGGER.exception("the pruned prefix of %s could not be loaded", name)
            self.counts.num_broken += 1
        self._send_back(name)
        return False

    def _send_back(self, name: str) -> None:
        waiting = self._waiting[name]
        self._sent_back[name] = waiting.find, waiting.num_tokens_ahead
        self._end(name)

    def _end(self, name: str) -> None:
        waiting = self._waiting.pop(name)
        self.reads.reader.cancel([waiting.work])
        self._ended.append(waiting)
        self._close_ended()

    def _close_ended(self) -> None:
        """Close the files that the reader has done with."""
        for each in [each for each in self._ended if each.work.is_done]:
            each.source.close()
            if each.is_forgotten:
                self.reads.known.discard(each.namespace)
            self._ended.remove(each)
