"""More streams than the pool holds: none fails, and every page comes back; on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
from radixlm.runtime.artifact import Artifact

from bench.load.ladder import RUNGS, Rung, climb, is_met, prompts_of, words_of

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
