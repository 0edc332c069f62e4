"""`/v1/cache`: what is cached for the caller's namespace, and forgetting it.

Says nothing of other namespaces, not even that there are any.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial, reduce
from hashlib import blake2s
from typing import cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ..cache.cache_tree import TreeRun
from ..cache.cache_uses import CacheUse
from ..engine.completion import FinishReason
from ..errors import InvalidParameter
from .models import Models
from .openai.replies import WhyNotMoreReply
from .openai.reply_parts import why_not_more
from .served import Served, json_response

PARAMETERS = ("cache_salt", "prompt_cache_key")  # as in the body of a completion


async def cache(models: Models, request: Request) -> Response:
    """`GET /v1/cache`: sums and runs, of one model. `DELETE /v1/cache`: what no running request uses is forgotten.

    All models forget, or the one that is named. Both wait for the step that runs.
    """
    for name in request.query_params:
        if name not in _parameters(models):
            raise InvalidParameter(f"there is no parameter {name!r:.80} here; use {' or '.join(_parameters(models))}")
    if request.method == "GET":
        return await _show(models.of_query(request), request)
    rows = models.rows if "model" not in request.query_params else (models.of_query(request),)
    replies = await asyncio.gather(*(_clear(served, request) for served in rows), return_exceptions=True)
    for failed in replies:  # after all: no model keeps what is to be forgotten because another one failed
        if isinstance(failed, BaseException):
            raise failed
    return json_response(reduce(_added, cast("list[ClearedReply]", replies)))


def _parameters(models: Models) -> tuple[str, ...]:
    return (*PARAMETERS, "model") if models.has_several else PARAMETERS


async def _clear(served: Served, request: Request) -> ClearedReply:
    cleared = await served.lanes.cache.run(request, partial(served.engine.clear_cache, _namespace(served, request)))
    return ClearedReply(cleared.num_freed_pages, cleared.num_kept_pages, cleared.num_discarded_pages)


def _added(one: ClearedReply, other: ClearedReply) -> ClearedReply:
    return ClearedReply(
        one.num_freed_pages + other.num_freed_pages,
        one.num_kept_pages + other.num_kept_pages,
        one.num_discarded_pages + other.num_discarded_pages,
    )


async def _show(served: Served, request: Request) -> Response:
    namespace = _namespace(served, request)
    tree = await served.lanes.cache.run(request, partial(served.engine.cache_tree, namespace))
    return json_response(
        CacheReply(
            num_runs=tree.num_runs,
            num_tokens=tree.num_tokens,
            num_pages=tree.num_pages,
            num_used_pages=tree.num_used_pages,
            num_aliases=tree.num_aliases,
            num_states=tree.num_states,
            runs=[_run_reply(served, run) for run in tree.runs],
            is_whole=tree.is_whole,
            is_counted=tree.is_counted,
            requests=[_use_reply(served, use, tree.now, namespace) for use in tree.uses],
        )
    )


def _namespace(served: Served, request: Request) -> bytes:
    return served.namespace(request, *(request.query_params.get(name) for name in PARAMETERS))


def _run_reply(served: Served, run: TreeRun) -> CachedRunReply:
    return CachedRunReply(
        parent=run.parent,
        start=run.start,
        num_tokens=run.num_tokens,
        num_generated=run.num_generated,
        num_pages=run.num_pages,
        num_users=run.num_users,
        num_children=run.num_children,
        num_states=run.num_states,
        unused_s=round(run.unused_s, 3),
        begins=served.text(run.first_ids) if served.options.tells_cached_text else None,
    )


def _use_reply(served: Served, use: CacheUse, now: float, namespace: bytes) -> CacheUseReply:
    ended_at = now if use.ended_at is None else use.ended_at
    # the engine's ids count the requests of all clients, which no client needs to know
    name = blake2s(use.request_id.encode(), key=namespace[:32], digest_size=4).hexdigest()
    return CacheUseReply(
        id=name,
        state=use.state,
        run=use.run,
        num_prompt_tokens=use.num_prompt_tokens,
        num_cached_tokens=sum(use.tokens_by_kind.values()),
        cached_tokens_by_kind=dict(use.tokens_by_kind),
        num_generated_tokens=use.num_generated,
        running_s=round(ended_at - use.arrived_at, 3),
        ended_s=None if use.ended_at is None else round(now - use.ended_at, 3),
        finish_reason=cast("FinishReason | None", use.finish_reason),  # the cache does not know which there are
        why_not_more=why_not_more(use.why_not_more, tells_cached_text=served.options.tells_cached_text),
    )


class CachedRunReply(msgspec.Struct, kw_only=True):
    parent: int | None  # the place in `runs` of what it goes on from
    start: int  # tokens before it
    num_tokens: int
    num_generated: int  # tokens that the model made
    num_pages: int
    num_users: int  # running requests that use it
    num_children: int
    num_states: int  # of a recurrent model: states behind its pages from which prompts can go on
    unused_s: float
    begins: str | None  # a few tokens


class CacheUseReply(msgspec.Struct, kw_only=True):
    id: str
    state: str  # waiting, running or ended
    run: int | None  # the place in `runs` of what its keys and values end in, if that is there
    num_prompt_tokens: int
    num_cached_tokens: int  # of these, found when it was admitted
    cached_tokens_by_kind: Mapping[str, int]
    num_generated_tokens: int
    running_s: float  # since it arrived, until it ended
    ended_s: float | None  # since it ended
    finish_reason: FinishReason | None
    why_not_more: WhyNotMoreReply | None


class CacheReply(msgspec.Struct, kw_only=True):
    num_runs: int
    num_tokens: int
    num_pages: int
    num_used_pages: int
    num_aliases: int
    num_states: int  # of a recurrent model: states from which prompts can go on
    runs: list[CachedRunReply]
    is_whole: bool  # all runs are there
    is_counted: bool  # all runs are in the sums
    requests: list[CacheUseReply]  # those that run, and the last that ended; the newest first
    object: str = "cache"


class ClearedReply(msgspec.Struct):
    num_freed_pages: int
    num_kept_pages: int  # running requests use them
    num_discarded_pages: int = 0  # taken off the disk
    object: str = "cache.cleared"
