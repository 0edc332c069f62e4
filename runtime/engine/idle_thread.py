"""Work that no request asked for yet, in a thread of its own, while there is no request.

Knows pieces and for how long it was quiet, not what is done.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

from ..errors import RadixLMError
from .upkeep import QUIET_S

_LOGGER = logging.getLogger(__name__)


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
