"""`radixlm serve`: a model behind an HTTP server, or several.

How one is served is `serving.py`'s, how several are is `several`'s.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .field_flags import ENGINE, CompileOptions, FieldCommand, compile_options, engine_keywords, server_keywords, take
from .help_sections import flag_of, variable_of
from .log_config import JSONErrors, log_line

if TYPE_CHECKING:
    from radixlm.runtime import Engine
    from radixlm.runtime.replay.recorder import Recorder


RECORD_MB = 100.0  # of a file of --record
GIVEN = "radixlm.given"  # arguments, in a context's `meta`


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
    """A command with errors in JSON where the log is, whose options environment variables set, too."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click's; what was given is kept for the processes of several models."""
        ctx.meta[GIVEN] = [*args]
        return super().parse_args(ctx, args)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """As click's, each option with its variable."""
        params = super().get_params(ctx)
        for param in params:
            if isinstance(param, click.Option) and param.envvar is None and not param.is_eager:
                param.envvar = variable_of(flag_of(param))
        return params


@click.command("serve", cls=ServeCommand, flags=(*ENGINE, "serve", "server"))
@click.argument("model", required=False)
@click.argument("more", nargs=-1, metavar="[MODEL]...")
@click.option(
    "--models",
    multiple=True,
    metavar="MODEL",
    help="Serve several models, each loaded when a request names it: what MODEL can be, a folder of such, or a TOML "
    "file with options of each; more may follow.",
)
@click.option(
    "--unload-after",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Of several models, unload one that had no request for so long.  [default: only to make room]",
)
@click.option(
    "--allow-pull",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Of several models: let clients add models of the Hugging Face hub with Ollama's /api/pull, and delete these. "
    "FILE has their names, which are served after a restart, too.  [default: no]",
)
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
    "--uds",
    "unix_socket",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Listen on a Unix socket in place of --host and --port, for a proxy on this machine.",
)
@click.option(
    "--root-path",
    default="",
    metavar="PATH",
    help="The path that a proxy passes on before each request's own, such as /llm.  [default: none]",
)
@click.option(
    "--ssl-certfile",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Serve HTTPS with this certificate chain (PEM).",
)
@click.option(
    "--ssl-keyfile",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The private key of --ssl-certfile, unless it holds it.",
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
@click.option(
    "--hide-cached-text",
    is_flag=True,
    help="Show clients no text of what is cached.  [default: where there are no keys and other machines can connect]",
)
@click.option(
    "--record",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Add each request to a file, with its seed, its options and its reply; replay computes them again.",
)
@click.option(
    "--record-mb",
    type=click.FloatRange(min=0, min_open=True),
    metavar="MB",
    help="The size at which that file is renamed to FILE.1, what was that to FILE.2, up to FILE.4.  [default: 100]",
)
@compile_options
def command(
    model: str | None,
    more: tuple[str, ...],
    models: tuple[str, ...],
    unload_after: float | None,
    allow_pull: Path | None,
    host: str,
    port: int,
    unix_socket: Path | None,
    api_keys: tuple[str, ...],
    api_key_files: tuple[Path, ...],
    root_path: str,
    ssl_certfile: Path | None,
    ssl_keyfile: Path | None,
    log_format: str,
    shutdown_timeout: float,
    hide_cached_text: bool,
    record: Path | None,
    record_mb: float | None,
    opened: Callable[[Engine], None] | None = None,
    **options: Any,
) -> None:
    """Serve MODEL to OpenAI's and Anthropic's clients: /v1/chat/completions, /v1/responses, /v1/messages, and others.

    With --models there are several models, each in a process of its own, which is started when a request names the
    model.

    Without an API key every client is answered: listen only on networks that you trust. On an address of this machine
    alone, requests must be sent to localhost then, so that web pages cannot use names of their own for it. GET
    /v1/cache shows what is cached for the caller, DELETE /v1/cache forgets it.

    Opening an artifact runs its model.so, which is native code with all that this process may do: serve only artifacts
    that you compiled, or that come from a source that you trust.

    The server listens at once. Until the model is compiled and loaded, /health is 503 with the stage and the percentage
    that is done, and requests get 503 with Retry-After. Later /health is "ready", or "degraded" with a reason when
    requests wait and no step gets on. /health/live is 200 as long as the process answers.

    Each option has an environment variable: --kv-cache-gb is RADIXLM_KV_CACHE_GB.

    \b
    radixlm serve smollm2 --port 8000
    radixlm serve --models ~/models --memory-gb 16 --unload-after 600
    curl localhost:8000/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Hi"}]}'
    """
    gc.disable()  # nothing that modules make is garbage: looking for some takes a seventh of loading them
    from radixlm.runtime.malloc_arenas import share_one_arena
    from radixlm.runtime.server.http.door import door, read_keys
    from radixlm.runtime.server.http.root_path import checked_root_path
    from radixlm.runtime.server.http.uvicorn_server import TLS, Address
    from radixlm.runtime.server.server_options import ServerOptions

    from .serving import Serving

    gc.freeze()
    gc.enable()

    if ssl_keyfile is not None and ssl_certfile is None:
        raise ValueError("--ssl-keyfile is given and --ssl-certfile is not; give both")
    keys = (*api_keys, *(key for path in api_key_files for key in read_keys(path)))
    server = ServerOptions(api_keys=keys, **server_keywords(options))
    door(server)  # what is wrong with keys and origins is known before the model is loaded, too
    tls = None if ssl_certfile is None else TLS(ssl_certfile, ssl_keyfile)
    address = Address(host, port, unix_socket)
    if models or more:
        from .several.serve_models import serve_models

        named = [*models, *([] if model is None else [model]), *more]
        serve_models(
            named,
            address,
            server,
            given=click.get_current_context().meta[GIVEN],
            store=options["store"],
            tls=tls,
            root_path=checked_root_path(root_path),
            log_format=log_format,
            grace_s=shutdown_timeout,
            unload_after_s=unload_after,
            memory_bytes=options["memory_bytes"],
            hides_cached_text=hide_cached_text,
            pulled=allow_pull,
        )
        return
    if model is None:
        raise ValueError("give a MODEL to serve, or several with --models")
    for flag, value in (("--unload-after", unload_after), ("--allow-pull", allow_pull)):
        if value is not None:
            raise ValueError(f"{flag} is of several models; give them with --models, or leave it out")
    find_artifact = partial(
        take(CompileOptions, options).artifact_of,
        model,
        log_line if log_format == "json" else None,
        kept=log_line if log_format == "json" else partial(click.echo, err=True),
    )
    serving = Serving(
        model,
        address,
        server,
        log_format=log_format,
        grace_s=shutdown_timeout,
        root_path=checked_root_path(root_path),
        tls=tls,
        hides_cached_text=hide_cached_text,
    )
    share_one_arena()
    keywords = engine_keywords(options)
    recorder: Recorder | None = None
    if record is None and record_mb is not None:
        raise ValueError("--record-mb is given and --record is not; give both, or leave --record-mb out")
    if record is not None:
        from radixlm.runtime.replay.recorder import Recorder

        try:
            recorder = keywords["recorder"] = Recorder(record, int((record_mb or RECORD_MB) * 1e6))
        except OSError as error:
            raise ValueError(f"--record {record} cannot be written ({error.strerror}); choose another file") from error

    def open_engine(artifact: Path) -> Engine:
        from radixlm.runtime import Engine  # while the server listens, or a model is compiled

        engine = Engine(artifact, **keywords)
        if recorder is not None:
            recorder.begin(engine, model)
        return engine

    try:
        serving.run(find_artifact, open_engine, opened)
    finally:
        if recorder is not None:
            recorder.close()
