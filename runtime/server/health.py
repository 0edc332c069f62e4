"""`GET /health`: whether the engine makes progress, not only whether it exists.

Knows the engine's counts and what is bad about them, not how they came about.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ..engine.engine_stats import EngineStats
from .http.api_keys import api_key_of

MAX_STALL_S = 60.0  # a step of the largest model takes seconds, not a minute
MAX_FAILED_STEPS = 3  # in a row: then it is not the requests' fault
_ELSEWHERE = {"to_first_token", "between_tokens", "to_end"}  # in `/metrics`


@dataclass(frozen=True)
class Verdict:
    """Whether the engine serves requests, and what is wrong with it. A degraded engine may still serve."""

    reason: str | None  # None: nothing is wrong
    serves: bool = True

    @classmethod
    def of(cls, stats: EngineStats, max_stall_s: float, *, tells_causes: bool = True) -> Verdict:
        """Something is wrong if the engine's thread is gone, if it has work and makes no progress, or if steps fail.

        Args:
            tells_causes: whether the operating system's own words may be told, which name files.
        """
        num_failed = stats.num_failed_steps_in_a_row
        if stats.crash is not None:
            return cls(f"the engine's thread died of {stats.crash}; start the server again", serves=False)
        if not stats.alive:
            return cls("the engine is closed: the server is stopping", serves=False)
        if stats.stalled_s >= max_stall_s:
            waiting = f"{stats.num_running} requests run and {stats.num_waiting} wait"
            return cls(f"no step got on for {stats.stalled_s:.0f} s while {waiting}", serves=False)
        if num_failed:
            steps = "the last step" if num_failed == 1 else f"the last {num_failed} steps"
            return cls(f"{steps} failed of {stats.last_failure}", serves=num_failed < MAX_FAILED_STEPS)
        if stats.restarted_after is not None:
            died = f"the engine's thread died of {stats.restarted_after}"
            return cls(f"{died}; it was started again with an empty cache, and has computed nothing since")
        store_off_because = stats.store_off_because if stats.tier is None else stats.tier.off_because
        if store_off_because is not None:
            cause = f" ({store_off_because})" if tells_causes else ""
            return cls(f"the store is off{cause}; nothing is kept on disk")
        return cls(None)


@dataclass(frozen=True)
class Health:
    """The endpoint; `stats` must not wait for the engine. Where there are keys, only clients with one get counts."""

    stats: Callable[[], EngineStats]
    max_stall_s: float
    has_keys: bool = False

    async def answer(self, request: Request) -> Response:
        """`ready`, or `degraded` with a `reason`: 503 if no request is served, 200 if the next one may be."""
        stats = self.stats()
        tells_all = not self.has_keys or api_key_of(request) is not None
        verdict = Verdict.of(stats, self.max_stall_s, tells_causes=tells_all)
        counts = {n: value for n, value in asdict(stats).items() if n not in _ELSEWHERE} if tells_all else {}
        body = {"status": "degraded" if verdict.reason else "ready", "reason": verdict.reason, **counts}
        return Response(msgspec.json.encode(body), 200 if verdict.serves else 503, media_type="application/json")
