"""A real model's replies, sampled freely, are not computed again when the conversation goes on."""

from __future__ import annotations

from pathlib import Path

from bench.replay.live import NEXT, LiveReplay, summary


def test_of_a_reply_that_came_whole_only_the_last_token_is_prefilled(smollm2_artifact: Path) -> None:
    with LiveReplay(smollm2_artifact, max_tokens=24, seed=29) as live:  # of either default of KV
        turns = live.talk("Write a haiku about a cat.", NEXT[:2]) + live.talk("写一首关于春天的诗。", NEXT[:2])
    assert len(turns) == 4
    found = summary(turns)
    assert found["whole"]["num_turns"] >= 2
    assert found["whole"]["num_again"] == 0
    # the second conversation has a reply whose text is encoded into other ids than it was sampled as
    assert sum(turn.num_prefilled for turn in turns) < sum(turn.num_by_ids for turn in turns)
