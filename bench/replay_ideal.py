"""How few tokens of a turn's prompt could be computed: those after the last one whose KV can exist.

A reply's last sampled token has no KV: it was never passed to the model. Counted in the encoding of the whole prompt by
the `tokenizers` library's own offsets, which are of whole characters: ids that go on within one may be reused up to
there, and are a token fewer than this ideal then. Knows neither caches nor what tokens spell.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import tokenizers
from radixlm.runtime import Engine

from .replay_engine import Message, Turn


class Ideal:
    """For one model, whose templates render a conversation as the beginning of a longer one."""

    def __init__(self, engine: Engine, tokenizer_json: str) -> None:
        self._engine = engine
        self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)

    def num_tokens(self, last: Turn, messages: Sequence[Message]) -> int:
        """Of the prompt of `messages`, which end in the reply of the turn `last` and in what the user says then."""
        rendered = self._engine.render(messages)
        place = rendered.rindex(last.text.strip(), 0, rendered.rindex(messages[-1]["content"].strip()))
        computed = self._engine.tokenizer.decode(last.reply_ids[:-1]).lstrip()
        place += sum(1 for _ in takewhile(_are_same, zip(computed, rendered[place:], strict=False)))
        without_suffix = rendered.removesuffix(" ")  # which the prompt need not have: the reply may begin with it
        offsets = self._tokenizer.encode(without_suffix, add_special_tokens=False).offsets
        return sum(end > place or start >= place for start, end in offsets)


def _are_same(pair: tuple[str, str]) -> bool:
    return pair[0] == pair[1]
