"""`/v1/cache`: show or delete what is cached in the caller's namespace.

Reveals nothing of other namespaces, not even that there are any.
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

from ..cache.cache_namespace import adapted_namespace
from ..cache.cache_tree import TreeRun
from ..cache.cache_uses import CacheUse
from ..engine.completion import FinishReason
from ..errors import InvalidParameter
from .errors import HTTPError
from .models import Models
from .openai.replies import WhyNotMoreReply
from .openai.reply_parts import why_not_more
from .served import Served, json_response

PARAMETERS = ("cache_salt", "prompt_cache_key")  # as in the body of a completion
RUN = "run"


async def cache(models: Models, request: Request) -> Response:
    """`GET /v1/cache`: return totals and runs of tokens of one model; with `?run=ID`, all text of one run.

    `DELETE /v1/cache`: delete all pages that no running request uses, of all models or the named one. Both wait for the
    running step.
    """
    allowed = (*_parameters(models), RUN) if request.method == "GET" else _parameters(models)
    for name in request.query_params:
        if name not in allowed:
            raise InvalidParameter(f"unknown query parameter {name!r:.80}; use {' or '.join(allowed)}")
    if request.method == "GET":
        served = models.of_query(request)
        run_id = request.query_params.get(RUN)
        return await (_show_namespace(served, request) if run_id is None else _show_run(served, request, run_id))
    rows = models.rows if "model" not in request.query_params else (models.of_query(request),)
    replies = await asyncio.gather(*(_clear_namespace(served, request) for served in rows), return_exceptions=True)
    for failed in replies:  # only now: one model's failure must not keep the others from deleting
        if isinstance(failed, BaseException):
            raise failed
    return json_response(reduce(_add_counts, cast("list[ClearedReply]", replies)))


def _parameters(models: Models) -> tuple[str, ...]:
    return (*PARAMETERS, "model") if models.has_choice else PARAMETERS


async def _clear_namespace(served: Served, request: Request) -> ClearedReply:
    """Delete the pages of the request's namespace that no running request uses; return how many went and stayed."""
    cleared = await served.work_queues.cache.run(
        request, partial(served.engine.clear_cache, _namespace(served, request))
    )
    return ClearedReply(cleared.num_freed_pages, cleared.num_kept_pages, cleared.num_discarded_pages)


def _add_counts(one: ClearedReply, other: ClearedReply) -> ClearedReply:
    """Return the sums of two replies' counts."""
    return ClearedReply(
        one.num_freed_pages + other.num_freed_pages,
        one.num_kept_pages + other.num_kept_pages,
        one.num_discarded_pages + other.num_discarded_pages,
    )


async def _show_namespace(served: Served, request: Request) -> Response:
    """Return the response that lists the cached runs of the request's namespace, and the requests that used them."""
    namespace = _namespace(served, request)
    tree = await served.work_queues.cache.run(request, partial(served.engine.cache_tree, namespace))
    return json_response(
        CacheReply(
            num_runs=tree.num_runs,
            num_tokens=tree.num_tokens,
            num_pages=tree.num_pages,
            num_used_pages=tree.num_used_pages,
            num_aliases=tree.num_aliases,
            num_states=tree.num_states,
            runs=[_describe_run(served, run, namespace) for run in tree.runs],
            is_whole=tree.is_whole,
            is_counted=tree.is_counted,
            requests=[_describe_use(served, use, tree.now, namespace) for use in tree.uses],
        )
    )


async def _show_run(served: Served, request: Request, run_id: str) -> Response:
    """Return one run with all of its text and token ids.

    Raises:
        HTTPError: 403 if the server does not show cached text, 404 if the run is no longer cached.
    """
    if not served.options.tells_cached_text:
        raise HTTPError(403, "this server does not show cached text", code="cached_text_withheld")
    namespace = _namespace(served, request)

    def read() -> CachedTextReply | None:
        runs = served.engine.cache_tree(namespace).runs
        node_id = next((run.node_id for run in runs if _public_id(f"run {run.node_id}", namespace) == run_id), None)
        found = None if node_id is None else served.engine.cached_text(namespace, node_id)
        if found is None:
            return None
        return CachedTextReply(run_id, found.start, found.token_ids, served.text(found.token_ids))

    reply = await served.work_queues.cache.run(request, read)
    if reply is None:
        raise HTTPError(404, "this run is no longer cached; request /v1/cache again", param=RUN, code="run_not_found")
    return json_response(reply)


