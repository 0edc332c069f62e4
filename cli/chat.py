"""`radixlm chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from .field_flags import ENGINE, CompileOptions, FieldCommand, compile_options, engine_keywords, sampled, take

if TYPE_CHECKING:
    from radixlm.runtime import Completion, Engine, SamplingParams

DEFAULT_SYSTEM = "You are a helpful assistant."
MAX_TOKENS = 1024  # default maximum of a reply: small models may repeat themselves endlessly
DEMO_QUESTIONS = ("What is gravity?", "Who first described it?")
DEMO_MAX_TOKENS = 128
DEMO_SEED = 1
HELP = (
    "/reset or /clear starts a new conversation, /exit, /quit, /bye or Ctrl-D quits; Ctrl-C stops a reply; "
    '""" begins and ends a text of several lines; //word sends /word'
)
_QUOTES = '"""'  # around a text of several lines, as in Ollama
_COMMAND = re.compile(r"/(\?|[A-Za-z]*)")  # a whole line; a path, or text after a slash and a word, is a question
# Commands with arguments, of ours and Ollama's, which would otherwise be questions to the model.
_WITH_ARGUMENTS = re.compile(r"/(set|show|load|save|system|help|reset|clear|exit|quit|bye)\s.*", re.DOTALL)


@click.command("chat", cls=FieldCommand, flags=(*ENGINE, "sampling"))
@click.argument("model")
@click.argument("prompt", required=False)
@click.option("--system", default=DEFAULT_SYSTEM, show_default=True, help="The system prompt; may be empty.")
@compile_options
def command(model: str, prompt: str | None, system: str, **options: Any) -> None:
    """Chat with MODEL in the terminal, or answer only PROMPT.

    Ctrl-C stops a reply, /exit quits, /reset starts a new conversation, /help lists the commands.

    After each reply, a line shows its number of tokens, their speed, the time to the first token, and the number of
    prompt tokens from the cache. If standard input is not a terminal, each of its lines is a turn; if it is empty, the
    command runs a short example conversation.

    \b
    radixlm chat smollm2
    radixlm chat smollm2 "Name a tree."
    radixlm chat model.Q4_K_M.gguf < questions.txt
    radixlm chat smollm2.radixlm --system "You are a pirate." --temperature 0.7
    """
    from radixlm.runtime import Engine

    keywords = engine_keywords(options)
    artifact = take(CompileOptions, options).artifact_of(model, for_chat=True)
    with Engine(artifact, **keywords) as engine:
        interactive = sys.stdin is not None and sys.stdin.isatty()
        piped = None if interactive or prompt is not None else _piped_lines()
        defaults = dataclasses.replace(engine.default_params, max_tokens=MAX_TOKENS)
        if not interactive and prompt is None and piped is None:
            defaults = dataclasses.replace(defaults, temperature=0.0, seed=DEMO_SEED, max_tokens=DEMO_MAX_TOKENS)
        conversation = Conversation(engine, sampled(options, defaults), system)
        if prompt is not None:
            conversation.ask(prompt)
        elif interactive:
            with interrupts(lambda: None):
                talk(conversation)
        else:
            _take_turns(conversation, DEMO_QUESTIONS if piped is None else piped)


def _piped_lines() -> Iterator[str] | None:
    """Return an iterator over the non-blank lines of standard input as they arrive; None if there is none."""
    lines = (line.strip() for line in sys.stdin or () if line.strip())
    first = next(lines, None)
    return None if first is None else itertools.chain([first], lines)


def _take_turns(conversation: Conversation, lines: Iterable[str]) -> None:
    """Print and answer each line. Errors end the command."""
    for line in lines:
        click.echo(f"> {line}")
        if not _answer(conversation, line):
            return


def talk(conversation: Conversation) -> None:
    """Read and answer lines until the user quits."""
    from radixlm.runtime.errors import RadixLMError

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives input() a history and cursor keys

    click.secho(HELP, dim=True)
    while (text := _read()) is not None:
        try:
            if not _answer(conversation, text.strip()):
                return
        except RadixLMError as error:
            click.secho(f"Error: {error}", err=True)


