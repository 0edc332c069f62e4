"""The `radixlm` command: finds the subcommand, and turns every expected error into one line.

Subcommands are imported when they are used, and their dependencies when they run: `radixlm chat` never imports the
compiler, and `--help` imports neither compiler nor engine.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import signal
import sys
from collections.abc import Sequence
from types import FrameType

import click
from radixlm.runtime.version import VERSION

COMMANDS = {
    "run": "Download a model by name, and chat with it.",
    "chat": "Chat with a model in the terminal.",
    "generate": "Continue a text, without a chat template.",
    "serve": "Serve a model to OpenAI and Anthropic clients.",
    "agent": "Serve a model to a coding agent, and write the agent's settings.",
    "warm": "Prefill an agent's system prompt and tools into a store.",
    "pull": "Download a model, and compile it.",
    "list": "List downloaded and compiled models, and stores.",
    "rm": "Remove downloaded or compiled models, or stores.",
    "compile": "Compile a model into an artifact.",
    "models": "List the model families and file formats.",
    "inspect": "Describe an artifact or a model file.",
    "bench": "Measure speed, compared with this machine's limits.",
    "verify-bits": "Print a digest of logits to compare with other machines.",
    "cache": "Show or clear the cache of compiled kernels.",
    "store": "List, verify, import or prune prefixes on disk.",
    "explain-cache": "Show what each turn reuses from the prefix cache, and why.",
    "calibrate": "Calibrate a model for approximate KV loading.",
    "replay": "Compute recorded requests again, and compare every bit.",
    "replay-kv": "Replay a KV event log, and verify it.",
}
"""All commands with their summaries, in the order of the help."""
_MODULES = {"run": "models.run", "pull": "models.pull", "list": "models.list_kept", "rm": "models.rm"}
COMMANDS_ELSEWHERE = {
    "show": "radixlm inspect MODEL",
    "ps": "curl localhost:8000/api/ps, or radixlm list",
    "stop": "Ctrl-C in the terminal of radixlm serve",
    "create": "radixlm compile MODEL -o NAME.radixlm",
    "ls": "radixlm list",
    "delete": "radixlm rm",
    "start": "radixlm serve MODEL",
    "embed": "/v1/embeddings of radixlm serve MODEL",
    "cp": "cp -r: an artifact is a folder",
    "push": "any file copy: an artifact is a folder",
}
"""What to use instead of the commands of Ollama and other tools."""
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as in shells
# Imports and distributions that an installation without the compiler lacks.
_COMPILER = ("radixlm.compile", "apache-tvm", "tvm", "gguf", "huggingface_hub", "ml_dtypes", "safetensors")
_SIGNALLED = 128  # plus the signal's number, as in shells: 143 for SIGTERM


class BadInput(click.ClickException):
    """An expected error, which needs no traceback."""

    exit_code = EXIT_BAD_INPUT


class _LazyGroup(click.Group):
    """A group that imports its commands on use: the modules of this folder, each with a click command `command`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the command of this name, for click; None if there is none."""
        if cmd_name not in COMMANDS:
            return None
        name = _MODULES.get(cmd_name, cmd_name.replace("-", "_"))
        module = importlib.import_module(f"radixlm.cli.{name}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command. The error for an unknown one suggests a similar name."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            near = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(COMMANDS)}"
            if name in COMMANDS_ELSEWHERE:
                hint = f"use {COMMANDS_ELSEWHERE[name]}"
            raise click.UsageError(f"No such command {name!r:.60}; {hint}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        """Run a command, and turn foreseen errors into one line and an exit code."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo(err=True)
            raise click.exceptions.Exit(EXIT_INTERRUPTED) from None
        except click.NoSuchOption as error:
            if not error.possibilities:  # the message has a hint of its own
                raise
            near = _near_options(error.option_name, error.possibilities or ())
            raise click.NoSuchOption(error.option_name, possibilities=near, ctx=error.ctx) from error
        except Exception as error:
            message = foreseen(error)
            if ctx.params["debug"] or message is None:
                raise
            raise BadInput(message) from error


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="radixlm")
@click.option("--debug", is_flag=True, help="Show where an error comes from.")
def cli(debug: bool) -> None:
    """Chat with a local language model, or serve it to OpenAI and Anthropic clients.

    A model is compiled for this machine once. Its prefix cache survives restarts.

    \b
    radixlm run smollm2
    radixlm serve model.Q4_K_M.gguf --port 8000
    radixlm COMMAND --help
    """


def main() -> None:
    """Run the command line. Exit code 2 means bad input, 130 an interrupt."""
    # Context managers clean up on SIGTERM, too, and when the terminal closes, unless started with nohup.
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
        signal.signal(signal.SIGHUP, _terminate)
    cli()


def _terminate(signum: int, frame: FrameType | None) -> None:
    sys.exit(_SIGNALLED + signum)


def foreseen(error: Exception) -> str | None:
    """Return the message of an error that the user can fix; None for a bug."""
    from radixlm.runtime.errors import RadixLMError

    if isinstance(error, ModuleNotFoundError) and _is_for_compiling(str(error.name)):
        return (
            f"compiling a model needs {error.name}, which is not installed; run: pip install radixlm. Or use an "
            "artifact that was compiled elsewhere"
        )
    if isinstance(error, RadixLMError | ValueError):
        return str(error)
    if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
        return _line_of(error)
    return None


def _near_options(given: str, near: Sequence[str]) -> list[str]:
    """Return the options that are near to a given one without their dashes, which make all short names similar.

    >>> _near_options("--model", ["--help", "--models"])
    ['--models']
    """
    name = given.lstrip("-")
    return [each for each in near if difflib.get_close_matches(name, [each.lstrip("-")])]


def _line_of(error: OSError) -> str:
    """Return the operating system's message without the error number.

    >>> _line_of(FileNotFoundError(errno.ENOENT, "No such file or directory", "kv.jsonl"))
    'kv.jsonl: No such file or directory'
    """
    if error.errno == errno.ENOMEM:
        return "out of memory; end other programs, lower --kv-cache-gb, or choose a smaller model"
    message = error.strerror or str(error)
    return message if error.filename is None else f"{error.filename}: {message}"


def _is_for_compiling(module: str) -> bool:
    return any(f"{module}.".startswith(f"{name}.") for name in _COMPILER)
