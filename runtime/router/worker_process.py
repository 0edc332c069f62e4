"""Models in processes of their own: `radixlm serve` of one model on a Unix socket.

A process imports Python modules before it gets its model, so a spare process is kept ready for the next model. Knows
processes, sockets and the health of a loading server, not flags.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import tempfile
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

import msgspec
from starlette.types import Message

from ..errors import ModelFailed
from ..server.about import ModelList, ModelReply
from ..server.http.forwarding import ServerGone
from .model_row import ModelSpec
from .model_server import Headers
from .unix_request import ask, ask_whole

STOP_S = 120.0  # for saving a store
_LONGEST_POLL_S = 0.25
_ERROR = "Error: "  # prefix of a command's error message
_PART_BYTES = 64 << 10
_LAST_LINES = 20

Say = Callable[[str, str], None]
"""Called with the name of a model, and a line that its process has written."""


class WorkerProcess:
    """The process of one model."""

    def __init__(self, process: asyncio.subprocess.Process, say: Say) -> None:
        self.memory_bytes = 0
        self.described: Mapping[str, ModelReply] = {}
        self.socket = Path()
        self._name = ""
        self._process, self._say = process, say
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._said = asyncio.create_task(self._relay())
        self._ended = asyncio.create_task(process.wait())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return not self._ended.done()

    def begin(self, name: str, arguments: Sequence[str], socket: Path) -> None:
        """Send the process the arguments for the model that it serves."""
        self._name, self.socket = name, socket
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([*arguments]).encode() + b"\n")

    async def wait_until_ready(self, headers: Headers, progressed: Callable[[str, float | None], None]) -> None:
        """Wait until the model serves requests.

        Raises:
            ModelFailed: the process has ended, or reports that its engine has failed.
        """
        began = time.monotonic()
        while self.is_alive:
            with suppress(ServerGone):
                status, body = await ask_whole(self.socket, "GET", b"/health", headers)
                health = msgspec.json.decode(body)
                if status == 200:
                    self.memory_bytes = health["memory_bytes"]
                    _, body = await ask_whole(self.socket, "GET", b"/v1/models", headers)
                    self.described = {each.id: each for each in msgspec.json.decode(body, type=ModelList).data}
                    return
                if health["status"] != "loading":
                    raise ModelFailed(f"{self._name} cannot serve: {health['reason']}")
                progressed(health["stage"], None if health["percent"] is None else health["percent"] / 100)
            poll_s = min(_LONGEST_POLL_S, 0.005 + (time.monotonic() - began) / 50)
            await asyncio.wait([self._ended], timeout=poll_s)
        raise ModelFailed(f"{self._name} cannot be loaded: {await self.wait_until_ended()}")

    def ask(self, method: str, target: bytes, headers: Headers = (), body: bytes = b"") -> AsyncGenerator[Message]:
        return ask(self.socket, method, target, headers, body)

    async def stop(self) -> None:
        """End the process by SIGTERM, so that it saves its store; after `STOP_S` by SIGKILL."""
        if self.is_alive:
            self._process.terminate()
        await asyncio.wait([self._ended], timeout=STOP_S)
        if self.is_alive:
            self._process.kill()
        await self._ended
        self.socket.unlink(missing_ok=True)

    async def kill(self) -> None:
        """Kill the process."""
        if self.is_alive:
            self._process.kill()
        await self._ended

    async def wait_until_ended(self) -> str:
        code = await asyncio.shield(self._ended)
        with suppress(TimeoutError):  # a child of the process may hold the stream open
            await asyncio.wait_for(asyncio.shield(self._said), 1.0)
        if code < 0:
            return f"its process was killed by {signal.Signals(-code).name}"
        return _reason_in(self._last_lines) or f"its process ended with exit code {code}"

    async def _relay(self) -> None:
        """Pass on the process's output, line by line."""
        stream, rest = self._process.stderr, b""
        assert stream is not None
        while part := await stream.read(_PART_BYTES):
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                text = line.decode(errors="replace")
                self._last_lines.append(text)
                with suppress(OSError):  # the reader has gone
                    self._say(self._name, text)


def _reason_in(lines: Sequence[str]) -> str | None:
    """Return the error message in a command's last lines, text or JSON; None if there is none."""
    for line in reversed(lines):
        if line.startswith(_ERROR):
            return line.removeprefix(_ERROR)
        with suppress(ValueError, KeyError, TypeError):
            record = json.loads(line)
            if record["level"] == "error":
                return str(record["message"])
    return None


class WorkerLoader:
    """Starts a process per model, and keeps a spare one ready.

    Args:
        command: a command that reads its arguments from standard input, as a line of JSON, and ends when that closes.
        arguments_of: returns the arguments for a model and its socket, whose folder only this user can access.
        environment: environment of the processes.
        headers: headers for requests to the models, with an API key if there are any.
        say: called with each line that a process writes.
        keeps_spare: keep a process ready, which takes about 60 MB.
    """

    def __init__(
        self,
        command: Sequence[str],
        arguments_of: Callable[[ModelSpec, Path], Sequence[str]],
        *,
        environment: Mapping[str, str],
        headers: Headers,
        say: Say,
        keeps_spare: bool = True,
    ) -> None:
        self._command, self._arguments_of, self._environment = command, arguments_of, environment
        self._headers, self._say, self._keeps_spare = headers, say, keeps_spare
        self._folder = Path(tempfile.mkdtemp(prefix="radixlm-"))
        self._numbers = count()
        self._spare: asyncio.Task[WorkerProcess] | None = None

    async def open(self) -> None:
        """Start the spare process."""
        if self._keeps_spare and self._spare is None:
            self._spare = asyncio.create_task(self._start())

    async def load(self, spec: ModelSpec, progressed: Callable[[str, float | None], None]) -> WorkerProcess:
        """Start a model's process, and return it when it serves requests."""
        worker = await self._take()
        try:
            socket = self._private_folder() / f"{next(self._numbers)}.sock"
            worker.begin(spec.name, self._arguments_of(spec, socket), socket)
            await worker.wait_until_ready(self._headers, progressed)
        except BaseException:
            await worker.kill()
            raise
        finally:
            await self.open()
        return worker

    async def close(self) -> None:
        """Kill the spare process."""
        if self._spare is not None:
            await (await self._spare).kill()
            self._spare = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def _private_folder(self) -> Path:
        """Return the folder for sockets, which only this user can access; a new one if systemd-tmpfiles removed it."""
        with suppress(FileNotFoundError):
            if self._folder.lstat().st_uid == os.getuid():  # else another user has taken the name
                return self._folder
        self._folder = Path(tempfile.mkdtemp(prefix="radixlm-"))
        return self._folder

    async def _take(self) -> WorkerProcess:
        """Return the spare process, or a new one."""
        if self._spare is not None:
            spare, self._spare = self._spare, None
            worker = await asyncio.shield(spare)
            if worker.is_alive:
                return worker
        return await self._start()

    async def _start(self) -> WorkerProcess:
        # In a session of its own, Ctrl-C does not reach it: the router ends it.
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env=self._environment,
            start_new_session=True,
        )
        return WorkerProcess(process, self._say)
