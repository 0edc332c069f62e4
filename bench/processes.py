"""Measure a process from outside: the seconds until its first output, and its memory. Reads Linux's /proc."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from .worker import ROOT

RADIXLM = str(Path(sys.executable).with_name("radixlm"))  # the command of this environment
_POLL_S = 0.02
_TREE_POLL_S = 0.1
_TAKEN_S = 0.5  # by then a process that loops has begun


def seconds_to_first_output(command: Sequence[str]) -> float:
    """Return the seconds from the start of a fresh process, whose bytecode may be kept, to its first byte of output.

    Raises:
        RuntimeError: it ended without output, or failed.
    """
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    start = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ)
    assert process.stdout is not None
    first = process.stdout.read(1)
    elapsed = time.perf_counter() - start
    _, errors = process.communicate()
    if not first or process.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}: {errors.decode()[-500:]}")
    return elapsed


@dataclass(frozen=True)
class PeakMemory:
    """Bytes: the most anonymous memory that was sampled, and the peak of resident memory, including mapped files."""

    anonymous: int
    resident: int


def peak_memory_during(pid: int, work: Callable[[], object]) -> PeakMemory:
    """Do `work`, which may wait for the process to end, and sample its memory every 20 ms meanwhile."""
    done = threading.Event()
    seen: list[PeakMemory] = [PeakMemory(0, 0)]

    def sample() -> None:
        while not done.wait(_POLL_S):
            seen.append(_larger(seen.pop(), memory_of(pid)))

    thread = threading.Thread(target=sample)
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
    """Return the anonymous memory now, and the peak of resident memory; zeros if the process has ended."""
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


class MemoryOfTree:
    """The most memory of a process and its descendants while the block runs: their own pages, each counted once, and
    the pages of mapped files of the one that has most. Other engines may map the same files.
    """

    def __init__(self, pid: int) -> None:
        self.peak_bytes = 0
        self._pid = pid
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def _sample(self) -> None:
        while not self._done.wait(_TREE_POLL_S):
            self.peak_bytes = max(self.peak_bytes, bytes_of_tree(self._pid))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()


def bytes_of_tree(pid: int) -> int:
    """Return the bytes that `MemoryOfTree` counts, now."""
    return _bytes_of(tree(pid))


def tree(pid: int) -> list[int]:
    """Return a process and its descendants."""
    found = [pid]
    for each in found:
        for path in Path(f"/proc/{each}/task").glob("*/children"):
            with suppress(OSError):
                found += map(int, path.read_text().split())
    return found


def _bytes_of(pids: Sequence[int]) -> int:
    """Return the bytes of memory of processes: what is their own, plus the largest share of mapped files."""
    own, files = 0, 0
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text() + Path(f"/proc/{pid}/status").read_text()
        except OSError:  # it has ended
            continue
        kib = {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
        own += kib.get("Pss_Anon", 0) + kib.get("Pss_Shmem", 0)
        files = max(files, kib.get("RssFile", 0))
    return 1024 * (own + files)


@contextmanager
def core_taken() -> Iterator[None]:
    """Make a process loop on one of the processors that this one may run on while the block runs."""
    core = max(os.sched_getaffinity(0))
    loop = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-S", "-c", loop]) as process:
        try:
            time.sleep(_TAKEN_S)
            yield
        finally:
            process.kill()


EVERY_S = 0.5
NUM_POINTS = 20
WARM_UP = 0.3  # the share of the time in which pools, arenas and caches fill up


class MemoryWatch:
    """Samples a process's memory while the block runs, and fits a line by least squares."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._samples: list[tuple[float, int]] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def figures(self) -> dict[str, float | list[float]]:
        """Return the resident bytes outside of files, when warm and at the end, the slope between in bytes per second,
        and some of the samples.
        """
        times, sizes = np.array(self._samples, np.float64).T
        warm = times >= times[0] + WARM_UP * (times[-1] - times[0])
        slope, _ = np.polyfit(times[warm], sizes[warm], 1)
        few = max(1, int(warm.sum()) // 10)
        return {
            "start_bytes": float(sizes[0]),
            "warm_bytes": float(np.median(sizes[warm][:few])),
            "end_bytes": float(np.median(sizes[-few:])),
            "bytes_per_s": float(slope),
            "course": [float(part.mean()) for part in np.array_split(sizes, NUM_POINTS) if part.size],
        }

    def _sample(self) -> None:
        while not self._done.wait(EVERY_S):
            self._samples.append((time.monotonic(), memory_of(self._pid).anonymous))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()
