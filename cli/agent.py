"""`radixlm agent`: serves a model as `serve` does, and tells one coding agent how to ask it."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from . import serve
from .agent_clients import CLIENTS, Client, Served, write_file

if TYPE_CHECKING:
    from radixlm.runtime import Engine


@click.command("agent", context_settings={"ignore_unknown_options": True})
@click.option("--write", is_flag=True, help="Write the agent's file, and keep what it held before as FILE.bak.")
@click.option("--no-store", is_flag=True, help="Keep no prefixes on disk.")
@click.argument("client", type=click.Choice(list(CLIENTS)))
@click.argument("model")
@click.argument("serve_options", nargs=-1, type=click.UNPROCESSED)
def command(write: bool, no_store: bool, client: str, model: str, serve_options: tuple[str, ...]) -> None:
    """Serve MODEL to a coding agent: print the agent's configuration, or write it, and serve.

    All options of serve may be given, too. The model answers to any name, for agents ask for others beside the one they
    are told. Without a --store, prefixes are kept in the cache folder, so that an agent's
    first prompt, which has 8,000 tokens and more, is computed once. With an --api-key the first key is in the file.
    The file is one more beside the agent's own settings, which are not touched.

    \b
    radixlm agent codex model.gguf --write --context-length 32768
    codex --profile radixlm
    """
    from radixlm.runtime.server.served import ANY, listed_of

    serving = serve.command.make_context("serve", [model, *serve_options], parent=click.get_current_context())
    options = serving.params
    if options["port"] == 0:
        raise ValueError("--port is 0, and the agent must be told a port; choose one")
    if no_store and options["store"] is not None:
        raise ValueError("--no-store and --store are given; choose one")
    if serving.get_parameter_source("ignores_prompt_cache_key") is ParameterSource.DEFAULT:
        options["ignores_prompt_cache_key"] = True  # Codex has one for each conversation, and all begin alike
    options["model_ids"] = (*options["model_ids"], ANY)  # subagents ask for models of their maker's
    if options["store"] is None and not no_store:
        options["store"] = str(default_store(options["model"]))
    agent = CLIENTS[client]

    def tell(engine: Engine) -> None:
        served = Served(
            url=url_of(options["host"], options["port"]),
            model=(listed_of(options["model_ids"]) or (engine.manifest.name,))[0],
            context_length=engine.context_length,
            api_key=_first_key(options["api_keys"], options["api_key_files"]),
        )
        _tell(agent, served, write=write)

    options["opened"] = tell
    with serving:
        serve.command.invoke(serving)


def default_store(model: str) -> Path:
    """Where a model's prefixes are kept: a folder for each, for one process at a time can use it.

    >>> default_store("models/Qwen2.5 Coder.gguf").name
    'Qwen2.5_Coder'
    """
    from radixlm.runtime.artifact import cache_dir

    name = re.sub(r"\.(gguf|radixlm)$", "", model.rstrip("/").rpartition("/")[2].partition("@")[0])
    return cache_dir() / "stores" / (re.sub(r"[^A-Za-z0-9._-]", "_", name)[:100] or "model")


def url_of(host: str, port: int) -> str:
    """Where clients on this machine reach what listens on `host`.

    >>> url_of("0.0.0.0", 8000), url_of("::1", 80)
    ('http://127.0.0.1:8000', 'http://[::1]:80')
    """
    here = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{here}]:{port}" if ":" in here else f"http://{here}:{port}"


def _first_key(keys: tuple[str, ...], files: tuple[Path, ...]) -> str | None:
    from radixlm.runtime.server.http.door import read_keys

    return next(iter([*keys, *(key for path in files for key in read_keys(path))]), None)


def _tell(agent: Client, served: Served, *, write: bool) -> None:
    """Print the agent's file, and nothing else on standard output; or write it."""
    path, text = agent.path(os.environ, Path.home()), agent.text(served)
    run = agent.run.format(file=shlex.quote(str(path)))
    if not write:
        click.echo(text, nl=False)
        click.echo(f"save this as {path}, or use --write; then run: {run}", err=True)
        return
    backup = write_file(path, text)
    kept = f"; what it held is in {backup}" if backup else ""
    click.echo(f"{path} tells {agent.name} where this server is{kept}; run: {run}", err=True)
