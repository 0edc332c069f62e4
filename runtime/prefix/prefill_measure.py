"""Measure what computing a prompt costs, so that the first load from disk can be weighed against it.

A file beside a store's pages keeps that for the next start. Knows a model and its pages, and that one file: of this
artifact on this machine, or a miss, whatever is wrong with it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec

from ..artifact.cpu import cpu_features, cpu_name, default_num_threads
from ..artifact.manifest import PAGE_SIZE
from ..cache.prefix_cache import PrefixCache
from ..errors import OutOfPages
from ..model.batch import Batch, Forward
from ..store import StoreIdentity
from ..store.record import BLOCK, CHECKSUM_BYTES, is_sealed, sealed
from .rates import ComputeSums, LinearRate, Rates

_LOGGER = logging.getLogger(__name__)
NAME: Final = "PREFILL"
_MAX_TOKEN_S: Final = 60.0  # what takes longer was not measured here
_FAR = 4096  # tokens: a context of 8,192 takes twice as long to measure at its end, and costs grow by the same line
_FEW_TOKENS = 32
_MEASURED_TOKENS = 128  # at 8,000 tokens SmolLM2 takes 1.70 ms for each, 2.00 for 64 at once, and 1.58 for 512


def measure_prefill(
    forward: Forward,
    cache: PrefixCache,
    rates: Rates,
    *,
    context_length: int,
    max_num_tokens: int,
    clock: Callable[[], float],
) -> Generator[None, None, bool]:
    """Compute a few tokens of no request, at the beginning of a context and far behind that, and tell `rates` how
    long they took: a step for each `next`. Free pages are written to; where there are too few it ends, for then
    requests were computed and have told more.

    Args:
        max_num_tokens: of one step.
        clock: seconds; only differences count.

    Returns:
        Whether all of it was measured.
    """
    num_pages = min(context_length // PAGE_SIZE, cache.pool.num_pages, _FAR // PAGE_SIZE)
    num_tokens = min(_MEASURED_TOKENS, max_num_tokens, num_pages * PAGE_SIZE)
    num_few = min(_FEW_TOKENS, num_tokens)
    for start in (0, num_pages * PAGE_SIZE - num_tokens):
        # what is first on pages of the pool waits for the system to find them: twice as long, and more
        for first, is_warm in ((start + num_tokens - num_few, False), (start, True)):
            try:
                seconds = seconds_of_zeros(forward, cache, first, start + num_tokens, clock=clock)
            except OutOfPages:
                return False
            except Exception:  # whatever it is, requests will meet it and say so
                _LOGGER.exception("prefill could not be measured")
                return False
            if is_warm:
                rates.observe_compute(num_tokens=num_tokens, position=start + num_tokens / 2, seconds=seconds)
            yield
    return True


def seconds_of_zeros(
    forward: Forward,
    cache: PrefixCache,
    start: int,
    stop: int,
    *,
    clock: Callable[[], float],
    vocab_size: int | None = None,
) -> float:
    """Return how long the tokens `[start, stop)` of a context of zeros take, on pages that are free before and after.

    Args:
        vocab_size: with the logits of the last one, and the largest of so many; None: without.

    Raises:
        OutOfPages: too few pages are free.
    """
    pool, states = cache.pool, cache.states
    slot = None if states is None else states.allocate()
    pages: list[int] = []
    try:
        pages = pool.allocate(-(-stop // PAGE_SIZE))
        batch = Batch.of_zeros(start, stop, pages, wants_logits=vocab_size is not None, state_out=slot)
        begun = clock()
        forward.forward(batch)
        if vocab_size is not None:
            forward.top_logits(1, vocab_size)
        return clock() - begun
    finally:
        pool.release(reversed(pages))  # a stack: the next step gets the same ones
        if states is not None and slot is not None:
            states.release(slot)


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file; a block with a checksum at its end, as a page's header is."""

    version: Literal[1]
    identity: str
    machine: str
    sums: ComputeSums


@dataclass(frozen=True)
class StoredPrefill:
    """The measurement in a store's directory. Another artifact's or machine's is not used, and is written over."""

    directory: Path
    identity: str
    machine: str

    @classmethod
    def of(cls, directory: Path, identity: StoreIdentity, *, num_threads: int | None, is_scored: bool) -> StoredPrefill:
        """That of an artifact on this machine, with so many threads; None: as many as it gives."""
        threads = default_num_threads() if num_threads is None else num_threads
        way = "scored" if is_scored else "plain"
        machine = f"{cpu_name()}; {' '.join(sorted(cpu_features()))}; {threads} threads; {way}"
        return cls(directory, identity.digest.hex(), machine)

    def load(self, rates: Rates) -> bool:
        """Have rates that measured nothing begin with it; False if there is none that is right."""
        sums = self._read()
        if sums is None:
            return False
        rates.begin_with(sums)
        return True

    def save(self, rates: Rates) -> None:
        """Write what the rates say of computing, if it was measured; a disk that fails is no trouble."""
        if rates.compute_sums is None:
            return
        record = _Record(1, self.identity, self.machine, rates.compute_sums)
        unnamed = self.directory / f"{NAME}.new"
        try:
            unnamed.unlink(missing_ok=True)
            fd = os.open(unnamed, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(fd, "wb") as file:
                file.write(sealed(msgspec.json.encode(record), BLOCK))
            os.replace(unnamed, self.directory / NAME)
        except OSError as error:
            _LOGGER.warning("what prefill costs could not be written to %s: %s", self.directory, error)
            with suppress(OSError):
                unnamed.unlink(missing_ok=True)

    def _read(self) -> ComputeSums | None:
        try:
            with (self.directory / NAME).open("rb") as file:
                block = file.read(BLOCK + 1)
        except OSError:
            return None
        if len(block) != BLOCK or not is_sealed(block):
            return None
        try:
            record = msgspec.json.decode(block[:-CHECKSUM_BYTES].rstrip(b"\0"), type=_Record)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return None
        if (record.identity, record.machine) != (self.identity, self.machine):
            return None
        return record.sums if _is_possible(record.sums) else None


def _is_possible(sums: ComputeSums) -> bool:
    """Whether sums are of measurements: JSON has no infinity, but may have any number."""
    weight, x, y, xx, _ = sums
    if min(sums) < 0 or weight <= 0 or y <= 0 or xx * weight < x * x * 0.999:  # but for rounding
        return False
    seconds = LinearRate.of(sums).seconds(0.0)
    return seconds is not None and 0 < seconds < _MAX_TOKEN_S
