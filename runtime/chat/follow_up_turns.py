"""How a reply stands in the prompts of later turns, and what the next of them begins with.

Found by rendering conversations that go on from the reply. Knows the texts of one model, not requests or pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Protocol

from radixlm.tokenizer_fix import PreparedPrompt

from ..errors import InvalidRequest
from .chat_template import ChatTemplate
from .reasoning_format import FIELD as REASONING_FIELD
from .tools.call_history import GeneratedArguments
from .tools.tool_calls import ReadReply, read_reply
from .tools.tool_format import Tool, ToolFormat

Message = Mapping[str, object]

_ANYTHING = ("A", "b")  # that may be said: what prompts with one and the other begin with, all begin with


class Texts(Protocol):
    """What makes prompts of one model's conversations; `engine/prompts.py` is the real one.

    Attributes:
        turn_ends: the texts of the tokens that end a reply.
    """

    @property
    def chat_template(self) -> ChatTemplate | None: ...
    @property
    def tool_format(self) -> ToolFormat: ...
    @property
    def turn_ends(self) -> Sequence[str]: ...

    def render(self, messages: Sequence[Message]) -> str: ...
    def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        template_kwargs: Mapping[str, object] | None,
        *,
        seam_of: bytes | None,
        remembers: bool,
    ) -> PreparedPrompt: ...


class FollowUpTurns:
    """The prompts that come after replies to one model's conversations; any thread may ask."""

    def __init__(self, prompts: Texts) -> None:
        self._prompts = prompts
        template = prompts.chat_template
        self._render_words = None if template is None else template.reply_renderer()

    def renderings(self, reply: str, reasoning: str, tools: Sequence[Tool]) -> list[str]:
        """A reply and its reasoning as later prompts may have them, up to the end of its turn: the words as they are,
        and as clients trim them. None where that is not known.

        Args:
            tools: that it may call.
        """
        read = self._read(reply, tools)
        words = read.content if read.calls else reply
        versions = dict.fromkeys([words, words.rstrip(), words.strip()])
        if read.calls or reasoning:
            renderings = [self._rendered(replace(read, content=each), reasoning) for each in versions]
        else:
            renderings = [self._rendered_words(each) for each in versions]
        return [rendering for rendering in renderings if rendering is not None]

    def next_ids(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        template_kwargs: Mapping[str, object] | None,
        reply: str,
        reasoning: str = "",
        *,
        seam_of: bytes | None = None,
    ) -> tuple[int, ...]:
        """The ids that a conversation begins with which goes on from a reply, whatever is said next: by the user, or by
        the tools that the reply calls.

        The reasoning is said again if earlier reasoning is. None of it where the reply stands in the next prompt as it
        was generated: it calls tools, and has no reasoning that is dropped.

        Raises:
            InvalidRequest: the template refuses the conversation.
        """
        read = self._read(reply, tools)
        keeps_reasoning = any(message.get(REASONING_FIELD) for message in messages)
        if read.calls and (keeps_reasoning or not reasoning):
            return ()
        said = _message_of(read if read.calls else ReadReply(reply), reasoning if keeps_reasoning else "")
        one, other = (
            self._prompts.chat(
                [*messages, said, *_answers(read, text)], tools, template_kwargs, seam_of=seam_of, remembers=False
            ).ids
            for text in _ANYTHING
        )
        return tuple(left for left, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))

    def _read(self, reply: str, tools: Sequence[Tool]) -> ReadReply:
        if not tools:
            return ReadReply(reply)
        return read_reply(reply, self._prompts.tool_format, tools)

    def _rendered_words(self, words: str) -> str | None:
        return None if self._render_words is None else self._render_words(words)

    def _rendered(self, reply: ReadReply, reasoning: str) -> str | None:
        """A reply with calls or reasoning behind a short prompt, up to the token that ends its turn."""
        asked: list[Message] = [{"role": "user", "content": _ANYTHING[0]}]
        try:
            prompt = self._prompts.render(asked)
            later = self._prompts.render([*asked, _message_of(reply, reasoning)])
        except InvalidRequest:  # the call was cut, for one
            return None
        places = [place for end in self._prompts.turn_ends if (place := later.find(end, len(prompt))) >= 0]
        return later[len(prompt) : min(places)] if later.startswith(prompt) and places else None


def _message_of(reply: ReadReply, reasoning: str) -> Message:
    """A reply as a message; the arguments of its calls are the model's."""
    said: dict[str, object] = {"role": "assistant", "content": reply.content}
    if reasoning:
        said[REASONING_FIELD] = reasoning
    functions = [{"name": call.name, "arguments": GeneratedArguments(call.arguments)} for call in reply.calls]
    ids = [call.call_id for call in reply.calls]
    calls = [{"id": id, "type": "function", "function": each} for id, each in zip(ids, functions, strict=True)]
    return {**said, "tool_calls": calls} if calls else said


def _answers(reply: ReadReply, text: str) -> list[Message]:
    """What may be said to a reply: by the tools that it calls, else by the user."""
    if not reply.calls:
        return [{"role": "user", "content": text}]
    return [{"role": "tool", "tool_call_id": call.call_id, "content": text} for call in reply.calls]
