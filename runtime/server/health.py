"""`GET /health` and `/health/ready`: report whether the engines make progress, not only that they exist.

Knows the engines' counters and which values of them are bad.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ..engine.engine_stats import EngineStats
from .http import loading
from .http.api_keys import api_key_of
from .models import Models
from .served import Served

MAX_FAILED_STEPS = 3  # in a row: more are not the requests' fault
_ELSEWHERE = {"to_first_token", "between_tokens", "to_end"}  # in `/metrics`


@dataclass(frozen=True)
class Verdict:
    """The health of one engine: whether it serves requests, and what is wrong. A degraded engine may still serve."""

    reason: str | None  # None if nothing is wrong
    serves: bool = True

    @classmethod
    def of(cls, stats: EngineStats, max_stall_s: float, *, tells_causes: bool = True) -> Verdict:
        """Judge an engine by its counters. Bad are a dead thread, stalled or failing steps, and a store that is off.

        Args:
            tells_causes: include the operating system's error messages, which name files.
        """
        num_failed = stats.num_failed_steps_in_a_row
        if stats.crash is not None:
            return cls(f"the engine's thread died of {stats.crash}; start the server again", serves=False)
        if not stats.alive:
            return cls("the engine is closed: the server is stopping", serves=False)
        if stats.stalled_s >= max_stall_s:
            waiting = f"{stats.num_running} requests run and {stats.num_waiting} wait"
            return cls(f"no step made progress for {stats.stalled_s:.0f} s while {waiting}", serves=False)
        if num_failed:
            steps = "the last step" if num_failed == 1 else f"the last {num_failed} steps"
            return cls(f"{steps} failed of {stats.last_failure}", serves=num_failed < MAX_FAILED_STEPS)
        if stats.restarted_after is not None:
            died = f"the engine's thread died of {stats.restarted_after}"
            return cls(f"{died}; it was restarted with an empty cache, and has computed nothing since")
        store_off_because = stats.store_off_because if stats.tier is None else stats.tier.off_because
        if store_off_because is not None:
            cause = f" ({store_off_because})" if tells_causes else ""
            return cls(f"the store is off{cause}; nothing is saved to disk")
        return cls(None)


async def live(models: Models, request: Request) -> Response:
    """`GET /health/live`: return 200 while the process responds."""
    return loading.live()


async def health(models: Models, request: Request) -> Response:
    """`GET /health`: return `ready`, or `degraded` with a `reason`; the status is 503 if no model serves requests.

    Several models are listed one by one in `models`. If the server has API keys, only clients with a key get names and
    counts. Waits for no engine.
    """
    tells_all = not models.options.api_keys or api_key_of(request) is not None
    reports = {served.name: _report(served, tells_all=tells_all) for served in models.rows}
    if not models.has_several:
        [(verdict, body)] = reports.values()
        serves = verdict.serves
    else:
        serves = any(verdict.serves for verdict, _ in reports.values())
        failing = {name: verdict.reason for name, (verdict, _) in reports.items() if verdict.reason}
        reasons = [f"{name}: {reason}" if tells_all else reason for name, reason in failing.items()]
        body = _body("; ".join(reasons) or None)
        body |= {"models": {name: each for name, (_, each) in reports.items()}} if tells_all else {}
    return Response(msgspec.json.encode(body), 200 if serves else 503, media_type="application/json")


def _report(served: Served, *, tells_all: bool) -> tuple[Verdict, dict[str, object]]:
    """Return the verdict on one model and the body that describes it."""
    stats = served.engine.stats()
    verdict = Verdict.of(stats, served.options.max_stall_s, tells_causes=tells_all)
    counts = {name: value for name, value in asdict(stats).items() if name not in _ELSEWHERE} if tells_all else {}
    return verdict, _body(verdict.reason) | counts


def _body(reason: str | None) -> dict[str, object]:
    return {"status": "degraded" if reason else "ready", "reason": reason}
