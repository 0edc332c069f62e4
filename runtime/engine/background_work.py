"""Run work that no client waits for: drop unused prefixes, and do optional work once it is quiet.

Knows clocks and callbacks, not what they drop or do. A failure is logged, and harms no request.
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

_CHECKS = 10  # per time to live: something is dropped late by a tenth of it at most
QUIET_S = 1.0  # without requests, before the first piece: the first request after a start must not wait for one


class CacheExpiry:
    """Calls `drop` regularly with the time since which an entry must have been used to stay.

    >>> now, dropped = 100.0, []
    >>> expiry = CacheExpiry(60.0, clock=lambda: now, drop=dropped.append)
    >>> expiry.run()
    >>> expiry.run()  # there is nothing to do before the next check
    >>> dropped, expiry.wait_s
    ([40.0], 6.0)

    Args:
        ttl_s: time to live of an unused entry, in seconds.

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
        """Seconds until the next check."""
        return max(0.0, self._next_at - self._clock())

    def run(self) -> None:
        """Drop expired entries, unless that was just checked."""
        now = self._clock()
        if now < self._next_at:
            return
        self._next_at = now + self._ttl_s / _CHECKS
        self._drop(now - self._ttl_s)

    def keep_up(self, queue: WorkQueue) -> None:
        """Run now, and between steps whenever a check is due."""
        try:
            self.run()
        except Exception:  # an entry kept too long harms no request
            _LOGGER.exception("dropping what was not used for long failed")
        finally:
            queue.at(self._clock() + self.wait_s, partial(self.keep_up, queue))


def work_when_quiet(
    queue: WorkQueue, pieces: Iterator[object], *, quiet_s: Callable[[], float], clock: Callable[[], float]
) -> None:
    """Run one piece at a time between steps, each after a quiet second; a piece that raises is the last.

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
    """Runs pieces one after the other in a thread, each after a quiet time; ends with the last, or with one that fails.

    Args:
        pieces: each `next` runs a piece. Its RadixLMError or OSError is not logged: a request that needs the piece
            will raise it again.
        quiet_s: seconds since there was other work; 0.0 while there is.
        least_s: quiet time before a piece.
    """

    def __init__(self, pieces: Iterator[object], *, quiet_s: Callable[[], float], least_s: float = QUIET_S) -> None:
        self._pieces, self._quiet_s, self._least_s = pieces, quiet_s, least_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="radixlm-idle", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Start no more pieces. The running one continues."""
        self._stopped.set()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until the last piece is done; return False after a timeout."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        """Run the pieces, each after a quiet time, until they end, one fails, or `stop`."""
        try:
            while self._wait_until_quiet():
                next(self._pieces)
        except (StopIteration, RadixLMError, OSError):
            return
        except Exception:
            _LOGGER.exception("what was to be done without requests failed")

    def _wait_until_quiet(self) -> bool:
        """Wait until it was quiet for long enough; return False if the thread must end."""
        while (missing_s := self._least_s - self._quiet_s()) > 0.0:
            if self._stopped.wait(missing_s):
                return False
        return not self._stopped.is_set()
