"""Replay conversations among clients that change them, and hold each reuse to what was computed.

Reuse must be true (the used ids spell the prompt, and the reused ones were computed one after the other) and reach the
last token before the first changed byte. `Memo`, the other way to be true, is held to the same.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from .replay_conversations import Conversation
from .replay_engine import Message, ReplayEngine, Turn, with_reply
from .replay_histories import CHANGES
from .replay_ledger import Ledger
from .replay_memo import Memo
from .replay_replies import Replies

NO_ANSWER = "Well."


@dataclass
class Held:
    """Requests of one kind, and how many of them reused less than they must."""

    num_requests: Counter[str] = field(default_factory=Counter)
    num_short: Counter[str] = field(default_factory=Counter)


class Adversaries:
    """Clients in one namespace of an engine, whose model splits its replies anyhow.

    Args:
        with_memo: prompts are put together by a memo, and the cache matches their ids alone.
    """

    def __init__(self, engine: ReplayEngine, *, with_memo: bool = False, seed: int = 0) -> None:
        self.held = Held()
        self._engine = engine
        self._memo = Memo() if with_memo else None
        self._random = random.Random(seed)
        self._replies = Replies(engine.engine.tokenizer, seed)
        self._ledger = Ledger()
        self._lead = _lead(engine)

    def run(self, conversations: Sequence[Conversation]) -> Held:
        """Each conversation, then what others make of it; every request is held to the laws.

        Raises:
            AssertionError: what was reused is not what the prompt says.
        """
        for conversation in conversations:
            self._talk(conversation)
        return self.held

    def _talk(self, conversation: Conversation) -> None:
        messages: list[Message] = [{"role": "user", "content": conversation.texts[0]}]
        for said, asked in zip(conversation.texts[1::2], [*conversation.texts[2::2], None], strict=False):
            turn = self._ask("same client", messages, said)
            again = self._ask("regenerated", messages, said)  # the same text, other ids
            other = self._ask("regenerated", messages, said[: len(said) // 2] + NO_ANSWER)
            for name, change in CHANGES.items():
                told = with_reply(messages, self._random.choice([turn, again, other]).text)
                if name == "first turn left out" and len(told) < 4:
                    continue
                self._ask(name, change(self._random, told), NO_ANSWER)
            if asked is None:
                return
            messages = with_reply(messages, turn.text, asked)

    def _ask(self, name: str, messages: Sequence[Message], said: str) -> Turn:
        prompt = self._engine.spelled(messages)
        must = self._ledger.num_allowed(prompt)
        reply = [*self._replies.split(self._lead + said), self._engine.end_id]
        if self._memo is None:
            turn = self._engine.ask(messages, reply)
        else:
            turn = self._engine.ask_raw(self._memo.prompt_ids(prompt), reply)
            self._memo.note(prompt, turn)
        self._ledger.check_truth(prompt, turn)
        self.held.num_requests[name] += 1
        self.held.num_short[name] += self._ledger.num_reused(prompt, turn) < must
        self._ledger.note(prompt, turn)
        return turn


def _lead(engine: ReplayEngine) -> str:
    """What a reply begins with so that the template renders it as it was said: a space, or nothing."""
    asked: list[Message] = [{"role": "user", "content": "a"}]
    prompt = engine.engine.render(asked).removesuffix(" ")
    later = engine.engine.render(with_reply(asked, "xyz", "b"))
    return later[len(prompt) :].partition("xyz")[0]
