"""The values of JSON that comes in pieces are counted as if it came whole, whatever its texts are made of."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from radixlm.runtime.server.http.request_body import JSONSize


def num_borders(value: Any) -> int:
    """What is counted, of a value that was read: a bracket for each array and object, and the commas in it."""
    if not isinstance(value, list | dict):
        return 0
    items = value.values() if isinstance(value, dict) else value
    return 1 + max(len(items) - 1, 0) + sum(map(num_borders, items))


def random_value(chance: Random, depth: int) -> Any:
    kind = chance.randrange(4 if depth else 2)
    if kind == 0:
        return chance.choice([0, -1.5, None, True])
    if kind == 1:
        return random_text(chance)
    values = [random_value(chance, depth - 1) for _ in range(chance.randrange(5))]
    return values if kind == 2 else {random_text(chance): value for value in values}


def random_text(chance: Random) -> str:
    return "".join(chance.choices('a,"\\[]{}:\né', k=chance.randrange(8)))


def test_any_json_in_any_pieces_has_as_many_values_as_when_it_is_read() -> None:
    chance = Random(17)
    for _ in range(2000):
        value = random_value(chance, depth=4)
        text = json.dumps(value, ensure_ascii=chance.random() < 0.5).encode()
        cuts = sorted(chance.randrange(len(text) + 1) for _ in range(chance.randrange(5)))
        size = JSONSize()
        for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            size.add(text[begin:end])
        assert size.num_values == num_borders(value), text
