"""The artifact that a command runs: as it is given, or compiled once and kept in the cache folder.

Knows keys, the cache folder, its locks and the command that compiles. That command is a process of its own, so that
what serves has the same memory the first time as later, and never loads the compiler. It leaves the artifact in memory,
where it is used at once. Meanwhile it compares the weights with the source and writes the artifact to the cache folder,
and goes on when this process ends.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
from radixlm.runtime.artifact import Artifact, cache_dir
from radixlm.runtime.artifact.cpu import cpu_features
from radixlm.runtime.artifact.model_names import ALIAS, SUFFIX, is_artifact, is_hub, part_paths, short_name
from radixlm.runtime.errors import ArtifactError, CompileError
from radixlm.runtime.system import available_memory_bytes, memory_file
from radixlm.runtime.version import VERSION

from .compile_process import Progressed, Say, StatusPipe, run_compile, watch

if TYPE_CHECKING:
    from radixlm.compile.in_memory import InMemory

_MODEL_FILES = {".json", ".safetensors", ".model", ".jinja", ".bin"}  # of a directory
_PACKAGE = Path(__file__).resolve().parent.parent
_COMPILER = ("compile", "tokenizer_fix", "runtime/artifact")
_KEY_DIGITS = 16
_SHARE_OF_MEMORY = 0.6  # of what is available, for weights in memory: unlike a mapped file they cannot be dropped
_SMALL_FILES_BYTES = 64 << 20  # at most, all but the weights


def artifact_of(
    model: str,
    options: Mapping[str, str],
    say: Say | None = None,
    meanwhile: AbstractContextManager[None] | None = None,
    *,
    written: Callable[[Path], None] | None = None,
    progressed: Progressed | None = None,
    kept: Say | None = None,
    on_disk: bool = False,
) -> Path:
    """Return the artifact of `model`. It is compiled first if the cache folder has none of this source.

    A fresh artifact is in memory, where the system has files there (Linux): this process can open it until it ends. At
    idle priority its weights are compared with the source, and it is written to the cache folder. Should they differ,
    this process ends by SIGTERM.

    Args:
        model: an artifact, or what `radixlm compile` takes.
        options: of `radixlm compile`, by their names; only where `model` is no artifact.
        say: gets the lines of the progress; without it the progress goes to the error stream.
        meanwhile: entered while the model is compiled, or another process is waited for that compiles it.
        written: gets the path of a fresh artifact that is complete, while its logits are compared. Nothing that is
            computed with it may be used before this function has returned.
        progressed: gets the stage of the compile, and the part of it all that is done, unless `on_disk`.
        kept: gets a line once a fresh artifact is in the cache folder, or could not be written there.
        on_disk: wait for the disk, and return the path in the cache folder.

    Raises:
        ArtifactNotFound: there is nothing at that path.
        ValueError: options are given for an artifact.
        CompileError: the cache folder cannot be written; with `say`, what the compiler has said.
        Exit: the compiler has said what is wrong, and failed with this code.
    """
    if is_artifact(model):
        if options:
            given = " and ".join(f"--{name} {value}" for name, value in options.items())
            raise ValueError(f"{model} is compiled already, and {given} is for what is compiled now; leave it out")
        return Path(model)
    name, key = short_name(model), _key(model, options)
    path = artifacts_dir() / f"{name}-{key}{SUFFIX}"
    if _is_whole(path):
        return path
    tell = say or (lambda text: click.echo(text, err=True))
    arguments = ["-o", str(path), "--name", name, *_arguments(options)]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        waits = f"another process compiles {model}, or writes it to the disk; waiting for it"
        with meanwhile or nullcontext(), _locked(path.with_suffix(".lock"), lambda: tell(waits)) as lock:
            if _is_whole(path):
                return path
            tell(f"compiling {model}, once; it is kept in {path}")
            weights_fd = None if on_disk else memory_file("radixlm-weights")
            if weights_fd is None:
                run_compile([*arguments, "--", model], [lock.descriptor], say)
                return path
            with _in_memory(path, weights_fd) as memory:
                status = StatusPipe()
                numbers = (memory.weights_fd, memory.limit_bytes, status.writer.fileno())
                place = ("--in-memory", str(memory.directory), *map(str, numbers), str(lock.path))
                descriptors = (lock.descriptor, memory.weights_fd)
                tell_written = None if written is None else partial(written, memory.directory)
                compiling = [*arguments, *place, "--", model]
                process = run_compile(compiling, descriptors, say, status, tell_written, progressed)
                if not memory.is_used:  # too large for the memory
                    return path
                lock.hand_over()
                watch(process, status.reader, kept)
                return memory.directory
    except OSError as error:
        raise CompileError(
            f"{path.parent} cannot be written ({error.strerror or error}); set XDG_CACHE_HOME to another folder, or "
            f"compile to a place of your own: radixlm compile {model} -o {name}{SUFFIX}"
        ) from error


def artifacts_dir() -> Path:
    """Return where artifacts are kept that commands have compiled."""
    return cache_dir() / "artifacts"


def _key(model: str, options: Mapping[str, str]) -> str:
    """A digest of all that decides what is compiled: source, options, compiler and processor.

    Files are known by path, size and time. What is downloaded is known by its name: a model of the hub stays the one
    that was compiled first, until another revision is named.
    """
    source = model if model == ALIAS or is_hub(model) else _files(Path(model))
    versions = [VERSION, importlib.metadata.version("apache-tvm")]
    decides = [source, sorted(options.items()), versions, _digest_of_compiler(), sorted(cpu_features())]
    return hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:_KEY_DIGITS]


def _files(path: Path) -> list[tuple[str, int, int]]:
    """Path, size in bytes and time in nanoseconds of a file and its parts, or of the model's files in a directory."""
    # of an embedding model, each step after the layers has a folder of its own
    beside = (*path.iterdir(), *path.glob("*/config.json")) if path.is_dir() else ()
    found = (file for file in beside if file.suffix in _MODEL_FILES) if path.is_dir() else part_paths(path)
    files = sorted(file.resolve() for file in found)
    return [(str(file), (status := file.stat()).st_size, status.st_mtime_ns) for file in files if file.is_file()]


