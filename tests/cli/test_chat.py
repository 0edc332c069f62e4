"""A conversation in the terminal: what is shown, remembered and survived."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import textwrap
import time
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner
from radixlm.cli import chat
from radixlm.cli.chat import Conversation, summary
from radixlm.cli.main import cli
from radixlm.runtime.engine.completion import CacheMatch, Completion, Timings, Usage
from radixlm.runtime.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from .conftest import FakeEngine

SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
REPLY = {"role": "assistant", "content": "Hello there"}


def test_without_a_terminal_it_holds_a_conversation_of_two_turns(runner: CliRunner, engine: type[FakeEngine]) -> None:
    result = runner.invoke(cli, ["chat", "x.radixlm"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[:2] == [f"> {chat.DEMO_QUESTIONS[0]}", "Hello there"]
    assert lines[2] == ("2 tokens · 80.0 tokens/s · first token after 125 ms · 0 of 20 prompt tokens from the cache")
    assert lines[5].endswith("20 of 40 prompt tokens from the cache")
    first, second = ({"role": "user", "content": question} for question in chat.DEMO_QUESTIONS)
    assert [messages for messages, _ in engine.asked] == [[SYSTEM, first], [SYSTEM, first, REPLY, second]]
    assert all(params.greedy and params.max_tokens for _, params in engine.asked)


def test_the_line_about_a_reply_says_how_many_guesses_were_right() -> None:
    usage, match = Usage(9, 7, 0, drafted_tokens=6, accepted_tokens=4), CacheMatch(None, 0, None)
    completion = Completion("a", (1,), (2,), None, "stop", usage, Timings(None, None, 1.0), match)
    assert summary(completion) == "7 tokens · 0 of 9 prompt tokens from the cache · 4 of 6 draft tokens accepted"


@pytest.mark.parametrize("command", ["chat", "run"])
def test_a_prompt_is_the_only_turn(runner: CliRunner, engine: type[FakeEngine], command: str) -> None:
    result = runner.invoke(cli, [command, "x.radixlm", "Name a tree."], input="never\n")
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[0] == "Hello there"
    [(messages, params)] = engine.asked
    assert messages == [SYSTEM, {"role": "user", "content": "Name a tree."}]
    assert params.max_tokens == chat.MAX_TOKENS and not params.greedy


def test_each_piped_line_is_a_turn(runner: CliRunner, engine: type[FakeEngine]) -> None:
    result = runner.invoke(cli, ["chat", "x.radixlm"], input="What is 2+2?\n\nAnd 3+3?")
    assert result.exit_code == 0, result.output
    first, second = ({"role": "user", "content": question} for question in ("What is 2+2?", "And 3+3?"))
    assert [messages for messages, _ in engine.asked] == [[SYSTEM, first], [SYSTEM, first, REPLY, second]]
    assert result.output.splitlines()[:2] == ["> What is 2+2?", "Hello there"]
    assert {params.max_tokens for _, params in engine.asked} == {chat.MAX_TOKENS}  # as at a terminal


def test_piped_lines_may_begin_again_and_leave(runner: CliRunner, engine: type[FakeEngine]) -> None:
    runner.invoke(cli, ["chat", "x.radixlm"], input="One\n/reset\nTwo\n/exit\nThree\n")
    asked = [[message["content"] for message in messages[1:]] for messages, _ in engine.asked]  # type: ignore[index]
    assert asked == [["One"], ["Two"]]


def test_blank_lines_are_no_conversation(runner: CliRunner, engine: type[FakeEngine]) -> None:
    result = runner.invoke(cli, ["chat", "x.radixlm"], input="\n  \n")
    assert result.output.startswith(f"> {chat.DEMO_QUESTIONS[0]}")


def test_a_model_without_a_template_says_so_before_it_is_asked(
    runner: CliRunner, engine: type[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "chat_template", None)
    result = runner.invoke(cli, ["chat", "x.radixlm"])
    assert (result.exit_code, result.output.count("\n"), engine.asked) == (2, 1, [])
    assert "x.radixlm has no chat template; continue a text instead: radixlm generate x.radixlm" in result.output


def test_options_reach_engine_and_sampler(runner: CliRunner, engine: type[FakeEngine]) -> None:
    options = [
        "--system",
        "",
        "--temperature",
        "0.7",
        "--stop",
        "a",
        "--stop",
        "b",
        "--kv-cache-gb",
        "0.5",
        "--state-cache-gb",
        "0.25",
    ]
    kept = ["--store", "kept", "--store-gb", "2.5", "--kv-budget", "0.25", "--chunk-cache-mb", "1.5"]
    runner.invoke(
        cli, ["chat", "x.radixlm", *options, "--threads", "2", "--match", "seam", "--strip-suffix", "always", *kept]
    )
    messages, params = engine.asked[0]
    assert [message["role"] for message in messages] == ["user"]  # type: ignore[attr-defined]
    assert (params.temperature, params.stop) == (0.7, ("a", "b"))
    assert engine.opened == [
        {
            "kv_cache_bytes": 500_000_000,
            "state_cache_bytes": 250_000_000,
            "num_threads": 2,
            "match": "seam",
            "strip_suffix": "always",
            "store": "kept",
            "store_bytes": 2_500_000_000,
            "kv_budget": 0.25,
            "chunk_cache_bytes": 1_500_000,
        }
    ]


def test_a_missing_artifact_is_one_line_and_exit_code_2(runner: CliRunner, engine: type[FakeEngine]) -> None:
    result = runner.invoke(cli, ["chat", "nothing.gguf"])
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert "nothing.gguf does not exist; give an artifact" in result.output


def test_a_value_out_of_range_is_one_line_and_exit_code_2(runner: CliRunner, engine: type[FakeEngine]) -> None:
    result = runner.invoke(cli, ["chat", "x.radixlm", "--top-p", "7"])
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert "--top-p is 7.0; " in result.output


def test_a_stopped_reply_stays_as_far_as_it_went(engine: type[FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    conversation = Conversation(engine("x.radixlm"), SamplingParams(), "")  # type: ignore[arg-type]
    engine.words = ["Once", None, "never"]
    conversation.ask("Tell a story")
    assert capsys.readouterr().out.endswith("· stopped\n")
    assert conversation.messages[-1] == {"role": "assistant", "content": "Once"}


def test_a_reply_stopped_before_its_first_word_is_forgotten_with_its_question(
    engine: type[FakeEngine],
) -> None:
    conversation = Conversation(engine("x.radixlm"), SamplingParams(), "Be brief.")  # type: ignore[arg-type]
    engine.words = [None]
    conversation.ask("Tell a story")
    assert [message["role"] for message in conversation.messages] == ["system"]


def test_reset_and_errors_leave_a_conversation_that_goes_on(
    engine: type[FakeEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = iter(["Hi", "too long", "", "/help", "/fly", "/reset", "Bye", "/exit", "never"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    conversation = Conversation(engine("x.radixlm"), SamplingParams(), "")  # type: ignore[arg-type]
    chat.talk(conversation)
    assert [len(messages) for messages, _ in engine.asked] == [1, 1]  # type: ignore[arg-type]
    output = capsys.readouterr()
    assert output.err == "Error: the prompt has 9999 tokens, the context 2048; send a shorter one\n"
    assert "unknown command /fly" in output.out
    assert next(lines) == "never"


@pytest.mark.parametrize("line", ["/set system You are a pirate.", "/show info", "/system Be brief.", "/fly"])
def test_commands_of_other_tools_never_reach_the_model(
    engine: type[FakeEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    lines = iter([line, "/clear", "/?", "/quit", "never"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    chat.talk(Conversation(engine("x.radixlm"), SamplingParams(), ""))  # type: ignore[arg-type]
    said = capsys.readouterr().out
    assert engine.asked == [] and next(lines) == "never"
    assert f"unknown command {line}; " in said and "new conversation" in said and said.count(chat.HELP) == 3


@pytest.mark.parametrize(
    ("line", "asked"),
    [
        ("/etc/hosts", "/etc/hosts"),
        ("/tmp is full, why?", "/tmp is full, why?"),
        ("//tmp", "/tmp"),
        ("//set a", "/set a"),
    ],
)
def test_a_question_may_begin_with_a_path(
    engine: type[FakeEngine], monkeypatch: pytest.MonkeyPatch, line: str, asked: str
) -> None:
    lines = iter([line, "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    chat.talk(Conversation(engine("x.radixlm"), SamplingParams(), ""))  # type: ignore[arg-type]
    [(messages, _)] = engine.asked
    assert messages == [{"role": "user", "content": asked}]


@pytest.mark.parametrize(
    ("typed", "asked"),
    [
        (['"""one', "/exit", "", 'two"""'], "one\n/exit\n\ntwo"),
        (['"""', "one", '"""'], "one"),
        (['"""one"""'], "one"),
        (['one """'], 'one """'),
    ],
)
def test_quotes_hold_a_question_of_several_lines(
    engine: type[FakeEngine], monkeypatch: pytest.MonkeyPatch, typed: list[str], asked: str
) -> None:
    lines = iter([*typed, "/bye"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    chat.talk(Conversation(engine("x.radixlm"), SamplingParams(), ""))  # type: ignore[arg-type]
    [(messages, _)] = engine.asked
    assert messages == [{"role": "user", "content": asked}]
    assert next(lines, None) is None


def test_a_reply_cannot_steer_the_terminal(engine: type[FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    engine.words = ["a\x1b]0;title\x07", "\x9b31m\u202eb\tc"]
    Conversation(engine("x.radixlm"), SamplingParams(), "").ask("Hi")  # type: ignore[arg-type]
    assert capsys.readouterr().out.startswith("a]0;title31mb\tc\n")


ENDLESS = """
import itertools, time, types
import radixlm.runtime.engine.engine as engine_module
from radixlm.cli import cached_artifact
from radixlm.runtime.artifact import CHAT_TEMPLATE
from radixlm.runtime.engine.completion import CacheMatch, Completion, Delta, Timings, Usage
from radixlm.runtime.engine.sampling_params import SamplingParams

