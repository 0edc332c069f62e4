"""Build the wheels and source archives that are published, the same bytes wherever and whenever.

Usage: .ci/build_distributions.py FOLDER, which gets them. Needs the packages of requirements-wheel.lock.
"""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path

from distributions import FULL, ROOT, SERVE
from distributions import main as lay_out


def build(folder: Path) -> None:
    """Lay out both distributions, and build each."""
    epoch = epoch_of(ROOT)
    with tempfile.TemporaryDirectory(prefix="radixlm-build-") as scratch:
        lay_out(Path(scratch))
        for name in (SERVE, FULL):
            command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), f"{scratch}/{name}"]
            environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch)}
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
            if done.returncode:
                raise SystemExit(done.stdout + done.stderr)
    for archive in folder.glob("*.tar.gz"):
        archive.write_bytes(normalized(archive.read_bytes(), epoch))


def epoch_of(root: Path) -> int:
    """Return the time of the checked-out commit; 315532800, the first date of ZIP, without git."""
    command = ["git", "log", "-1", "--format=%ct"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return int(done.stdout) if done.returncode == 0 else 315532800


def normalized(archive: bytes, epoch: int) -> bytes:
    """Return a source archive with one time, one owner and one order: setuptools takes those of the machine."""
    packed = BytesIO()
    with tarfile.open(fileobj=BytesIO(archive)) as old, tarfile.open(fileobj=packed, mode="w") as new:
        for member in sorted(old.getmembers(), key=lambda each: each.name):
            content = old.extractfile(member)
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() else 0o644
            member.pax_headers = {}
            new.addfile(member, content)
    return gzip.compress(packed.getvalue(), mtime=epoch)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
