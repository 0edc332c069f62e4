"""How much processor time the control groups of this process allow, in processors.

Knows the files of cgroup v1 and v2, not what the time is for. Works in a container that sees its own group as the root,
and in a service several groups below it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def cpu_quota(root: Path = Path("/")) -> float:
    """The least that a group of this process, or one above it, allows; infinity if none limits it.

    `root` is where `/proc` and the mounted groups are looked for.
    """
    return min((_quota(group) for group in _groups(root)), default=math.inf)


def _groups(root: Path) -> Iterator[Path]:
    """The directories of the groups that may limit processor time, each with those above it."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return
    paths: dict[str, str] = {}  # by controller; "" is the one hierarchy of v2
    for line in groups:
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    for line in mounts:
        left, _, right = line.partition(" - ")
        mounted, mount_point = left.split()[3:5]
        kind, _, options = right.split()[:3]
        if kind == "cgroup2" and "" in paths:
            yield from _from_here_up(root, mount_point, mounted, paths[""])
        elif kind == "cgroup" and "cpu" in options.split(",") and "cpu" in paths:
            yield from _from_here_up(root, mount_point, mounted, paths["cpu"])


def _from_here_up(root: Path, mount_point: str, mounted: str, path: str) -> Iterator[Path]:
    """The group `path` and those above it, as far as the mount of the group `mounted` shows them."""
    top = root / mount_point.lstrip("/")
    try:
        parts = PurePosixPath(path).relative_to(mounted).parts
    except ValueError:  # mounted from outside of a container
        parts = ()
    for length in range(len(parts), -1, -1):
        yield top.joinpath(*parts[:length])


def _quota(group: Path) -> float:
    try:
        quota, period = (group / "cpu.max").read_text().split()  # v2
        return math.inf if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        quota_us = int((group / "cpu.cfs_quota_us").read_text())  # v1
        return quota_us / int((group / "cpu.cfs_period_us").read_text()) if quota_us > 0 else math.inf
    except (OSError, ValueError):
        return math.inf
