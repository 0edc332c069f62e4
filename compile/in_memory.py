"""An artifact that is used before it is on disk: its weights are in memory, and a process of its own writes them later.

Knows files and descriptors, not models. Imports no TVM.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from radixlm.runtime.artifact import MANIFEST, WEIGHTS, Artifact

from .preflight import check_space
from .publish import publish, unpublished

_COPIED_AT_A_TIME = 16 << 20  # bytes; so much waits for the disk at most
_SYS_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_IDLE = 3 << 13  # the class of those that get the disk when no other process wants it


@dataclass(frozen=True)
class InMemory:
    """A place for an artifact that is not published: a directory, and a file in memory for the weights.

    weights.safetensors in `directory` is a link to `weights_fd`. A process that opens the artifact there must have that
    descriptor under the same number.

    Attributes:
        weights_fd: of a file in memory (`os.memfd_create`).
        limit_bytes: of weights; a compile publishes larger ones as usual, and leaves `directory` empty.
    """

    directory: Path
    weights_fd: int
    limit_bytes: int

    def prepare(self) -> Path:
        """Make the link to the weights. Returns the directory that takes the other files."""
        (self.directory / WEIGHTS).symlink_to(f"/proc/self/fd/{self.weights_fd}")
        return self.directory

    @property
    def is_used(self) -> bool:
        """Whether a compile has left its artifact here."""
        return (self.directory / MANIFEST).is_file()


def write_to_disk(directory: Path, output: Path, opened: Callable[[], None] = lambda: None) -> None:
    """Copy the artifact in `directory`, whose weights are in memory, to `output`, check the copy and publish it.

    Args:
        opened: called once `directory` is needed no more.

    Raises:
        CompileError: the disk is too full.
        OSError: the disk failed.
    """
    check_space(output.parent, (directory / WEIGHTS).stat().st_size)
    with unpublished(output) as copy:
        for file in directory.iterdir():
            if file.name != WEIGHTS:
                shutil.copy(file, copy)
        with (directory / WEIGHTS).open("rb") as weights:
            opened()
            _copy_slowly(weights, copy / WEIGHTS)
        manifest = Artifact.open(copy).manifest  # reads it all, which the next start need not do
        publish(copy, output)
        Artifact(output, manifest).remember_weights()


def _copy_slowly(reader: BinaryIO, destination: Path) -> None:
    """Copy a file, and wait for the disk now and then, so that other writers do not wait for this one's bytes."""
    with destination.open("wb") as writer:
        offset = 0
        while count := os.sendfile(writer.fileno(), reader.fileno(), offset, _COPIED_AT_A_TIME):
            os.fdatasync(writer.fileno())
            os.posix_fadvise(writer.fileno(), offset, count, os.POSIX_FADV_DONTNEED)
            offset += count
        os.fsync(writer.fileno())


def be_idle() -> None:
    """Have this process use only processors and disks that no other process wants; best effort."""
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(OSError):
        os.nice(19)
    number = _SYS_IOPRIO_SET.get(os.uname().machine)
    if number is not None:
        ctypes.CDLL(None).syscall(number, 1, 0, _IOPRIO_IDLE)  # 1: a process, 0: this one


def main(directory: str, output: str, lock: str, ready: str) -> None:
    """Write an artifact at idle priority, print one line about it, and remove the file `lock`.

    The program of a process that holds the lock and the weights' descriptor, and that outlives its parent. It closes
    the descriptor `ready` when its parent may remove `directory`, and removes it itself if the parent has ended.
    """
    parent = os.getppid()

    def opened() -> None:
        os.close(int(ready))
        be_idle()

    try:
        write_to_disk(Path(directory), Path(output), opened)
        said = f"kept in {output}; the next start takes it from there"
    except Exception as error:  # a server that runs has one line of it, whatever it is
        said = f"not kept, so that the next start compiles again: {error}"
    finally:
        with contextlib.suppress(OSError):
            os.unlink(lock)
    if os.getppid() != parent:
        shutil.rmtree(directory, ignore_errors=True)
    with contextlib.suppress(OSError):  # the parent has ended
        print(said, file=sys.stderr, flush=True)
