"""Do what can wait, piece by piece, while there is nothing else to do.

Knows a clock and pieces, not what they are. A request that comes meanwhile waits for one piece at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

QUIET_S = 1.0  # without any work, before the first piece: the first request after a start is not to meet one


class IdleWork:
    """Runs one piece at a time, once nothing was done for a while.

    >>> now, done = 0.0, iter(["first", "second"])
    >>> work = IdleWork(done, clock=lambda: now)
    >>> work.run()  # too early
    >>> now = 1.0
    >>> work.run()
    >>> list(done), work.wait_s
    (['second'], 0.0)

    Args:
        pieces: each `next` does a piece; they end when all is done.
        clock: seconds; only differences count.
    """

    def __init__(self, pieces: Iterator[object], *, clock: Callable[[], float], quiet_s: float = QUIET_S) -> None:
        self._pieces: Iterator[object] | None = pieces
        self._clock, self._quiet_s = clock, quiet_s
        self.postpone()

    @property
    def wait_s(self) -> float | None:
        """Seconds until the next piece is due; None: all is done."""
        return None if self._pieces is None else max(0.0, self._due_at - self._clock())

    def postpone(self) -> None:
        """Something else was done just now."""
        self._due_at = self._clock() + self._quiet_s

    def run(self) -> None:
        """Do the next piece, if it is due."""
        if self._pieces is None or self._clock() < self._due_at:
            return
        try:
            next(self._pieces)
        except StopIteration:
            self._pieces = None
        except BaseException:
            self._pieces = None
            raise
