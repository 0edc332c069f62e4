"""Check the output and the disk before anything slow, and let the disk begin to read.

Imports no TVM, and opens no model.
"""

from __future__ import annotations

import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path

from radixlm.runtime.errors import CompileError

from .publish import check_output, unpublished

_OTHER_FILES_BYTES = 16 << 20  # about: library, tokenizer, manifest
_WEIGHT_FILES = (".safetensors", ".bin")  # of a directory; the first that there are are read
_READ_AHEAD_BYTES = 2 << 30  # what a fast disk reads while the compiler is loaded and the kernels are found
# The least part of its bytes that a source becomes: half, because it may have tensors that are not compiled, such as
# those of images, times the bits of a number over the 32 that it may have had.
_LEAST_SHARE = {"keep": 0.5, "f32": 0.5, "f16": 0.25, "q8": 0.13, "q4": 0.07}


def check_ready(source: str | Path, output: Path, quantize: str, *, needs_space: bool = True) -> None:
    """Raise where compiling `source` into `output` cannot succeed, as far as that is known at once.

    Args:
        needs_space: whether the artifact is written to the disk.

    Raises:
        InvalidParameter: no artifact can be put at `output`.
        CompileError: its folder cannot be written, or its disk is too full.
    """
    check_output(output)
    if needs_space:
        check_space(output.parent, least_bytes(Path(source), quantize), is_least=True)
    try:
        with unpublished(output):
            pass
    except OSError as error:
        raise CompileError(
            f"{output.parent} cannot be written ({error.strerror or error}); choose another folder with -o"
        ) from error


def check_space(directory: Path, weights_bytes: int, *, is_least: bool = False) -> None:
    """Raise CompileError where the disk is too full for an artifact with so many bytes of weights, or more."""
    needed, free = weights_bytes + _OTHER_FILES_BYTES, shutil.disk_usage(directory).free
    if free < needed:
        raise CompileError(
            f"{directory} has {free / 1e6:,.0f} MB free, the artifact needs {'at least ' * is_least}"
            f"{needed / 1e6:,.0f} MB; make room, or choose another disk with -o, or with XDG_CACHE_HOME for the "
            "artifacts that serve, chat and generate keep"
        )


def read_ahead(source: Path) -> threading.Thread:
    """Have the disk read the beginning of a model's files, in a thread: a busy disk lets its callers wait."""
    thread = threading.Thread(target=_read_ahead, args=(source,), name="radixlm-read-ahead", daemon=True)
    thread.start()
    return thread


def _read_ahead(source: Path) -> None:
    left = _READ_AHEAD_BYTES if hasattr(os, "posix_fadvise") else 0
    with suppress(OSError):  # who reads it says what is wrong
        for path in _weight_files(source):
            with path.open("rb") as file:
                size = min(left, path.stat().st_size)
                if size:  # 0 would be all of it
                    os.posix_fadvise(file.fileno(), 0, size, os.POSIX_FADV_WILLNEED)
            left -= size


def _weight_files(source: Path) -> list[Path]:
    """The files with a model's weights, in one format if it is there in two; none if it is not here yet."""
    if not source.is_dir():
        return [source] if source.is_file() else []
    files = sorted(path for path in source.iterdir() if path.is_file())
    for suffix in _WEIGHT_FILES:
        if found := [path for path in files if path.suffix == suffix]:
            return found
    return []


def least_bytes(source: Path, quantize: str) -> int:
    """Return a lower bound of the bytes of weights; 0 if `source` is not here yet."""
    if source.is_dir():
        files = [path for path in source.iterdir() if path.suffix in _WEIGHT_FILES]
        # The same weights may be there in both formats, and as one file beside its shards: the largest file is a bound.
        size = max((path.stat().st_size for path in files if path.is_file()), default=0)
    else:
        size = source.stat().st_size if source.is_file() else 0
    return int(_LEAST_SHARE[quantize] * size)
