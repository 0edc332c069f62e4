"""Words of the system in the middle of a conversation, for templates that know them there and for those that do not.

Found by rendering short conversations. Knows messages, not who sends them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from ..errors import InvalidRequest
from .chat_template import ChatTemplate

Message = Mapping[str, object]

_ROLES = ("system", "user", "assistant", "user", "system")
_WORDS = ("alpha xyzzy", "beta xyzzy", "gamma xyzzy", "delta xyzzy", "epsilon xyzzy")


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
        for message in messages:
            last = told[-1] if told else {}
            if message.get("role") == "system" and last.get("role") == "system":  # both at the beginning
                told[-1] = _joined(last, str(message.get("content")))
            elif message.get("role") == "system" and told:
                said = f"<system-reminder>\n{message.get('content')}\n</system-reminder>"
                if last.get("role") in ("user", "tool"):
                    told[-1] = _joined(last, said)
                else:
                    told.append({"role": "user", "content": said, "is_reminder": True})
            elif message.get("role") == "user" and last.get("is_reminder"):
                told[-1] = _joined({"role": "user", "content": last.get("content")}, str(message.get("content")))
            else:
                told.append(message)
        return [{key: value for key, value in message.items() if key != "is_reminder"} for message in told]

    @cached_property
    def _knows_the_middle(self) -> bool:
        """Whether the template writes all words in their order, those of the system behind a question among them."""
        if self._template is None:
            return True
        messages = [{"role": role, "content": words} for role, words in zip(_ROLES, _WORDS, strict=True)]
        try:
            text = self._template.render(messages)
        except InvalidRequest:
            return False
        places = [text.find(words) for words in _WORDS]
        return places == sorted(places) and -1 not in places and all(text.count(words) == 1 for words in _WORDS)


def _joined(message: Message, words: str) -> Message:
    return {**message, "content": f"{message.get('content')}\n\n{words}"}
