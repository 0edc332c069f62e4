"""Read the arguments of a call that was cut: as values for a dialect that has no JSON, and where the call comes back.

Knows JSON, not calls.
"""

from __future__ import annotations

import json
from typing import Any


def read_cut(text: str) -> dict[str, Any]:
    """A JSON object, or what can be read of one that was cut.

    >>> read_cut('{"path": "a.py", "lines": [1, 2], "text": "x = \\\\"1')
    {'path': 'a.py', 'lines': [1, 2], 'text': 'x = "1'}
    """
    closers: list[str] = []
    is_in_text = is_escaped = False
    num_whole, closing = 0, "{}"  # up to the last value that is whole, and what ends it
    for place, letter in enumerate(text):
        if is_in_text:
            if is_escaped:
                is_escaped = False
            elif letter == "\\":
                is_escaped = True
            elif letter == '"':
                is_in_text = False
        elif letter == '"':
            is_in_text = True
        elif letter in "{[":
            closers.append("}" if letter == "{" else "]")
            num_whole, closing = place + 1, "".join(reversed(closers))
        elif letter in "}]" and closers:
            closers.pop()
            num_whole, closing = place + 1, "".join(reversed(closers))
        elif letter == ",":
            num_whole, closing = place, "".join(reversed(closers))
    end = "".join(reversed(closers))
    candidates = [text[:num_whole] + closing]
    if is_in_text:
        candidates.insert(0, f'{text[:-1] if is_escaped else text}"{end}')
    elif text.endswith('"'):  # else a number or a word, which may have gone on
        candidates.insert(0, text + end)
    for candidate in candidates:
        try:
            read = json.loads(candidate)
        except (ValueError, RecursionError):
            continue
        if isinstance(read, dict):
            return read
    return {}
