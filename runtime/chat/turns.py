"""Adapt conversations for templates that require alternating roles, or allow system messages only at the start.

Agents send such conversations. What a template accepts is found by rendering short conversations, and passed unchanged.
Knows messages, not which client sends them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import zip_longest
from typing import Any, Final, TypeVar

from ..errors import InvalidRequest
from .chat_template import ChatTemplate
from .reasoning_format import FIELD as REASONING_FIELD
from .reasoning_format import Message

T = TypeVar("T")

_ID: Final = "abcdefgh0"  # Mistral's templates require nine letters and digits
_UNANSWERED: Final = "[no result: the call was interrupted]"


class Turns:
    """Rewrites messages that a template does not accept as turns.

    Args:
        template: None if there is none; then messages stay as they are.
    """

    def __init__(self, template: ChatTemplate | None) -> None:
        self._template = template
        self._known: dict[int, bool] = {}  # by the number of the rule

    def for_template(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages, with what the template refuses, or leaves out, in another form.

        - Empty replies are left out, and replies in a row are joined.
        - Results of unknown calls become the user's text, and calls without results get one.
        - A reply before any question gets an empty question. The system prompt is put before the first user text, also
          if the template forgets it after a call.
        - User text right after a tool's result is appended to it, and user messages in a row are joined.

        >>> turns = ChatTemplate("{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        ...                      "{{ raise_exception('turns!') }}{% endif %}[{{ m.content }}]{% endfor %}")
        >>> asked = [{"role": "system", "content": "Be brief."}, *[{"role": "user", "content": text} for text in "ab"]]
        >>> Turns(turns).for_template(asked)
        [{'role': 'user', 'content': 'Be brief.\\n\\na\\n\\nb'}]
        """
        told = messages
        for number, (rewrite, _, _) in enumerate(_RULES if self._template is not None else ()):
            other = rewrite(told)
            if list(other) != list(told) and not self._knows(number):
                told = other
        return told

    def _knows(self, number: int) -> bool:
        """Return whether the template needs no rewriting by a rule: it accepts the case that the rule removes.

        Also if it refuses the rewritten case, which would help nothing.
        """
        if number not in self._known:
            _, odd, plain = _RULES[number]
            self._known[number] = self._writes(odd) or not self._writes(plain)
        return self._known[number]

    def _writes(self, messages: Sequence[Message]) -> bool:
        """Return whether the template writes the content of all these messages."""
        text = _rendered(self._template, messages)
        return text is not None and all(str(message["content"]) in text for message in messages)


class SystemMessages:
    """Rewrites system messages in the middle of a conversation, unless the template supports them there.

    Args:
        template: None if there is none; then messages stay as they are.
    """

    def __init__(self, template: ChatTemplate | None) -> None:
        self._template = template

    def for_template(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages; a system message that the template does not support in its place joins its neighbour.

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
        words: list[list[str]] = []  # of each message, joined in the end
        is_reminder = False  # the last message has only system text
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
        """Return whether the template writes all texts in order, with system messages in the middle among them: after a
        question, and after the results of calls if it supports any.
        """
        if self._template is None:
            return True
        results = _rendered(self._template, [message for message in _LOOP if message["role"] != "system"])
        return self._keeps(_TALK, "") and (results is None or self._keeps(_LOOP, results))

    def _keeps(self, messages: Sequence[Message], results: str) -> bool:
        """Return whether all texts are written once, in order; texts of results only if `results` has them."""
        said = [(each["role"], str(each["content"])) for each in messages if each["content"]]
        words = [text for role, text in said if role != "tool" or text in results]
        text = _rendered(self._template, messages) or ""
        places = [text.find(each) for each in words]
        return places == sorted(places) and all(text.count(each) == 1 for each in words)


def grouped(items: Iterable[T], belongs: Callable[[Sequence[T], T], bool]) -> list[list[T]]:
    """Return the items in groups of adjacent ones that belong together.

    Texts of a group are joined at once: one by one, thousands of long messages were copied for ten seconds.

    >>> grouped([1, 2, 4, 5], lambda group, item: item == group[-1] + 1)
    [[1, 2], [4, 5]]

    Args:
        belongs: returns whether an item belongs to the group before it.
    """
    groups = list[list[T]]()
    for item in items:
        if groups and belongs(groups[-1], item):
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups


def _rendered(template: ChatTemplate | None, messages: Sequence[Message]) -> str | None:
    """Return the text of messages; None if the template refuses them."""
    try:
        return None if template is None else template.render(messages)
    except InvalidRequest:
        return None


def _drop_empty_replies(messages: Sequence[Message]) -> Sequence[Message]:
    """Leave out assistant messages without text, tool calls and reasoning."""
    keys = ("content", "tool_calls", REASONING_FIELD)
    return [each for each in messages if each.get("role") != "assistant" or any(each.get(key) for key in keys)]


def _turn_lone_results_into_questions(messages: Sequence[Message]) -> Sequence[Message]:
    """Turn tool results whose call is in no earlier message into user messages."""
    told, ids = list[Message](), set[str]()
    for message in messages:
        ids |= {str(call.get("id")) for call in _calls(message)}
        if message.get("role") == "tool" and str(message.get("tool_call_id")) not in ids:
            name = message.get("name") or "the function"
            message = {"role": "user", "content": f"Result of {name}: {message.get('content')}"}
        told.append(message)
    return told


def _add_missing_results(messages: Sequence[Message]) -> Sequence[Message]:
    """Add a tool result that says so to each tool call whose message is followed by no result.

    A message at the end, or followed by other tool calls, stays as it is.
    """
    told = list[Message]()
    for message, behind in zip_longest(messages, messages[1:]):
        told.append(message)
        if behind is None or behind.get("role") == "tool" or _calls(behind):
            continue
        for call in _calls(message):
            result = {"role": "tool", "tool_call_id": call.get("id"), "content": _UNANSWERED}
            told.append({**result, "name": call["function"]["name"]})
    return told


def _insert_first_question(messages: Sequence[Message]) -> Sequence[Message]:
    """Insert an empty user message before the first message after the system prompt, if that is a reply."""
    first = next((at for at, message in enumerate(messages) if message.get("role") != "system"), len(messages))
    if messages[first:] and messages[first].get("role") == "assistant":
        return [*messages[:first], {"role": "user", "content": ""}, *messages[first:]]
    return messages


def _join_replies(messages: Sequence[Message]) -> Sequence[Message]:
    """Join assistant messages in a row, up to and including the first with tool calls."""

    def belongs(group: Sequence[Message], message: Message) -> bool:
        return group[-1].get("role") == message.get("role") == "assistant" and not _calls(group[-1])

    return [_merge_replies(group) for group in grouped(messages, belongs)]


def _merge_replies(messages: Sequence[Message]) -> Message:
    """Return one message with the texts and the reasoning of all; other fields are those of the last that has them."""
    joined = {key: value for message in messages for key, value in message.items()}
    for key in ("content", REASONING_FIELD):
        said = [str(each[key]) for each in messages if each.get(key)]
        if len(messages) > 1 and said:
            joined[key] = "\n\n".join(said)
    return joined


def _move_system_into_question(messages: Sequence[Message]) -> Sequence[Message]:
    """Put the system prompt before the text of the user message right after it."""
    roles = [message.get("role") for message in messages[:2]]
    return [_join_texts(*messages[:2]), *messages[2:]] if roles == ["system", "user"] else messages


def _append_questions_to_results(messages: Sequence[Message]) -> Sequence[Message]:
    """Append user messages that follow a tool result to its text."""

    def belongs(group: Sequence[Message], message: Message) -> bool:
        return group[0].get("role") == "tool" and message.get("role") == "user"

    return [
        {**group[0], "content": "\n\n".join(str(each.get("content")) for each in group)} if group[1:] else group[0]
        for group in grouped(messages, belongs)
    ]


def _join_questions(messages: Sequence[Message]) -> Sequence[Message]:
    """Join user messages in a row."""

    def belongs(group: Sequence[Message], message: Message) -> bool:
        return group[-1].get("role") == message.get("role") == "user"

    return [_join_texts(*group) if group[1:] else group[0] for group in grouped(messages, belongs)]


def _calls(message: Message) -> Sequence[Any]:
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list | tuple) else ()