def _digest_of_compiler() -> str:
    digest = hashlib.sha256()
    for file in sorted(file for folder in _COMPILER for file in (_PACKAGE / folder).rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _is_whole(path: Path) -> bool:
    """Whether an artifact is there that can be opened; a damaged one is compiled again."""
    try:
        Artifact.open(path)
    except ArtifactError:
        return False
    return True


def _arguments(options: Mapping[str, str]) -> Iterator[str]:
    for name, value in options.items():
        yield from (f"--{name}", value)


@dataclass
class _Lock:
    """A file that is locked as long as a process has `descriptor` open, and removed by the process that locked it."""

    path: Path
    descriptor: int
    is_mine: bool = True

    def hand_over(self) -> None:
        """Leave it to another process, which has the descriptor, to remove the file."""
        self.is_mine = False


@contextmanager
def _locked(path: Path, when_busy: Callable[[], None]) -> Iterator[_Lock]:
    """Hold the file `path` as a lock, and remove it afterwards."""
    while True:
        lock = _Lock(path, os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
        try:
            try:
                fcntl.flock(lock.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                when_busy()
                fcntl.flock(lock.descriptor, fcntl.LOCK_EX)
            if os.fstat(lock.descriptor).st_nlink == 0:  # its last owner removed the file: others lock a new one
                continue
            try:
                yield lock
            finally:
                if lock.is_mine:
                    with contextlib.suppress(OSError):
                        path.unlink()
            return
        finally:
            os.close(lock.descriptor)


@contextmanager
def _in_memory(path: Path, weights_fd: int) -> Iterator[InMemory]:
    """A place in memory for the artifact of `path`. What a compile left there stays until this process ends."""
    from radixlm.compile.in_memory import InMemory
    from radixlm.compile.publish import unpublished_directory

    has_room = shutil.disk_usage(path.parent).free > _SMALL_FILES_BYTES
    directory = unpublished_directory(path if has_room else Path(tempfile.gettempdir()) / path.name)
    memory = InMemory(directory, weights_fd, int(_SHARE_OF_MEMORY * available_memory_bytes()))
    is_left = False
    try:
        yield memory
        is_left = memory.is_used
    finally:
        if is_left:
            atexit.register(shutil.rmtree, directory, ignore_errors=True)
        else:
            shutil.rmtree(directory, ignore_errors=True)
            os.close(weights_fd)
