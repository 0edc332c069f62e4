"""mini-swe-agent, which calls a shell, and aider, which writes whole files: agents from PyPI, at their commands."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from ..serve_process import free_port
from .task import SHOWN, STEPS, TASK, TITLE, Call, Step, check_done, script
from .workplace import Workplace, check_tokens

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"  # mini-swe-agent's model says so when it is done


def shell_call(step: Step) -> Call:
    match step.kind:
        case "run":
            command = step.text
        case "read":
            command = f"cat {step.path}"
        case "write":
            command = f"cat > {step.path} <<'EOF'\n{step.text}EOF"
        case "edit":
            replace = f"t.replace({step.old!r}, {step.text!r})"
            program = f"t = open('{step.path}').read()\nopen('{step.path}', 'w').write({replace})"
            command = f"python3 - <<'EOF'\n{program}\nEOF"
    return "bash", {"command": command}


FAULTS = {"2": 429, "5": 500}


@pytest.mark.parametrize("faults", [{}, FAULTS], ids=["", "after faults"])
def test_mini_swe_agent_does_the_task_and_nothing_is_computed_twice(
    faults: dict[str, object], workplace: Workplace
) -> None:
    steps = (*STEPS, Step("run", text=SUBMIT))
    told = script("bash", shell_call, steps) | {"faults": faults}
    with workplace.serve(told, "serve", "fake.radixlm", "--port", "0", "--model-id", "scripted") as server:
        environment = workplace.environment(
            OPENAI_API_BASE=f"{server.url}/v1",
            OPENAI_API_KEY="none",
            MSWEA_CONFIGURED="true",  # else it asks for a key
            MSWEA_COST_TRACKING="ignore_errors",
            LITELLM_LOCAL_MODEL_COST_MAP="True",
        )
        mini = Path(sys.executable).parent / "mini"
        workplace.run([str(mini), "-m", "openai/scripted", "-t", TASK, "-y", "--exit-immediately"], environment)
        assert re.findall("^fault: (.*)$", server.log, re.MULTILINE) == [str(fault) for fault in faults.values()]
    check_done(workplace.repository)
    asked = workplace.asked()
    assert [each.path for each in asked] == ["/v1/chat/completions"] * len(steps)
    assert all(shown in asked[-1].prompt for shown in SHOWN), "the commands did not run"
    check_tokens(asked, "mini-swe-agent")
    assert workplace.way_out.hosts == set()


def whole(path: str, text: str) -> str:
    """A reply with a file, as aider reads it."""
    return f"This is the file.\n\n{path}\n```\n{text}```\n"


GREETING = 'def greet(name):\n    return "{}, " + name + "!"\n'
NOTES = [f"Note {number} is here.\n" for number in range(1, 9)]
SAID = [  # by the user, a line each
    TASK,
    *(f"Add note {number} to NOTES.md." for number in range(1, 9)),
]
REPLIES = [
    whole("greeting.py", GREETING.format("Hallo")),  # the test fails, and aider asks again
    whole("greeting.py", GREETING.format("Hello")),
    *(whole("NOTES.md", "".join(NOTES[: number + 1])) for number in range(8)),
]


@pytest.mark.parametrize("faults", [{}, FAULTS], ids=["", "after faults"])
def test_aider_edits_tests_and_edits_again_and_nothing_is_computed_twice(
    faults: dict[str, object], workplace: Workplace
) -> None:
    aider = Path(os.environ["RADIXLM_AIDER"])
    if not aider.exists():
        pytest.skip("aider is not installed: it needs Python 3.12 or older")
    told = {"task": TASK, "tool": None, "turns": REPLIES, "otherwise": TITLE, "faults": faults}
    port = str(free_port())
    with workplace.serve(told, "agent", "aider", "fake.radixlm", "--write", "--port", port) as server:
        config = str(workplace.home / ".aider.radixlm.yml")
        server.said(re.escape(f"run: aider --config {config}"))
        unattended = ["--yes-always", "--no-fancy-input", "--no-pretty", "--no-gitignore", "--no-auto-commits"]
        tested = ["--no-suggest-shell-commands", "--auto-test", "--test-cmd", "python3 test_greeting.py"]
        command = [str(aider), "--config", config, *unattended, *tested, "greeting.py", "NOTES.md"]
        said = workplace.run(command, said="\n".join([*SAID, "/exit", ""]))
        assert re.findall("^fault: (.*)$", server.log, re.MULTILINE) == [str(fault) for fault in faults.values()]
    assert (workplace.repository / "greeting.py").read_text() == GREETING.format("Hello")
    assert (workplace.repository / "NOTES.md").read_text() == "".join(NOTES)
    assert "AssertionError: Hallo, Ann!" in said, "the test did not run"
    asked = workplace.asked()
    assert [each.said.strip() for each in asked] == [reply.strip() for reply in REPLIES]
    assert {each.path for each in asked} == {"/v1/chat/completions"}
    check_tokens(asked, "aider")
    assert workplace.way_out.hosts <= {"raw.githubusercontent.com"}  # for the prices of models
