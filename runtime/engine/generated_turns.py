"""Continue a prompt from the token ids of earlier turns, so that they are neither rendered nor encoded again.

Knows the texts of one model, not where earlier turns are stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any, Protocol

from radixlm.tokenizer_fix import PreparedPrompt

from ..chat.reasoning_format import FIELD as REASONING_FIELD
from ..chat.tools.tool_format import Tool
from ..errors import InvalidRequest

Message = Mapping[str, object]

EDGE = 32  # characters at both ends of a text that templates may inspect: `<tool_response>`, white space


class ChatPrompts(Protocol):
    """Makes the prompts of one model's conversations, as `prompts.py` does.

    Attributes:
        turn_ends: the texts of the tokens that end a reply.
        end_ids: the ids of these tokens.
    """

    @property
    def turn_ends(self) -> Sequence[str]: ...
    @property
    def end_ids(self) -> Sequence[int]: ...

    def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        template_kwargs: Mapping[str, object] | None,
        *,
        context_length: int | None,
        remembers: bool,
    ) -> PreparedPrompt:
        """Prepare the prompt of a conversation, with the generation prompt at its end.

        Args:
            context_length: the most tokens; None: any number.
            remembers: prompts that continue this one can reuse its encoding.
        """


@dataclass(frozen=True)
class GeneratedTurns:
    """The first messages of a conversation, and the ids that they were prefilled and generated as.

    Attributes:
        num_messages: number of messages; the last one is a reply.
        token_ids: of the prompt and the reply, with the token that ended the reply if one did.
    """

    num_messages: int
    token_ids: tuple[int, ...]

    def continued(
        self,
        prompts: ChatPrompts,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        template_kwargs: Mapping[str, object] | None,
        *,
        context_length: int | None,
    ) -> PreparedPrompt | None:
        """Return the prompt of a conversation that begins with these messages: their ids, then those of the rest.

        The template gets short texts in place of the earlier ones, and only the turns that follow are encoded in full.
        So the time does not depend on the length of the history.

        Returns:
            None if the template would write the earlier messages differently: for instance, it drops reasoning from the
            history, or moves the tools. Then the whole conversation must be rendered.

        Raises:
            ContextLengthExceeded: the turns that follow alone have too many tokens.
        """
        short = [*map(_shorten_texts, messages[: self.num_messages]), *messages[self.num_messages :]]
        write = partial(
            prompts.chat,
            tools=tools,
            template_kwargs=template_kwargs,
            context_length=context_length,
            remembers=False,
        )
        try:
            before, after = write(short[: self.num_messages - 1]), write(short)
        except InvalidRequest:
            return None  # rendering the whole conversation raises the error again
        start = _end_of_reply(prompts, before, after, short[self.num_messages - 1])
        if start is None:
            return None
        ends = set(prompts.end_ids)
        num_ended = sum(1 for _ in takewhile(ends.__contains__, reversed(self.token_ids)))
        earlier = self.token_ids[: len(self.token_ids) - num_ended]
        ids = earlier + after.ids[start:]
        num_after = len(after.ids) - after.num_match  # at the end of a prompt, not matched
        return replace(after, ids=ids, num_match=len(ids) - num_after)


def _end_of_reply(prompts: ChatPrompts, before: PreparedPrompt, after: PreparedPrompt, reply: Message) -> int | None:
    """Return the index in `after.ids` of the token that ends a reply to `before`.

    None if the template does not write the reply as it was generated.
    """
    text, prefix = after.text or "", before.text or ""
    if not text.startswith(prefix):
        return None
    places = [place for end in prompts.turn_ends if (place := text.find(end, len(prefix))) >= 0]
    if not places or not _has_all(text[len(prefix) : min(places)], reply):
        return None
    ends = set(prompts.end_ids)
    num_before = sum(token_id in ends for token_id in before.ids)
    found = [place for place, token_id in enumerate(after.ids) if token_id in ends]
    return found[num_before] if num_before < len(found) else None


def _has_all(written: str, reply: Message) -> bool:
    """Return whether a rendered reply has the reasoning, the text and the calls of the message, in this order."""
    calls: Any = reply.get("tool_calls") or ()
    parts = [reply.get(REASONING_FIELD), reply.get("content"), *(call["function"]["name"] for call in calls)]
    place = 0
    for part in parts:
        place = written.find(str(part or "").strip(), place)
        if place < 0:
            return False
    return True


def _shorten_texts(message: Message) -> Message:
    """Return a message with only the ends of its texts, and without the arguments of its calls."""
    short = {name: _ends_of(value) for name, value in message.items() if name not in ("role", "name", "tool_call_id")}
    calls: Any = message.get("tool_calls")
    if calls:
        functions = [{**call["function"], "arguments": "{}"} for call in calls]
        short["tool_calls"] = [{**call, "function": each} for call, each in zip(calls, functions, strict=True)]
    return {**message, **short}


def _ends_of(value: object) -> object:
    """Return a text without its middle; other values unchanged.

    >>> _ends_of("a" * 40 + "b" * 40 + "c" * 40) == "a" * 32 + "c" * 32
    True
    """
    if isinstance(value, str) and len(value) > 2 * EDGE:
        return value[:EDGE] + value[-EDGE:]
    return value
