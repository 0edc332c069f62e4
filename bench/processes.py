"""A process seen from outside: how long until it says something, and how much memory it has. Reads Linux's /proc."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .worker import ROOT

_POLL_S = 0.005


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
    """Do `work` and look at the process every 5 ms meanwhile; the kernel itself keeps the peak of what is resident."""
    done, peak = threading.Event(), 0

    def look() -> None:
        nonlocal peak
        while not done.wait(_POLL_S):
            peak = max(peak, _status_bytes(pid, "RssAnon"))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        work()
    finally:
        done.set()
        thread.join()
    return PeakMemory(max(peak, _status_bytes(pid, "RssAnon")), _status_bytes(pid, "VmHWM"))


def _status_bytes(pid: int, field: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/{pid}/status has no {field}; the process has ended, or this is no Linux")
