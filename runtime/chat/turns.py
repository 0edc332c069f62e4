"""Messages of the user in a row, and templates that want roles to take turns or know no system.

Found by rendering short conversations. Knows messages, not which client sends them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise

from ..errors import InvalidRequest
from .chat_template import ChatTemplate

Message = Mapping[str, object]

_ID, _WORDS = "abcdefgh0", "1 xyzzy"  # Mistral's templates want nine letters and digits
_CALL = {"id": _ID, "type": "function", "function": {"name": "a", "arguments": {}}}
_CALLS: Message = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_RESULT: Message = {"role": "tool", "tool_call_id": _ID, "name": "a", "content": "b"}


class UserTurns:
    """What a template takes for a turn of the user.

    Args:
        template: None: there is none, and messages stay as they are.
    """

    def __init__(self, template: ChatTemplate | None) -> None:
        self._template = template

    def for_template(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages; where the template refuses them, those of the user in a row are one, what the system says first
        begins it, and words of the user right behind a tool's result end that, as agents' reminders do.

        >>> turns = ChatTemplate("{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        ...                      "{{ raise_exception('turns!') }}{% endif %}[{{ m.content }}]{% endfor %}")
        >>> asked = [{"role": "system", "content": "Be brief."}, *[{"role": "user", "content": text} for text in "ab"]]
        >>> UserTurns(turns).for_template(asked)
        [{'role': 'user', 'content': 'Be brief.\\n\\na\\n\\nb'}]
        """
        told = list(messages)
        roles = [message.get("role") for message in told]
        if roles[:2] == ["system", "user"] and not self._knows_a_system:
            told[:2] = [_joined(told[0], told[1])]
        if ("tool", "user") in pairwise(roles) and not self._knows_words_behind_a_result:
            told = _with_words_in_results(told)
        if not any(pair == ("user", "user") for pair in pairwise(roles)) or self._knows_a_row:
            return told if len(told) < len(messages) else messages
        joined: list[Message] = []
        for message in told:
            if joined and message.get("role") == joined[-1].get("role") == "user":
                joined[-1] = _joined(joined[-1], message)
            else:
                joined.append(message)
        return joined

    @cached_property
    def _knows_a_row(self) -> bool:
        return self._knows("user", "user") or not self._knows("user")

    @cached_property
    def _knows_a_system(self) -> bool:
        return self._knows("system", "user") or not self._knows("user")

    @cached_property
    def _knows_words_behind_a_result(self) -> bool:
        if self._template is None:
            return True
        loop = [{"role": "user", "content": "0 xyzzy"}, _CALLS, _RESULT]
        try:
            self._template.render(loop)
        except InvalidRequest:
            return True  # it knows no results
        try:
            return _WORDS in self._template.render([*loop, {"role": "user", "content": _WORDS}])
        except InvalidRequest:
            return False

    def _knows(self, *roles: str) -> bool:
        """Whether the template writes what all of these say."""
        if self._template is None:
            return True
        words = [f"{number} xyzzy" for number in range(len(roles))]
        try:
            text = self._template.render([{"role": r, "content": w} for r, w in zip(roles, words, strict=True)])
        except InvalidRequest:
            return False
        return all(each in text for each in words)


def _with_words_in_results(messages: Sequence[Message]) -> list[Message]:
    told: list[Message] = []
    for message in messages:
        if message.get("role") == "user" and told and told[-1].get("role") == "tool":
            told[-1] = {**told[-1], "content": f"{told[-1].get('content')}\n\n{message.get('content')}"}
        else:
            told.append(message)
    return told


def _joined(message: Message, more: Message) -> Message:
    return {**more, "content": f"{message.get('content')}\n\n{more.get('content')}"}
