"""`radixlm chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
import signal
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import click

from .conversation import interrupts
from .field_flags import ENGINE, FieldCommand, engine_keywords, sampled
from .options import CompileOptions, compile_options, take

if TYPE_CHECKING:
    from .conversation import Conversation

DEFAULT_SYSTEM = "You are a helpful assistant."
MAX_TOKENS = 1024  # of a reply, unless asked otherwise: small models may repeat themselves without end
DEMO_QUESTIONS = ("What is gravity?", "Who first described it?")
DEMO_MAX_TOKENS = 128
DEMO_SEED = 1
HELP = "/reset forgets the conversation, /exit leaves (so does Ctrl-D); Ctrl-C stops a reply; //word asks /word"
_COMMAND = re.compile(r"/[A-Za-z]*")  # a line that is only that: a path, or a question about one, is a question


@click.command("chat", cls=FieldCommand, flags=(*ENGINE, "sampling"))
@click.argument("model")
@click.option("--system", default=DEFAULT_SYSTEM, show_default=True, help="The system prompt; may be empty.")
@compile_options
def command(model: str, system: str, **options: Any) -> None:
    """Talk with MODEL: an artifact, or what compile takes, which is compiled once and kept in the cache folder.

    Ctrl-C stops a reply, /exit leaves, /reset begins again, /help says so.

    After each reply one line tells its tokens, their speed, the time to the first one, and how many tokens of
    the prompt came from the cache. Each line of a standard input that is no terminal is a turn; where there is none,
    it holds a short conversation of its own.

    \b
    radixlm chat smollm2
    radixlm chat model.Q4_K_M.gguf < questions.txt
    radixlm chat smollm2.radixlm --system "You are a pirate." --temperature 0.7
    """
    from radixlm.runtime import Engine
    from radixlm.runtime.errors import InvalidRequest

    from .conversation import Conversation

    keywords = engine_keywords(options)
    artifact = take(CompileOptions, options).artifact_of(model)
    with Engine(artifact, **keywords) as engine:
        if engine.prompts.chat_template is None:
            raise InvalidRequest(
                f'{model} takes no conversations; continue a text: radixlm generate {model} "Once upon"'
            )
        interactive = sys.stdin is not None and sys.stdin.isatty()
        piped = None if interactive else _piped_lines()
        defaults = dataclasses.replace(engine.default_params, max_tokens=MAX_TOKENS)
        if not interactive and piped is None:
            defaults = dataclasses.replace(defaults, temperature=0.0, seed=DEMO_SEED, max_tokens=DEMO_MAX_TOKENS)
        conversation = Conversation(engine, sampled(options, defaults), system)
        if interactive:
            with interrupts(lambda: None):
                talk(conversation)
        else:
            _take_turns(conversation, DEMO_QUESTIONS if piped is None else piped)


def _piped_lines() -> Iterator[str] | None:
    """The lines of standard input that are not blank, each as soon as it comes; None if there is none."""
    lines = (line.strip() for line in sys.stdin or () if line.strip())
    first = next(lines, None)
    return None if first is None else itertools.chain([first], lines)


def _take_turns(conversation: Conversation, lines: Iterable[str]) -> None:
    """Show and answer each line; what cannot be answered ends the command."""
    for line in lines:
        click.echo(f"> {line}")
        if not _answer(conversation, line):
            return


def talk(conversation: Conversation) -> None:
    """Read and answer until the user leaves."""
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
    """Ask a question, or do what a line that is a slash and a word says; False: that was to leave."""
    match line:
        case "":
            pass
        case "/exit":
            return False
        case "/reset":
            conversation.reset()
            click.secho("the conversation begins again", dim=True)
        case "/help":
            click.secho(HELP, dim=True)
        case command if _COMMAND.fullmatch(command):
            click.secho(f"there is no {command}; {HELP}", dim=True)
        case question:
            conversation.ask(question[1:] if _COMMAND.fullmatch(question[1:]) else question)
    return True


def _read() -> str | None:
    """A line from the terminal; None at its end. Ctrl-C drops the line."""
    while True:
        try:
            with interrupts(_drop_line):
                return input("> ")
        except EOFError:
            click.echo()
            return None
        except KeyboardInterrupt:
            click.secho("\n/exit leaves", dim=True)


def _drop_line() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # once: a second one would hit whatever comes after
    raise KeyboardInterrupt
