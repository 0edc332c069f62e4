"""Recognize how a model writes reasoning before its answer, from its chat template.

A format is a few literal texts around the reasoning. Knows texts and messages, not replies;
`reasoning_splitter.py` splits replies.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ..errors import InvalidRequest
from .chat_template import ChatTemplate

Message = Mapping[str, object]

FIELD = "reasoning_content"  # the name of a message's reasoning outside of templates
_FIELDS: Final = (FIELD, "reasoning", "thinking", "thought")  # names that templates use,
_PART: Final = "content"  # or reasoning is a part of the content
_TAGS: Final = (  # for templates that read no reasoning
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel>thought\n", "<channel|>"),
    ("<seed:think>", "</seed:think>"),
    ("<thought>", "</thought>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
_SWITCHES: Final[tuple[Mapping[str, object], ...]] = ({}, {"enable_thinking": True}, {"thinking": True})
_TAG = re.compile(r"<[^<>]*>|\[[^\[\]]*\]")
_FIRST_TAG = re.compile(rf"^\s*(?:{_TAG.pattern})")
_REASONING, _ANSWER = "xyzzy plugh", "quux corge"
_ASKED: Final[Message] = {"role": "user", "content": "a"}
_REPLY: Final[Message] = {"role": "assistant", "content": _ANSWER}
_CALL: Final[Message] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "b", "type": "function", "function": {"name": "c", "arguments": {}}}],
}


@dataclass(frozen=True)
class ReasoningFormat:
    """The texts around reasoning. White space around a tag belongs to the format if the template writes it::

        begin reasoning end answer        <think>\\n Hm. \\n</think>\\n\\n Yes.
        bare answer                       Yes.

    Args:
        begin, end: as above.
        bare: the text before an answer without reasoning.
        field: the template's name for the reasoning of an earlier reply; None: it drops it.
        is_loose: any white space around the tags belongs to the format, because no template writes reasoning.
    """

    begin: str
    end: str
    bare: str = ""
    field: str | None = None
    is_loose: bool = False

    @property
    def header_end(self) -> str | None:
        """The text that ends the header of each part of a reply, if parts have headers, as in gpt-oss; else None."""
        begins, ends = _TAG.findall(self.begin), _TAG.findall(self.end)
        is_headed = bool(begins and ends) and begins[-1] == ends[-1] and self.begin.strip() != begins[-1]
        return begins[-1] if is_headed else None

    @property
    def end_tag(self) -> str:
        """The tag that ends reasoning, without the beginning of the answer."""
        found = _TAG.search(self.end)
        return self.end.strip() if found is None else found[0]

    @property
    def texts(self) -> str:
        """All texts that the format writes: special tokens in them are text of the reply."""
        return self.begin + self.end + self.bare

    def is_opened_by(self, prompt: str) -> bool:
        """Return whether a reply to the prompt begins inside reasoning.

        >>> ReasoningFormat("<think>", "</think>").is_opened_by("<|assistant|><think>\\n")
        True
        """
        return prompt.rstrip().endswith(self.begin.strip())

    def for_template(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with their reasoning in the field that the template reads, or without it."""
        return [self._rename_reasoning(message) if FIELD in message else message for message in messages]

    def _rename_reasoning(self, message: Message) -> Message:
        """Return a message with its reasoning in the template's field, or without reasoning if that has none."""
        others = {key: value for key, value in message.items() if key != FIELD}
        reasoning = message[FIELD]
        return others if self.field is None or not reasoning else {**others, **_thinking(self.field, reasoning, others)}


def reasoning_format_of(template: ChatTemplate) -> ReasoningFormat | None:
    """Return the format of the model with this chat template; None if it is not known to reason.

    >>> reasoning_format_of(ChatTemplate("{% for message in messages %}{{ message.content }}{% endfor %}")) is None
    True
    """
    for said in (_REPLY, _CALL):  # some templates keep the reasoning of calls only
        for field in (*_FIELDS, _PART):
            for kwargs in _SWITCHES:
                found = _format_written(template, said, field, kwargs)
                if found is not None:
                    return found
    texts = template.own_texts
    for begin, end in _TAGS:
        if any(end.strip() in text for text in texts) and any(begin.strip() in text for text in texts):
            return ReasoningFormat(begin, end, is_loose=True)
    return None


def without_reasoning(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages for a template that knows no reasoning."""
    if not any(FIELD in message for message in messages):
        return messages
    return [{key: value for key, value in message.items() if key != FIELD} for message in messages]


def _format_written(
    template: ChatTemplate, said: Message, field: str, kwargs: Mapping[str, object]
) -> ReasoningFormat | None:
    """Return the format in which a template writes the reasoning of an earlier reply; None if it writes none."""
    try:
        prompt = template.render([_ASKED], kwargs=kwargs)
        later = template.render([_ASKED, {**said, **_thinking(field, _REASONING, said)}], False, kwargs=kwargs)
    except InvalidRequest:
        return None
    before, found, rest = later.partition(_REASONING)
    end = rest.partition(_ANSWER)[0] if said is _REPLY else "".join(_FIRST_TAG.findall(rest))
    if not found or end == rest or not _TAG.search(end) or '"' in end or "'" in end:  # a part written as JSON
        return None
    begin, more = before[_last_tag(before) :], prompt[len(before) :]
    if before.startswith(prompt) and before[len(prompt) :].strip():
        begin = before[len(prompt) :]
    elif prompt.startswith(before) and not _TAG.search(more):  # text that introduces the reasoning
        begin += more
    bare = _bare(template, prompt, kwargs)
    return ReasoningFormat(begin, end, "" if begin.strip() in bare else bare, field) if begin.strip() else None


def _bare(template: ChatTemplate, prompt: str, kwargs: Mapping[str, object]) -> str:
    """Return the text that the template writes between a prompt and an answer without reasoning."""
    try:
        later = template.render([_ASKED, _REPLY], False, kwargs=kwargs)
    except InvalidRequest:
        return ""
    before, found, _ = later.partition(_ANSWER)
    bare = before[len(prompt) :] if found and before.startswith(prompt) else ""
    return bare if bare.strip() else ""


def _last_tag(text: str) -> int:
    """Return the start of the tag that ends a text, apart from white space; the text's length if there is none."""
    starts = [match.start() for match in _TAG.finditer(text) if not text[match.end() :].strip()]
    return starts[-1] if starts else len(text)


def _thinking(field: str, reasoning: object, message: Message) -> dict[str, object]:
    """Return the fields of a message that hold its reasoning, by the template's name for it."""
    if field != _PART:
        return {field: reasoning}
    content = message.get("content")
    said = [{"type": "text", "text": content}] if content else []
    return {_PART: [{"type": "thinking", "thinking": reasoning}, *said]}
