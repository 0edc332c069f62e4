"""One arena for all threads, seen in what glibc says of itself."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

COUNT_ARENAS = """
import ctypes, io, os, sys, threading
from radixlm.runtime.malloc_arenas import share_one_arena
if sys.argv[1] == "one":
    assert share_one_arena()
barrier = threading.Barrier(9)
def work():
    ctypes.CDLL(None).malloc(100)
    barrier.wait()
    barrier.wait()
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads:
    thread.start()
barrier.wait()
ctypes.CDLL(None).malloc_stats()
barrier.wait()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="arenas are glibc's")
def test_many_threads_share_one_arena() -> None:
    def num_arenas(how: str) -> int:
        done = subprocess.run([sys.executable, "-c", COUNT_ARENAS, how], capture_output=True, text=True, check=True)
        return done.stderr.count("Arena ")

    assert num_arenas("one") == 1 < num_arenas("many")
