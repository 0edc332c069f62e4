"""A prefix on disk is not loaded where computing it is quicker.

SGLang 26305: with its file backend a hit of 8k tokens took 2450 ms to the first token, and computing them 1725 ms.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from radixlm.runtime.engine.sampling_params import SamplingParams

from ..runtime.fake_model import FAKE_PAGE_BYTES, alone
from ..runtime.fake_tier import Served

PROMPT = [number % 37 for number in range(90)]  # five full pages
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
PREFILL_S = 1e-3  # a token


@pytest.fixture
def warm(tmp_path: Path) -> Iterator[Served]:
    """A process that finds the prompt on disk, and has measured how fast the model computes; its clock stands still."""
    first = Served(tmp_path / "store")
    first.bench.add("cold", PROMPT, GREEDY)
    first.run()
    first.close()
    served = Served(tmp_path / "store")
    while served.tier.rates.disk_bytes_per_s is None:  # it is measured as soon as it is opened
        served.bench.step()
        time.sleep(0.0005)  # for the thread that does
    served.tier.rates.observe_compute(num_tokens=512, position=256, seconds=512 * PREFILL_S)
    yield served
    served.close()


def ask(served: Served) -> int:
    served.bench.add("again", PROMPT, GREEDY)
    served.run()
    assert served.bench.tokens("again") == alone(PROMPT, GREEDY)
    return served.num_loaded("again")


@pytest.mark.parametrize(("times_as_fast", "num_loaded"), [(0.5, 0), (1.0, 0), (2.0, 80)])
def test_a_disk_is_read_from_only_if_it_is_faster_than_the_model(
    warm: Served, times_as_fast: float, num_loaded: int
) -> None:
    page_s = 16 * PREFILL_S / times_as_fast
    warm.tier.rates.disk_bytes_per_s = FAKE_PAGE_BYTES / page_s
    assert ask(warm) == num_loaded
    assert warm.tier.stats().num_loads_refused == (num_loaded == 0)


def test_a_disk_that_turns_out_slow_is_given_up_while_it_is_read_from(warm: Served) -> None:
    warm.tier.reader.piece_pages = 1
    warm.tier.rates.disk_bytes_per_s = 1e12
    real = warm.tier.rates.observe_read
    warm.tier.rates.observe_read = lambda *, num_bytes, seconds: real(  # type: ignore[method-assign]
        num_bytes=num_bytes, seconds=num_bytes / FAKE_PAGE_BYTES
    )  # a second for each page
    assert ask(warm) == 16, "the first page came, and with it the measurement"
    assert warm.tier.stats().num_loads_cut == 1
