"""The `radixlm` command: finds the subcommand, and turns every foreseen error into one line.

Subcommands load when they are asked for, and what they use loads when they run: `radixlm chat` never loads
the compiler, and `--help` loads neither compiler nor model.
"""

from __future__ import annotations

import importlib
import signal
import sys
from types import FrameType

import click

COMMANDS = (
    *("compile", "chat", "generate", "serve", "agent", "warm", "inspect", "bench"),
    *("calibrate", "models", "cache", "explain-cache", "store", "replay-kv"),
)
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it
_SIGNALLED = 128  # and the signal's number, as shells have it: 143 for SIGTERM


class BadInput(click.ClickException):
    """An error that the message alone explains."""

    exit_code = EXIT_BAD_INPUT


class _LazyGroup(click.Group):
    """A group whose commands are the modules beside this one, each with a click command `command`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"radixlm.cli.{cmd_name.replace('-', '_')}")
        command: click.Command = module.command
        return command

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo(err=True)
            raise click.exceptions.Exit(EXIT_INTERRUPTED) from None
        except Exception as error:
            if ctx.params["debug"] or not is_foreseen(error):
                raise
            raise BadInput(str(error)) from error


@click.group(cls=_LazyGroup)
@click.version_option(package_name="radixlm", prog_name="radixlm")
@click.option("--debug", is_flag=True, help="Show where an error comes from.")
def cli(debug: bool) -> None:
    """Compile a language model into one artifact, and run it with a cache that computes no text twice.

    \b
    radixlm compile smollm2 -o smollm2.radixlm
    radixlm chat smollm2.radixlm
    """


def main() -> None:
    """The console script. Exit code 2 is bad input, 130 an interrupt."""
    # What a context manager cleans up, it cleans up on SIGTERM too, and when the terminal closes, but for nohup.
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
        signal.signal(signal.SIGHUP, _terminate)
    cli()


def _terminate(signum: int, frame: FrameType | None) -> None:
    sys.exit(_SIGNALLED + signum)


def is_foreseen(error: Exception) -> bool:
    """Whether `error` is about what the user gave: our own errors, refused values, files that fail."""
    from radixlm.runtime.errors import RadixLMError

    return isinstance(error, RadixLMError | ValueError | OSError) and not isinstance(error, BrokenPipeError)
