"""The one thread that owns an `EngineCore`: it takes requests from a queue, runs steps, and calls their listeners.

The thread sleeps while there is no work. If it dies, every request that it has gets the error. After its first death
it continues with a core that starts over; after the second it ends. `EngineCore` is one step as a plain call; this
module decides when steps run. Knows requests and listeners, not text or HTTP.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from ..errors import EngineClosed, EngineDied, EngineError, EngineOverloaded, RadixLMError
from .completion import Delta, PrefillProgress, RequestOutput
from .engine_core import EngineCore
from .engine_queue import Command, EngineQueue
from .request import Request
from .request_options import Client

_LOGGER = logging.getLogger(__name__)
T = TypeVar("T")

FORGIVEN_S = 600.0  # after a death: an error that kills the thread again sooner would kill it for ever

Listener = Callable[[RequestOutput], None]
"""A callback for a request's outputs, on the loop's thread; must neither block nor raise."""


class EngineLoop:
    """Runs `core` in its own thread until `close`; all methods can be called from any thread.

    Attributes:
        queue: commands for the thread, and the limit on requests.
    """

    def __init__(
        self,
        core: EngineCore,
        *,
        clock: Callable[[], float],
        on_exit: Callable[[], None],
        max_num_requests: int | None = None,
    ) -> None:
        """Start the thread; `on_exit` is called on it when it ends, to free the resources of the core.

        Args:
            max_num_requests: requests that can run and wait together; None: any number.
        """
        self.queue = EngineQueue(
            core.queue.changed, clock=clock, max_num_requests=max_num_requests, make_room=self._make_room
        )
        self._core = core
        core.on_progress = self._tell_progress
        self._on_exit = on_exit
        self._listeners: dict[str, Listener] = {}  # of requests in the core; used by the thread only
        self._clients: dict[str, Client] = {}  # likewise
        self._pid = os.getpid()
        self._clock = clock
        self._died_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="radixlm-engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Return whether requests are accepted and computed."""
        return self.is_own and self._thread.is_alive() and not self.queue.is_closed and self.queue.crash is None

    @property
    def crash(self) -> str | None:
        """The kind of error that ended the thread for good; None while it runs, or if it was closed."""
        return None if self.queue.crash is None else type(self.queue.crash).__name__

    @property
    def is_own(self) -> bool:
        """Return whether this process opened the engine; a forked child did not."""
        return os.getpid() == self._pid

    def require_own_process(self) -> None:
        """Raise EngineClosed in a forked child: it has the engine's memory, but not its thread."""
        if not self.is_own:
            raise EngineClosed(
                f"this engine belongs to process {self._pid}, this is {os.getpid()}; open an engine in this process"
            )

    def submit(self, request: Request, listener: Listener) -> None:
        """Hand a request over; all its outputs, errors too, go to `listener`.

        Raises:
            EngineOverloaded: too many requests run and wait.
            EngineClosed: the loop was closed, or belongs to another process.
            EngineDied: the loop died of an error.
        """
        self.require_own_process()
        refuse = partial(self._lose, request.request_id, listener, is_final=True)
        self.queue.put(Command(partial(self._add, request, listener), refuse, True, request.client))

    def cancel(self, request_id: str) -> None:
        """Cancel a request; does nothing if it, or the loop, has ended."""
        if not self.is_own:
            return
        try:
            self.queue.put(Command(partial(self._abort, request_id), lambda cause: None))
        except EngineError:
            return  # closing or dying, the loop ends every request itself

    def call(self, work: Callable[[EngineCore], T]) -> T:
        """Run `work` with the core on the loop's thread, after the running step; return or raise what it does.

        Raises:
            EngineClosed: the loop was closed.
            EngineDied: the loop died of an error.
        """
        assert threading.current_thread() is not self._thread, "it would wait for itself"
        return self.post(work).result()

    def post(self, work: Callable[[EngineCore], T]) -> Future[T]:
        """Like `call`, without waiting; runs before requests that are submitted later."""
        self.require_own_process()
        result: Future[T] = Future()

        def do() -> None:
            try:
                result.set_result(work(self._core))
            except BaseException as error:
                result.set_exception(error)
                if not isinstance(error, Exception):
                    raise

        self.queue.put(Command(do, lambda cause: result.set_exception(EngineDied(cause, is_final=True))))
        return result

    def close(self) -> None:
        """Cancel all requests, end the thread and the kernels' threads, and wait for them.

        Can be called twice; does nothing in a forked child.
        """
        if not self.is_own:
            return
        self.queue.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # On the thread.

    def _run(self) -> None:
        """Serve until the loop ends, and start over after each death that allows it. The thread's main function."""
        try:
            while not self._serve_until_end():
                pass
        finally:
            self._on_exit()

    def _serve_until_end(self) -> bool:
        """Serve until the loop is closed or dies for good; return False if it died and started over."""
        try:
            self._serve()
        except BaseException as error:
            _LOGGER.critical("the engine's thread died", exc_info=error)
            return not self._start_over(error)
        return True

    def _serve(self) -> None:
        """Run commands and steps, and deliver outputs, until `close`; then abort the requests that are left."""
        while self._wait_for_work():
            self._core.queue.run()  # drop what has expired before a command finds it
            self.queue.do_all()
            for output in self._core.step():
                self._deliver(output)
        self.queue.do_all()
        for request_id in list(self._listeners):
            self._abort(request_id)

    def _wait_for_work(self) -> bool:
        """Sleep until there may be work; return False when the loop must end."""
        if self._core.has_work:  # between two steps: there is nothing to wait for
            self.queue.note(self._core.counters.progress)
        else:
            self.queue.wait(lambda: self._core.wait_s)
        return not self.queue.is_closed

    def _add(self, request: Request, listener: Listener) -> None:
        """Queue a request in the core; if it is refused, its listener gets the error."""
        self._clients[request.request_id] = request.client
        self._listeners[request.request_id] = listener  # first: if this request kills the loop, its listener is called
        try:
            self._core.add(request)
        except Exception as error:
            known = error
            if not isinstance(known, RadixLMError):
                _LOGGER.error("request %s failed", request.request_id, exc_info=error)
                known = EngineError(f"the request failed: {type(error).__name__}; the log says more")
            self._deliver(RequestOutput(request.request_id, error=known))

    def _make_room(self, client: Client, refusal: EngineOverloaded) -> bool:
        """Refuse a client's newest request that never ran, with `refusal`. Returns False if there is none."""
        output = self._core.refuse_newest(client, refusal)
        if output is not None:
            self._deliver(output)
        return output is not None

    def _abort(self, request_id: str) -> None:
        """Cancel a request, and deliver its last output; nothing if it has ended."""
        output = self._core.abort(request_id)
        if output is not None:
            self._deliver(output)

    def _deliver(self, output: RequestOutput) -> None:
        """Call a request's listener; one that raises loses its request, and is told so if possible."""
        is_last = output.completion is not None or output.error is not None
        listener = self._listeners.get(output.request_id)
        if is_last:
            self._release_room(output)
        if listener is not None and (error := _tell(listener, output)) is not None:
            if not is_last:
                self._release_room(self._core.abort(output.request_id) or output)
                is_last = True
            lost = EngineError(f"the reply could not be delivered: {type(error).__name__}; try again")
            _tell(listener, RequestOutput(output.request_id, error=lost))
        if is_last:  # not before: if the loop dies here, the listener is told
            self._listeners.pop(output.request_id, None)

    def _tell_progress(self, request_id: str, progress: PrefillProgress) -> None:
        """Call a request's listener within a step, and only log an error: it will fail again at its next output."""
        listener = self._listeners.get(request_id)
        if listener is None:
            return
        try:
            listener(RequestOutput(request_id, Delta("", (), progress=progress)))
        except Exception:
            _LOGGER.exception("telling the progress of request %s failed", request_id)

    def _release_room(self, output: RequestOutput) -> None:
        """Tell the queue that a request has ended, so that another one is accepted."""
        completion = output.completion
        is_usual = completion is not None and completion.finish_reason != "cancelled"
        total_s = completion.timings.total_s if completion is not None and is_usual else None
        self.queue.leave(total_s, self._clients.pop(output.request_id, b""))

    def _start_over(self, cause: BaseException) -> bool:
        """Fail all requests, because `cause` ended a step; return whether the loop continues with new ones.

        It does not if it was closed, if it failed less than `FORGIVEN_S` ago, or if the core cannot start over.
        """
        now, died_at = self._clock(), self._died_at
        goes_on = not self.queue.is_closed and (died_at is None or now - died_at >= FORGIVEN_S)
        self._died_at = now
        if goes_on:
            try:
                self._core.start_over(cause)
            except BaseException as error:
                _LOGGER.critical("the engine could not start over", exc_info=error)
                goes_on = False
        lost, self._listeners = self._listeners, {}
        self._clients.clear()
        self.queue.start_over()  # waiting commands are served if the loop continues
        if not goes_on:
            self.queue.die(cause)
        for request_id, listener in lost.items():
            self._lose(request_id, listener, cause, is_final=not goes_on)
        return goes_on

    def _lose(self, request_id: str, listener: Listener, cause: BaseException, *, is_final: bool) -> None:
        """Tell a request's listener that the engine died of `cause`, and count the request as failed."""
        died = EngineDied(cause, is_final=is_final)
        self._core.counters.count_failed(died)
        try:
            _tell(listener, RequestOutput(request_id, error=died))
        except BaseException as error:  # the others still have to be told, and new requests served
            _LOGGER.critical("telling request %s of it failed", request_id, exc_info=error)


def _tell(listener: Listener, output: RequestOutput) -> Exception | None:
    """Hand an output to a listener; return what the listener raised, if it did."""
    try:
        listener(output)
    except Exception as error:
        _LOGGER.exception("delivering to request %s failed", output.request_id)
        return error
    return None
