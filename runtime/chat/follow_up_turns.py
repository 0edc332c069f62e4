"""Find how later prompts render a reply, and the beginning of the next prompt.

Found by rendering conversations that continue after the reply. Knows the texts of one model, not requests or pages.
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

_ANYTHING = ("A", "b")  # two replies: what prompts with one and the other share, all prompts share


class ModelPrompts(Protocol):
    """Makes the prompts of one model's conversations, as `engine/prompts.py` does.

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
    ) -> PreparedPrompt:
        """Prepare the prompt of a conversation.

        Args:
            seam_of: namespace of the earlier texts that its encoding can continue; None: none.
            remembers: later prompts can continue this one's encoding.
        """


class FollowUpTurns:
    """Predicts the prompts after replies to one model's conversations, in any thread."""

    def __init__(self, prompts: ModelPrompts) -> None:
        self._prompts = prompts
        template = prompts.chat_template
        self._render_words = None if template is None else template.reply_renderer()

    def renderings(self, reply: str, reasoning: str, tools: Sequence[Tool]) -> list[str]:
        """Return the ways in which later prompts may render a reply and its reasoning, up to the end of its turn: the
        text as it is, and as clients trim it. Empty if unknown.

        Args:
            tools: tools that it may call.
        """
        read = self._parse_reply(reply, tools)
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
        """Return the ids that begin any conversation after this reply, whatever follows: from the user, or from tools
        that the reply calls.

        The reasoning is repeated if earlier reasoning is. Empty if the next prompt has the reply as generated: it
        calls tools, and has no reasoning that is dropped.

        Raises:
            InvalidRequest: the template refuses the conversation.
        """
        read = self._parse_reply(reply, tools)
        keeps_reasoning = any(message.get(REASONING_FIELD) for message in messages)
        if read.calls and (keeps_reasoning or not reasoning):
            return ()
        said = _message_of(read if read.calls else ReadReply(reply), reasoning if keeps_reasoning else "")
        one, other = (
            self._prompts.chat(
                [*messages, said, *_possible_next_messages(read, text)],
                tools,
                template_kwargs,
                seam_of=seam_of,
                remembers=False,
            ).ids
            for text in _ANYTHING
        )
        return tuple(left for left, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))

    def _parse_reply(self, reply: str, tools: Sequence[Tool]) -> ReadReply:
        """Return a reply's text with the tool calls in it; without `tools` it has none."""
        if not tools:
            return ReadReply(reply)
        return read_reply(reply, self._prompts.tool_format, tools)

    def _rendered_words(self, words: str) -> str | None:
        return None if self._render_words is None else self._render_words(words)

    def _rendered(self, reply: ReadReply, reasoning: str) -> str | None:
        """Return a reply with calls or reasoning as written after a short prompt, up to the end of its turn."""
        asked: list[Message] = [{"role": "user", "content": _ANYTHING[0]}]
        try:
            prompt = self._prompts.render(asked)
            later = self._prompts.render([*asked, _message_of(reply, reasoning)])
        except InvalidRequest:  # the call is incomplete, for instance
            return None
        places = [place for end in self._prompts.turn_ends if (place := later.find(end, len(prompt))) >= 0]
        return later[len(prompt) : min(places)] if later.startswith(prompt) and places else None


def _message_of(reply: ReadReply, reasoning: str) -> Message:
    """Return a reply as a message; the arguments of its calls are the model's."""
    said: dict[str, object] = {"role": "assistant", "content": reply.content}
    if reasoning:
        said[REASONING_FIELD] = reasoning
    functions = [{"name": call.name, "arguments": GeneratedArguments(call.arguments)} for call in reply.calls]
    ids = [call.call_id for call in reply.calls]
    calls = [{"id": id, "type": "function", "function": each} for id, each in zip(ids, functions, strict=True)]
    return {**said, "tool_calls": calls} if calls else said


def _possible_next_messages(reply: ReadReply, text: str) -> list[Message]:
    """Return messages that may follow a reply: a result for each tool call, or if it has none a user message."""
    if not reply.calls:
        return [{"role": "user", "content": text}]
    return [{"role": "tool", "tool_call_id": call.call_id, "content": text} for call in reply.calls]
