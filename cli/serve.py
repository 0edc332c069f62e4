"""`radixlm serve`: serve one model over HTTP, or several.

`serving.py` serves one model, `several` serves several.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .environment import EnvironmentCommand
from .field_flags import ENGINE, CompileOptions, compile_options, engine_keywords, server_keywords, take
from .log_config import JSONErrors, log_line

if TYPE_CHECKING:
    from radixlm.runtime import Engine
    from radixlm.runtime.replay.recorder import Recorder


RECORD_MB = 100.0  # size of a file of --record
GIVEN = "radixlm.given"  # key of the command line's arguments in a context's `meta`


class KeyOption(click.Option):
    """A repeatable option whose environment variable has one value.

    click would split the variable at spaces, and ignore an empty one.
    """

    def value_from_envvar(self, ctx: click.Context) -> tuple[str, ...] | None:
        """Return the value of the variable, unchanged.

        Raises:
            BadParameter: it is empty.
        """
        assert isinstance(self.envvar, str)
        key = os.environ.get(self.envvar)
        if key == "":
            raise click.BadParameter(f"{self.envvar} is empty; unset it, or set it to a key", ctx, self)
        return None if key is None else (key,)


class ServeCommand(JSONErrors, EnvironmentCommand):
    """A command whose errors are JSON if the log is, and whose options can be set by environment variables."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments, and keep them for the processes of several models."""
        ctx.meta[GIVEN] = [*args]
        return super().parse_args(ctx, args)


@click.command("serve", cls=ServeCommand, flags=(*ENGINE, "serve", "server"))
@click.argument("model", required=False)
@click.argument("more", nargs=-1, metavar="[MODEL]...")
@click.option(
    "--models",
    multiple=True,
    metavar="MODEL",
    help="Serve several models, each loaded when a request names it: models, folders of models, or a TOML file with "
    "options for each; further arguments are models, too.",
)
@click.option(
    "--unload-after",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="With several models, unload those without a request for this long.  [default: only to make room]",
)
@click.option(
    "--allow-pull",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="With several models, let clients add models of the Hugging Face hub with Ollama's /api/pull, and delete "
    "these. FILE keeps their names for the next start.  [default: no]",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="Port to listen on; 0 takes any free one.",
)
@click.option(
    "--api-key",
    "api_keys",
    cls=KeyOption,
    multiple=True,
    metavar="KEY",
    envvar="RADIXLM_API_KEY",
    help="Require this key; each key has its own prefix cache. Repeatable; the environment variable has one key.",
)
@click.option(
    "--api-key-file",
    "api_key_files",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File with API keys, one per line, so that lists of processes do not show them; repeatable.",
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
    help="Path prefix that a proxy forwards, such as /llm.  [default: none]",
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
    help="Private key of --ssl-certfile, unless that file has it.",
)
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Format of stderr: a line per request, with counts, times and errors; with json, all lines are JSON.",
)
@click.option(
    "--shutdown-timeout",
    type=click.FloatRange(min=0),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="On shutdown, give running replies this long to end, then cancel them.",
)
@click.option(
    "--hide-cached-text",
    is_flag=True,
    help="Show clients no cached text.  [default: if there are no keys and other machines can connect]",
)
@click.option(
    "--record",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Append each request to a file, with seed, options and reply, for radixlm replay.",
)
@click.option(
    "--record-mb",
    type=click.FloatRange(min=0, min_open=True),
    metavar="MB",
    help="Size at which that file is rotated to FILE.1, FILE.2 and so on, up to FILE.4.  [default: 100]",
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
    for_chat: bool = False,
    **options: Any,
) -> None:
    """Serve MODEL to OpenAI, Anthropic and Ollama clients: /v1/chat/completions, /v1/responses, /v1/messages, /api/chat
    and others.

    With --models, several models are served, each in a process of its own that starts when a request names the model.

    Without an API key, every client is served: listen only on networks that you trust. If only this machine can
    connect, requests must then name the host localhost, so that web pages cannot reach the server under names of their
    own. GET /v1/cache shows the caller's cached prefixes, DELETE /v1/cache deletes them.

    Opening an artifact runs its model.so, which is native code with all rights of this process: serve only artifacts
    that you compiled, or that come from a source that you trust.

    The server listens at once. Until the model is compiled and loaded, /health returns 503 with stage and percentage,
    and requests get 503 with Retry-After. Then /health is "ready", or "degraded" with a reason, for example if requests
    wait but no step makes progress. /health/live returns 200 as long as the process responds.

    Each option has an environment variable: --kv-cache-gb is RADIXLM_KV_CACHE_GB.

    \b
    radixlm serve smollm2 --port 8000
    radixlm serve --models ~/models --memory-gb 16 --unload-after 600
    curl localhost:8000/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Hi"}]}'
    """
    gc.disable()  # imports make no garbage, and collecting takes a seventh of their time
    from radixlm.runtime.malloc_arenas import share_one_arena
    from radixlm.runtime.server.http.access import access_middleware
    from radixlm.runtime.server.http.api_keys import read_keys
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
    access_middleware(server)  # checks keys and origins before the model is loaded
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
            raise ValueError(f"{flag} is for several models; use --models, or remove it")
    find_artifact = partial(
        take(CompileOptions, options).artifact_of,
        model,
        log_line if log_format == "json" else None,
        kept=log_line if log_format == "json" else partial(click.echo, err=True),
        for_chat=for_chat,
        loras=options.get("loras"),
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
        raise ValueError("--record-mb is given and --record is not; give both, or remove --record-mb")
    if record is not None:
        from radixlm.runtime.replay.recorder import Recorder

        try:
            recorder = keywords["recorder"] = Recorder(record, int((record_mb or RECORD_MB) * 1e6))
        except OSError as error:
            raise ValueError(f"--record {record} cannot be written ({error.strerror}); choose another file") from error

    def open_engine(artifact: Path) -> Engine:
        from radixlm.runtime import Engine  # imported while the server listens, or a model is compiled

        engine = Engine(artifact, **keywords)
        if recorder is not None:
            recorder.begin(engine, model)
        return engine

    try:
        serving.run(find_artifact, open_engine, opened)
    finally:
        if recorder is not None:
            recorder.close()
