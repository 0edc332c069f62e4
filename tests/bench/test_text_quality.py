"""Ids that are the encoding are no worse and no better; others are compared token by token."""

from __future__ import annotations

from pathlib import Path

import pytest
from radixlm.runtime.artifact import Artifact
from radixlm.tokenizer_fix import Tokenizer

from bench.replay_conversations import Conversation
from bench.text_quality import Compared, TextQuality, summary

TALK = Conversation(
    (
        "What is the capital of France?",
        "The capital of France is the city of Paris.",
        "And of Italy?",
        "The capital of Italy is Rome.",
    )
)


def test_a_model_makes_something_else_of_other_ids_only(smollm2_artifact: Path) -> None:
    artifact = Artifact.open(smollm2_artifact)
    usual = Tokenizer(artifact.tokenizer_json).encode_inside(TALK.texts[1])
    quality = TextQuality(artifact)
    same = quality.compare_sampled(TALK, usual)
    split = quality.compare_split(TALK)
    quality.close()
    assert (same.gain, same.kl, same.agreement) == (0, 0, 1)
    assert -3 < same.usual < -0.1
    assert [(one.ids, one.follows) for one in split] == [("split", "next reply"), ("split", "rest")]
    assert all(0.001 < one.kl < 5 for one in split)
    assert split[0].usual == same.usual


def test_a_talks_own_samples_count_once() -> None:
    rows = summary(
        [
            Compared(talk, "sampled", "next reply", gain=gain, usual=-2, kl=0.1, agreement=1)
            for talk, gain in [("a", 0.0), ("a", 2.0), ("b", 3.0)]
        ]
    )
    assert len(rows) == 1
    assert (rows[0]["num_talks"], rows[0]["num_replies"]) == (2, 3)
    assert rows[0]["gain"] == pytest.approx(2.0)
    assert rows[0]["gain_error"] == pytest.approx(2.0)
