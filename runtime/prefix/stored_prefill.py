"""Keep beside a store's pages what computing a prompt costs, so that the next start does not measure it again.

Knows one small file: of this artifact on this machine, or a miss, whatever is wrong with it.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec

from ..artifact.cpu import cpu_features, cpu_name, default_num_threads
from ..store import StoreIdentity
from ..store.record import BLOCK, CHECKSUM_BYTES, is_sealed, sealed
from .rates import ComputeSums, LinearRate, Rates

_LOGGER = logging.getLogger(__name__)
NAME: Final = "PREFILL"
_MAX_TOKEN_S: Final = 60.0  # what takes longer was not measured here


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
