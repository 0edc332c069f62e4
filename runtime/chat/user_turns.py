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


class UserTurns:
    """What a template takes for a turn of the user.

    Args:
        template: None: there is none, and messages stay as they are.
    """

    def __init__(self, template: ChatTemplate | None) -> None:
        self._template = template

    def for_template(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages; where the template refuses them, those of the user in a row are one, and what the system says
        first begins it.

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


def _joined(message: Message, more: Message) -> Message:
    return {**more, "content": f"{message.get('content')}\n\n{more.get('content')}"}
