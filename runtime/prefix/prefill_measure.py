"""Measure the cost of prefill, so that the first load from disk can be compared with it.

A file next to a store's pages keeps the result for the next start. Knows a model and its pages, and that one file. A
file of another artifact or machine, or a damaged one, is a miss.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
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
from ..system import replaced
from .rates import ComputeSums, LinearRate, Rates

_LOGGER = logging.getLogger(__name__)
NAME: Final = "PREFILL"
_MAX_TOKEN_S: Final = 60.0  # a higher value cannot be a measurement
_FAR = 4096  # tokens; measuring at 8,192 takes twice as long, and the costs follow the same line
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
    """Measure prefill at both ends of a context, one step for each `next`, and pass the times to `rates`.

    Computes a few tokens that belong to no request, on free pages. Ends if there are too few, because then requests
    have been computed, which measure more.

    Args:
        max_num_tokens: the most tokens of one step.
        clock: seconds; only differences count.

    Returns:
        Whether everything was measured.
    """
    num_pages = min(context_length // PAGE_SIZE, cache.pool.max_allocation, _FAR // PAGE_SIZE)
    num_tokens = min(_MEASURED_TOKENS, max_num_tokens, num_pages * PAGE_SIZE)
    num_few = min(_FEW_TOKENS, num_tokens)
    for start in (0, num_pages * PAGE_SIZE - num_tokens):
        # the first use of pages of the pool waits for the system to allocate memory: twice as long, and more
        for first, is_warm in ((start + num_tokens - num_few, False), (start, True)):
            try:
                seconds = seconds_of_zeros(forward, cache, first, start + num_tokens, clock=clock)
            except OutOfPages:
                return False
            except Exception:  # requests will raise the same error, and report it
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
    num_outputs: int | None = None,
) -> float:
    """Measure the seconds that a prefill of the tokens `[start, stop)` takes; all token ids are 0.

    Uses pages that are free before and after.

    Args:
        num_outputs: with the logits of the last token, and the largest of this many; None: without logits.

    Raises:
        OutOfPages: too few pages are free.
    """
    pool, states = cache.pool, cache.states
    slot = None if states is None else states.allocate()
    pages: list[int] = []
    try:
        pages = pool.allocate(-(-stop // PAGE_SIZE))
        batch = Batch.of_zeros(start, stop, pages, wants_logits=num_outputs is not None, state_out=slot)
        begun = clock()
        forward.forward(batch)
        if num_outputs is not None:
            forward.top_logits(1, num_outputs)
        return clock() - begun
    finally:
        pool.release(reversed(pages))  # the pool is a stack: the next step gets the same pages
        if states is not None and slot is not None:
            states.release(slot)


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of the file, in a block with a checksum at its end, like a page's header."""

    version: Literal[1]
    identity: str
    machine: str
    sums: ComputeSums


@dataclass(frozen=True)
class StoredPrefill:
    """The measurement in a store's directory. One of another artifact or machine is ignored, and overwritten."""

    directory: Path
    identity: str
    machine: str

    @classmethod
    def of(cls, directory: Path, identity: StoreIdentity, *, num_threads: int | None, is_scored: bool) -> StoredPrefill:
        """Return the measurement of an artifact on this machine. `num_threads` is None for the default number."""
        threads = default_num_threads() if num_threads is None else num_threads
        way = "scored" if is_scored else "plain"
        machine = f"{cpu_name()}; {' '.join(sorted(cpu_features()))}; {threads} threads; {way}"
        return cls(directory, identity.digest.hex(), machine)

    def load(self, rates: Rates) -> bool:
        """Initialize unmeasured rates from the file; return False if there is no valid one."""
        sums = self._read()
        if sums is None:
            return False
        rates.begin_with(sums)
        return True

    def save(self, rates: Rates) -> None:
        """Write the measured rates of prefill, if any; a failing disk is only logged."""
        if rates.compute_sums is None:
            return
        record = _Record(1, self.identity, self.machine, rates.compute_sums)
        try:
            with replaced(self.directory / NAME, mode=0o600, is_synced=False) as file:  # it can be measured again
                file.write(sealed(msgspec.json.encode(record), BLOCK))
        except OSError as error:
            _LOGGER.warning("what prefill costs could not be written to %s: %s", self.directory, error)

    def _read(self) -> ComputeSums | None:
        """Return the sums that the file holds; None if it is missing or damaged, or of another model or machine."""
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
    """Return whether sums can come from measurements: JSON has no infinity, but can contain any number."""
    weight, x, y, xx, _ = sums
    if min(sums) < 0 or weight <= 0 or y <= 0 or xx * weight < x * x * 0.999:  # allows for rounding
        return False
    seconds = LinearRate.of(sums).seconds(0.0)
    return seconds is not None and 0 < seconds < _MAX_TOKEN_S
