"""The arguments of a model's process: flags shared by all models, and the model's own.

Knows the flags of `radixlm serve`, and which of them belong to the router or to one model.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from radixlm.runtime.errors import ArtifactError, InvalidParameter
from radixlm.runtime.router.model_row import ModelSpec

from ..environment import EnvironmentCommand
from ..help_sections import flag_of, variable_of

WORKER = (sys.executable, "-P", "-c", "from radixlm.cli.several.worker import main; main()")
"""The command of a process that gets its arguments later: `worker.py`."""
OF_ROUTER = frozenset(
    {
        *("--models", "--unload-after", "--allow-pull", "--memory-gb", "--host", "--port", "--uds", "--root-path"),
        *("--ssl-certfile", "--ssl-keyfile", "--api-key", "--api-key-file", "--metrics-key", "--allowed-host"),
        *("--cors-origin", "--log-format", "--shutdown-timeout", "--hide-cached-text", "--store"),
    }
)
"""Flags that the router applies to all models, or passes on in another form."""
OF_ONE_MODEL = ("--model-id", "--draft", "--lora", "--record", "--log-kv")
"""Flags that name a file or a model, and so must be set for each model."""
_GIVEN_ANYWAY = ("--model-id", "--memory-gb", "--uds", "--log-format")  # set by the router for each process


@dataclass(frozen=True)
class WorkerFlags:
    """The arguments shared by the processes of all models.

    Attributes:
        shared: flags for all models.
        store: folder in which each model has a store; None: no prefixes are saved to disk.
        keys: the API keys.
    """

    shared: Sequence[str]
    memory_bytes: int
    log_format: str
    store: Path | None = None
    keys: Sequence[str] = ()
    hides_cached_text: bool = False

    def arguments(self, spec: ModelSpec, socket: Path) -> list[str]:
        """Return the arguments of `radixlm` for one model and its socket.

        Writes the keys to a file in the socket's folder.
        """
        names = [argument for name in (spec.name, *spec.aliases) for argument in ("--model-id", name)]
        return [
            *("serve", "--uds", str(socket), "--log-format", self.log_format, "--shutdown-timeout", "0"),
            *("--memory-gb", f"{self.memory_bytes / 1e9:.9f}"),
            *names,
            *(["--api-key-file", str(_key_file(self.keys, socket.parent))] if self.keys else []),
            *(["--hide-cached-text"] if self.hides_cached_text else []),
            *self.shared,
            *([] if spec.store is None else ["--store", spec.store]),
            *spec.flags,
            *("--", spec.source),
        ]


def shared_flags(ctx: click.Context, given: Sequence[str]) -> list[str]:
    """Return the arguments of the command line that apply to every model.

    Raises:
        InvalidParameter: a flag can only be set for one model, or is not for several.
    """
    params = [param for param in ctx.command.get_params(ctx) if isinstance(param, click.Option)]
    for param in params:
        source = ctx.get_parameter_source(param.name or "")
        if source not in (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT):
            continue
        if flag_of(param) in OF_ONE_MODEL:
            raise InvalidParameter(
                f"{flag_of(param)} is for one model; set {flag_of(param)[2:]} = ... in a TOML file for --models"
            )
    given_values, _, _ = ctx.command.make_parser(ctx).parse_args([*given])
    chosen = [param for param in params if param.name in given_values and flag_of(param) not in OF_ROUTER]
    return [argument for param in chosen for argument in _arguments(param, given_values[str(param.name)])]


def worker_environment(ctx: click.Context) -> Mapping[str, str]:
    """Return this process's environment without the variables of the router's flags, and without unknown ones."""
    assert isinstance(ctx.command, EnvironmentCommand)
    flags = {flag_of(param) for param in ctx.command.get_params(ctx) if isinstance(param, click.Option)}
    left_out = {variable_of(flag) for flag in flags & OF_ROUTER} | {*ctx.command.unknown_variables(ctx)}
    return {name: value for name, value in os.environ.items() if name not in left_out}


def parsed_flags(command: click.Command, source: str, flags: Sequence[str], place: str) -> Mapping[str, Any]:
    """Parse a model's own flags, and return the keyword arguments of `radixlm serve`.

    Raises:
        InvalidParameter: a flag is unknown, invalid, or not for one model.
    """
    own = OF_ROUTER - {"--store", "--hide-cached-text"} | {*_GIVEN_ANYWAY}
    for flag in flags:
        if flag in own:
            raise InvalidParameter(f"{place}: {flag[2:]} is for the whole server; give {flag} on the command line")
    try:
        return command.make_context("serve", [*flags, "--", source]).params
    except (click.ClickException, ArtifactError, ValueError) as error:
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        raise InvalidParameter(f"{place}: {message}") from error


def _key_file(keys: Sequence[str], folder: Path) -> Path:
    """Write the keys to a file for this user only, so that lists of processes do not show them.

    It is written for each process, because it may have been removed, and replaced whole, because another may read it.
    """
    file, new = folder / "keys", folder / "keys.new"
    new.touch(mode=0o600)
    new.write_text("".join(f"{key}\n" for key in keys), encoding="utf-8")
    return new.replace(file)


def _arguments(param: click.Option, value: Any) -> Iterator[str]:
    """Yield the command line's arguments that give a flag this value."""
    if param.is_flag:
        yield flag_of(param) if value else param.secondary_opts[0]
    else:
        for each in value if param.multiple else (value,):
            yield from (flag_of(param), str(each))
