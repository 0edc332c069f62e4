"""The quota of a process is the least of its groups, wherever they are mounted."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from radixlm.runtime.artifact.cpu import cpu_quota

V2 = "35 24 0:30 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw"
V1 = "33 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct"
OTHERS = "22 1 0:20 / /proc rw - proc proc rw\n34 31 0:31 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset"


def system(root: Path, group: str, mounts: str, files: dict[str, str]) -> Path:
    """A root directory with /proc/self and groups."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(group)
    (root / "proc/self/mountinfo").write_text("\n".join(filter(None, (OTHERS, mounts))) + "\n")
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("text", "quota"),
    [("max 100000", math.inf), ("200000 100000\n", 2.0), ("50000 100000", 0.5), ("", math.inf), ("x y", math.inf)],
)
def test_a_container_sees_its_group_as_the_root(tmp_path: Path, text: str, quota: float) -> None:
    assert cpu_quota(system(tmp_path, "0::/\n", V2, {"cpu.max": text})) == quota


def test_a_service_is_limited_by_all_groups_above_it(tmp_path: Path) -> None:
    files = {
        "user.slice/one.service/cpu.max": "max 100000",
        "user.slice/cpu.max": "300000 100000",
        "user.slice/other.service/cpu.max": "100000 100000",
        "cpu.max": "400000 100000",
    }
    assert cpu_quota(system(tmp_path, "0::/user.slice/one.service\n", V2, files)) == 3.0


def test_a_part_of_the_groups_is_mounted(tmp_path: Path) -> None:
    mount = V2.replace(" / /sys", " /docker/abc /sys")
    files = {"cpu.max": "600000 100000", "inner/cpu.max": "150000 100000"}
    assert cpu_quota(system(tmp_path, "0::/docker/abc/inner\n", mount, files)) == 1.5


def test_groups_mounted_from_outside_count_at_their_top(tmp_path: Path) -> None:
    mount = V2.replace(" / /sys", " /docker/abc /sys")
    assert cpu_quota(system(tmp_path, "0::/\n", mount, {"cpu.max": "250000 100000"})) == 2.5


@pytest.mark.parametrize(("quota_us", "quota"), [("-1", math.inf), ("300000", 3.0), ("nonsense", math.inf)])
def test_the_older_groups_have_other_files(tmp_path: Path, quota_us: str, quota: float) -> None:
    group = "12:cpu,cpuacct:/docker/abc\n3:cpuset:/docker/abc\n0::/docker/abc\n"
    here = "cpu,cpuacct/docker/abc"
    files = {f"{here}/cpu.cfs_quota_us": quota_us, f"{here}/cpu.cfs_period_us": "100000"}
    assert cpu_quota(system(tmp_path, group, V1, files)) == quota


def test_without_groups_nothing_is_limited(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) == math.inf
    assert cpu_quota(system(tmp_path, "", "", {})) == math.inf
