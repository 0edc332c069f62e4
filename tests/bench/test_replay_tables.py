"""Replayed conversations become tables."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from bench import replay_tables
from bench.replay_adversaries import Held
from bench.results import read_results, write_results


def row(policy: str, num_prefilled: int) -> dict[str, Any]:
    return {
        "model": "llama2",
        "replies": "bare",
        "policy": policy,
        "num_prompt_tokens": 12_000,
        "num_prefilled": num_prefilled,
        "ratio": num_prefilled / 1000,
    }


def test_ratios_and_changed_histories_have_a_row_each(tmp_path: Path) -> None:
    held = Held(Counter({"quoted": 20, "truncated": 20}), Counter({"quoted": 0, "truncated": 3}))
    figures = {
        "rows": [row("text", 1000), row("seam", 6500), row("exact", 6500), row("others", 6600)],
        "changed": {name: {"text": vars(held), "memo": vars(held)} for name in ("llama2", "qwen2")},
    }
    write_results("replay", figures, tmp_path)
    results = read_results("replay", tmp_path)
    assert results is not None
    assert replay_tables.ratios(results).splitlines()[2] == "| llama2, bare | 1 | 6.5 | 6.5 | 6.6 | 1,000 | 12,000 |"
    assert replay_tables.changed(results).splitlines()[2:] == [
        "| text | 0 of 40 | 6 of 40 |",
        "| memo | 0 of 40 | 6 of 40 |",
    ]


def test_live_turns_and_qualities_have_a_row_each() -> None:
    counts = {"num_turns": 9, "is_other": 2, "num_prompt_tokens": 4000, "num_prefilled": 90}
    live = {"replies": {"whole": {**counts, "num_again": 0, "num_by_ids": 1500}}}
    assert replay_tables.live(live).splitlines()[2] == "| whole | 9 (2) | 4,000 | 90 | 0 | 1,500 |"
    means = {"usual": -2.5, "gain": 0.001, "gain_error": 0.004, "kl": 0.003, "kl_error": 0.0005}
    shares = {"agreement": 0.966, "agreement_error": 0.012}
    quality = {"rows": [{"ids": "sampled", "follows": "rest", "num_talks": 3, "num_replies": 4, **means, **shares}]}
    assert replay_tables.text_quality(quality).splitlines()[2] == (
        "| sampled, rest | 4, 3 | -2.500 | **+0.0010** ± 0.0040 | 0.0030 ± 0.0005 | 96.6% ± 1.2% |"
    )
