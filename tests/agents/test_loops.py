"""Tool loops of packages from PyPI and npm: the same task in ten steps, each with the package's own loop."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from .task import DONE, SHOWN, STEPS, TASK, Call, Step, check_done, script
from .workplace import Workplace, check_tokens

LOOPS = Path(__file__).resolve().parent / "loops"
MODEL = "scripted"


def call_of(step: Step) -> Call:
    match step.kind:
        case "run":
            return "run", {"command": step.text}
        case "read":
            return "read", {"path": step.path}
        case "write":
            return "write", {"path": step.path, "text": step.text}
        case "edit":
            return "edit", {"path": step.path, "old": step.old, "text": step.text}


@pytest.mark.parametrize(
    ("loop", "path"),
    [
        (("anthropic_runner.py",), "/v1/messages"),
        (("openai_agents.py",), "/v1/responses"),
        (("pydantic_agents.py", "messages"), "/v1/messages"),
        (("pydantic_agents.py", "chat"), "/v1/chat/completions"),
        (("pydantic_agents.py", "responses"), "/v1/responses"),
        (("anthropic_runner.cjs",), "/v1/messages"),
        (("ai_sdk.cjs", "anthropic"), "/v1/messages"),
        (("ai_sdk.cjs", "open-responses"), "/v1/responses"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_package_does_the_task_and_nothing_is_computed_twice(
    loop: tuple[str, ...], path: str, workplace: Workplace, npm: Path
) -> None:
    program, *arguments = loop
    interpreter = sys.executable if program.endswith(".py") else "node"
    with workplace.serve(script("run", call_of), "serve", "fake.radixlm", "--port", "0", "--model-id", MODEL) as server:
        environment = workplace.environment(
            RADIXLM_URL=server.url, RADIXLM_MODEL=MODEL, RADIXLM_TASK=TASK, NODE_PATH=str(npm)
        )
        said = workplace.run([interpreter, str(LOOPS / program), *arguments], environment)
    assert DONE in said
    check_done(workplace.repository)
    asked = workplace.asked()
    assert [each.path for each in asked] == [path] * (len(STEPS) + 1)
    assert all(shown in asked[-1].prompt for shown in SHOWN), "the tools did not run"
    check_tokens(asked, " ".join(loop))
    assert workplace.way_out.hosts == set()
