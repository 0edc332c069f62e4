"""Clients of three APIs, and the way each sends its history back.

Knows request bodies and replies over HTTP; not what is computed for them.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from .loops import SYSTEM, TOOLS

Json = dict[str, Any]
MAX_TOKENS = 4096


@dataclass(frozen=True)
class Shape:
    """The changes that a client makes to its history.

    Attributes:
        rewrites: arguments are parsed and serialized again: keys in another order, no spaces, everything escaped.
        trims: text loses the white space around it.
        drops_thoughts: reasoning is not sent back.
        moves_reminder: the last message has a reminder, which no earlier message has.
        num_subagents: subagents of the same client, each with its own system prompt, that alternate with the main
            conversation.
        bills: in Messages, a line with a unique number for each request precedes the system prompt.
    """

    name: str
    rewrites: bool = False
    trims: bool = False
    drops_thoughts: bool = False
    moves_reminder: bool = False
    num_subagents: int = 0
    bills: bool = False


SHAPES = (
    Shape("as it came"),
    Shape("rewrites arguments", rewrites=True),
    Shape("trims text", trims=True),
    Shape("drops thoughts", drops_thoughts=True),
    Shape("moves a reminder", moves_reminder=True),
    Shape("all of these", rewrites=True, trims=True, drops_thoughts=True, moves_reminder=True),
    Shape("has three subagents", num_subagents=3, bills=True),
)
REMINDER = "<system-reminder>\nThe list of tasks is empty. Do not mention this.\n</system-reminder>"


@dataclass(frozen=True)
class AgentReply:
    """A reply as a client receives it; arguments are JSON."""

    thought: str
    words: str
    calls: tuple[tuple[str, str, str], ...]  # ids, names, arguments
    num_tokens: int


@dataclass
class Client(ABC):
    """A conversation over one API; of the main agent, or of a subagent by its number."""

    shape: Shape
    model: str
    agent: int = 0
    history: list[tuple[str, Any]] = field(default_factory=list)
    instructions: str = SYSTEM
    tools: Sequence[Mapping[str, Any]] = tuple(TOOLS)

    path: ClassVar[str]

    @property
    def system(self) -> str:
        """The system prompt."""
        subagent = f"You are subagent {self.agent}, and answer to another agent. " if self.agent else ""
        return subagent + self.instructions

    def ask(self, question: str) -> None:
        """Add a message of the user."""
        self.history.append(("asked", question))

    def add(self, reply: AgentReply, results: Sequence[str]) -> None:
        """Add a reply of the model, and the results of its calls."""
        self.history.append(("reply", reply))
        if results:
            ids = [call_id for call_id, _, _ in reply.calls]
            self.history.append(("results", list(zip(ids, results, strict=True))))

    @abstractmethod
    def body(self) -> Json:
        """Return the body of the next request."""

    @abstractmethod
    def read(self, answer: Json) -> AgentReply:
        """Read the reply in a response."""

    def _arguments(self, text: str) -> str:
        """Return the arguments of a call as the client writes them: in the model's text, or rewritten."""
        return json.dumps(self._value(text), separators=(",", ":")) if self.shape.rewrites else text

    def _value(self, text: str) -> Any:
        value = json.loads(text)
        return dict(reversed(value.items())) if self.shape.rewrites else value

    def _words(self, reply: AgentReply) -> str:
        return reply.words.strip() if self.shape.trims else reply.words

    def _thought(self, reply: AgentReply) -> str:
        return "" if self.shape.drops_thoughts else reply.thought


class ChatClient(Client):
    """A client of `/v1/chat/completions`."""

    path = "/v1/chat/completions"

    def body(self) -> Json:
        """Return the body of the next request to the Chat Completions API, with the history so far."""
        messages: list[Json] = [{"role": "system", "content": self.system}]
        for kind, value in self.history:
            match kind:
                case "asked":
                    messages.append({"role": "user", "content": value})
                case "reply":
                    messages.append(self._reply(value))
                case "results":
                    messages += [{"role": "tool", "tool_call_id": id, "content": text} for id, text in value]
        if self.shape.moves_reminder:
            messages.append({"role": "user", "content": REMINDER})
        tools = [{"type": "function", "function": tool} for tool in self.tools]
        return {"messages": messages, "tools": tools, "temperature": 0.0, "max_tokens": MAX_TOKENS}

    def read(self, answer: Json) -> AgentReply:
        """Return the reply in a response: its reasoning, text, tool calls and number of tokens."""
        message = answer["choices"][0]["message"]
        functions = [(call["id"], call["function"]) for call in message.get("tool_calls", ())]
        return AgentReply(
            message.get("reasoning_content", ""),
            message["content"] or "",
            tuple((id, each["name"], each["arguments"]) for id, each in functions),
            answer["usage"]["completion_tokens"],
        )

    def _reply(self, reply: AgentReply) -> Json:
        """Return a reply as a message of the history."""
        message: Json = {"role": "assistant", "content": self._words(reply) or None}
        if reply.calls:
            message["tool_calls"] = [
                {"id": id, "type": "function", "function": {"name": name, "arguments": self._arguments(arguments)}}
                for id, name, arguments in reply.calls
            ]
        elif message["content"] is None:
            message["content"] = ""
        thought = self._thought(reply)
        return {**message, "reasoning_content": thought} if thought else message