class Stream:
    def __enter__(self): return self
    def __exit__(self, *_): pass
    cancelled = False
    def cancel(self): self.cancelled = True
    def __iter__(self):
        for number in itertools.count():
            if self.cancelled: return
            time.sleep(0.01)
            yield Delta(f"w{number} ", (0,))
    def result(self):
        usage, timings, match = Usage(1, 1, 0), Timings(None, None, 1.0), CacheMatch(None, 0, None)
        return Completion("w0", (0,), (0,), None, "cancelled", usage, timings, match)

class Engine:
    default_params = SamplingParams()
    prompts = types.SimpleNamespace(chat_template="a template")
    def __init__(self, *_, **__): pass
    def __enter__(self): return self
    def __exit__(self, *_): print("closed")
    def stream_chat(self, *_): return Stream()

engine_module.Engine = Engine
from radixlm.cli.main import main
import sys
cached_artifact.read_manifest = lambda path: types.SimpleNamespace(files=[CHAT_TEMPLATE])
sys.argv = ["radixlm", "chat", "x.radixlm"]
main()
"""


@pytest.mark.parametrize("ctrl_c", [b"\x03", b"\x03\x03\x03"])
def test_in_a_real_terminal_ctrl_c_stops_the_reply_and_the_line_but_not_the_program(ctrl_c: bytes) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", textwrap.dedent(ENDLESS)]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=_take_terminal)
    os.close(theirs)
    terminal = Terminal(ours)
    try:
        terminal.expect(b"> ")
        terminal.type(b"Hi\n")
        terminal.expect(b"w3 ")
        terminal.type(ctrl_c)
        terminal.expect(b"stopped")
        terminal.expect(b"> ")
        terminal.type(b"half a line")
        terminal.expect(b"half a line")
        time.sleep(0.5)  # an interrupt between two keys is only seen at the next one: so is CPython's input()
        terminal.type(ctrl_c)
        terminal.expect(b"/exit quits")
        terminal.expect(b"> ")
        terminal.type(b"Again\n")
        terminal.expect(b"w3 ")
        terminal.type(b"\x03")
        terminal.expect(b"stopped")
        terminal.expect(b"> ")
        terminal.type(b"\x04")
        terminal.expect(b"closed")
        assert process.wait(10) == 0
    finally:
        process.kill()
        os.close(ours)


class Terminal:
    """The other side of a pseudo-terminal."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._seen = b""

    def type(self, keys: bytes) -> None:
        os.write(self._file, keys)

    def expect(self, what: bytes) -> None:
        """Read past `what`; a time-out fails the test."""
        deadline = time.monotonic() + 20
        while what not in self._seen:
            ready, _, _ = select.select([self._file], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, self._seen
            self._seen += os.read(self._file, 4096)
        self._seen = self._seen.partition(what)[2]


def _take_terminal() -> None:
    """Make standard input the controlling terminal, so that Ctrl-C on it interrupts."""
    import fcntl
    import termios

    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
