"""What orders lose, and what learning them costs, become tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from bench.report import partial

Lines = Callable[[Iterable[object]], list[str]]


def test_orders_of_both_texts_are_lines_of_which_those_that_say_nothing_are_left_out(lines: Lines) -> None:
    stays, lost = {"stays": 0.95, "least": 0.9}, {"kl": 0.4, "kl_error": 0.1, "more": 0.1, "more_error": 0.02}
    rows = [{"way": "before", "num_queries": 3, **lost}, {"way": "a restart", "num_queries": 3, **stays, **lost}]
    found = partial.learned(
        {
            "num_questions": 9,
            "budget": 0.25,
            "nq": {"num_tokens": [3000], "rows": [{"way": "before", "num_queries": 0}, {"way": "nothing", **stays}]},
            "bbh": {"num_tokens": [800, 900], "rows": rows},
        }
    )
    assert lines(found) == [
        "| NQ | after, in one process | 95.0% (90.0%) |  |  |",
        "| BBH | before a restart |  | 0.400 ± 0.100 | +0.100 ± 0.020 |",
        "| BBH | after a restart | 95.0% (90.0%) | 0.400 ± 0.100 | +0.100 ± 0.020 |",
    ]


def test_a_step_that_learns_too_slowly_stands_out_and_each_model_has_its_table(lines: Lines) -> None:
    def run(ratio: float) -> dict[str, object]:
        step = {"step": "512", "forward_s": 0.2, "scored_s": 0.2 * ratio, "scored_over_forward": ratio}
        origin = dict.fromkeys(("command", "commit", "date", "machine", "apache_tvm"), "x")
        return {"model": "m", "calls": 3, "rows": [step], "origin": origin}

    assert lines(partial.scored({"runs": {"a": run(1.1), "b": run(1.25)}})) == [
        "| 512 | 200.00 | 220.00 | 1.10 | met |",
        "| 512 | 200.00 | 250.00 | 1.25 | **missed** |",
    ]
