"""Let a model call a Python function, and answer with its result: python examples/tools.py smollm2.radixlm"""

from __future__ import annotations

import json
import sys
from typing import Any

from radixlm import Engine, Tool

WEATHER = Tool(
    "weather",
    {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
    description="Tell the weather in a city.",
)


def weather(city: str) -> str:
    return f"It rains in {city}, at 12 degrees."


def main(artifact: str) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Paris?"}]
    with Engine(artifact) as engine:
        must_call = engine.tool_format.grammar([WEATHER], "required")  # "auto" lets the model decide
        reply = engine.chat(messages, tools=[WEATHER], constraint=must_call, max_tokens=80, temperature=0)
        [call] = engine.read_reply(reply.text, [WEATHER]).calls
        result = weather(**json.loads(call.arguments))
        print(f"{call.name}({call.arguments}) -> {result}")

        function = {"name": call.name, "arguments": call.arguments}
        calls = [{"id": call.call_id, "type": "function", "function": function}]
        messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        messages.append({"role": "tool", "tool_call_id": call.call_id, "content": result})
        print(engine.chat(messages, tools=[WEATHER], max_tokens=40, temperature=0).text)


if __name__ == "__main__":
    main(*sys.argv[1:])
