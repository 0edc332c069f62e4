"""Process the requests of batches, one batch after the other, while the server has no other requests.

Knows lines and responses. `scheduler.py` knows what idle means.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
from starlette.requests import Request

from ...cache.cache_namespace import CacheScope
from ...errors import StoreOff
from ..errors import describe
from ..request_log import RequestRecord, new_id
from .batches import BatchFault, BatchFaults, BatchReply, OpenBatch
from .stored import Stored

if TYPE_CHECKING:
    from ..models import ModelEndpoint, Models

_LOGGER = logging.getLogger(__name__)
MAX_REQUESTS: Final = 50_000  # per batch, as in OpenAI's API
MAX_FAULTS: Final = 20  # reported per batch
NUM_AT_ONCE: Final = 8
RETRY_S: Final = 1.0  # if the queue is full, the model is loading or the disk has failed
_LATER: Final = (429, 503)


class BatchLine(msgspec.Struct):
    """A request of a batch: one line of its file."""

    custom_id: str
    method: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True)
class Line:
    """A request with its line number."""

    number: int
    asked: BatchLine


class BatchRunner:
    """Processes the requests of all batches, in a task of the event loop.

    Args:
        endpoints: the endpoints that batches can call, by path.
    """

    def __init__(self, models: Models, stored: Stored, endpoints: Mapping[str, ModelEndpoint[Any, Any]]) -> None:
        self.endpoints = endpoints
        self._models, self._stored = models, stored
        self._task: asyncio.Task[None] | None = None
        self._is_wanted = False

    def begin(self) -> None:
        """Start processing open batches, unless it runs already. Call this on the event loop."""
        self._is_wanted = True
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        """Process batches until none is open and no more were created."""
        while self._is_wanted:
            self._is_wanted = False
            try:
                while (batch := await self._stored.batches.next_open()) is not None:
                    await self._advance_or_fail(batch)
            except StoreOff:
                self._is_wanted = True
                await asyncio.sleep(RETRY_S)
            except Exception:
                _LOGGER.exception("processing batches failed; it resumes when the next batch is created")
                return

    async def _advance_or_fail(self, found: OpenBatch) -> None:
        """Process a batch to its end. If an unforeseen error stops it, end it as `failed`: other batches wait for it.

        Raises:
            StoreOff: the disk failed; the batch stays open.
        """
        try:
            await self._advance(found)
        except StoreOff:
            raise
        except Exception as error:
            _LOGGER.exception("batch %s fails because of an unforeseen error", found.batch.id)
            name = type(error).__name__  # its text may contain paths or other clients' data
            message = f"the server could not process the batch: {name}; the server's log has more"
            await self._stored.batches.fail(found.batch.id, BatchFault("internal_error", message))

    async def _advance(self, found: OpenBatch) -> None:
        """Process a batch to its end."""
        batches, batch = self._stored.batches, found.batch
        keys = self._models.options.api_keys or (None,)
        scope = (await batches.owners([CacheScope(key) for key in keys])).get(found.owner)
        lines, faults = await asyncio.to_thread(lines_of, found.content, batch.endpoint)
        if scope is None:
            faults = [BatchFault("invalid_api_key", "the API key that created the batch is no longer valid")]
        if batch.status == "validating":
            batch = await batches.change(batch.id, lambda each, now: _end_validation(each, now, len(lines), faults))
        if batch.status == "failed":
            return
        if batch.status == "in_progress" and scope is not None and not faults:
            waiting = [line for line in lines if line.number not in found.answered]
            await self._answer(batch, waiting, scope)
            batch = await batches.change(batch.id, _begin_finalizing)
        ended = {"cancelling": "cancelled", "finalizing": "completed"}.get(batch.status, "expired")
        late = {line.number: _expired(line) for line in lines} if ended == "expired" else {}
        await batches.end(found.owner, batch.id, ended, late)  # type: ignore[arg-type]  # one of the statuses

    async def _answer(self, batch: BatchReply, lines: Sequence[Line], scope: CacheScope) -> None:
        """Process lines, a few at a time, until all are done, or the batch is cancelled or has expired.

        Raises:
            StoreOff: the disk failed, possibly with other errors, which come again if they have another cause.
            Exception: a line failed in an unforeseen way.
        """
        waiting = iter(lines)
        goes_on = time.time() < batch.expires_at

        async def work() -> None:
            nonlocal goes_on
            for line in waiting:
                if not goes_on:
                    return
                answered = await self._answer_line(line, scope, batch.id)
                if answered is None:
                    return
                answer, is_error = answered
                goes_on &= await self._stored.batches.answer(batch.id, line.number, answer, is_error=is_error)

        workers = [asyncio.create_task(work()) for _ in range(min(NUM_AT_ONCE, len(lines)))]
        if not workers:
            return
        try:  # not a TaskGroup, which forgets that it was cancelled if a line fails meanwhile
            await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for each in workers:
                each.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        errors = [found for each in workers if not each.cancelled() and (found := each.exception()) is not None]
        if errors:
            raise next((each for each in errors if isinstance(each, StoreOff)), errors[0])

    async def _answer_line(self, line: Line, scope: CacheScope, batch_id: str) -> tuple[bytes, bool] | None:
        """Process a request, and return its output line and whether it is an error. Retries if the server is busy.

        Returns None if the server was busy until the batch was cancelled or expired.
        """
        while True:
            request_id = new_id("req-")
            status, body = await self._ask(line.asked, scope, request_id)
            if status not in _LATER:
                break
            if not await self._stored.batches.goes_on(batch_id):
                return None
            await asyncio.sleep(RETRY_S)
        answer = {
            "id": new_id("batch_req_"),
            "custom_id": line.asked.custom_id,
            "response": {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)},
            "error": None,
        }
        return msgspec.json.encode(answer), status != 200

    async def _ask(self, asked: BatchLine, scope: CacheScope, request_id: str) -> tuple[int, bytes]:
        """Run a request at idle priority, and return the status and body of the response."""
        try:
            request = _request_of(asked, scope, request_id)
            answer = await self._models.answer(self.endpoints[asked.url], request)
        except Exception as error:
            status, reply = describe(error)
            return status, msgspec.json.encode(reply)
        return answer.status_code, bytes(answer.body)


def _request_of(asked: BatchLine, scope: CacheScope, request_id: str) -> Request:
    """Return a request at idle priority.

    Raises:
        msgspec.DecodeError: the body is nested too deep. The event loop's stack is deeper than the thread's that read
            the file, so that fewer levels can be encoded here than were decoded there.
    """
    body = {**asked.body, "stream": False} if "stream" in asked.body else dict(asked.body)
    if asked.url == "/v1/responses":
        body.setdefault("store", False)  # thousands of them would displace other responses
    try:
        content = msgspec.json.encode(body)
    except RecursionError as error:
        raise msgspec.DecodeError("its arrays and objects are nested too deep") from error
    record = RequestRecord(request_id, time.monotonic(), is_idle=True)
    has_come = False

    async def receive() -> dict[str, Any]:
        nonlocal has_come
        if has_come:
            await asyncio.Event().wait()  # there is no client that could disconnect
        has_come = True
        return {"type": "http.request", "body": content, "more_body": False}

    http = {
        "type": "http",
        "method": "POST",
        "path": asked.url,
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "state": {"record": record, "api_key": scope.api_key},
    }
    return Request(http, receive)


def _expired(line: Line) -> bytes:
    """Return OpenAI's error line for a request without a result when its batch expired."""
    error = {"code": "batch_expired", "message": "the request was not processed within the completion window"}
    answer = {"id": new_id("batch_req_"), "custom_id": line.asked.custom_id, "response": None, "error": error}
    return msgspec.json.encode(answer)


