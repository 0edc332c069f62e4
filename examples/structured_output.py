"""Constrain replies to a JSON schema or a pydantic model: python examples/structured_output.py smollm2.radixlm"""

from __future__ import annotations

import json
import sys
from typing import Any

from radixlm import Engine, Grammar

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Person:
    """A class with `model_json_schema`, which is all that is needed. A pydantic model works unchanged."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return PERSON


def main(artifact: str) -> None:
    question = [{"role": "user", "content": "Invent a person, as JSON."}]
    with Engine(artifact) as engine:
        for response_format in (PERSON, Person):
            person = json.loads(engine.chat(question, response_format=response_format, max_tokens=60, seed=1).text)
            print(f"{person['name']!r} is {person['age']} years old")
        mood = engine.generate("I like rain. My mood is", response_format=Grammar.choice([" good", " bad"]))
        print(f"The mood is{mood.text}")


if __name__ == "__main__":
    main(*sys.argv[1:])
