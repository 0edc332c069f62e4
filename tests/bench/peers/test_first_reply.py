"""Replies are read without their names, and each mark goes to the engine whose reply it stands behind."""

from __future__ import annotations

import re

import pytest

from bench.peers.first_reply import OURS, PEER, read_marks, text_to_read
from bench.report import serving

ROWS = [
    {"question": f"What is {number}?", "replies": {OURS: f"good {number}", PEER: f"bad\n--- {number}"}, "marks": {}}
    for number in range(1, 21)
]


def read_by_someone(text: str) -> str:
    """The text with a mark behind each letter, by what the reply says."""
    return re.sub(
        r"^(--- [AB]:)\n(good|bad)", lambda found: f"{found[1]} {MARKS[found[2]]}\n{found[2]}", text, flags=re.MULTILINE
    )


MARKS = {"good": "yes", "bad": "'bad' is no word"}


def test_marks_go_to_the_replies_that_they_are_behind() -> None:
    rows = read_marks(ROWS, read_by_someone(text_to_read(ROWS)))
    assert [row["marks"] for row in rows] == [{OURS: "yes", PEER: "'bad' is no word"}] * len(ROWS)
    *_, page = serving.first_reply({"max_tokens": 128, "rows": rows})
    assert page.splitlines()[-1] == "| **sane in all** | 20 of 20 | 0 of 20 |"


def test_the_order_does_not_tell_whose_a_reply_is() -> None:
    text = text_to_read(ROWS)
    assert OURS not in text and PEER not in text
    assert 0 < text.count("A:\ngood") < len(ROWS)


def test_a_reply_without_a_mark_is_not_counted() -> None:
    unread = read_by_someone(text_to_read(ROWS)).replace("--- B: yes", "--- B:", 1)
    with pytest.raises(ValueError, match="write one behind each of"):
        read_marks(ROWS, unread)
