"""Words of the system in the middle of a conversation, for templates that know them there and for those that do not.

Found by rendering short conversations. Knows messages, not who sends them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from ..errors import InvalidRequest
from .chat_template import ChatTemplate

Message = Mapping[str, object]

_ID = "abcdefgh0"  # Mistral's templates want nine letters and digits
_CALL = {"id": _ID, "type": "function", "function": {"name": "a", "arguments": {}}}
_CALLS: Message = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_RESULT: Message = {"role": "tool", "tool_call_id": _ID, "name": "a"}


def _said(words: str, **message: object) -> Message:
    return {**message, "content": f"{words} xyzzy"}


# What comes behind the system's words counts, too: some templates take these for a turn, and refuse the next.
_TALK = (
    *(_said("alpha", role="system"), _said("beta", role="user"), _said("gamma", role="assistant")),
    *(_said("delta", role="user"), _said("epsilon", role="system"), _said("kappa", role="assistant")),
    _said("lambda", role="user"),
)
_LOOP = (
    *(_said("alpha", role="user"), _CALLS, _said("beta", **_RESULT), _said("gamma", role="system")),
    *(_CALLS, _said("delta", **_RESULT), _said("epsilon", role="system")),
)


class SystemMessages:
    """Where a template reads what the system says.

    Args:
        template: None: there is none, and messages stay as they are.
    """

    def __init__(self, template: ChatTemplate | None) -> None:
        self._template = template

    def for_template(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages, with words of the system that the template cannot read in their place as a part of what is said
        there.

        >>> alone = ChatTemplate("{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        ...                      "{{ raise_exception('first!') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}")
        >>> history = [{"role": "user", "content": "Hi"}, {"role": "system", "content": "Be brief."}]
        >>> print(SystemMessages(alone).for_template(history)[0]["content"])
        Hi
        <BLANKLINE>
        <system-reminder>
        Be brief.
        </system-reminder>
        """
        if not any(message.get("role") == "system" for message in messages[1:]) or self._knows_the_middle:
            return messages
        told: list[Message] = []
        words: list[list[str]] = []  # of each, which are joined in the end
        is_reminder = False  # the last one has nothing but words of the system
        for message in messages:
            role, text, last = message.get("role"), str(message.get("content")), told[-1] if told else {}
            reminder = f"<system-reminder>\n{text}\n</system-reminder>"
            if role == "system" and last.get("role") == "system":  # both at the beginning
                words[-1].append(text)
            elif role == "system" and last.get("role") in ("user", "tool"):
                words[-1].append(reminder)
            elif role == "user" and is_reminder:
                words[-1].append(text)
                is_reminder = False
            else:
                is_reminder = role == "system" and bool(told)
                told.append({"role": "user", "content": reminder} if is_reminder else message)
                words.append([reminder if is_reminder else text])
        return [
            {**message, "content": "\n\n".join(said)} if len(said) > 1 else message
            for message, said in zip(told, words, strict=True)
        ]

    @cached_property
    def _knows_the_middle(self) -> bool:
        """Whether the template writes all words in their order, those of the system in the middle among them: behind a
        question, and behind the results of calls if it takes any.
        """
        if self._template is None:
            return True
        results = self._rendered([message for message in _LOOP if message["role"] != "system"])
        return self._keeps(_TALK, "") and (results is None or self._keeps(_LOOP, results))

    def _keeps(self, messages: Sequence[Message], results: str) -> bool:
        """Whether all words are written once, in their order; words of results that `results` has."""
        said = [(each["role"], str(each["content"])) for each in messages if each["content"]]
        words = [text for role, text in said if role != "tool" or text in results]
        text = self._rendered(messages) or ""
        places = [text.find(each) for each in words]
        return places == sorted(places) and all(text.count(each) == 1 for each in words)

    def _rendered(self, messages: Sequence[Message]) -> str | None:
        """The text; None: the template refuses it."""
        assert self._template is not None
        try:
            return self._template.render(messages)
        except InvalidRequest:
            return None
