"""Use an artifact before it is on disk: its weights are in memory, and are written later.

Knows files and descriptors, not models. Imports no TVM.
"""

from __future__ import annotations

import contextlib
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
from radixlm.runtime.progress import Progress
from radixlm.runtime.system import DESCRIPTORS, be_idle, drop_cached, sync_file, write_back

from .preflight import check_space
from .publish import publish, unpublished

# First words of the lines to the parent: PROGRESS and WRITTEN, then those of `keep`.
PROGRESS, WRITTEN, READY, KEPT, NOT_KEPT, WRONG = "progress", "written", "ready", "kept", "not kept", "wrong"
_COPIED_AT_A_TIME = 16 << 20  # bytes; at most this much waits for the disk


@dataclass(frozen=True)
class InMemory:
    """A directory for an unpublished artifact, and a file in memory for its weights.

    weights.safetensors in `directory` is a link to `weights_fd`. A process that opens the artifact there must have that
    descriptor under the same number.

    Attributes:
        weights_fd: descriptor of a file in memory (`memory_file`).
        limit_bytes: maximum of weights; a compile publishes larger ones as usual, and leaves `directory` empty.
        written: called when the artifact is complete, before its logits are compared.
    """

    directory: Path
    weights_fd: int
    limit_bytes: int
    written: Callable[[], None] = lambda: None

    def prepare(self) -> Path:
        """Create the link to the weights. Returns the directory for the other files."""
        (self.directory / WEIGHTS).symlink_to(f"{DESCRIPTORS}{self.weights_fd}")
        return self.directory

    @property
    def is_used(self) -> bool:
        """True if a compile has left its artifact here."""
        return (self.directory / MANIFEST).is_file()


def keep(place: InMemory, output: Path, check_weights: Callable[[], object], *, status_fd: int, lock: Path) -> None:
    """Let the parent use the artifact in `place`; then check its weights, write it to `output`, and remove `lock`.

    This runs in the process that compiled, at idle priority, and also if the parent has ended. The parent may remove
    the directory after the line READY. The last line is KEPT, NOT_KEPT or WRONG, with a text.

    Args:
        place: the artifact, whose weights are in memory.
        check_weights: raises VerificationFailed if the weights are wrong; then nothing is published.
        status_fd: a pipe to the parent, which reads lines.
    """
    parent = os.getppid()

    try:
        with _copy_files(place.directory, output) as copy:
            _close_stderr()
            tell(status_fd, READY)
            be_idle()
            check_weights()
            copy.finish()
        outcome = KEPT, f"in {output}; the next start takes it from there"
    except VerificationFailed as error:
        outcome = WRONG, str(error)
    except Exception as error:  # a running server logs one line for any error
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
class ProgressWriter:
    """A callback that writes the progress of a compile to the parent, a line for each stage and percent.

    Attributes:
        status_fd: a pipe to the parent, which reads lines.
    """

    status_fd: int
    _told: str = ""

    def __call__(self, progress: Progress) -> None:
        """Tell the parent, unless the line is the same as before."""
        line = f"{progress.stage} {int(100 * progress.fraction)}"
        if line != self._told:
            self._told = line
            tell(self.status_fd, PROGRESS, line)


@dataclass
class _Copy:
    """A copy of an artifact in memory, without its weights; or the error that prevented it."""

    output: Path
    weights: BinaryIO
    directory: Path | None = None
    error: Exception | None = None

    def finish(self) -> None:
        """Copy the weights from memory to the copy on disk, check the copy, and publish it at `output`.

        Raises:
            CompileError: the disk is too full.
            OSError: the disk failed.
        """
        if self.directory is None:
            raise self.error or AssertionError
        _copy_slowly(self.weights, self.directory / WEIGHTS)
        manifest = Artifact.open(self.directory).manifest  # reads all bytes, so that the next start need not do so
        publish(self.directory, self.output)
        Artifact(self.output, manifest).remember_weights()


@contextmanager
def _copy_files(directory: Path, output: Path) -> Iterator[_Copy]:
    """Copy all files but the weights to a new directory next to `output`, and yield the copy.

    The directory is removed afterwards unless it was published. An error is kept in the copy.
    """
    with (directory / WEIGHTS).open("rb") as weights, contextlib.ExitStack() as stack:
        copy = _Copy(output, weights)
        try:
            check_space(output.parent, os.fstat(weights.fileno()).st_size)
            copy.directory = stack.enter_context(unpublished(output))
            for file in directory.iterdir():
                if file.name != WEIGHTS:
                    shutil.copy(file, copy.directory)
        except (CompileError, OSError) as error:  # the artifact is usable without a copy
            copy.directory, copy.error = None, error
        yield copy


def _close_stderr() -> None:
    """Send the error stream to /dev/null, because from now on it is the parent's."""
    sys.stderr.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)


def _copy_slowly(reader: BinaryIO, destination: Path) -> None:
    """Copy a file, waiting for the disk regularly, so that other writers do not wait for these bytes."""
    with destination.open("wb") as writer:
        offset = 0
        while count := os.sendfile(writer.fileno(), reader.fileno(), offset, _COPIED_AT_A_TIME):
            write_back(writer.fileno())
            drop_cached(writer.fileno(), offset, count)
            offset += count
        sync_file(writer.fileno())
