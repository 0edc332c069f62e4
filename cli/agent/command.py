"""`radixlm agent`: serve a model, or find a running server, and configure coding agents for it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from .. import serve
from ..help_sections import SectionedCommand
from .clients import CLIENTS, Client, Served, write_file
from .launch import launch_beside_server, replace_process
from .running_server import ask_server

if TYPE_CHECKING:
    from radixlm.runtime import Engine


class ClientList(click.ParamType[tuple[Client, ...]]):
    """A command-line parameter: names of agents, separated by commas."""

    name = "client"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Client, ...]:
        """Return the agents, each once.

        Raises:
            BadParameter: a name is unknown.
        """
        if isinstance(value, tuple):
            return value
        names = dict.fromkeys(value.split(","))
        unknown = [name for name in names if name not in CLIENTS]
        if unknown:
            known = ", ".join(map(repr, CLIENTS))
            self.fail(f"{unknown[0]!r} is not one of {known}", param, ctx)
        return tuple(CLIENTS[name] for name in names)


@click.command("agent", cls=SectionedCommand, context_settings={"ignore_unknown_options": True})
@click.option(
    "--write", is_flag=True, help="Write the agent's settings file. If you changed it, it is renamed to FILE.bak."
)
@click.option("--print", "prints", is_flag=True, help="Print the agent's settings file, and write nothing.  [default]")
@click.option("--launch", is_flag=True, help="Write the file, and start the agent when the model is ready.")
@click.option("--url", help="Use the server running at this address; MODEL is then one of its models.")
@click.option("--no-store", is_flag=True, help="Save no prefixes to disk.")
@click.argument("clients", type=ClientList(), metavar="CLIENT[,CLIENT...]")
@click.argument("model", required=False)
@click.argument("serve_options", nargs=-1, type=click.UNPROCESSED)
def command(
    write: bool,
    prints: bool,
    launch: bool,
    url: str | None,
    no_store: bool,
    clients: tuple[Client, ...],
    model: str | None,
    serve_options: tuple[str, ...],
) -> None:
    """Serve MODEL to a coding agent, and print or write the agent's settings, or start the agent.

    CLIENT is codex, opencode, claude or aider. Several, separated by commas, share the server.

    All options of serve can be added. The model accepts any name, because agents also request other models than the
    configured one. Without --store, prefixes are saved in the cache folder, so that an agent's first prompt, which has
    8,000 tokens or more, is prefilled only once. With --api-key, the first key is in the file. The file is separate
    from the agent's own settings, which are not changed.

    \b
    radixlm agent codex model.gguf --launch
    radixlm agent codex,claude model.gguf --write --context-length 32768
    radixlm agent opencode --url http://127.0.0.1:8000 --write
    radixlm agent opencode qwen --url http://127.0.0.1:8000 --write
    """
    if prints and (write or launch):
        raise ValueError("--print cannot be combined with --write or --launch; choose one")
    if launch and len(clients) > 1:
        raise ValueError("--launch starts one agent; name one, and start the others with --url")
    if launch:
        clients[0].check_installed()
    if url is not None:
        _configure(clients, url, model, serve_options, write=write, launch=launch)
        return
    if model is None:
        raise ValueError("give a MODEL to serve, or the --url of a running server")
    _serve(clients, model, serve_options, write=write, launch=launch, no_store=no_store)


def _configure(
    clients: Sequence[Client], url: str, model: str | None, options: Sequence[str], *, write: bool, launch: bool
) -> None:
    """Configure agents for a running server at `url`, and with `launch` replace this process by the first of them.

    Args:
        model: the model's name; None: the server's first model.
        options: words of the command line for `radixlm serve`; only API keys are allowed.
        write: write the settings files, as `launch` does, too; else print them.

    Raises:
        ValueError: the server does not respond, or an option is about starting one.
    """
    given = [*([] if model is None else [model]), *options]
    parsed = serve.command.make_context("serve", ["none", *given], parent=click.get_current_context())
    sources = {name: parsed.get_parameter_source(name) for name in parsed.params}
    others = {name for name, source in sources.items() if source is ParameterSource.COMMANDLINE}
    names = parsed.params["more"]
    if others - {"api_keys", "api_key_files", "model", "more"} or len(names) > 1:
        raise ValueError("--url is for a running server; of serve's options only --api-key can be added")
    key = _first_key(parsed.params["api_keys"], parsed.params["api_key_files"])
    served = ask_server(url, key, names[0] if names else None)
    for client in clients:
        _tell(client, served, write=write or launch)
    if launch:
        replace_process(_run_line(clients[0]))


def _serve(
    clients: Sequence[Client], model: str, serve_options: Sequence[str], *, write: bool, launch: bool, no_store: bool
) -> None:
    """Configure agents for a server that this process then runs until it is stopped; see `_configure`.

    Args:
        serve_options: words of the command line for `radixlm serve`.
        no_store: keep prefixes in memory only; without it and --store, the model's own store is used.

    Raises:
        ValueError: options contradict each other, or the server cannot run with them.
    """
    from radixlm.runtime.server.served import ANY, listed_of

    serving = serve.command.make_context("serve", [model, *serve_options], parent=click.get_current_context())
    options = serving.params
    if options["models"] or options["more"]:
        raise ValueError(
            "an agent uses one model; serve several with radixlm serve --models, and name one before --url"
        )
    if options["port"] == 0:
        raise ValueError("--port is 0, but the agent's settings need a port; choose one")
    if no_store and options["store"] is not None:
        raise ValueError("--no-store and --store are given; choose one")
    if serving.get_parameter_source("ignores_prompt_cache_key") is ParameterSource.DEFAULT:
        options["ignores_prompt_cache_key"] = True  # Codex sends one for each conversation, although all begin alike
    options["model_ids"] = (*options["model_ids"], ANY)  # subagents request models of their vendor
    if options["store"] is None and not no_store:
        options["store"] = str(default_store(options["model"]))

    def tell(engine: Engine) -> None:
        served = Served(
            url=url_of(options["host"], options["port"]),
            model=(listed_of(options["model_ids"]) or (engine.manifest.name,))[0],
            context_length=engine.context_length,
            api_key=_first_key(options["api_keys"], options["api_key_files"]),
        )
        for client in clients:
            _tell(client, served, write=write or launch)
        if launch:
            launch_beside_server(_run_line(clients[0]))

    options["opened"], options["for_chat"] = tell, True
    with serving:
        serve.command.invoke(serving)


def default_store(model: str) -> Path:
    """Return the folder of a model's prefixes. Each model has its own, because only one process can use a store.

    >>> default_store("models/Qwen2.5 Coder.gguf").name
    'Qwen2.5_Coder'
    """
    from radixlm.runtime.artifact import cache_dir
    from radixlm.runtime.artifact.model_names import SUFFIX, short_name

    return cache_dir() / "stores" / short_name(model).removesuffix(SUFFIX)


def url_of(host: str, port: int) -> str:
    """Return the URL at which clients on this machine reach a server that listens on `host`.

    >>> url_of("0.0.0.0", 8000), url_of("::1", 80)
    ('http://127.0.0.1:8000', 'http://[::1]:80')
    """
    here = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{here}]:{port}" if ":" in here else f"http://{here}:{port}"


def _first_key(keys: tuple[str, ...], files: tuple[Path, ...]) -> str | None:
    from radixlm.runtime.server.http.api_keys import read_keys

    return next(iter([*keys, *(key for path in files for key in read_keys(path))]), None)


def _run_line(client: Client) -> str:
    return client.run.format(file=shlex.quote(str(client.path(os.environ, Path.home()))))


def _tell(client: Client, served: Served, *, write: bool) -> None:
    """Write the agent's settings file, or print it, with nothing else on standard output."""
    path, text = client.path(os.environ, Path.home()), client.text(served)
    warning = None
    if served.context_length < client.min_context:
        fit = f"{client.name}'s first prompt does not fit into the context of {served.context_length:,} tokens"
        warning = f"warning: {fit}; use a model with {client.min_context:,} or more, or raise --context-length"
    if write:
        backup = write_file(path, text, client.has_written)
        kept = f"; the previous file is {backup}" if backup else ""
        click.echo(f"{path} configures {client.name} for this server{kept}", err=True)
    else:
        click.echo(text, nl=False)
        click.echo(f"save this as {path}, which {client.name} must find there, or use --write", err=True)
    if client.note:
        click.echo(f"note: {client.note}", err=True)
    if warning is not None:
        click.secho(warning, err=True)
    click.echo(f"then run: {_run_line(client)}", err=True)