def _join_texts(*messages: Message) -> Message:
    """Return the last message with the texts of all, separated by empty lines."""
    said = [str(each["content"]) for each in messages if each.get("content")]
    return {**messages[-1], "content": "\n\n".join(said)}


def _said(role: str, word: object, **more: object) -> Message:
    return {"role": role, **more, "content": f"{word} xyzzy"}


_SYSTEM, _QUESTION, _MORE = _said("system", 0), _said("user", 1), _said("user", 2)
_REPLY, _AGAIN = _said("assistant", 3), _said("assistant", 4)
_CALL: Final = {"id": _ID, "type": "function", "function": {"name": "a", "arguments": {}}}
_CALLS: Message = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_RESULT = _said("tool", 5, tool_call_id=_ID, name="a")
_Rule = tuple[Callable[[Sequence[Message]], Sequence[Message]], Sequence[Message], Sequence[Message]]
_RULES: Final[Sequence[_Rule]] = (
    (_drop_empty_replies, (_QUESTION, {**_REPLY, "content": ""}, _MORE), (_QUESTION, _REPLY, _MORE)),
    (_turn_lone_results_into_questions, (_QUESTION, _RESULT), (_QUESTION, _CALLS, _RESULT)),
    (_add_missing_results, (_QUESTION, _CALLS, _MORE), (_QUESTION, _CALLS, _RESULT)),
    (_insert_first_question, (_REPLY, _QUESTION), (_QUESTION, _REPLY, _MORE)),
    (_join_replies, (_QUESTION, _REPLY, _AGAIN, _MORE), (_QUESTION, _REPLY, _MORE)),
    (_move_system_into_question, (_SYSTEM, _QUESTION), (_QUESTION,)),
    (_move_system_into_question, (_SYSTEM, _QUESTION, _CALLS, _RESULT), (_QUESTION, _CALLS, _RESULT)),
    (_append_questions_to_results, (_QUESTION, _CALLS, _RESULT, _MORE), (_QUESTION, _CALLS, _RESULT)),
    (_join_questions, (_QUESTION, _MORE), (_QUESTION,)),
)
"""Rules that rewrite messages, each with a conversation that a template may refuse, and a similar plain one."""

# Text after the system prompt counts, too: some templates treat that as a turn, and refuse the next one.
_TALK = (
    *(_said("system", "alpha"), _said("user", "beta"), _said("assistant", "gamma")),
    *(_said("user", "delta"), _said("system", "epsilon"), _said("assistant", "kappa")),
    _said("user", "lambda"),
)
_LOOP = (
    *(_said("user", "alpha"), _CALLS, {**_RESULT, "content": "beta xyzzy"}, _said("system", "gamma")),
    *(_CALLS, {**_RESULT, "content": "delta xyzzy"}, _said("system", "epsilon")),
)
