"""`GET /health` and `/health/ready`: whether engines make progress, not only whether they exist.

Knows engines' counts and what is bad about them, not how they came about.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ..engine.engine_stats import EngineStats
from .http import loading
from .http.door import api_key_of
from .models import Models
from .served import Served

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


async def live(models: Models, request: Request) -> Response:
    """`GET /health/live`: 200 as long as the process answers."""
    return loading.live()


async def health(models: Models, request: Request) -> Response:
    """`ready`, or `degraded` with a `reason`: 503 if no request is served, 200 if the next one may be.

    Of several models each says it for itself, in `models`; 503 if none serves. Where there are keys, only clients with
    one get names and counts. Waits for no engine.
    """
    tells_all = not models.options.api_keys or api_key_of(request) is not None
    told = {served.name: _told(served, tells_all=tells_all) for served in models.rows}
    if not models.has_several:
        [(verdict, body)] = told.values()
        serves = verdict.serves
    else:
        serves = any(verdict.serves for verdict, _ in told.values())
        failing = {name: verdict.reason for name, (verdict, _) in told.items() if verdict.reason}
        reasons = [f"{name}: {reason}" if tells_all else reason for name, reason in failing.items()]
        body = _body("; ".join(reasons) or None)
        body |= {"models": {name: each for name, (_, each) in told.items()}} if tells_all else {}
    return Response(msgspec.json.encode(body), 200 if serves else 503, media_type="application/json")


def _told(served: Served, *, tells_all: bool) -> tuple[Verdict, dict[str, object]]:
    """What is said of one model."""
    stats = served.engine.stats()
    verdict = Verdict.of(stats, served.options.max_stall_s, tells_causes=tells_all)
    counts = {name: value for name, value in asdict(stats).items() if name not in _ELSEWHERE} if tells_all else {}
    return verdict, _body(verdict.reason) | counts


def _body(reason: str | None) -> dict[str, object]:
    return {"status": "degraded" if reason else "ready", "reason": reason}
