"""`/v1/cache`: what is cached for the caller's namespace, and forgetting it.

Never of another namespace, not even that there is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from hashlib import blake2s
from typing import cast

from starlette.requests import Request
from starlette.responses import Response

from ..cache.cache_tree import TreeRun
from ..cache.cache_uses import CacheUse
from ..engine.completion import FinishReason
from ..errors import InvalidParameter
from .openai.replies import CachedRunReply, CacheReply, CacheUseReply, ClearedReply, WhyNotMoreReply
from .served import Served, json_response

PARAMETERS = ("cache_salt", "prompt_cache_key")  # as in the body of a completion


@dataclass(frozen=True)
class Cache:
    """The endpoint for one served model."""

    served: Served

    async def answer(self, request: Request) -> Response:
        """`GET /v1/cache`: sums and runs. `DELETE /v1/cache`: what no running request uses is forgotten.

        Both wait for the step that runs.
        """
        namespace = self._namespace(request)
        engine, run = self.served.engine, self.served.lanes.cache.run
        if request.method == "DELETE":
            cleared = await run(request, partial(engine.clear_cache, namespace))
            numbers = cleared.num_freed_pages, cleared.num_kept_pages, cleared.num_discarded_pages
            return json_response(ClearedReply(*numbers))
        tree = await run(request, partial(engine.cache_tree, namespace))
        return json_response(
            CacheReply(
                num_runs=tree.num_runs,
                num_tokens=tree.num_tokens,
                num_pages=tree.num_pages,
                num_used_pages=tree.num_used_pages,
                num_aliases=tree.num_aliases,
                runs=[self._run(run) for run in tree.runs],
                is_whole=tree.is_whole,
                is_counted=tree.is_counted,
                requests=[self._use(use, tree.now, namespace) for use in tree.uses],
            )
        )

    def _namespace(self, request: Request) -> bytes:
        for name in request.query_params:
            if name not in PARAMETERS:
                raise InvalidParameter(f"there is no parameter {name!r:.80} here; use {' or '.join(PARAMETERS)}")
        return self.served.namespace(request, *(request.query_params.get(name) for name in PARAMETERS))

    def _run(self, run: TreeRun) -> CachedRunReply:
        return CachedRunReply(
            parent=run.parent,
            start=run.start,
            num_tokens=run.num_tokens,
            num_generated=run.num_generated,
            num_pages=run.num_pages,
            num_users=run.num_users,
            num_children=run.num_children,
            unused_s=round(run.unused_s, 3),
            begins=self.served.text(run.first_ids) if self.served.tells_cached_text else None,
        )

    def _use(self, use: CacheUse, now: float, namespace: bytes) -> CacheUseReply:
        ended_at = now if use.ended_at is None else use.ended_at
        # the engine's ids count everybody's requests, which is nobody's business
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
            why_not_more=WhyNotMoreReply.told(use.why_not_more, tells_cached_text=self.served.tells_cached_text),
        )
