"""Log the prefill progress of a request whose prompts take longer than a second.

Knows counts and a timer, not text.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from typing import Any

from ..engine.completion import PrefillProgress
from ..engine.generation_stream import GenerationStream
from .request_log import RequestRecord, line_of

FIRST_S = 1.0  # shorter prefills are logged at the end of the request only
INTERVAL_S = 10.0

_log = logging.getLogger("radixlm.requests")


class PrefillLog:
    """Writes log lines of one request until its prompts are prefilled, with the estimated time left.

    Args:
        record: the request's record, which reads `counts` if the request ends before its prefill does.
        streams: all replies, including those that are submitted later.
        running: the replies that have not ended.
    """

    def __init__(
        self, record: RequestRecord, streams: Sequence[GenerationStream], running: Collection[GenerationStream]
    ) -> None:
        self._record = record
        self._streams = streams
        self._running = running
        record.prefill = self.counts
        self._timer = asyncio.get_running_loop().call_later(FIRST_S, self._log_progress)

    def stop(self) -> None:
        """Stop writing lines."""
        self._timer.cancel()

    def counts(self) -> dict[str, int]:
        """Return token counts over all prompts: their length, found in the cache, and found or computed so far."""
        started = [stream.progress for stream in self._streams if stream.progress is not None]
        return {
            "prompt_tokens": sum(stream.num_prompt_tokens for stream in self._streams),
            "cached_tokens": sum(each.num_cached_tokens for each in started),
            "prefilled_tokens": sum(each.num_processed_tokens for each in started),
        }

    def _log_progress(self) -> None:
        """Log the counts and the seconds left, and schedule the next line; stop when all prompts are computed."""
        progress = [stream.progress for stream in self._running]
        unfinished = [each for each in progress if each and each.num_processed_tokens < each.num_prompt_tokens]
        if not unfinished and None not in progress:
            return
        state = "prefill" if unfinished else "queued"
        fields: dict[str, Any] = {"id": self._record.request_id, "state": state, **self.counts()}
        fields["total_s"] = round(time.monotonic() - self._record.arrived_at, 1)
        left = [seconds for each in unfinished if (seconds := left_s(each)) is not None]
        if left:
            fields["left_s"] = round(max(left), 1)
        _log.info("%s", line_of(fields), extra={"fields": fields})
        self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._log_progress)


def left_s(progress: PrefillProgress) -> float | None:
    """Return the seconds that the rest of a prompt takes at the present rate; None before a token is computed.

    >>> left_s(PrefillProgress(num_prompt_tokens=100, num_cached_tokens=20, num_processed_tokens=60, elapsed_s=2.0))
    2.0
    """
    computed = progress.num_processed_tokens - progress.num_cached_tokens
    if computed <= 0:
        return None
    return progress.elapsed_s * (progress.num_prompt_tokens - progress.num_processed_tokens) / computed
