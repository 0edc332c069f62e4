"""A process seen from outside: how long until it says something, and how much memory it has. Reads Linux's /proc."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .worker import ROOT

_POLL_S = 0.02


def seconds_to_first_output(command: Sequence[str]) -> float:
    """From the start of a fresh process to the first byte on its standard output.

    Raises:
        RuntimeError: it ended without a word, or failed.
    """
    start = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    first = process.stdout.read(1)
    elapsed = time.perf_counter() - start
    _, errors = process.communicate()
    if not first or process.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}: {errors.decode()[-500:]}")
    return elapsed


@dataclass(frozen=True)
class PeakMemory:
    """Bytes: the most anonymous memory that was seen, and the most resident memory that ever was, mapped files too."""

    anonymous: int
    resident: int


def peak_memory_during(pid: int, work: Callable[[], object]) -> PeakMemory:
    """Do `work`, which may wait for the process to end, and look at its memory every 20 ms meanwhile."""
    done = threading.Event()
    seen: list[PeakMemory] = [PeakMemory(0, 0)]

    def look() -> None:
        while not done.wait(_POLL_S):
            seen.append(_larger(seen.pop(), memory_of(pid)))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        work()
    finally:
        done.set()
        thread.join()
    return _larger(seen[0], memory_of(pid))


def _larger(a: PeakMemory, b: PeakMemory) -> PeakMemory:
    return PeakMemory(max(a.anonymous, b.anonymous), max(a.resident, b.resident))


def memory_of(pid: int) -> PeakMemory:
    """Anonymous memory now, and the peak of what was resident; zeros if the process has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return PeakMemory(0, 0)
    fields = dict(line.split(":", 1) for line in text.splitlines())
    # Python maps anonymous memory as shared, and the KV pool is such memory
    private, shared, resident = (
        int(fields[name].split()[0]) if name in fields else 0 for name in ("RssAnon", "RssShmem", "VmHWM")
    )
    return PeakMemory((private + shared) * 1024, resident * 1024)
