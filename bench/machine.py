"""The conditions of a measurement besides the code: the machine, the commit, the command, the date.

Knows Linux's /proc; says "unknown" where it is missing.
"""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from radixlm.runtime.artifact.cpu import default_num_threads

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Origin:
    """The machine, commit, command and date of a measurement."""

    machine: str  # such as "2 cores of AMD EPYC (family 26), 32 MiB L3, 23 GiB"
    commit: str  # "-dirty" if files that git knows differ from it, apart from results
    command: str
    date: str  # UTC
    python: str
    apache_tvm: str

    @classmethod
    def of_this_process(cls) -> Origin:
        """Query the system and git."""
        return cls(
            machine=_machine(),
            commit=_commit(),
            command=_command(),
            date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
            python=platform.python_version(),
            apache_tvm=_version("apache-tvm"),
        )


@dataclass(frozen=True)
class CPUTime:
    """The start of a measurement, and the CPU seconds until then: of all processes, and of this one."""

    began_at: float
    all_s: float
    own_s: float

    @classmethod
    def now(cls) -> CPUTime:
        """Return the CPU seconds so far of the whole machine, and of this process with the children that have ended."""
        user, nice, system = map(int, Path("/proc/stat").read_text().split(maxsplit=4)[1:4])
        own = os.times()
        all_s = (user + nice + system) / os.sysconf("SC_CLK_TCK")
        return cls(time.monotonic(), all_s, own.user + own.system + own.children_user + own.children_system)

    def taken_by_others(self) -> float:
        """Return the share of this process's processors that others have used since then."""
        now = CPUTime.now()
        others_s = now.all_s - self.all_s - (now.own_s - self.own_s)
        return max(0.0, others_s) / ((now.began_at - self.began_at) * default_num_threads())


def _machine() -> str:
    """Return the machine in words: cores, CPU, its instructions, cache and memory."""
    info = _cpuinfo()
    name = f"{info.get('model name', platform.machine())} (family {info.get('cpu family', '?')})"
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    vnni = "AVX-512 VNNI" if "avx512_vnni" in info.get("flags", "").split() else "no AVX-512 VNNI"
    return f"{default_num_threads()} cores of {name}, {vnni}, {info.get('cache size', '? KB')} cache, {gib:.0f} GiB"


def _cpuinfo() -> dict[str, str]:
    """Return the fields of the first core in /proc/cpuinfo; none if it cannot be read."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _commit() -> str:
    commit = _git("rev-parse", "--short=7", "HEAD")
    changed = _git("diff", "--name-only", "HEAD", "--", ":!bench/results", ":!bench/RESULTS.md")
    return (commit or "unknown") + ("-dirty" if changed else "")


def _git(*arguments: str) -> str:
    """Return the output of git, or an empty string outside of a checkout."""
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def _command() -> str:
    """Return the command as typed from the repository's root; files by name only."""
    main = sys.modules["__main__"]
    name = main.__spec__.name if main.__spec__ is not None else Path(sys.argv[0]).name
    words = (Path(word).name if "/" in word else word for word in sys.argv[1:])
    return shlex.join(["python", "-m", name.removesuffix(".__main__"), *words])


def _version(package: str) -> str:
    """Return the version of an installed package, or that it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
