"""Options of the server, each declared once; the command line's flags are made from them.

Knows ranges. `http/access.py` checks origins, `http/api_keys.py` keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..fields import Flag, check_fields, documented, option
from .truncation import Truncation

MAX_STALL_S = 60.0  # a step of the largest model takes seconds, not a minute
DAY_S = 86400.0
KEEP_ALIVE_S = 15.0  # proxies close connections that are silent for a minute, some for half a minute


@documented
@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of a server; the keyword arguments of `create_app`.

    Raises:
        InvalidParameter: a value is outside its range.
    """

    model_ids: Sequence[str] = option(
        (),
        "Name of the model for clients; repeatable. * accepts any name.",
        unset="the artifact's own name",
        flag=Flag("--model-id", "server", metavar="NAME"),
    )
    api_keys: Sequence[str] = option(
        (), "Keys of which clients must send one. Each key has its own prefix cache. None: no key is required."
    )
    cors_origins: Sequence[str] = option(
        (),
        "Origin whose web pages may use the server, such as https://example.com; * for all; repeatable.",
        unset="none",
        flag=Flag("--cors-origin", "server", metavar="ORIGIN"),
    )
    hosts: Sequence[str] = option(
        (),
        "Host name that requests may use, besides localhost; repeatable.",
        unset="any name; localhost only, if only this machine can connect and there are no keys",
        flag=Flag("--allowed-host", "server", metavar="NAME"),
    )
    metrics_key: str | None = option(
        None,
        "Key for Prometheus that gives access to /metrics only.",
        unset="clients' keys give access, if there are any",
        flag=Flag("--metrics-key", "server", metavar="KEY"),
    )
    ignores_prompt_cache_key: bool = option(
        False,
        "Share the prefix cache between requests with different prompt_cache_key. Agents send a key per conversation, "
        "although all conversations begin with the same prompt. A cache_salt still isolates requests.",
        unset="each key has its own cache",
        flag=Flag("--ignore-prompt-cache-key", "server", off="--heed-prompt-cache-key"),
    )
    truncation: Truncation = option(
        "none",
        "Default for histories and prompts that exceed the context. `none`: an error; `middle`: drop old turns of a "
        "history, or the middle of a prompt, and list them in the reply.",
        flag=Flag("--truncation", "server", default="none"),
    )
    is_strict: bool = option(
        False,
        "Refuse every request field that is not in /openapi.json. Without it, fields that do not change the reply are "
        "ignored, and listed in the header x-radixlm-ignored.",
        flag=Flag("--strict", "server", off=""),
    )
    logs_prompts: bool = option(
        False,
        "Log prompts, too, except of requests with cache_match off.",
        flag=Flag("--log-prompts", "server", off=""),
    )
    tells_cached_text: bool = option(
        True,
        "Show cached text of the request's namespace: some tokens in `why_not_more`, and the beginnings of runs in "
        "`/v1/cache`. False for a server whose clients share a namespace and do not trust each other.",
    )
    keeps_responses: bool = option(
        True,
        "Store responses, so that previous_response_id can continue them, and conversations, files and batches: in the "
        "directory of --store, else in memory. A request opts out with store set to false.",
        flag=Flag("--keep-responses", "server"),
    )
    response_ttl_s: float = option(
        30 * DAY_S,
        "Delete responses and conversations that were not used for this long.",
        above=0,
        flag=Flag("--response-ttl", "server", unit=("days", DAY_S), metavar="DAYS"),
    )
    response_bytes: int = option(
        1_000_000_000,
        "Maximum size of stored responses and conversations, and the same for files and batches.",
        low=1,
        flag=Flag("--response-gb", "server", unit=("GB", 1e9), metavar="GB"),
    )
    max_body_bytes: int = option(16 << 20, "Maximum size of a request body; longer ones are refused with 413.", low=1)
    max_stall_s: float = option(
        MAX_STALL_S, "`/health` returns 503 if an engine has had work for this many seconds without progress.", above=0
    )
    keep_alive_s: float = option(
        KEEP_ALIVE_S,
        "A stream that is silent for this many seconds sends a comment, so that no proxy closes it.",
        above=0,
    )

    def __post_init__(self) -> None:
        check_fields(self)
