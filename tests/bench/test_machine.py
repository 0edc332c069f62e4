"""What others take of the processors while something is measured."""

from __future__ import annotations

import os
import subprocess
import sys

from bench.machine import CPUTime

BUSY = "import time; stop = time.process_time() + 2\nwhile time.process_time() < stop: pass"


def test_a_child_is_one_of_the_others_until_it_is_waited_for() -> None:
    since = CPUTime.now()
    child = subprocess.Popen([sys.executable, "-c", BUSY])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    ended = CPUTime.now()
    assert ended.all_s - since.all_s > 1.8 and since.taken_by_others() > 0.0
    child.wait()
    waited = CPUTime.now()
    assert waited.own_s - ended.own_s > 1.8
    assert waited.all_s - ended.all_s < waited.own_s - ended.own_s
