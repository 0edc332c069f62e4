"""An artifact that is used before it is on disk: its weights are in memory, and are written later.

Knows files and descriptors, not models. Imports no TVM.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from radixlm.runtime.artifact import MANIFEST, WEIGHTS, Artifact
from radixlm.runtime.errors import CompileError, VerificationFailed

from .preflight import check_space
from .publish import publish, unpublished

# What the lines to the parent begin with: at first WRITTEN, then those of `keep`.
WRITTEN, READY, KEPT, NOT_KEPT, WRONG = "written", "ready", "kept", "not kept", "wrong"
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
        written: called when the artifact is complete and its logits are to be compared.
    """

    directory: Path
    weights_fd: int
    limit_bytes: int
    written: Callable[[], None] = lambda: None

    def prepare(self) -> Path:
        """Make the link to the weights. Returns the directory that takes the other files."""
        (self.directory / WEIGHTS).symlink_to(f"/proc/self/fd/{self.weights_fd}")
        return self.directory

    @property
    def is_used(self) -> bool:
        """Whether a compile has left its artifact here."""
        return (self.directory / MANIFEST).is_file()


def keep(place: InMemory, output: Path, check_weights: Callable[[], object], *, status_fd: int, lock: Path) -> None:
    """Let the parent use the artifact in `place`; then check its weights, write it to `output`, and remove `lock`.

    That is done at idle priority, and also if the parent has ended. The parent may remove the directory as soon as it
    was told READY. At last it is told KEPT, NOT_KEPT or WRONG, and a text. Nothing else is said from then on.

    Args:
        check_weights: raises VerificationFailed if the weights are wrong; then nothing is published.
        status_fd: a pipe to the parent, which takes lines.
    """
    parent = os.getppid()

    try:
        with _copied(place.directory, output) as copy:
            _be_silent()
            tell(status_fd, READY)
            be_idle()
            check_weights()
            copy.finish()
        outcome = KEPT, f"in {output}; the next start takes it from there"
    except VerificationFailed as error:
        outcome = WRONG, str(error)
    except Exception as error:  # a server that runs has one line of it, whatever it is
        outcome = NOT_KEPT, f"so that the next start compiles again: {error}"
    with contextlib.suppress(OSError):
        lock.unlink()
    if os.getppid() != parent:
        shutil.rmtree(place.directory, ignore_errors=True)
    tell(status_fd, *outcome)


def tell(status_fd: int, status: str, text: str = "") -> None:
    """Write a line to the parent, which may have ended."""
    with contextlib.suppress(OSError):
        os.write(status_fd, f"{status} {text}".rstrip().encode() + b"\n")


@dataclass
class _Copy:
    """A copy of an artifact in memory, which lacks its weights; or why there is none."""

    output: Path
    weights: BinaryIO
    directory: Path | None = None
    error: Exception | None = None

    def finish(self) -> None:
        """Copy the weights, check the copy and publish it.

        Raises:
            CompileError: the disk is too full.
            OSError: the disk failed.
        """
        if self.directory is None:
            raise self.error or AssertionError
        _copy_slowly(self.weights, self.directory / WEIGHTS)
        manifest = Artifact.open(self.directory).manifest  # reads it all, which the next start need not do
        publish(self.directory, self.output)
        Artifact(self.output, manifest).remember_weights()


@contextmanager
def _copied(directory: Path, output: Path) -> Iterator[_Copy]:
    """All files of the artifact but the weights, copied beside `output`; gone afterwards unless they are published."""
    with (directory / WEIGHTS).open("rb") as weights, contextlib.ExitStack() as stack:
        copy = _Copy(output, weights)
        try:
            check_space(output.parent, os.fstat(weights.fileno()).st_size)
            copy.directory = stack.enter_context(unpublished(output))
            for file in directory.iterdir():
                if file.name != WEIGHTS:
                    shutil.copy(file, copy.directory)
        except (CompileError, OSError) as error:  # the artifact can be used all the same
            copy.directory, copy.error = None, error
        yield copy


def _be_silent() -> None:
    """Close the error stream, which is the parent's from now on."""
    sys.stderr.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)


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
