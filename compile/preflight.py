"""Check the output and the disk before any slow step, and start reading ahead.

Imports no TVM, and opens no model.
"""

from __future__ import annotations

import shutil
import threading
from contextlib import suppress
from pathlib import Path

from radixlm.runtime.artifact.model_names import part_paths
from radixlm.runtime.errors import CompileError
from radixlm.runtime.system import expect_reads

from .publish import check_output, unpublished

_OTHER_FILES_BYTES = 16 << 20  # about; library, tokenizer, manifest
_WEIGHT_FILES = (".safetensors", ".bin")  # in a directory; the first kind that exists is read
_READ_AHEAD_BYTES = 2 << 30  # about what a fast disk reads while the compiler is loaded and kernels are looked up
# Lower bound of an artifact's size as a share of its source's. It is half, because tensors such as those of images may
# not be compiled. That is multiplied by the quantized bits of a number over its 32 bits at most.
_LEAST_SHARE = {"keep": 0.5, "f32": 0.5, "f16": 0.25, "q8": 0.13, "q4": 0.07}


def check_ready(source: str | Path, output: Path, quantize: str, *, needs_space: bool = True) -> None:
    """Raise if compiling `source` into `output` will certainly fail.

    Args:
        needs_space: true if the artifact is written to the disk.

    Raises:
        InvalidParameter: no artifact can be put at `output`.
        CompileError: its folder is not writable, or its disk is too full.
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
    """Raise CompileError if the disk is too full for an artifact with at least this many bytes of weights."""
    needed, free = weights_bytes + _OTHER_FILES_BYTES, shutil.disk_usage(directory).free
    if free < needed:
        raise CompileError(
            f"{directory} has {free / 1e6:,.0f} MB free, the artifact needs {'at least ' * is_least}"
            f"{needed / 1e6:,.0f} MB; make room, or choose another disk with -o, or with XDG_CACHE_HOME for the "
            "artifacts that serve, chat and generate keep"
        )


def read_ahead(source: Path) -> threading.Thread:
    """Read the beginning of a model's files in a thread, because a busy disk blocks its callers."""
    thread = threading.Thread(target=_read_ahead, args=(source,), name="radixlm-read-ahead", daemon=True)
    thread.start()
    return thread


def _read_ahead(source: Path) -> None:
    """Request reads of the first bytes of the weights from the disk."""
    left = _READ_AHEAD_BYTES
    with suppress(OSError):  # the actual reader reports errors
        for path in _weight_files(source):
            with path.open("rb") as file:
                size = min(left, path.stat().st_size)
                if size:  # 0 would mean the whole file
                    expect_reads(file.fileno(), 0, size)
            left -= size


def _weight_files(source: Path) -> list[Path]:
    """Return the files with a model's weights: the first kind of `_WEIGHT_FILES` that exists; [] before a download."""
    if not source.is_dir():
        return [path for path in part_paths(source) if path.is_file()]
    files = sorted(path for path in source.iterdir() if path.is_file())
    for suffix in _WEIGHT_FILES:
        if found := [path for path in files if path.suffix == suffix]:
            return found
    return []


def least_bytes(source: Path, quantize: str) -> int:
    """Return a lower bound of the bytes of weights; 0 if `source` is not downloaded yet."""
    if source.is_dir():
        files = [path for path in source.iterdir() if path.suffix in _WEIGHT_FILES]
        # Weights may exist in both formats, and as one file with its shards, so the largest file is a bound.
        size = max((path.stat().st_size for path in files if path.is_file()), default=0)
    else:
        size = sum(path.stat().st_size for path in _weight_files(source))
    return int(_LEAST_SHARE[quantize] * size)
