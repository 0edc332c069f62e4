"""Put tools, their calls and their results into a conversation, for templates with and without tool support.

Knows messages in the form that chat templates expect; `tool_format.py` knows what a call looks like.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from ...errors import InvalidRequest
from ..reasoning_format import FIELD
from ..spelled_json import SpelledJson, to_json
from ..turns import grouped
from .arguments import read_cut, value_without_halves
from .call_history import GeneratedArguments
from .tool_format import HeadedFormat, ToolFormat

Message = Mapping[str, object]

_ID_LENGTH: Final = 9  # letters and digits, as Mistral's templates require; of our ids, the end, which the model wrote
_OUR_ID: Final = re.compile(rf"call_[a-zA-Z0-9]{{{24 - _ID_LENGTH}}}([a-zA-Z0-9]{{{_ID_LENGTH}}})")
_SHORT_ID: Final = re.compile(rf"[a-zA-Z0-9]{{{_ID_LENGTH}}}")
_ESCAPED_HALF: Final = re.compile(r"\\u[dD][89a-fA-F]")
_INSTRUCTIONS = """\
You may call these functions:
{functions}
To call one, reply with only {call} where ARGUMENTS is a JSON object that fits the function's parameters. \
To call several, write one such line for each. The results come in the next message. \
Where no function helps, reply in words."""


def for_template(
    messages: Sequence[Message], tools: Sequence[Message], format: ToolFormat
) -> tuple[list[Message], Sequence[Message]]:
    """Return messages and tools in the form that the template of a format expects; each content is one text.

    If the template has no tool support, the messages describe the tools, and the returned tools are empty.

    Raises:
        InvalidRequest: the arguments of a call are not a JSON object, or a part of a content is not a text.
    """
    messages = [_with_one_text(message) for message in messages]
    for message in messages:
        _calls(message)  # first, to refuse other shapes
    messages = _with_ordered_results(messages)
    if format.writes_ids:
        messages = _with_short_ids(messages)
    elif format.id_text:
        messages = _with_counted_ids(messages, format.id_text)
    if format.separator is None:
        messages = _with_one_call_each(messages)
    if isinstance(format, HeadedFormat):
        messages = [_with_words_in_reasoning(message) for message in messages]
    if format.is_content:
        messages = [_with_calls_in_content(message, format, between="") for message in messages]
    if format.is_native:
        return [_with_parsed_calls(message) for message in messages], tools
    names = _names(messages)
    told = [_as_plain_message(message, names, format) for message in messages]
    return _with_instructions(_merge_adjacent(told), tools, format), ()


def _with_one_text(message: Message) -> Message:
    """Return a message with its text parts joined.

    Templates join them, too, and two parts that are harmless alone could form a control token together: client text is
    searched for these before it is rendered.

    Raises:
        InvalidRequest: a part is not a text.
    """
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return message
    texts = [
        part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else None
        for part in content
    ]
    for part, text in zip(content, texts, strict=True):
        if not isinstance(text, str):
            raise InvalidRequest(
                f'a part of a content is {part!r:.60}; send {{"type": "text", "text": ...}}, or one text'
            )
    return {**message, "content": "".join(map(str, texts))}


def _with_ordered_results(messages: Sequence[Message]) -> list[Message]:
    """Return messages with the results after several calls in the order of the calls.

    Clients may append results as they complete, and templates without ids give the first result to the first call.
    Results of unknown calls come last. The order is kept if two calls have the same id.
    """
    ordered = list[Message]()
    places: dict[str, int] = {}  # of the last message's calls, by id
    for group in grouped(messages, lambda group, message: group[0].get("role") == message.get("role") == "tool"):
        if group[0].get("role") == "tool":
            group.sort(key=lambda result: places.get(str(result.get("tool_call_id")), len(places)))
        calls = _calls(group[0])
        places = {str(call.get("id")): place for place, call in enumerate(calls)}
        if len(places) < len(calls):
            places = {}
        ordered += group
    return ordered


def short_id(call_id: object) -> str:
    """Return nine letters and digits for an id: the last nine of our ids; for others, always the same ones.

    >>> short_id("call_0123456789abcdefghijklmn"), short_id("a1b2c3d4e"), len(short_id("toolu_1"))
    ('fghijklmn', 'a1b2c3d4e', 9)
    """
    text = str(call_id)
    if _SHORT_ID.fullmatch(text):
        return text
    ours = _OUR_ID.fullmatch(text)
    return ours[1] if ours else hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_ID_LENGTH]


