"""`radixlm serve`: a model behind an HTTP server; how it is served is `serving.py`'s."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .field_flags import ENGINE, CompileOptions, FieldCommand, compile_options, engine_keywords, server_keywords, take
from .log_config import JSONErrors, log_line

if TYPE_CHECKING:
    from radixlm.runtime import Engine


class KeyOption(click.Option):
    """A repeatable option that the environment may give once. click would split the value at its spaces, and ignore an
    empty one."""

    def value_from_envvar(self, ctx: click.Context) -> tuple[str, ...] | None:
        """The value of the variable, unchanged.

        Raises:
            BadParameter: it is empty.
        """
        assert isinstance(self.envvar, str)
        key = os.environ.get(self.envvar)
        if key == "":
            raise click.BadParameter(f"{self.envvar} is empty; unset it, or put a key into it", ctx, self)
        return None if key is None else (key,)


class ServeCommand(JSONErrors, FieldCommand):
    """With errors in JSON where the log is, and with the flags of the engine and the server."""


@click.command("serve", cls=ServeCommand, flags=(*ENGINE, "serve", "server"))
@click.argument("model")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes any that is free."
)
@click.option(
    "--api-key",
    "api_keys",
    cls=KeyOption,
    multiple=True,
    metavar="KEY",
    envvar="RADIXLM_API_KEY",
    show_envvar=True,
    help="Answer only requests with this key, from a cache of the key's own; repeatable. The environment has one.",
)
@click.option(
    "--api-key-file",
    "api_key_files",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The same with the keys in a file, one a line, where no list of processes shows them; repeatable.",
)
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="How stderr is written: a line a request, with counts, times and errors; as json, nothing but JSON.",
)
@click.option(
    "--shutdown-timeout",
    type=click.FloatRange(min=0),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="Told to stop, give running replies so long to end, then cancel them.",
)
@compile_options
def command(
    model: str,
    host: str,
    port: int,
    api_keys: tuple[str, ...],
    api_key_files: tuple[Path, ...],
    log_format: str,
    shutdown_timeout: float,
    opened: Callable[[Engine], None] | None = None,
    **options: Any,
) -> None:
    """Serve MODEL to OpenAI's and Anthropic's clients: /v1/chat/completions, /v1/responses, /v1/messages, and others.

    MODEL is an artifact, or what compile takes: a .gguf file, a model directory, hf:ORG/NAME, or the alias smollm2.
    That is compiled once, and kept in the cache folder.

    Without an API key every client is answered: listen only on networks that you trust. On an address of this machine
    alone, requests must be sent to localhost then, so that web pages cannot use names of their own for it. GET
    /v1/cache shows what is cached for the caller, DELETE /v1/cache forgets it.

    Opening an artifact runs its model.so, which is native code with all that this process may do: serve only artifacts
    that you compiled, or that come from a source that you trust.

    The server listens at once, and answers 503 until the model is compiled and loaded. /health is "ready", "degraded"
    with a reason when requests wait and no step gets on, or "loading".

    \b
    radixlm serve smollm2 --port 8000
    curl localhost:8000/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Hi"}]}'
    """
    gc.disable()  # nothing that modules make is garbage: looking for some takes a seventh of loading them
    from radixlm.runtime.server.http.door import door, read_keys
    from radixlm.runtime.server.malloc_arenas import share_one_arena
    from radixlm.runtime.server.server_options import ServerOptions

    from .serving import Serving

    gc.freeze()
    gc.enable()

    keys = (*api_keys, *(key for path in api_key_files for key in read_keys(path)))
    server = ServerOptions(api_keys=keys, **server_keywords(options))
    door(server)  # what is wrong with keys and origins is known before the model is loaded, too
    find_artifact = partial(
        take(CompileOptions, options).artifact_of,
        model,
        log_line if log_format == "json" else None,
        kept=log_line if log_format == "json" else partial(click.echo, err=True),
    )
    serving = Serving(
        model,
        host,
        port,
        server,
        log_format=log_format,
        grace_s=shutdown_timeout,
    )
    share_one_arena()
    keywords = engine_keywords(options)

    def open_engine(artifact: Path) -> Engine:
        from radixlm.runtime import Engine  # while the server listens, or a model is compiled

        return Engine(artifact, **keywords)

    serving.run(find_artifact, open_engine, opened)
