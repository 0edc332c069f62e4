"""Conversations in which roles do not take turns, as agents send them, for templates that refuse these.

Found by rendering short conversations: what a template takes stays as it is. Knows messages, not which client sends
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any, Final, TypeVar

from ..errors import InvalidRequest
from .chat_template import ChatTemplate
from .reasoning_format import FIELD as REASONING_FIELD
from .reasoning_format import Message

T = TypeVar("T")

_ID: Final = "abcdefgh0"  # Mistral's templates want nine letters and digits
_UNANSWERED: Final = "[no result: the call was interrupted]"


class Turns:
    """What a template takes for turns.

    Args:
        template: None: there is none, and messages stay as they are.
    """

    def __init__(self, template: ChatTemplate | None) -> None:
        self._template = template
        self._known: dict[int, bool] = {}  # by the number of the rule

    def for_template(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages, with what the template refuses, or leaves out, in another form:

        - replies without a word are left out, and those in a row are one;
        - results of calls that are not there are the user's words, and calls without results get one;
        - a reply before any question gets an empty one, and what the system says first begins the user's words, also
          where the template forgets it behind a call;
        - words of the user right behind a tool's result end that, and messages of the user in a row are one.

        >>> turns = ChatTemplate("{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        ...                      "{{ raise_exception('turns!') }}{% endif %}[{{ m.content }}]{% endfor %}")
        >>> asked = [{"role": "system", "content": "Be brief."}, *[{"role": "user", "content": text} for text in "ab"]]
        >>> Turns(turns).for_template(asked)
        [{'role': 'user', 'content': 'Be brief.\\n\\na\\n\\nb'}]
        """
        told = messages
        for number, (mended, _, _) in enumerate(_RULES if self._template is not None else ()):
            other = mended(told)
            if list(other) != list(told) and not self._knows(number):
                told = other
        return told

    def _knows(self, number: int) -> bool:
        """Whether the template writes what is odd, or not even what is plain."""
        if number not in self._known:
            _, odd, plain = _RULES[number]
            self._known[number] = self._writes(odd) or not self._writes(plain)
        return self._known[number]

    def _writes(self, messages: Sequence[Message]) -> bool:
        """Whether the template writes all that these say."""
        assert self._template is not None
        try:
            text = self._template.render(messages)
        except InvalidRequest:
            return False
        return all(str(message["content"]) in text for message in messages)


def grouped(items: Iterable[T], belongs: Callable[[Sequence[T], T], bool]) -> list[list[T]]:
    """The items in groups of neighbours that belong together, each of at least one.

    Texts of a group are joined at once: one after the other, thousands of long messages were copied for ten seconds.

    >>> grouped([1, 2, 4, 5], lambda group, item: item == group[-1] + 1)
    [[1, 2], [4, 5]]

    Args:
        belongs: whether an item belongs to the group before it.
    """
    groups = list[list[T]]()
    for item in items:
        if groups and belongs(groups[-1], item):
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups


def _without_empty_replies(messages: Sequence[Message]) -> Sequence[Message]:
    keys = ("content", "tool_calls", REASONING_FIELD)
    return [each for each in messages if each.get("role") != "assistant" or any(each.get(key) for key in keys)]


def _with_lone_results_said(messages: Sequence[Message]) -> Sequence[Message]:
    told, ids = list[Message](), set[str]()
    for message in messages:
        ids |= {str(call.get("id")) for call in _calls(message)}
        if message.get("role") == "tool" and str(message.get("tool_call_id")) not in ids:
            name = message.get("name") or "the function"
            message = {"role": "user", "content": f"Result of {name}: {message.get('content')}"}
        told.append(message)
    return told


def _with_calls_answered(messages: Sequence[Message]) -> Sequence[Message]:
    told = list[Message]()
    for message, behind in zip_longest(messages, messages[1:]):
        told.append(message)
        if behind is None or behind.get("role") == "tool" or _calls(behind):
            continue
        for call in _calls(message):
            result = {"role": "tool", "tool_call_id": call.get("id"), "content": _UNANSWERED}
            told.append({**result, "name": call["function"]["name"]})
    return told