def _namespace(served: Served, request: Request) -> bytes:
    """Return the namespace of the request; if it names a LoRA adapter, the adapter's part alone."""
    namespace = served.namespace(request, *(request.query_params.get(name) for name in PARAMETERS))
    if served.lora is None:
        return namespace
    return adapted_namespace(namespace, served.engine.adapters.named(served.lora).digest)


def _public_id(name: str, namespace: bytes) -> str:
    """Return an id for clients. The engine's own ids are counters, which would reveal other clients' activity."""
    return blake2s(name.encode(), key=namespace[:32], digest_size=4).hexdigest()


def _describe_run(served: Served, run: TreeRun, namespace: bytes) -> CachedRunReply:
    """Return a cached run as the reply lists it; its first text only if the server shows cached text."""
    tells = served.options.tells_cached_text
    return CachedRunReply(
        id=_public_id(f"run {run.node_id}", namespace),
        parent=run.parent,
        start=run.start,
        num_tokens=run.num_tokens,
        num_generated=run.num_generated,
        num_pages=run.num_pages,
        num_users=run.num_users,
        num_children=run.num_children,
        num_states=run.num_states,
        unused_s=round(run.unused_s, 3),
        num_shared=run.num_shared,
        begins=served.text(run.first_ids) if tells else None,
        begins_after=served.text(run.first_ids[run.num_shared :]) if tells else None,
    )


def _describe_use(served: Served, use: CacheUse, now: float, namespace: bytes) -> CacheUseReply:
    """Return what one request found in the cache, as the reply lists it.

    Args:
        now: seconds, on the cache's clock.
    """
    ended_at = now if use.ended_at is None else use.ended_at
    return CacheUseReply(
        id=_public_id(use.request_id, namespace),
        state=use.state,
        run=use.run,
        num_prompt_tokens=use.num_prompt_tokens,
        num_cached_tokens=sum(use.tokens_by_kind.values()),
        cached_tokens_by_kind=dict(use.tokens_by_kind),
        num_generated_tokens=use.num_generated,
        running_s=round(ended_at - use.arrived_at, 3),
        ended_s=None if use.ended_at is None else round(now - use.ended_at, 3),
        finish_reason=cast("FinishReason | None", use.finish_reason),  # the cache has it as a plain string
        why_not_more=why_not_more(use.why_not_more, tells_cached_text=served.options.tells_cached_text),
    )


class CachedRunReply(msgspec.Struct, kw_only=True):
    id: str  # for `?run=`
    parent: int | None  # index in `runs` of the run that it continues
    start: int  # tokens before it
    num_tokens: int
    num_generated: int  # tokens that the model generated
    num_pages: int
    num_users: int  # running requests that use it
    num_children: int
    num_states: int  # of a recurrent model: snapshots after its pages from which prompts can continue
    unused_s: float
    num_shared: int  # first tokens that the sibling before it in `runs` begins with, too
    begins: str | None  # text of the first few tokens
    begins_after: str | None  # the same without the shared tokens


class CacheUseReply(msgspec.Struct, kw_only=True):
    id: str
    state: str  # waiting, running or ended
    run: int | None  # index in `runs` of the run in which its KV ends, if listed
    num_prompt_tokens: int
    num_cached_tokens: int  # of these, found in the cache on admission
    cached_tokens_by_kind: Mapping[str, int]
    num_generated_tokens: int
    running_s: float  # from arrival to its end, or until now
    ended_s: float | None  # time since its end
    finish_reason: FinishReason | None
    why_not_more: WhyNotMoreReply | None


class CacheReply(msgspec.Struct, kw_only=True):
    num_runs: int
    num_tokens: int
    num_pages: int
    num_used_pages: int
    num_aliases: int
    num_states: int  # of a recurrent model: snapshots from which prompts can continue
    runs: list[CachedRunReply]
    is_whole: bool  # all runs are listed
    is_counted: bool  # all runs are in the totals
    requests: list[CacheUseReply]  # running ones, and the last that ended; newest first
    object: str = "cache"


class CachedTextReply(msgspec.Struct):
    id: str
    start: int  # tokens before it
    token_ids: tuple[int, ...]
    text: str
    object: str = "cache.run"


class ClearedReply(msgspec.Struct):
    num_freed_pages: int
    num_kept_pages: int  # running requests use them
    num_discarded_pages: int = 0  # deleted from disk
    object: str = "cache.cleared"