def _answer(conversation: Conversation, line: str) -> bool:
    """Answer a question, or run a command such as /reset. Returns False if the command was to quit."""
    match line:
        case "":
            pass
        case "/exit" | "/quit" | "/bye":
            return False
        case "/reset" | "/clear":
            conversation.reset()
            click.secho("new conversation", dim=True)
        case "/help" | "/?":
            click.secho(HELP, dim=True)
        case command if _is_command(command):
            click.secho(f"unknown command {command:.60}; {HELP}", dim=True)
        case question:
            conversation.ask(question[1:] if _is_command(question[1:]) else question)
    return True


def _is_command(line: str) -> bool:
    return bool(_COMMAND.fullmatch(line) or _WITH_ARGUMENTS.fullmatch(line))


def _read() -> str | None:
    """Read a line or a quoted text from the terminal; None at its end. Ctrl-C drops the line."""
    while True:
        try:
            with interrupts(_drop_line):
                return _whole(input("> "))
        except EOFError:
            click.echo()
            return None
        except KeyboardInterrupt:
            click.secho("\n/exit quits", dim=True)


def _whole(line: str) -> str:
    """Return a line, or a text of several lines if the line begins with quotes."""
    if not line.startswith(_QUOTES):
        return line
    lines = [line.removeprefix(_QUOTES)]
    while not lines[-1].endswith(_QUOTES):
        lines.append(input("... "))
    return "\n".join(lines).removesuffix(_QUOTES)


def _drop_line() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only once: a second interrupt would hit later code
    raise KeyboardInterrupt


_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@dataclass
class Conversation:
    """The messages of a conversation, and the engine that answers them."""

    engine: Engine
    params: SamplingParams
    system: str  # the system prompt; empty: none, but the chat template may add its own
    messages: list[dict[str, str]] = field(init=False)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Drop all messages except the system prompt."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def ask(self, text: str) -> Completion:
        """Print the reply to `text` as it is generated, then a dim line of statistics. Ctrl-C stops the reply.

        The conversation keeps the text of a stopped reply. A reply without text is dropped together with its question.

        Raises:
            RadixLMError: there is no reply. The conversation is unchanged.
        """
        question = {"role": "user", "content": text}
        with (
            self.engine.stream_chat([*self.messages, question], self.params) as stream,
            interrupts(stream.cancel),
        ):
            is_thinking = False
            for delta in stream:
                if delta.thought:
                    is_thinking = True
                    click.secho(shown(delta.thought), nl=False, dim=True)
                if delta.text:
                    text = shown(delta.text)
                    click.echo(f"\n\n{text}" if is_thinking else text, nl=False)
                    is_thinking = False
            completion = stream.result()
        click.echo()
        click.secho(summary(completion), dim=True)
        if completion.text:
            thought = {"reasoning_content": completion.thought} if completion.thought else {}
            self.messages += [question, {"role": "assistant", "content": completion.text, **thought}]
        return completion


def shown(text: str) -> str:
    """Return text without characters that control a terminal or the text direction.

    >>> shown("a\\x1b]0;title\\x07b\\n")
    'a]0;titleb\\n'
    """
    return _STEERING.sub("", text)


def summary(completion: Completion) -> str:
    """Return a line of statistics: tokens, speed, TTFT, cached prompt tokens and accepted draft tokens."""
    usage, timings = completion.usage, completion.timings
    parts = [f"{usage.completion_tokens} tokens"]
    if timings.decode_tokens_per_s is not None:
        parts.append(f"{timings.decode_tokens_per_s:.1f} tokens/s")
    if timings.time_to_first_token_s is not None:
        parts.append(f"first token after {timings.time_to_first_token_s * 1000:.0f} ms")
    parts.append(f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens from the cache")
    if usage.drafted_tokens:
        parts.append(f"{usage.accepted_tokens} of {usage.drafted_tokens} draft tokens accepted")
    if completion.finish_reason != "stop":
        parts.append({"length": "stopped at the length limit", "cancelled": "stopped"}[completion.finish_reason])
    return " · ".join(parts)


@contextmanager
def interrupts(action: Callable[[], None]) -> Iterator[None]:
    """Call `action` for each SIGINT within the block, instead of raising KeyboardInterrupt.

    KeyboardInterrupt could also interrupt cleaning up, so that two quick ones would end the program. The main thread
    must enter the block; `action` runs in it.
    """
    previous = signal.signal(signal.SIGINT, lambda signum, frame: action())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