def _begun_by_the_user(messages: Sequence[Message]) -> Sequence[Message]:
    first = next((at for at, message in enumerate(messages) if message.get("role") != "system"), len(messages))
    if messages[first:] and messages[first].get("role") == "assistant":
        return [*messages[:first], {"role": "user", "content": ""}, *messages[first:]]
    return messages


def _with_replies_joined(messages: Sequence[Message]) -> Sequence[Message]:
    def belongs(group: Sequence[Message], message: Message) -> bool:
        return group[-1].get("role") == message.get("role") == "assistant" and not _calls(group[-1])

    return [_one_reply(group) for group in grouped(messages, belongs)]


def _one_reply(messages: Sequence[Message]) -> Message:
    joined = {key: value for message in messages for key, value in message.items()}
    for key in ("content", REASONING_FIELD):
        said = [str(each[key]) for each in messages if each.get(key)]
        if len(messages) > 1 and said:
            joined[key] = "\n\n".join(said)
    return joined


def _with_the_system_in_a_question(messages: Sequence[Message]) -> Sequence[Message]:
    roles = [message.get("role") for message in messages[:2]]
    return [_joined(*messages[:2]), *messages[2:]] if roles == ["system", "user"] else messages


def _with_words_in_results(messages: Sequence[Message]) -> Sequence[Message]:
    def belongs(group: Sequence[Message], message: Message) -> bool:
        return group[0].get("role") == "tool" and message.get("role") == "user"

    return [
        {**group[0], "content": "\n\n".join(str(each.get("content")) for each in group)} if group[1:] else group[0]
        for group in grouped(messages, belongs)
    ]


def _with_questions_joined(messages: Sequence[Message]) -> Sequence[Message]:
    def belongs(group: Sequence[Message], message: Message) -> bool:
        return group[-1].get("role") == message.get("role") == "user"

    return [_joined(*group) if group[1:] else group[0] for group in grouped(messages, belongs)]


def _calls(message: Message) -> Sequence[Any]:
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list | tuple) else ()


def _joined(*messages: Message) -> Message:
    said = [str(each["content"]) for each in messages if each.get("content")]
    return {**messages[-1], "content": "\n\n".join(said)}


def _said(role: str, number: int) -> Message:
    return {"role": role, "content": f"{number} xyzzy"}


_SYSTEM, _QUESTION, _MORE = _said("system", 0), _said("user", 1), _said("user", 2)
_REPLY, _AGAIN = _said("assistant", 3), _said("assistant", 4)
_CALL: Final = {"id": _ID, "type": "function", "function": {"name": "a", "arguments": {}}}
_CALLS: Message = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_RESULT: Message = {**_said("tool", 5), "tool_call_id": _ID, "name": "a"}
_Rule = tuple[Callable[[Sequence[Message]], Sequence[Message]], Sequence[Message], Sequence[Message]]
_RULES: Final[Sequence[_Rule]] = (
    (_without_empty_replies, (_QUESTION, {**_REPLY, "content": ""}, _MORE), (_QUESTION, _REPLY, _MORE)),
    (_with_lone_results_said, (_QUESTION, _RESULT), (_QUESTION, _CALLS, _RESULT)),
    (_with_calls_answered, (_QUESTION, _CALLS, _MORE), (_QUESTION, _CALLS, _RESULT)),
    (_begun_by_the_user, (_REPLY, _QUESTION), (_QUESTION, _REPLY, _MORE)),
    (_with_replies_joined, (_QUESTION, _REPLY, _AGAIN, _MORE), (_QUESTION, _REPLY, _MORE)),
    (_with_the_system_in_a_question, (_SYSTEM, _QUESTION), (_QUESTION,)),
    (_with_the_system_in_a_question, (_SYSTEM, _QUESTION, _CALLS, _RESULT), (_QUESTION, _CALLS, _RESULT)),
    (_with_words_in_results, (_QUESTION, _CALLS, _RESULT, _MORE), (_QUESTION, _CALLS, _RESULT)),
    (_with_questions_joined, (_QUESTION, _MORE), (_QUESTION,)),
)
"""How messages are told otherwise, each with what a template may refuse, and what it takes if it knows the like."""