class ResponsesClient(Client):
    """A client of `/v1/responses`."""

    path = "/v1/responses"

    def body(self) -> Json:
        """Return the body of the next request to the Responses API, with the history so far."""
        items: list[Json] = []
        for kind, value in self.history:
            match kind:
                case "asked":
                    items.append({"type": "message", "role": "user", "content": value})
                case "reply":
                    items += self._reply(value)
                case "results":
                    items += [{"type": "function_call_output", "call_id": id, "output": text} for id, text in value]
        if self.shape.moves_reminder:
            items.append({"type": "message", "role": "user", "content": REMINDER})
        tools = [{"type": "function", **tool} for tool in self.tools]
        asked = {"input": items, "instructions": self.system, "tools": tools}
        return {**asked, "temperature": 0.0, "max_output_tokens": MAX_TOKENS, "store": False}

    def read(self, answer: Json) -> AgentReply:
        """Return the reply in a response: its reasoning, text, tool calls and number of tokens."""
        thought, words, calls = "", "", list[tuple[str, str, str]]()
        for item in answer["output"]:
            match item["type"]:
                case "reasoning":
                    thought += "".join(part["text"] for part in item["content"])
                case "message":
                    words += "".join(part["text"] for part in item["content"])
                case "function_call":
                    calls.append((item["call_id"], item["name"], item["arguments"]))
        return AgentReply(thought, words, tuple(calls), answer["usage"]["output_tokens"])

    def _reply(self, reply: AgentReply) -> list[Json]:
        """Return a reply as input items of the history: reasoning, text and tool calls."""
        items: list[Json] = []
        if thought := self._thought(reply):
            content = [{"type": "reasoning_text", "text": thought}]
            reasoning: Json = {"type": "reasoning", "summary": [], "content": content}
            items.append(reasoning)
        if words := self._words(reply):
            part: Json = {"type": "output_text", "text": words, "annotations": []}
            items.append({"type": "message", "role": "assistant", "content": [part]})
        for id, name, arguments in reply.calls:
            call = {"type": "function_call", "call_id": id, "name": name, "arguments": self._arguments(arguments)}
            items.append(call)
        return items


class MessagesClient(Client):
    """A client of `/v1/messages`, whose calls have objects as arguments."""

    path = "/v1/messages"

    def body(self) -> Json:
        """Return the body of the next request to Anthropic's Messages API, with the history so far."""
        messages: list[Json] = []
        for kind, value in self.history:
            match kind:
                case "asked":
                    words: list[Json] = [{"type": "text", "text": value}]
                    messages.append({"role": "user", "content": words})
                case "reply":
                    messages.append({"role": "assistant", "content": self._reply(value)})
                case "results":
                    results = [{"type": "tool_result", "tool_use_id": id, "content": text} for id, text in value]
                    messages.append({"role": "user", "content": results})
        if self.shape.moves_reminder:
            last = messages[-1]
            messages[-1] = {**last, "content": [*last["content"], {"type": "text", "text": REMINDER}]}
        tools = [{"name": tool["name"], "input_schema": tool["parameters"]} for tool in self.tools]
        asked = {"model": self.model, "system": self._system(), "messages": messages, "tools": tools}
        return {**asked, "temperature": 0.0, "max_tokens": MAX_TOKENS, "thinking": {"type": "enabled"}}

    def read(self, answer: Json) -> AgentReply:
        """Return the reply in a response: its reasoning, text, tool calls and number of tokens."""
        thought, words, calls = "", "", list[tuple[str, str, str]]()
        for block in answer["content"]:
            match block["type"]:
                case "thinking":
                    thought += block["thinking"]
                case "text":
                    words += block["text"]
                case "tool_use":
                    calls.append((block["id"], block["name"], json.dumps(block["input"], ensure_ascii=False)))
        return AgentReply(thought, words, tuple(calls), answer["usage"]["output_tokens"])

    def _system(self) -> list[Json]:
        """Return the system prompt in Claude Code's form."""
        bill = f"x-anthropic-billing-header: cc_version=2.1.330; cch={self.agent}{len(self.history):05x};"
        return [{"type": "text", "text": text} for text in ([bill] if self.shape.bills else []) + [self.system]]

    def _reply(self, reply: AgentReply) -> list[Json]:
        """Return a reply as the content blocks of one assistant message: reasoning, text and tool calls."""
        blocks: list[Json] = []
        if thought := self._thought(reply):
            blocks.append({"type": "thinking", "thinking": thought, "signature": "unsigned"})
        if words := self._words(reply):
            blocks.append({"type": "text", "text": words})
        for id, name, arguments in reply.calls:
            blocks.append({"type": "tool_use", "id": id, "name": name, "input": self._value(arguments)})
        return blocks


DIALECTS: Mapping[str, type[Client]] = {"chat": ChatClient, "responses": ResponsesClient, "messages": MessagesClient}
