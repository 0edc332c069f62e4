"""More streams than the pool holds: none fails, and every page comes back; on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
from radixlm.runtime.artifact import Artifact

from bench import ladder, ladder_tables
from bench.ladder import RUNGS, Rung, climb, is_met, prompts_of, words_of

SMALL = Rung("6 streams", 6, 12, num_words=8, num_reply_tokens=24, pool_tokens=256)


@pytest.fixture(scope="module")
def artifact(smollm2_artifact: Path) -> Artifact:
    return Artifact.open(smollm2_artifact)


def test_prompts_are_distinct_words_and_the_same_in_every_run(artifact: Artifact) -> None:
    words = words_of(artifact)
    texts = list(prompts_of(words, SMALL))
    assert texts == list(prompts_of(words, SMALL))
    assert len(set(texts)) == SMALL.num_requests
    assert all(len(set(text.split())) == SMALL.num_words for text in texts)


def test_every_request_of_a_rung_fits_its_pool() -> None:
    assert all(2 * rung.num_words + rung.num_reply_tokens < rung.pool_tokens for rung in RUNGS)


def test_streams_beyond_the_pool_all_get_their_replies_and_give_their_pages_back(artifact: Artifact) -> None:
    found = climb(artifact, SMALL, ())
    assert is_met(found), found["failures"]
    assert found["num_pages"] == 16
    assert found["num_preemptions"] > 0
    assert 0 < found["first_token_s"]["p50"] <= found["first_token_s"]["p99"]


def test_a_request_that_is_refused_is_a_failure(artifact: Artifact) -> None:
    found = climb(artifact, SMALL, ("--max-num-seqs", "1", "--max-queue", "0"))
    assert found["num_failures"] > 0
    assert "status 429" in found["failures"][0]
    assert not is_met(found)


def test_the_table_has_a_row_for_each_rung_and_shows_what_is_wrong() -> None:
    times = {"p50": 0.25, "p99": 2.0, "max": 3.0}
    rung = {
        **vars(SMALL),
        "mean_prompt_tokens": 39.6,
        "tokens_per_s": 1234.5,
        "first_token_s": times,
        "between_tokens_s": times,
        "num_preemptions": 1000,
        "num_failures": 0,
        "num_pages": 16,
        "num_free_pages": 16,
    }
    broken = {**rung, "num_failures": 2, "num_free_pages": 15}
    rows = ladder_tables.rungs({"name": "m", "rungs": [rung, broken]}).splitlines()
    assert rows[2] == (
        "| 6 streams | 12 | 40 + 24 | 256 | 1,234 | 250 ms / 2,000 ms | 250 ms / 2,000 ms | 1,000 | none | 16 of 16 |"
    )
    assert rows[3].endswith("| **2** | **15 of 16** |")
    assert not ladder.is_met(broken)
