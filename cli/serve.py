"""`radixlm serve`: an artifact behind an HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import math
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .json_errors import JSONErrors
from .log_config import log_config
from .opening import Opening
from .options import EngineOptions, engine_options, store_options

if TYPE_CHECKING:
    import uvicorn
    from radixlm.runtime import Engine

GRACE_S = 5.0  # for running replies, once the server is told to stop
CLOSING_S = 5  # for the last step, and for what clients are told then


@click.command("serve", cls=JSONErrors)
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes any that is free."
)
@click.option("--model-id", help="The name that clients call the model by.  [default: the artifact's own]")
@click.option(
    "--api-key",
    "api_keys",
    multiple=True,
    metavar="KEY",
    envvar="RADIXLM_API_KEY",
    show_envvar=True,
    help="Answer only who sends this key, from a cache of the key's own; repeatable.",
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
    "--cors-origin",
    "cors_origins",
    multiple=True,
    metavar="ORIGIN",
    help="Let web pages of this origin use the server, https://example.com; * for all; repeatable.  [default: none]",
)
@click.option(
    "--cache-ttl",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Drop cached prefixes that were not used for so long.  [default: only to make room]",
)
@click.option(
    "--max-queue",
    type=click.IntRange(min=0),
    default=256,
    show_default=True,
    help="Requests that may wait beside the --max-num-seqs that are computed; more are answered 429.",
)
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="How stderr is written: a line a request, with counts, times and errors; as json, nothing but JSON.",
)
@click.option("--log-prompts", is_flag=True, help="Write into the log what was asked, too.")
@click.option(
    "--log-kv",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Add a JSON line to this file for each change of a sequence or its pages, to be replayed.",
)
@click.option(
    "--shutdown-timeout",
    type=click.FloatRange(min=0),
    default=GRACE_S,
    show_default=True,
    metavar="SECONDS",
    help="Told to stop, give running replies so long to end, then cancel them.",
)
@store_options
@engine_options
def command(
    artifact: Path,
    host: str,
    port: int,
    model_id: str | None,
    api_keys: tuple[str, ...],
    api_key_files: tuple[Path, ...],
    cors_origins: tuple[str, ...],
    cache_ttl: float | None,
    max_queue: int,
    log_format: str,
    log_prompts: bool,
    log_kv: Path | None,
    shutdown_timeout: float,
    **options: Any,
) -> None:
    """Serve the model to OpenAI's clients: /v1/chat/completions, /v1/completions, /v1/models, /health.

    Without an API key everybody is let in: listen on addresses that you trust. On this machine's own, requests must be
    sent to localhost then, lest web pages get in under names of theirs. GET /v1/cache shows what is cached for the
    caller, DELETE /v1/cache forgets it.

    The server listens at once, and answers 503 until the model is loaded. /health is "ready", "degraded" with a reason
    when requests wait and no step gets on, or "loading".

    \b
    radixlm serve smollm2.radixlm --port 8000
    curl localhost:8000/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Hi"}]}'
    """
    import uvicorn
    from radixlm.runtime.malloc_arenas import share_one_arena
    from radixlm.runtime.server import Loading, create_app
    from radixlm.runtime.server.api_keys import checked_keys, read_keys
    from radixlm.runtime.server.http_protocol import MAX_HEADER_BYTES, HTTPProtocol
    from radixlm.runtime.server.origins import local_hosts, origin_middleware

    origin_middleware(cors_origins)  # what is wrong with these is known before the model is loaded, too
    api_keys = (*checked_keys(api_keys), *(key for path in api_key_files for key in read_keys(path)))
    say = logging.getLogger("radixlm.serve").info if log_format == "json" else partial(click.echo, err=True)
    share_one_arena()
    with _listen(host, port) as listener:  # first: an address in use is known before the model is loaded
        loading = Loading()
        is_loopback = _is_loopback(listener)
        url = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"

        def serve(engine: Engine) -> None:
            loading.app = create_app(
                engine,
                model_id=model_id,
                api_keys=api_keys,
                tells_cached_text=bool(api_keys) or is_loopback,
                logs_prompts=log_prompts,
                cors_origins=cors_origins,
                hosts=local_hosts(host) if is_loopback and not api_keys else (),
            )
            say(f"serving {artifact} at {url}/v1")
            warm_up(engine)

        def stop() -> None:
            serving.should_exit = True

        config = uvicorn.Config(
            loading,
            log_config=log_config(log_format),
            access_log=False,
            lifespan="off",
            http=HTTPProtocol,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        )
        serving = server(config, lambda: opening.close_value(), shutdown_timeout)
        say(f"loading {artifact}; {url}/health tells when it is ready")
        open_engine = partial(
            EngineOptions(**options).open, artifact, cache_ttl_s=cache_ttl, max_queue=max_queue, kv_log=log_kv
        )
        opening = Opening(open_engine, opened=serve, failed=stop)
        try:
            serving.run(sockets=[listener])
        finally:
            opening.close()


def warm_up(engine: Engine) -> None:
    """Let the first grammar be judged as fast as any; what goes wrong, whoever sends a grammar is told then."""
    from radixlm.runtime.errors import RadixLMError

    with contextlib.suppress(RadixLMError, OSError):
        engine.grammars.warm_up()


def server(config: uvicorn.Config, close_engine: Callable[[], None], grace_s: float = GRACE_S) -> uvicorn.Server:
    """A server that, told to stop, gives replies `grace_s` to end and then closes the engine.

    So clients are told in their own terms. Left to uvicorn, tasks would be cancelled: an "Internal Server Error",
    or a stream that breaks off.
    """
    import uvicorn

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            loop = asyncio.get_running_loop()
            closing = loop.call_later(grace_s, lambda: loop.run_in_executor(None, close_engine))
            try:
                await super().shutdown(sockets)
            finally:
                closing.cancel()

    config.timeout_graceful_shutdown = math.ceil(grace_s) + CLOSING_S
    return Server(config)


def _is_loopback(listener: socket.socket) -> bool:
    """Whether only this machine can connect."""
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ValueError(f"cannot listen on {host} port {port}: {error.strerror}; choose another") from error
