"""The script of a whole coding session: long instructions, many tools, files that are read, and two subagents.

The same each time, and of the size of Claude Code's and Codex's, whose own texts belong to their makers. Each request
has the scripted history, whatever the server replied. Knows texts and bodies, not servers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..served import Json
from .clients import DIALECTS, AgentReply, Client, Shape
from .loops import QUESTIONS, TOOL_NAMES, Turn, loop

SHAPE = Shape("session", drops_thoughts=True, moves_reminder=True, num_subagents=2)
NUM_SUBAGENT_TURNS = 4
_TOKENS_A_RULE, _TOKENS_A_LINE, _TOKENS_A_TOOL = 31, 21, 242  # approximate, by Qwen's tokenizer
_TOKENS_A_TURN = 266  # without the files that are read
_NUM_TOOLS = 16
_FIRST_SHARE = 0.4  # of the longest prompt: length of the first one
_ACTIONS = ("read", "edit", "rename", "delete", "format", "run", "commit", "review", "search", "explain")
_THINGS = ("a module", "a test", "a fixture", "a script", "the changelog", "a page of the docs", "a lock file")


@dataclass(frozen=True)
class Request:
    """A request of an agent: `agent` is 0 for the main conversation, else the number of a subagent."""

    agent: int
    path: str
    body: Json


def session(num_turns: int, num_tokens: int, dialect: str = "chat", model: str = "any") -> list[Request]:
    """Return all requests in order; the longest prompt has about `num_tokens`.

    Subagents take turns after the first third of the main conversation, with less to read.
    """
    first = int(_FIRST_SHARE * num_tokens)
    num_read = max(0, (num_tokens - first) // max(1, num_turns) - _TOKENS_A_TURN)
    tools = [_tool(number) for number in range(_NUM_TOOLS)]
    rules = (first - _NUM_TOOLS * _TOKENS_A_TOOL) // _TOKENS_A_RULE
    main = DIALECTS[dialect](SHAPE, model, instructions=_instructions(rules), tools=tools)
    some = tools[: _NUM_TOOLS // 2]
    subagents = [
        DIALECTS[dialect](SHAPE, model, agent, instructions=_instructions(rules // 4), tools=some)
        for agent in range(1, 1 + SHAPE.num_subagents)
    ]
    spawned = num_turns // 3
    requests = list(_requests([main], _turns(num_turns, num_read)[:spawned]))
    requests += _requests(subagents, _turns(NUM_SUBAGENT_TURNS, num_read // 2))
    return requests + list(_requests([main], _turns(num_turns, num_read)[spawned:]))


def _requests(clients: Sequence[Client], turns: Sequence[Turn]) -> Iterator[Request]:
    """Yield a request of each client in turn; replies are those of the turns."""
    for client in clients:
        if not client.history:
            client.ask(QUESTIONS[0])
    for turn in turns:
        for client in clients:
            yield Request(client.agent, client.path, client.body())
            number = len(client.history)
            calls = tuple((f"call_{client.agent}_{number}_{i}", *call) for i, call in enumerate(turn.calls))
            client.add(AgentReply("", turn.words, calls, 0), turn.results)
            if turn.question is not None:
                client.ask(turn.question)


def _turns(num_turns: int, num_read: int) -> list[Turn]:
    """Return a loop whose tools return files, of `num_read` tokens per turn."""
    turns = enumerate(loop(num_turns))
    return [
        dataclasses.replace(turn, results=(turn.results[0] + _listing(number, num_read), *turn.results[1:]))
        if turn.results
        else turn
        for number, turn in turns
    ]


def _listing(number: int, num_tokens: int) -> str:
    """Return a source file of about this many tokens, as a tool that reads files prints it."""
    return "".join(
        f"\n{line:5d}\t    value_{(line * 7919 + number) % 9973} = compute(part_{line % 17}, {line * number % 83})"
        for line in range(num_tokens // _TOKENS_A_LINE)
    )


def _instructions(num_rules: int) -> str:
    """Return the system prompt of a coding agent, with this many rules."""
    rules = (
        f"Rule {number}: before you {_ACTIONS[number % 10]} {_THINGS[number % 7]}, look for what depends on it, "
        f"and {_ACTIONS[number % 9]} no more than {number % 13 + 2} of them at once."
        for number in range(max(1, num_rules))
    )
    return "You are a coding agent.\n\n" + "\n".join(rules)


def _tool(number: int) -> Mapping[str, Any]:
    """Return the definition of a tool; the first have the names that turns call."""
    name = TOOL_NAMES[number] if number < len(TOOL_NAMES) else f"{_ACTIONS[number % 10]}_{number}"
    about = " ".join(f"It can {action} {thing}, if asked." for action, thing in zip(_ACTIONS, _THINGS, strict=False))
    properties = {
        f"{_ACTIONS[(number + i) % 10]}_{i}": {"type": "string", "description": f"What to {_ACTIONS[i]}, if anything."}
        for i in range(6)
    }
    parameters = {"type": "object", "properties": properties, "required": []}
    return {"name": name, "description": f"Tool {number} of the editor. {about}", "parameters": parameters}
