"""Codex, opencode and Claude Code, as `radixlm agent --write` configures them in a HOME with nothing else in it, and by
the command that it prints.

Each does a task of ten steps. Its model says what a script says; tools, files, prompts and cache are real.
"""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from ..serve_process import ServeProcess, free_port
from .task import DONE, SHOWN, STEPS, TASK, Call, Step, check_done, script
from .workplace import Asked, Workplace, check_tokens


@dataclass(frozen=True)
class Agent:
    """How a client is tried.

    Args:
        tool: one of those that its requests bring.
        path: the endpoint that it asks.
        command: what is run, given the folder of npm's packages, in place of the client's name.
        arguments: what it needs to work unattended, before the task.
        asks: hosts that it asks all the same; nothing in this suite answers for them.
        call_of: what its model calls for a step in a repository.
    """

    name: str
    tool: str
    path: str
    command: Callable[[Path], list[str]]
    arguments: tuple[str, ...]
    call_of: Callable[[Step, Path], Call]
    asks: frozenset[str] = frozenset()


def codex_call(step: Step, repository: Path) -> Call:
    """Codex has a shell, in which a program applies patches."""
    match step.kind:
        case "run":
            shell = step.text
        case "read":
            shell = f"sed -n '1,200p' {step.path}"
        case "write":
            lines = "".join(f"+{line}\n" for line in step.text.splitlines())
            shell = f"apply_patch <<'EOF'\n*** Begin Patch\n*** Add File: {step.path}\n{lines}*** End Patch\nEOF"
        case "edit":
            hunk = f"*** Update File: {step.path}\n@@\n-{step.old}\n+{step.text}"
            shell = f"apply_patch <<'EOF'\n*** Begin Patch\n{hunk}\n*** End Patch\nEOF"
    return "exec_command", {"cmd": shell}


def opencode_call(step: Step, repository: Path) -> Call:
    path = str(repository / step.path)
    match step.kind:
        case "run":
            return "bash", {"command": step.text, "description": "Look"}
        case "read":
            return "read", {"filePath": path}
        case "write":
            return "write", {"content": step.text, "filePath": path}
        case "edit":
            return "edit", {"filePath": path, "oldString": step.old, "newString": step.text}


def claude_call(step: Step, repository: Path) -> Call:
    path = str(repository / step.path)
    match step.kind:
        case "run":
            return "Bash", {"command": step.text, "description": "Look"}
        case "read":
            return "Read", {"file_path": path}
        case "write":
            return "Write", {"file_path": path, "content": step.text}
        case "edit":
            return "Edit", {"file_path": path, "old_string": step.old, "new_string": step.text}


AGENTS = (
    Agent(
        "codex",
        tool="exec_command",
        path="/v1/responses",
        command=lambda npm: [str(npm / ".bin" / "codex"), "exec"],
        arguments=("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
        call_of=codex_call,
    ),
    Agent(
        "opencode",
        tool="bash",
        path="/v1/chat/completions",
        command=lambda npm: [str(npm / "opencode-linux-x64" / "bin" / "opencode"), "run"],
        arguments=(),
        call_of=opencode_call,
        asks=frozenset({"registry.npmjs.org"}),  # for the package that its plugins would need
    ),
    Agent(
        "claude",
        tool="Bash",
        path="/v1/messages",
        command=lambda npm: ["node", str(npm / "@anthropic-ai" / "claude-code" / "cli-wrapper.cjs")],
        arguments=("--allowedTools", "Bash,Edit,Read,Write", "-p"),
        call_of=claude_call,
    ),
)


OPENS_REPLY, PAGE_SIZE = "<|im_start|>assistant\n", 16  # of the prompts, and tokens that the store keeps together

FAULTS = {"2": 429, "5": 500, "8": "cut"}


@pytest.mark.parametrize("faults", [{}, FAULTS], ids=["", "after faults"])
@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
def test_it_does_its_task_and_nothing_is_computed_twice(
    agent: Agent, faults: dict[str, object], workplace: Workplace, npm: Path
) -> None:
    """Also where the server was busy, failed, and broke off in the middle: each agent tries again by itself."""
    call_of = lambda step: agent.call_of(step, workplace.repository)  # noqa: E731
    told = script(agent.tool, call_of) | {"faults": faults}
    with workplace.serve(told, "agent", agent.name, "fake.radixlm", "--write", "--port", str(free_port())) as server:
        said = workplace.run(*_typed(agent, server, npm, workplace))
        met = re.findall("^fault: (.*)$", server.log, re.MULTILINE)
    assert met == [str(fault) for fault in faults.values()]
    assert DONE in said
    check_done(workplace.repository)
    asked = _asked(agent, workplace)
    assert [each.path for each in asked] == [agent.path] * (len(STEPS) + 1)
    assert all(shown in asked[-1].prompt for shown in SHOWN), "the tools did not run"
    check_tokens(asked, agent.name)
    assert workplace.way_out.hosts <= agent.asks


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
def test_it_does_its_task_though_the_server_is_killed_and_the_conversation_is_found_again(
    agent: Agent, workplace: Workplace, npm: Path
) -> None:
    """Killed in the middle of a reply, and started again by the same command: each agent tries again by itself."""
    told = script(agent.tool, lambda step: agent.call_of(step, workplace.repository)) | {"row_s": 0.0002}
    command = ("agent", agent.name, "fake.radixlm", "--write", "--port", str(free_port()))
    with (
        workplace.serve(told | {"faults": {"7": "kill"}}, *command) as server,
        workplace.begun(*_typed(agent, server, npm, workplace)) as client,
    ):
        assert server.wait_until_ended() == -signal.SIGKILL
        before = _asked(agent, workplace)
        with workplace.serve(told, *command):
            said = workplace.ended(client)
    assert DONE in said
    check_done(workplace.repository)
    again = _asked(agent, workplace)[len(before) :]
    assert len(before) >= 4 and len(again) >= 4, "it was not killed in the middle"
    assert again[-1].prompt.count(OPENS_REPLY) == len(STEPS) + 1
    assert again[0].num_cached >= before[-1].num_prompt // PAGE_SIZE * PAGE_SIZE


def _asked(agent: Agent, workplace: Workplace) -> list[Asked]:
    """The requests so far whose replies the script has."""
    return [each for each in workplace.asked() if f'"name": "{agent.tool}"' in each.prompt]


def _typed(agent: Agent, server: ServeProcess, npm: Path, workplace: Workplace) -> tuple[list[str], dict[str, str]]:
    """The command that `radixlm agent` has said to run, with the task; and its environment."""
    words = shlex.split(server.said(r"^then run: (.*)$")[1])
    at = words.index(agent.name)
    assigned = dict(word.split("=", 1) for word in words[:at])
    command = [*agent.command(npm), *words[at + 1 :], *agent.arguments, TASK]
    return command, workplace.environment(**assigned)
