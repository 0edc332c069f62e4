"""How a server answers; each option is declared here alone, and the command line's flags are made from that.

Knows ranges; which keys and origins can be used, `http/door.py` checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..fields import Flag, check_fields, documented, option
from .truncation import Truncation

MAX_STALL_S = 60.0  # a step of the largest model takes seconds, not a minute
DAY_S = 86400.0
KEEP_ALIVE_S = 15.0  # proxies close what was silent for a minute, some for half of one


@documented
@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of a server; those of `create_app`.

    Raises:
        InvalidParameter: a value is outside its range.
    """

    model_ids: Sequence[str] = option(
        (),
        "A name that clients call the model by; repeatable, and * is any.",
        unset="the artifact's own",
        flag=Flag("--model-id", "server", metavar="NAME"),
    )
    api_keys: Sequence[str] = option(
        (), "Clients must send one of them, and each has a cache of its own; none: every client is answered."
    )
    cors_origins: Sequence[str] = option(
        (),
        "Let web pages of this origin use the server, https://example.com; * for all; repeatable.",
        unset="none",
        flag=Flag("--cors-origin", "server", metavar="ORIGIN"),
    )
    hosts: Sequence[str] = option(
        (),
        "A host name that requests may be sent to, besides localhost; repeatable.",
        unset="any name, or localhost alone where only this machine can connect and there are no keys",
        flag=Flag("--allowed-host", "server", metavar="NAME"),
    )
    metrics_key: str | None = option(
        None,
        "The key with which /metrics is read, and nothing else: for Prometheus.",
        unset="a client's key, if there are any",
        flag=Flag("--metrics-key", "server", metavar="KEY"),
    )
    ignores_prompt_cache_key: bool = option(
        False,
        "Whether requests share a cache whatever their prompt_cache_key is. Agents send one for each conversation, of "
        "which all begin alike; a cache_salt isolates all the same.",
        unset="each has a cache of its own",
        flag=Flag("--ignore-prompt-cache-key", "server", off="--heed-prompt-cache-key"),
    )
    truncation: Truncation = option(
        "none",
        "What becomes of a history or prompt that does not fit, where a request does not say. `none`: an error; "
        "`middle`: whole old turns of a history are left out, or the middle of a prompt, and the answer says which.",
        flag=Flag("--truncation", "server", default="none"),
    )
    is_strict: bool = option(
        False,
        "Refuse every field of a request that /openapi.json does not have. Without it, those that do not change the "
        "answer are ignored, and listed in the header x-radixlm-ignored.",
        flag=Flag("--strict", "server", off=""),
    )
    logs_prompts: bool = option(
        False,
        "Write into the log what was asked, too, unless the match is off.",
        flag=Flag("--log-prompts", "server", off=""),
    )
    tells_cached_text: bool = option(
        True,
        "Whether `why_not_more` shows some tokens of what is cached in the request's namespace, and `/v1/cache` the "
        "beginnings of runs. False for a server whose clients share a namespace and do not trust each other.",
    )
    keeps_responses: bool = option(
        True,
        "Keep what /v1/responses answers, so that previous_response_id goes on from it, and conversations, files and "
        "batches: in the directory of --store, or else in memory. A request says no with store set to false.",
        flag=Flag("--keep-responses", "server"),
    )
    response_ttl_s: float = option(
        30 * DAY_S,
        "Forget a response or a conversation that was not used for so long.",
        above=0,
        flag=Flag("--response-ttl", "server", unit=("days", DAY_S), metavar="DAYS"),
    )
    response_bytes: int = option(
        1_000_000_000,
        "Room for responses and conversations, and as much for files and batches.",
        low=1,
        flag=Flag("--response-gb", "server", unit=("GB", 1e9), metavar="GB"),
    )
    max_body_bytes: int = option(16 << 20, "Longer request bodies are refused with 413.", low=1)
    max_stall_s: float = option(
        MAX_STALL_S, "`/health` is 503 when an engine had work for so many seconds and did none of it.", above=0
    )
    keep_alive_s: float = option(
        KEEP_ALIVE_S,
        "A stream that was silent for so many seconds gets a comment, so that no proxy closes it.",
        above=0,
    )

    def __post_init__(self) -> None:
        check_fields(self)
