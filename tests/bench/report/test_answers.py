"""What models answer over parts of prefixes becomes tables that claim no more than was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from bench.report import answers

Lines = Callable[[Iterable[object]], list[str]]


def test_a_share_of_which_no_request_had_a_part_has_no_scores(lines: Lines) -> None:
    """A quarter of the prefixes scored as well as all of them, because all of them were loaded."""
    scores = {"booleans exact": 0.525, "nq exact": 0.25, "nq f1": 0.3}
    rows = [
        {"way": "as in the file", "scores": {"text word_perplexity": 491.3, **scores}},
        {"way": "100% of stored prefixes", "scores": scores, "in_part": 0},
        {"way": "75% of stored prefixes", "scores": scores, "in_part": 0},
        {"way": "25% of stored prefixes", "scores": scores, "in_part": 1234},
    ]
    origin = dict.fromkeys(("command", "commit", "date", "machine", "apache_tvm"), "x")
    run = {"model": "m", "documents": 40, "rows": rows, "origin": origin}
    assert lines(answers.lm_eval({"runs": {"m.gguf": run}})) == [
        "| as in the file | 491.3 | 52.5% | 25.0% | 30.0% |  |",
        "| 100% of stored prefixes |  | 52.5% | 25.0% | 30.0% | 0 |",
        "| 75% of stored prefixes |  |  |  |  | none was served in part |",
        "| 25% of stored prefixes |  | 52.5% | 25.0% | 30.0% | 1,234 |",
    ]
