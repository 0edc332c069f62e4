"""Write an artifact next to its destination, and rename it when it is complete.

Nothing appears at the destination before that. An existing artifact is replaced; anything else is not.
"""

from __future__ import annotations

import errno
import glob
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from radixlm.runtime.artifact import MANIFEST
from radixlm.runtime.errors import InvalidParameter
from radixlm.runtime.system import sync_file, write_back

_WRITE_BACK_S = 0.25  # between two requests to write back
_LONGEST_NAME = 255  # bytes, on all usual file systems
_NAME_MARGIN = len("..xxxxxxxx.tmp")  # additional length of the name during writing
_ABANDONED_S = 24 * 3600.0  # a compile that takes longer than a day was killed
_PUBLISH_ATTEMPTS = 10
_OF_ANOTHER_COMPILE = (errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY)  # it has just moved or published the output


def check_output(output: Path) -> None:
    """Raise InvalidParameter if no artifact can be put at `output`."""
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
    """Yield a directory next to `output`, on the same file system; it is removed afterwards unless published."""
    directory = unpublished_directory(output)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def unpublished_directory(output: Path) -> Path:
    """Create a directory next to `output`.

    If it is left there, the first publication after a day removes it.
    """
    directory = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".tmp", dir=output.parent))
    directory.chmod(0o755)
    return directory


@contextmanager
def written_back(file: int) -> Iterator[Callable[[], None]]:
    """Write back data that come into `file` in the background; yields a function that waits for all of it.

    A slow disk takes longer to write weights than the CPU takes to make them, and the system starts writing only after
    half a minute.
    """
    ended, errors = threading.Event(), list[OSError]()

    def write() -> None:
        try:
            while not ended.wait(_WRITE_BACK_S):
                write_back(file)
        except OSError as error:  # the system reports an error once; the next `fsync` would succeed
            errors.append(error)

    def wait() -> None:
        ended.set()
        thread.join()
        if errors:
            raise errors[0]
        sync_file(file)

    thread = threading.Thread(target=write, name="radixlm-write-back", daemon=True)
    thread.start()
    try:
        yield wait
    finally:
        ended.set()
        thread.join()


def publish(directory: Path, output: Path) -> None:
    """Rename `directory` to `output`; an existing artifact is moved aside first and removed afterwards.

    Of concurrent compiles with the same output, the last one's artifact stays.

    Raises:
        OSError: it cannot be renamed; an existing artifact is still there.
    """
    for attempt in range(1, _PUBLISH_ATTEMPTS + 1):
        try:
            _exchange(directory, output)
            break
        except OSError as error:
            if error.errno not in _OF_ANOTHER_COMPILE or attempt == _PUBLISH_ATTEMPTS:
                raise
    _sweep(output)


def _exchange(directory: Path, output: Path) -> None:
    """Rename `directory` to `output`. An existing artifact is moved aside first, and back if that fails."""
    if not output.exists():
        os.rename(directory, output)
        return
    with unpublished(output) as aside:
        replaced = aside / "replaced"
        try:
            os.rename(output, replaced)
            os.rename(directory, output)
        except BaseException:
            if os.path.lexists(replaced) and not os.path.lexists(output):
                with suppress(OSError):  # another compile has published its own meanwhile
                    os.rename(replaced, output)
            raise


def _sweep(output: Path) -> None:
    """Remove directories that killed compiles of the same output left long ago."""
    for directory in output.parent.glob(f".{glob.escape(output.name)}.????????.tmp"):
        try:
            abandoned = directory.stat().st_mtime < time.time() - _ABANDONED_S
        except OSError:
            continue  # another compile has just removed it
        if abandoned:
            shutil.rmtree(directory, ignore_errors=True)
