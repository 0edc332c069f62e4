"""Digests of logits become one row where all targets agree, and as many as there are digests where they do not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from bench.digests.__main__ import FUSED, MODELS
from bench.report import targets

Lines = Callable[[Iterable[object]], list[str]]
ORIGIN = dict.fromkeys(("command", "machine", "apache_tvm"), "x")


def run(target: str, sha256: str, *, num_tokens: int = 512, commit: str = "1234567", date: str = "1") -> dict[str, Any]:
    figures = {"model": "m", "kv_dtype": "f16", "vocab_size": 1000, "sha256": sha256 * 64}
    origin = {**ORIGIN, "commit": commit, "date": date}
    return {**figures, "target": target, "num_tokens": num_tokens, "origin": origin}


def test_targets_that_agree_share_a_row(lines: Lines) -> None:
    runs = [run("armv8", "a"), run("x86-64-v3", "a"), run("x86-64-v3", "b", num_tokens=16)]
    assert lines(targets.digests({"runs": dict(enumerate(runs))})) == [
        f"| m | f16 | 512 x 1,000 | {'a' * 16} | armv8, x86-64-v3 |",
        f"| m | f16 | 16 x 1,000 | {'b' * 16} | x86-64-v3 |",
    ]


def test_a_target_that_differs_has_a_row_of_its_own(lines: Lines) -> None:
    runs = [run("armv8", "b"), run("x86-64-v3", "a"), run("x86-64-v4", "a")]
    assert lines(targets.digests({"runs": dict(enumerate(runs))})) == [
        f"| m | f16 | 512 x 1,000 | {'b' * 16} | armv8 |",
        f"| m | f16 | 512 x 1,000 | {'a' * 16} | x86-64-v3, x86-64-v4 |",
    ]


def test_each_commit_is_named_once_with_its_last_date() -> None:
    runs = [run("armv8", "a", date="2"), run("x86-64-v3", "a", date="3"), run("x86-64-v4", "a", commit="7654321")]
    *_, first, second = targets.digests({"runs": dict(enumerate(runs))})
    assert "commit 1234567, 3;" in first and "commit 7654321, 1;" in second


def test_targets_with_fused_multiply_add_are_compared() -> None:
    assert {"x86-64-v3", "x86-64-v4", "x86-64-v4-vnni", "armv8", "armv8.2-dotprod", "armv8.2-i8mm"} <= {*FUSED}
    assert "x86-64-v2" not in FUSED and {each.kv_dtype for each in MODELS.values()} == {"k12v8", "f16", "f32"}