def _with_short_ids(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose calls and results have short ids."""
    return [_with_short_id(message) for message in messages]


def _with_counted_ids(messages: Sequence[Message], id_text: str) -> list[Message]:
    """Return messages whose calls, counted from 0 in the conversation, have the ids that a template writes unchanged.

    >>> calls = [{"id": "call_1", "function": {"name": "f"}}]
    >>> said = [{"tool_calls": calls}, {"role": "tool", "tool_call_id": "call_1"}]
    >>> _with_counted_ids(said, "functions.{name}:{number}")[1]["tool_call_id"]
    'functions.f:0'

    Args:
        id_text: an id, with the slots `{name}` and `{number}`.
    """
    ids: dict[str, str] = {}  # ids that were sent -> ids of the template
    number, counted = 0, list[Message]()
    for message in messages:
        changed: dict[str, object] = {}
        if "tool_call_id" in message:
            changed["tool_call_id"] = ids.get(str(message["tool_call_id"]), message["tool_call_id"])
        calls = message.get("tool_calls")
        if isinstance(calls, list | tuple):
            named: list[object] = []
            for call in calls:
                made = id_text.replace("{number}", str(number)).replace("{name}", call["function"]["name"])
                ids[str(call.get("id"))], number = made, number + 1
                named.append({**call, "id": made})
            changed["tool_calls"] = named
        counted.append({**message, **changed} if changed else message)
    return counted


def _with_short_id(message: Message) -> Message:
    """Return a message with the ids of its calls, and of the call whose result it is, replaced by `short_id`."""
    changed: dict[str, object] = {}
    if "tool_call_id" in message:
        changed["tool_call_id"] = short_id(message["tool_call_id"])
    calls = message.get("tool_calls")
    if isinstance(calls, list | tuple):
        changed["tool_calls"] = [{**call, "id": short_id(call.get("id"))} for call in calls]
    return {**message, **changed} if changed else message


def _with_one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Return messages with one call each, followed by its results, for models that make one call per reply.

    gpt-oss's template renders only the first call of a message, and names a result by the call before it; Llama 3's
    refuses several.
    """
    told, left = list[Message](), deque(messages)
    while left:
        message = left.popleft()
        calls = _calls(message)
        if not calls:
            told.append({key: value for key, value in message.items() if key != "tool_calls"})
            continue
        results = list[Message]()
        while len(calls) > 1 and left and left[0].get("role") == "tool":
            results.append(left.popleft())
        told += _split_calls(message, calls, results)
    return told


def _split_calls(message: Message, calls: Sequence[Mapping[str, Any]], results: Sequence[Message]) -> Iterator[Message]:
    """Yield a message with one call for each of `calls`, each followed by its results, then results of unknown calls.

    The first has the text of `message`, the others have none. Of several calls with the same id, the last one gets all
    remaining results.
    """
    num_left = Counter(call["id"] for call in calls if call.get("id") is not None)
    own = {call_id: deque[Message]() for call_id in num_left}
    others = deque[Message]()
    for result in results:
        own.get(result.get("tool_call_id"), others).append(result)
    for number, call in enumerate(calls):
        said = message if number == 0 else {"role": message.get("role"), "content": ""}
        yield {**said, "tool_calls": [call]}
        num_left[call.get("id")] -= 1
        answers = own.get(call.get("id"), ())
        while answers:
            yield answers.popleft()
            if num_left[call["id"]]:
                break  # the next result belongs to the next call of that id
    yield from others


def _with_words_in_reasoning(message: Message) -> Message:
    """Return a message that has reasoning, text and calls with its text moved to the end of its reasoning.

    gpt-oss's template refuses both. Other messages are unchanged.
    """
    reasoning, content = message.get(FIELD), message.get("content")
    if not (message.get("tool_calls") and reasoning and content):
        return message
    return {**message, FIELD: f"{reasoning}\n{content}", "content": ""}


def _with_parsed_calls(message: Message) -> Message:
    """Return a message whose calls have their arguments decoded, because templates write values as JSON themselves."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    parsed = [{**call, "function": {**call["function"], "arguments": _arguments(call)}} for call in _calls(message)]
    return {**message, "tool_calls": parsed}


def _as_plain_message(message: Message, names: Mapping[str, str], format: ToolFormat) -> Message:
    """Return a message for templates without tools: calls become part of its text, and a result a user's message.

    Args:
        names: of the called functions, by call id.
    """
    if message.get("role") == "tool":
        name = names.get(str(message.get("tool_call_id")), "the function")
        return {"role": "user", "content": f"Result of {name}: {message.get('content')}", "is_result": True}
    return _with_calls_in_content(message, format, between="\n")


def _with_calls_in_content(message: Message, format: ToolFormat, between: str) -> Message:
    """Return a message with its calls in its content, after its text, as the model would write them.

    Args:
        between: text between the two, if there are both.
    """
    calls = _calls(message)
    if not calls:
        return message
    said = format.text_of([(call["function"]["name"], to_json(_arguments(call), _json)) for call in calls])
    content = str(message.get("content") or "")
    others = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**others, "content": f"{content}{between}{said}" if content else said}


def _merge_adjacent(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with adjacent results, and user's messages after them, joined to one, line by line.

    Templates expect roles to alternate. Results lose their mark `is_result`.
    """
    groups = grouped(messages, lambda group, message: bool(group[0].get("is_result")) and message.get("role") == "user")
    plain = ([{key: value for key, value in each.items() if key != "is_result"} for each in group] for group in groups)
    return [
        group[0] if len(group) == 1 else {**group[0], "content": "\n".join(str(each["content"]) for each in group)}
        for group in plain
    ]


def _with_instructions(messages: list[Message], tools: Sequence[Message], format: ToolFormat) -> list[Message]:
    """Return the messages with a system prompt that lists the tools and tells how to call them.

    For templates without tools. The text is added to the system prompt if there is one; nothing changes without tools.
    """
    if not tools:
        return messages
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    call = format.head("NAME") + "ARGUMENTS" + format.tail()
    instructions = _INSTRUCTIONS.format(functions=functions, call=call)
    if messages and messages[0].get("role") == "system":
        first = messages[0]
        return [{**first, "content": f"{first['content']}\n\n{instructions}"}, *messages[1:]]
    return [{"role": "system", "content": instructions}, *messages]


def _names(messages: Sequence[Message]) -> dict[str, str]:
    """Return the names of the called functions, by call id."""
    return {str(call.get("id")): call["function"]["name"] for message in messages for call in _calls(message)}


def _calls(message: Message) -> Sequence[dict[str, dict[str, Any]]]:
    """Return the calls of a message, each with a function that has a name and arguments; empty if there are none.

    Raises:
        InvalidRequest: `tool_calls` has another shape.
    """
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, list | tuple) or not all(map(_is_call, calls)):
        raise InvalidRequest(
            f'tool_calls is {calls!r:.60}; send a list of {{"id": ..., "function": {{"name": ..., "arguments": ...}}}}'
        )
    return calls


def _is_call(call: object) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str) and "arguments" in function


def _arguments(call: dict[str, dict[str, Any]]) -> object:
    """Return the decoded arguments of a call, which are JSON, or values already.

    Of incomplete JSON, return the readable part, because clients send it again with every later request.
    `GeneratedArguments` must be complete, because no prompt had just their part; they become `SpelledJson`.

    Raises:
        InvalidRequest: the arguments are not a JSON object.
    """
    name, text = call["function"]["name"], call["function"]["arguments"]
    if isinstance(text, Mapping):
        return text
    try:
        arguments = json.loads(text or "{}")
        if isinstance(arguments, str):  # some clients encode it as JSON twice
            arguments = json.loads(arguments or "{}")
        arguments = {} if arguments is None else arguments
    except ValueError:
        is_cut = not isinstance(text, GeneratedArguments) and text.lstrip().startswith("{")
        arguments = read_cut(text) if is_cut else None
    except (TypeError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"the arguments of the call of {name!r} are {text!r:.60}; they must be a JSON object")
    if _ESCAPED_HALF.search(text or ""):  # perhaps of a pair, which was decoded
        arguments = value_without_halves(arguments)
    return SpelledJson(arguments, text) if isinstance(text, GeneratedArguments) else arguments


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
