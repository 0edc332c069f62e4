"""What computing costs is kept beside a store's pages: of this artifact on this machine, or not at all."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from radixlm.runtime.prefix.prefill_measure import NAME, StoredPrefill
from radixlm.runtime.prefix.rates import Rates
from radixlm.runtime.store.record import BLOCK, sealed

from ..store.pages import IDENTITY, OTHER


def of(directory: Path, identity: object = IDENTITY, num_threads: int = 2) -> StoredPrefill:
    assert identity in (IDENTITY, OTHER)
    chosen = IDENTITY if identity == IDENTITY else OTHER
    return StoredPrefill.of(directory, chosen, num_threads=num_threads, is_scored=False)


def measured() -> Rates:
    rates = Rates()
    rates.observe_compute(num_tokens=128, position=64, seconds=0.128)
    rates.observe_compute(num_tokens=128, position=4032, seconds=0.256)
    return rates


@pytest.fixture
def stored(tmp_path: Path) -> StoredPrefill:
    of(tmp_path).save(measured())
    return of(tmp_path)


def test_rates_begin_with_what_the_one_before_it_knew(stored: StoredPrefill) -> None:
    rates = Rates()
    assert stored.load(rates)
    for start, stop in ((0, 128), (3000, 4000)):
        assert rates.compute_s(start, stop) == measured().compute_s(start, stop)
    assert stat.S_IMODE((stored.directory / NAME).stat().st_mode) == 0o600


def test_what_was_measured_for_another_artifact_or_machine_is_not_used(stored: StoredPrefill) -> None:
    directory = stored.directory
    for other in (of(directory, OTHER), of(directory, num_threads=3), replace(stored, machine="another")):
        rates = Rates()
        assert not other.load(rates) and rates.compute_sums is None


def test_a_file_that_broke_anywhere_is_not_used(stored: StoredPrefill) -> None:
    path = stored.directory / NAME
    whole = path.read_bytes()
    broken = [b"", whole[:-1], whole + b"\0", bytes(BLOCK), *(flipped(whole, at) for at in range(0, BLOCK, 97))]
    for content in broken:
        path.write_bytes(content)
        assert not stored.load(Rates())


@pytest.mark.parametrize(
    "sums",
    [
        (0.0, 1.0, 1.0, 1.0, 1.0),  # of no measurement
        (1.0, 1.0, -1.0, 1.0, 1.0),
        (1.0, 1.0, 1e9, 1.0, 1.0),  # years a token
        (1.0, 1e300, 1.0, 1e300, 1.0),
        (1.0, 9.0, 1.0, 1.0, 1.0),  # of no positions
        (1.0, 1.0, None, 1.0, 1.0),
        (1.0,),
    ],
)
def test_numbers_that_were_never_measured_are_not_used(stored: StoredPrefill, sums: tuple[float, ...]) -> None:
    record = {"version": 1, "identity": stored.identity, "machine": stored.machine, "sums": sums}
    (stored.directory / NAME).write_bytes(sealed(msgspec.json.encode(record), BLOCK))
    assert not stored.load(Rates())


def test_a_directory_that_cannot_be_written_is_no_trouble(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    of(tmp_path / "not there").save(measured())
    assert "could not be written" in caplog.text


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
