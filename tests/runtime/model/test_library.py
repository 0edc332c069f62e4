"""Loading an artifact's library without TVM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from radixlm.runtime.artifact import MODULE

HIDE_TVM = "import sys; sys.modules['tvm'] = None"
RUN = """
from radixlm.runtime import Engine, SamplingParams
with Engine(sys.argv[1]) as engine:
    print(engine.generate("The capital", SamplingParams(max_tokens=8, temperature=0)).token_ids)
    print(sorted(line.split("/")[-1].strip() for line in open("/proc/self/maps") if "libtvm_runtime" in line))
"""
ITS_OWN_POOL = "__TVMBackend"  # what libraries export that take threads and scratch memory from TVM's runtime


def run(artifact: Path, before: str = "import sys") -> subprocess.CompletedProcess[str]:
    """Generate in a process of its own, and list what it has mapped of TVM's runtime."""
    command = [sys.executable, "-c", before + RUN, str(artifact)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_library_runs_without_tvm(tiny_artifact: Path) -> None:
    done = run(tiny_artifact, HIDE_TVM)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:] == ["[]"]
    assert ITS_OWN_POOL.encode() not in (tiny_artifact / MODULE).read_bytes()
