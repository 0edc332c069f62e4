"""Find out whether a grammar can be followed, at no risk to this process.

Starts `grammar_trial_process.py` when first needed, and sends it grammars. Knows pipes, not grammars.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress

from ..errors import EngineClosed, EngineError, InvalidGrammar
from .grammar import Grammar
from .grammar_trial_process import LOWEST, TokenBytes

_PROGRAM = TokenBytes.__module__
_PATIENCE_S = 30.0  # beyond the limit, on a very busy machine; then the program is restarted
_LEAST_S = 0.001  # 0 would be no limit
_MAX_MESSAGE = 500  # characters: the library prints a part of the grammar


class OutOfTime(Exception):
    """A trial took too long. `is_busy`: the machine is busy, and the grammar may be fine."""

    def __init__(self, *, is_busy: bool) -> None:
        super().__init__("the machine is busy" if is_busy else "the grammar is slow")
        self.is_busy = is_busy


class GrammarTrial:
    """Runs a process that tries grammars one after the other. Any thread can call; it waits for earlier trials.

    Args:
        vocabulary: the tokens of replies.
        eos_token_ids: tokens that end a reply.
        limits: the most work that a grammar may be; see `limits_of`.
        time_limit_s: seconds of CPU time for each grammar.
        niceness: of the process, 0 to 19 for the lowest priority.
    """

    def __init__(
        self,
        vocabulary: TokenBytes,
        *,
        eos_token_ids: list[int],
        limits: dict[str, int],
        time_limit_s: float,
        niceness: int = 0,
    ) -> None:
        hello = {"eos_token_ids": eos_token_ids, "limits": limits, "time_limit_s": time_limit_s, "niceness": niceness}
        self._hello = json.dumps(vocabulary.packed() | hello).encode() + b"\n"
        self._lock = threading.Lock()
        self._is_closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._is_starting_aside = False  # a start that no request waits for, with the lowest priority
        self._stop: Callable[[], object] = lambda: None

    def start(self, *, is_awaited: bool = True) -> None:
        """Start the process now rather than with the first grammar; return once it is ready.

        Args:
            is_awaited: a request waits for the process. If False, it starts with idle CPU time only. A later start that
                is awaited does not wait for that one: it ends that process, and starts another.

        Raises:
            EngineError: it does not start, or an awaited start ended this one.
        """
        if is_awaited and self._is_starting_aside and self._process is not None:
            _kill(self._process)
        with self._lock:
            self._ensure_started(is_awaited=is_awaited)

    @property
    def process_id(self) -> int | None:
        """The id of the process that tries grammars now; None if it is not started."""
        return None if self._process is None else self._process.pid

    def compiled(self, grammar: Grammar, *, real_limit_s: float) -> str:
        """Return the grammar in the library's form. The trial itself takes at most `real_limit_s`.

        Raises:
            InvalidGrammar: it is wrong, describes no text that the model can write, or takes too much memory.
            OutOfTime: it takes longer than one of the limits.
            EngineError: the process that tries it could not be used; EngineClosed after `close`.
        """
        wish = {"kind": grammar.kind, "text": grammar.text, "is_strict": grammar.is_strict}
        line = json.dumps(wish | {"real_limit_s": max(real_limit_s, _LEAST_S)}).encode() + b"\n"
        with self._lock:
            answer = self._ask_process(line, real_limit_s + _PATIENCE_S)
        if "late" in answer:
            raise OutOfTime(is_busy=answer["late"] == "busy")
        if "error" in answer:
            raise _refusal(grammar, answer["error"].replace("<non-verbose/>", ""))
        return answer["grammar"]

    def close(self) -> None:
        """End the process, even during a trial. Callers that wait, and later ones, get EngineClosed."""
        self._is_closed = True
        process = self._process
        if process is not None:
            _kill(process)
        with self._lock:
            self._stop()
            self._process = None

    def _ask_process(self, line: bytes, timeout_s: float) -> dict[str, str]:
        """Send the process a grammar as a line of JSON, and return its answer; start it if it does not run.

        Raises:
            EngineError: the process failed, and was ended.
        """
        process = self._ensure_started()
        try:
            return _exchange(process, line, timeout_s)
        except (OSError, ValueError, TimeoutError) as error:
            self._stop()
            self._process = None
            self._require_open()
            raise EngineError(f"the process that tries grammars failed: {error!r}; try again") from error

    def _require_open(self) -> None:
        if self._is_closed:
            raise EngineClosed("the engine was closed; open it again")

    def _ensure_started(self, *, is_awaited: bool = True) -> subprocess.Popen[bytes]:
        """Return the running process; start it if there is none, and wait until it is ready.

        Raises:
            EngineError: it does not start; EngineClosed after `close`.
        """
        self._require_open()
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._stop()
        pipe = subprocess.PIPE
        command = [sys.executable, "-P", "-m", _PROGRAM, "0" if is_awaited else str(LOWEST)]
        process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, bufsize=0, process_group=0
        )
        self._stop = weakref.finalize(self, _end, process)  # if the owner forgets to close this
        self._process, self._is_starting_aside = process, not is_awaited
        try:
            _exchange(process, self._hello, _PATIENCE_S)
            self._is_starting_aside = False
        except (OSError, ValueError, TimeoutError) as error:
            self._stop()
            self._process = None
            self._require_open()
            raise EngineError(f"the process that tries grammars does not start: {error!r}") from error
        return process


def _refusal(grammar: Grammar, error: str) -> InvalidGrammar:
    """Return the error for a grammar that the library refused, with its message in one line.

    Our own grammars, which clients do not know, are not quoted.
    """
    line = None
    if grammar.kind == "lark":
        where = re.match(r"at (\d+)\(\d+\): (failed to compile JSON schema: )?", error)
        if where is not None:
            line, error = int(where[1]), error[where.end() :]
        error = re.split(r"\n *\d+ \| ", error, maxsplit=1)[0]
    error = " ".join(error.split())
    return InvalidGrammar(f"the {grammar.noun} cannot be used: {error[:_MAX_MESSAGE]}", line=line)


def _exchange(process: subprocess.Popen[bytes], line: bytes, timeout_s: float) -> dict[str, str]:
    """Send a line and read one.

    Raises:
        OSError, ValueError: the process ended.
        TimeoutError: it does not answer in time.
    """
    assert process.stdin is not None and process.stdout is not None
    written = 0
    while written < len(line):
        written += process.stdin.write(line[written:])
    deadline, answer = time.monotonic() + timeout_s, b""
    poll = select.poll()  # `select` takes no descriptor above 1,023, and a server can have more connections
    poll.register(process.stdout, select.POLLIN)
    while not answer.endswith(b"\n"):
        if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
            raise TimeoutError(f"no answer in {timeout_s:g} s")
        piece = os.read(process.stdout.fileno(), 1 << 20)
        if not piece:
            raise ValueError(f"it ended with status {process.wait()}")
        answer += piece
    result: dict[str, str] = json.loads(answer)
    return result


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the process and the fork that tries a grammar, because a fork alone would keep callers waiting."""
    if process.poll() is None:  # else the process id may have been reused
        with suppress(ProcessLookupError, PermissionError):  # it is ending; macOS raises the latter for a zombie
            os.killpg(process.pid, signal.SIGKILL)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process, close its pipes and wait for its end."""
    _kill(process)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    process.wait()