def _end_validation(batch: BatchReply, now: int, num_lines: int, faults: list[BatchFault]) -> None:
    """Set a batch's status to `failed` if its file has faults, else to `in_progress` with its number of requests."""
    if faults:
        batch.status, batch.failed_at, batch.errors = "failed", now, BatchFaults(faults[:MAX_FAULTS])
    elif batch.status == "validating":
        batch.status, batch.in_progress_at, batch.request_counts.total = "in_progress", now, num_lines


def _begin_finalizing(batch: BatchReply, now: int) -> None:
    """Set a batch's status to `finalizing` if all of its requests have results."""
    counts = batch.request_counts
    if batch.status == "in_progress" and counts.completed + counts.failed >= counts.total:
        batch.status, batch.finalizing_at = "finalizing", now


def lines_of(content: bytes | None, endpoint: str) -> tuple[list[Line], list[BatchFault]]:
    """Return the requests in a batch's file, and the errors found in it.

    >>> asked = b'{"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": {}}'
    >>> [fault.code for fault in lines_of(asked, "/v1/completions")[1]]
    ['mismatched_endpoint']
    """
    if content is None:
        return [], [BatchFault("file_not_found", "the file of the batch was deleted, or has expired")]
    lines: list[Line] = []
    faults: list[BatchFault] = []
    seen: set[str] = set()
    for number, text in enumerate(content.splitlines(), start=1):
        if not text.strip() or len(faults) >= MAX_FAULTS:
            continue
        try:
            asked = msgspec.json.decode(text, type=BatchLine)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            faults.append(BatchFault("invalid_json_line", f"line {number} is not a valid request: {error}", number))
            continue
        if asked.custom_id in seen:
            message = f"line {number} repeats the custom_id {asked.custom_id!r:.80} of an earlier line"
            faults.append(BatchFault("duplicate_custom_id", message, number, "custom_id"))
        elif asked.method != "POST":
            message = f"line {number} has the method {asked.method!r:.80}; it must be POST"
            faults.append(BatchFault("invalid_method", message, number, "method"))
        elif asked.url != endpoint:
            message = f"line {number} has the url {asked.url!r:.80}, and the batch is for {endpoint}"
            faults.append(BatchFault("mismatched_endpoint", message, number, "url"))
        elif asked.body.get("stream"):
            message = f"line {number} has stream set; batches do not stream"
            faults.append(BatchFault("invalid_value", message, number, "body.stream"))
        elif asked.body.get("background"):
            message = f"line {number} has background set; a batch waits for its responses"
            faults.append(BatchFault("invalid_value", message, number, "body.background"))
        seen.add(asked.custom_id)
        lines.append(Line(number, asked))
    if not lines and not faults:
        faults.append(BatchFault("empty_file", "the file of the batch has no requests"))
    if len(lines) > MAX_REQUESTS:
        faults.append(BatchFault("too_many_requests", f"the file has {len(lines)} requests, at most {MAX_REQUESTS}"))
    return lines, faults
