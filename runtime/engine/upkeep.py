"""When what no client asked for is done: drop what was not used for long, and do what can wait once it is quiet.

Knows clocks and what to call, not what is dropped or done. A failure is logged, and harms no request.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator
from functools import partial

from ..errors import InvalidParameter, RadixLMError
from .engine_queue import WorkQueue

_LOGGER = logging.getLogger(__name__)

_CHECKS = 10  # within a time to live: so much of it late, at most, is something dropped
QUIET_S = 1.0  # without any work, before the first piece: the first request after a start is not to meet one


class CacheExpiry:
    """Calls `drop` with the time before which nothing is kept that was not used since.

    >>> now, dropped = 100.0, []
    >>> expiry = CacheExpiry(60.0, clock=lambda: now, drop=dropped.append)
    >>> expiry.run()
    >>> expiry.run()  # there is nothing to do before the next check
    >>> dropped, expiry.wait_s
    ([40.0], 6.0)

    Args:
        ttl_s: how long something unused is kept, in seconds.

    Raises:
        InvalidParameter: `ttl_s` is not above 0.
    """

    def __init__(self, ttl_s: float, *, clock: Callable[[], float], drop: Callable[[float], object]) -> None:
        if not (ttl_s > 0 and math.isfinite(ttl_s)):
            raise InvalidParameter(f"the cache's time to live is {ttl_s} s; it must be above 0")
        self._ttl_s, self._clock, self._drop = ttl_s, clock, drop
        self._next_at = -math.inf

    @property
    def wait_s(self) -> float:
        """Seconds to the next check."""
        return max(0.0, self._next_at - self._clock())

    def run(self) -> None:
        """Drop what is due, unless that was just checked."""
        now = self._clock()
        if now < self._next_at:
            return
        self._next_at = now + self._ttl_s / _CHECKS
        self._drop(now - self._ttl_s)

    def keep_up(self, queue: WorkQueue) -> None:
        """Run now, and between steps whenever a check is due."""
        try:
            self.run()
        except Exception:  # what is kept too long harms no request
            _LOGGER.exception("dropping what was not used for long failed")
        finally:
            queue.at(self._clock() + self.wait_s, partial(self.keep_up, queue))


def work_when_quiet(
    queue: WorkQueue, pieces: Iterator[object], *, quiet_s: Callable[[], float], clock: Callable[[], float]
) -> None:
    """Have one piece at a time done between steps, each once it was quiet for a while; ends with one that raises.

    Args:
        pieces: each `next` does a piece.
        quiet_s: seconds since there was a request; 0.0 while there is one.
    """

    def go_on() -> None:
        if (missing_s := QUIET_S - quiet_s()) > 0.0:
            queue.at(clock() + missing_s, go_on)
        elif next(pieces, queue) is not queue:
            queue.post(go_on)

    queue.post(go_on)


class IdleThread:
    """Does one piece after the other, each once it was quiet for a while; ends with the last, or with one that fails.

    Args:
        pieces: each `next` does a piece. A RadixLMError or OSError of one is no fault: a request that needs the piece
            will meet it and say so.
        quiet_s: seconds since there was something else to do; 0.0 while there is.
        least_s: how long it must have been quiet.
    """

    def __init__(self, pieces: Iterator[object], *, quiet_s: Callable[[], float], least_s: float = QUIET_S) -> None:
        self._pieces, self._quiet_s, self._least_s = pieces, quiet_s, least_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="radixlm-idle", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Begin no more pieces. The one that runs goes on."""
        self._stopped.set()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until the last piece is done; whether it is."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._waited():
                next(self._pieces)
        except (StopIteration, RadixLMError, OSError):
            return
        except Exception:
            _LOGGER.exception("what was to be done without requests failed")

    def _waited(self) -> bool:
        """Wait until it was quiet for long enough; False if the thread is to end."""
        while (missing_s := self._least_s - self._quiet_s()) > 0.0:
            if self._stopped.wait(missing_s):
                return False
        return not self._stopped.is_set()
