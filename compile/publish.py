"""Write an artifact beside its destination, and put it there when it is done.

Nothing appears at the destination before that. An artifact that was there is replaced; anything else is not.
"""

from __future__ import annotations

import glob
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from radixlm.runtime.artifact import MANIFEST
from radixlm.runtime.errors import InvalidParameter

_WRITE_BACK_S = 0.25  # between two times that the disk is asked to
_LONGEST_NAME = 255  # bytes, on all usual file systems
_NAME_MARGIN = len("..xxxxxxxx.tmp")  # that the name has more while it is written
_ABANDONED_S = 24 * 3600.0  # a compile that takes longer than a day was killed


def check_output(output: Path) -> None:
    """Raise InvalidParameter where no artifact can be put."""
    if not output.name:
        raise InvalidParameter(f"-o {str(output)!r} is no name of an artifact; give one such as model.radixlm")
    if len(os.fsencode(output.name)) + _NAME_MARGIN > _LONGEST_NAME:
        longest = _LONGEST_NAME - _NAME_MARGIN
        raise InvalidParameter(f"{output.name[:20]}... has more than {longest} bytes; give a shorter -o")
    if output.exists() and not (output / MANIFEST).is_file():
        raise InvalidParameter(f"{output} exists and is no artifact; choose another -o, or remove it")
    if not output.parent.is_dir():
        raise InvalidParameter(f"{output.parent} is no directory; make it first, or choose another -o")


@contextmanager
def unpublished(output: Path) -> Iterator[Path]:
    """A directory beside `output`, on the same file system; gone afterwards unless it was published."""
    directory = unpublished_directory(output)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def unpublished_directory(output: Path) -> Path:
    """Make a directory beside `output`. If it is left there, the next publication removes it, a day later."""
    directory = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".tmp", dir=output.parent))
    directory.chmod(0o755)
    return directory


@contextmanager
def written_back(file: int) -> Iterator[Callable[[], None]]:
    """Have the disk write what comes into `file` meanwhile; what this gives waits until all of it is written.

    A slow disk takes longer to write weights than the processor to make them, and the system waits half a minute before
    it begins by itself.
    """
    ended, errors = threading.Event(), list[OSError]()

    def write_back() -> None:
        try:
            while not ended.wait(_WRITE_BACK_S):
                os.fdatasync(file)
        except OSError as error:  # the system tells it once: the next `fsync` would say that all is well
            errors.append(error)

    def wait() -> None:
        ended.set()
        thread.join()
        if errors:
            raise errors[0]
        os.fsync(file)

    thread = threading.Thread(target=write_back, name="radixlm-write-back", daemon=True)
    thread.start()
    try:
        yield wait
    finally:
        ended.set()
        thread.join()


def publish(directory: Path, output: Path) -> None:
    """Rename `directory` to `output`; an artifact that was there is moved aside first and then removed."""
    if output.exists():
        with unpublished(output) as aside:
            os.rename(output, aside / "replaced")
            os.rename(directory, output)
    else:
        os.rename(directory, output)
    _sweep(output)


def _sweep(output: Path) -> None:
    """Remove what compiles of the same output left beside it when they were killed, long ago."""
    for directory in output.parent.glob(f".{glob.escape(output.name)}.????????.tmp"):
        try:
            abandoned = directory.stat().st_mtime < time.time() - _ABANDONED_S
        except OSError:
            continue  # another compile has just removed it
        if abandoned:
            shutil.rmtree(directory, ignore_errors=True)
