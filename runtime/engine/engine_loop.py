"""The one thread that owns an `EngineCore`, and the door through which others talk to it.

It sleeps while there is nothing to do. If it dies, every request that it has gets the error instead of waiting on. The
first time it goes on with a core that starts over, the second time not. Knows requests and listeners, not text or HTTP.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from ..errors import EngineClosed, EngineDied, EngineError, EngineOverloaded, RadixLMError
from .cache_expiry import CacheExpiry
from .completion import Delta, PrefillProgress
from .engine_core import EngineCore
from .idle_work import IdleWork
from .request import Request
from .request_output import RequestOutput

_LOGGER = logging.getLogger(__name__)
T = TypeVar("T")

MIN_RETRY_S, MAX_RETRY_S = 1, 60
MAX_RESTARTS = 1  # what kills it twice would kill it for ever

Listener = Callable[[RequestOutput], None]
"""Gets a request's outputs, on the loop's thread; must neither block nor raise."""


@dataclass(frozen=True)
class _Submission:
    request: Request
    listener: Listener


@dataclass(frozen=True)
class _Cancellation:
    request_id: str


@dataclass(frozen=True)
class _Call:
    work: Callable[[EngineCore], object]
    result: Future[Any]

    def __call__(self, core: EngineCore) -> None:
        try:
            self.result.set_result(self.work(core))
        except BaseException as error:
            self.result.set_exception(error)
            if not isinstance(error, Exception):
                raise


_Command = _Submission | _Cancellation | _Call


class EngineLoop:
    """Runs `core` in a thread of its own until `close`; all methods may be called from any thread."""

    def __init__(
        self,
        core: EngineCore,
        *,
        clock: Callable[[], float],
        on_exit: Callable[[], None],
        expiry: CacheExpiry | None = None,
        idle: IdleWork | None = None,
        max_num_requests: int | None = None,
    ) -> None:
        """Start the thread; `on_exit` is called on it when it ends, to free what the core works with.

        Args:
            expiry: runs on the thread, also while there is nothing to do.
            idle: runs on the thread, only while there is nothing to do.
            max_num_requests: that may run and wait together; None: any number.
        """
        self._core = core
        core.on_progress = self._tell_progress
        self._expiry = expiry
        self._idle = idle
        self._clock = clock
        self._on_exit = on_exit
        self._listeners: dict[str, Listener] = {}  # of requests in the core; the thread's own
        self.max_num_requests = max_num_requests
        self._wake = threading.Condition()  # guards all below
        self._num_requests = 0  # submitted, and not ended yet
        self._num_rejected = 0
        self._usual_s = 0.0  # what requests took of late, waiting included
        self._inbox: deque[_Command] = deque()
        self._is_woken = False
        self._is_closing = False
        self._crash: BaseException | None = None  # that it died of for good
        # begin of the work, or end of the last step that got on, then set without the lock; None when idle
        self._busy_since: float | None = None
        self._progress = 0  # of the core, when that was set
        self._thread = threading.Thread(target=self._run, name="radixlm-engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether requests are taken and computed."""
        return self._thread.is_alive() and not self._is_closing and self._crash is None

    @property
    def crash(self) -> str | None:
        """The kind of error that the thread died of for good; None while it lives, or if it was closed."""
        return None if self._crash is None else type(self._crash).__name__

    @property
    def stalled_s(self) -> float:
        """Seconds since a step got on while there is work; 0.0 when idle."""
        with self._wake:
            return 0.0 if self._busy_since is None else max(0.0, self._clock() - self._busy_since)

    @property
    def num_submitted(self) -> int:
        """Requests that the thread has not looked at yet."""
        return sum(isinstance(command, _Submission) for command in tuple(self._inbox))

    @property
    def num_rejected(self) -> int:
        """Requests that were refused because too many ran and waited."""
        return self._num_rejected

    @property
    def room(self) -> int | None:
        """How many requests more would be taken now; None: any number."""
        most = self.max_num_requests
        return None if most is None else max(most - self._num_requests, 0)

    def refusal(self, num_waiting: int) -> EngineOverloaded:
        """Count a request that was refused before it came here, where `num_waiting` others wait: what it is told."""
        with self._wake:
            return self._refusal(num_waiting)

    def require_room(self) -> None:
        """Raise EngineOverloaded if `submit` would: asked first, a request costs nothing when there are too many."""
        with self._wake:
            self._require_room()

    def submit(self, request: Request, listener: Listener) -> None:
        """Hand a request over; all that comes of it, errors too, goes to `listener`.

        Raises:
            EngineOverloaded: too many requests run and wait.
            EngineClosed: the loop was closed.
            EngineDied: the loop died of an error.
        """
        self._post(_Submission(request, listener))

    def cancel(self, request_id: str) -> None:
        """End a request where it is; harmless if it has ended, or the loop has."""
        try:
            self._post(_Cancellation(request_id))
        except EngineError:
            return  # closing or dying, the loop ends every request itself

    def call(self, work: Callable[[EngineCore], T]) -> T:
        """What `work` returns or raises, done with the core on the loop's thread after the step that runs.

        Raises:
            EngineClosed: the loop was closed.
            EngineDied: the loop died of an error.
        """
        assert threading.current_thread() is not self._thread, "it would wait for itself"
        return self.post(work).result()

    def post(self, work: Callable[[EngineCore], T]) -> Future[T]:
        """Like `call`, without waiting: who submits a request later has it after that."""
        result: Future[T] = Future()
        self._post(_Call(work, result))
        return result

    def wake(self) -> None:
        """Look whether the core has work, which came from elsewhere."""
        with self._wake:
            self._is_woken = True
            self._wake.notify()

    def close(self) -> None:
        """Cancel what runs, end the thread and wait for it. May be called twice."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _post(self, command: _Command) -> None:
        with self._wake:
            if self._crash is not None:
                raise EngineDied(self._crash, is_final=True)
            if self._is_closing:
                raise EngineClosed("the engine was closed; open it again")
            if isinstance(command, _Submission):
                self._require_room()
                self._num_requests += 1
            if self._busy_since is None:
                self._busy_since = self._clock()
            self._inbox.append(command)
            self._wake.notify()

    def _require_room(self) -> None:
        """The lock is held."""
        if self.max_num_requests is None or self._num_requests < self.max_num_requests:
            return
        raise self._refusal()

    def _refusal(self, num_waiting: int = 0) -> EngineOverloaded:
        """The lock is held."""
        assert self.max_num_requests is not None
        self._num_rejected += 1
        retry_after_s = min(max(math.ceil(self._usual_s), MIN_RETRY_S), MAX_RETRY_S)
        return EngineOverloaded(self._num_requests + num_waiting, self.max_num_requests, retry_after_s)

    # On the thread.

    def _run(self) -> None:
        try:
            while not self._has_served():
                pass
        finally:
            self._on_exit()

    def _has_served(self) -> bool:
        """Serve until the loop is closed or dies for good; False if it died and started over."""
        try:
            self._serve()
        except BaseException as error:
            _LOGGER.critical("the engine's thread died", exc_info=error)
            return not self._has_started_over(error)
        return True

    def _serve(self) -> None:
        while self._wait_for_work():
            self._expire()
            self._use_idle_time()
            self._do_commands()
            if self._core.has_work:
                for output in self._core.step():
                    self._deliver(output)
        self._do_commands()
        for request_id in list(self._listeners):
            self._abort(request_id)

    def _wait_for_work(self) -> bool:
        """Sleep until there may be something to do; False when the loop is to end."""
        if self._core.has_work:  # between two steps: nobody is to be waited for
            progress = self._core.counters.progress
            if progress != self._progress or self._busy_since is None:
                self._progress, self._busy_since = progress, self._clock()
            return not self._is_closing
        with self._wake:
            self._busy_since = self._clock() if self._inbox else None
            if not (self._is_closing or self._inbox or self._is_woken):
                parts = (self._core, self._expiry, self._idle)
                waits = (part.wait_s for part in parts if part is not None)
                self._wake.wait(min((wait_s for wait_s in waits if wait_s is not None), default=None))
            self._is_woken = False
            return not self._is_closing

    def _expire(self) -> None:
        try:
            if self._expiry is not None:
                self._expiry.run()
        except Exception:  # what is kept too long harms nobody
            _LOGGER.exception("dropping what was not used for long failed")

    def _use_idle_time(self) -> None:
        if self._idle is None:
            return
        if self._inbox or self._core.has_work or self._core.num_waiting:
            self._idle.postpone()
            return
        try:
            self._idle.run()
        except Exception:  # what can wait is not needed
            _LOGGER.exception("what was to be done without requests failed")

    def _do_commands(self) -> None:
        while self._inbox:
            command = self._inbox.popleft()
            match command:
                case _Submission():
                    self._add(command.request, command.listener)
                case _Cancellation():
                    self._abort(command.request_id)
                case _Call():
                    command(self._core)

    def _add(self, request: Request, listener: Listener) -> None:
        self._listeners[request.request_id] = listener  # first: if the loop dies of this request, it is told
        try:
            self._core.add(request)
        except Exception as error:
            known = error if isinstance(error, RadixLMError) else EngineError(f"the request failed: {error}")
            self._deliver(RequestOutput(request.request_id, error=known))

    def _abort(self, request_id: str) -> None:
        output = self._core.abort(request_id)
        if output is not None:
            self._deliver(output)

    def _deliver(self, output: RequestOutput) -> None:
        """Tell a request's listener; one that raises loses its request, and is told so if it can be."""
        is_last = output.completion is not None or output.error is not None
        listener = self._listeners.get(output.request_id)
        if is_last:
            self._leave(output)
        if listener is not None and (error := _tell(listener, output)) is not None:
            if not is_last:
                self._leave(self._core.abort(output.request_id) or output)
                is_last = True
            lost = EngineError(f"the reply could not be delivered: {type(error).__name__}; try again")
            _tell(listener, RequestOutput(output.request_id, error=lost))
        if is_last:  # not before: if the loop dies here, the listener is told of that
            self._listeners.pop(output.request_id, None)

    def _tell_progress(self, request_id: str, progress: PrefillProgress) -> None:
        """Tell a request's listener, within a step: one that raises is found out by what comes after it."""
        listener = self._listeners.get(request_id)
        if listener is None:
            return
        try:
            listener(RequestOutput(request_id, Delta("", (), progress=progress)))
        except Exception:
            _LOGGER.exception("telling the progress of request %s failed", request_id)

    def _leave(self, output: RequestOutput) -> None:
        """Make room for another request: this one has ended."""
        with self._wake:
            self._num_requests -= 1
            if output.completion is not None and output.completion.finish_reason != "cancelled":
                self._usual_s += (output.completion.timings.total_s - self._usual_s) / 4

    def _has_started_over(self, cause: BaseException) -> bool:
        """After a death: tell every request that it is lost, and whether the loop goes on with those that come."""
        goes_on = not self._is_closing and self._core.counters.num_restarts < MAX_RESTARTS
        if goes_on:
            try:
                self._core.start_over(cause)
            except BaseException as error:
                _LOGGER.critical("the engine could not start over", exc_info=error)
                goes_on = False
        lost, self._listeners = self._listeners, {}
        with self._wake:
            if not goes_on:
                self._crash = cause
                lost |= self._refuse_inbox(cause)
            # what is in the inbox yet has seen nothing of the death, and is served
            self._num_requests = self.num_submitted
        for request_id, listener in lost.items():
            died = EngineDied(cause, is_final=not goes_on)
            self._core.counters.count_failed(died)
            try:
                _tell(listener, RequestOutput(request_id, error=died))
            except BaseException as error:  # the others wait to be told, and those that come to be served
                _LOGGER.critical("telling request %s of it failed", request_id, exc_info=error)
        return goes_on

    def _refuse_inbox(self, cause: BaseException) -> dict[str, Listener]:
        """End the calls in the inbox; the listeners of the requests in it. The lock is held."""
        listeners: dict[str, Listener] = {}
        while self._inbox:
            match self._inbox.popleft():
                case _Submission(request, listener):
                    listeners[request.request_id] = listener
                case _Call(_, result):
                    result.set_exception(EngineDied(cause, is_final=True))
        return listeners


def _tell(listener: Listener, output: RequestOutput) -> Exception | None:
    """Hand an output to a listener; what the listener raised, if it did."""
    try:
        listener(output)
    except Exception as error:
        _LOGGER.exception("delivering to request %s failed", output.request_id)
        return error
    return None
