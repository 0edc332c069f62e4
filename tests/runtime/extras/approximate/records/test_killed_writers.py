"""A process that is killed while it writes leaves everything that it was told is stored, and nothing wrong."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

NUM_KILLS = 30  # hundreds: python -m tests.runtime.extras.approximate.records.kill_writers --kills 500
REPOSITORY = Path(__file__).resolve().parents[5]


def test_kills_at_random_moments_take_nothing_that_was_promised() -> None:
    command = [sys.executable, "-m", "tests.runtime.extras.approximate.records.kill_writers", "--kills", str(NUM_KILLS)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    said = re.match(
        r"(\d+) kills, (\d+) of them in the middle of .* (\d+) promised pages.* (\d+) runs, none wrong"
        r".* (\d+) states, none wrong",
        done.stdout,
    )
    assert said is not None, done.stdout
    num_kills, num_in_the_middle, num_promised, num_runs, num_states = map(int, said.groups())
    assert num_kills == NUM_KILLS
    assert num_in_the_middle > 0
    assert num_promised > 0
    assert num_runs > 0
    assert num_states > 0
