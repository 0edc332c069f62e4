"""Find where a prompt's last message begins, by the special tokens between messages. Knows ids alone."""

from __future__ import annotations

from collections.abc import Container, Sequence

MAX_BETWEEN = 4  # tokens from one special token to the next of the same seam, as in `<|im_end|>\\n<|im_start|>`
MIN_BEFORE = 16  # tokens; it costs more to stop than to compute less again
MIN_MESSAGE = 8  # tokens; less behind the last seam is no message, but how the template asks for one


def turn_start(token_ids: Sequence[int], special_ids: Container[int]) -> int | None:
    """How many tokens are before the last message, the special ones included; None: no seam was found.

    A client that changes its last message each time, or puts words behind it that it takes away again, goes on from
    there.

    >>> turn_start([1] * 20 + [9, 7, 8] + [1] * 10 + [9, 7, 8], special_ids=(7, 9))
    22
    """
    before = len(token_ids)
    for place in range(len(token_ids) - 1, -1, -1):
        if token_ids[place] in special_ids:
            if before - place > MAX_BETWEEN and before - place - 1 >= MIN_MESSAGE:
                return place + 1 if place >= MIN_BEFORE else None
            before = place
    return None
