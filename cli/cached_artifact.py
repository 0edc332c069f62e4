"""Find the artifact of a model, or compile the model once into the cache folder.

Knows keys, the cache folder, its locks and the compile command. That command runs in a process of its own, so that a
server needs no more memory on its first start than later, and never imports the compiler. It leaves the artifact in
memory, where it is used at once. Then it compares the weights with the source and writes the artifact to the cache
folder, even if this process ends.
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
from radixlm.runtime.artifact import CHAT_TEMPLATE, Artifact, read_manifest
from radixlm.runtime.artifact.compiled_models import artifact_named, artifacts_dir
from radixlm.runtime.artifact.cpu import cpu_features
from radixlm.runtime.artifact.local_models import check_named
from radixlm.runtime.artifact.model_names import ALIAS, SUFFIX, is_hub, no_chat_template, part_paths, short_name
from radixlm.runtime.errors import ArtifactError, CompileError, InvalidRequest
from radixlm.runtime.system import available_memory_bytes, memory_file
from radixlm.runtime.version import VERSION

from .compile_process import Progressed, Say, StatusPipe, run_compile, watch

if TYPE_CHECKING:
    from radixlm.compile.in_memory import InMemory

_MODEL_FILES = {".json", ".safetensors", ".model", ".jinja", ".bin"}  # of a model directory
_PACKAGE = Path(__file__).resolve().parent.parent
_COMPILER = ("compile", "tokenizer_fix", "runtime/artifact")
_KEY_DIGITS = 16
_SHARE_OF_MEMORY = 0.6  # of available memory, for weights: unlike a mapped file, they cannot be dropped
_SMALL_FILES_BYTES = 64 << 20  # maximum of all files but the weights


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
    for_chat: bool = False,
) -> Path:
    """Return the artifact of `model`. Compiles it first unless the cache folder has it.

    On Linux, a fresh artifact is in memory: this process can open it until it ends. At idle priority, its weights are
    compared with the source, and it is written to the cache folder. If the weights differ, this process is ended by
    SIGTERM.

    Args:
        model: an artifact, the name of a compiled model, or a source for `radixlm compile`.
        options: options of `radixlm compile` by name; only if `model` is not an artifact.
        say: called with lines of progress; None: progress goes to stderr.
        meanwhile: entered while the model is compiled here or by another process.
        written: called with the path of a complete artifact while its logits are compared. Results computed with it
            must not be used before this function has returned.
        progressed: called with the stage of the compile and the overall progress, unless `on_disk`.
        kept: called with a line when a fresh artifact has been written to the cache folder, or could not be.
        on_disk: wait for the disk, and return the path in the cache folder.
        for_chat: refuse a model without a chat template before it is compiled or opened.

    Raises:
        InvalidRequest: the model has no chat template, and is `for_chat`.
        ArtifactNotFound: there is no such model.
        SourceError: there is no model at that path, or it is damaged.
        ValueError: options are given for an artifact.
        CompileError: the cache folder cannot be written; with `say`, also for errors of the compiler.
        Exit: the compiler has printed an error, and failed with this exit code.
    """
    if (artifact := artifact_named(model)) is not None:
        if options:
            given = " and ".join(f"--{name} {value}" for name, value in options.items())
            raise ValueError(f"{model} is already compiled; remove {given}, which is for compiling")
        return _with_template(artifact, model) if for_chat else artifact
    name, path = short_name(model), artifact_path(model, options)
    if _is_whole(path):
        return _with_template(path, model) if for_chat else path
    check_named(model)
    tell = say or (lambda text: click.echo(text, err=True))
    arguments = ["-o", str(path), "--cached", "--name", name, *_arguments(options)]
    arguments += ["--for-chat"] if for_chat else []
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        waits = f"another process compiles {model}, or writes it to disk; waiting for it"
        with meanwhile or nullcontext(), _locked(path.with_suffix(".lock"), lambda: tell(waits)) as lock:
            if _is_whole(path):
                return _with_template(path, model) if for_chat else path
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
            f"compile it to another path: radixlm compile {model} -o {name}{SUFFIX}"
        ) from error


def artifact_path(model: str, options: Mapping[str, str]) -> Path:
    """Return where `artifact_of` finds the artifact of `model` on disk, or writes it.

    Raises:
        ArtifactNotFound: there is no such model.
    """
    return artifact_named(model) or artifacts_dir() / f"{short_name(model)}-{_key(model, options)}{SUFFIX}"


def _with_template(artifact: Path, model: str) -> Path:
    """Return the path of an artifact that can chat.

    Raises:
        InvalidRequest: it has no chat template.
    """
    if CHAT_TEMPLATE not in read_manifest(artifact).files:
        raise InvalidRequest(no_chat_template(model))
    return artifact


def _key(model: str, options: Mapping[str, str]) -> str:
    """Return a digest of everything that the compiled artifact depends on: source, options, compiler and CPU.

    Files are identified by path, size and time, downloads by name: a model of the hub stays the version that was
    compiled first, until another revision is named.
    """
    source = model if model == ALIAS or is_hub(model) else _files(Path(model))
    versions = [VERSION, importlib.metadata.version("apache-tvm")]
    decides = [source, sorted(options.items()), versions, _digest_of_compiler(), sorted(cpu_features())]
    return hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:_KEY_DIGITS]


def _files(path: Path) -> list[tuple[str, int, int]]:
    """Return path, size in bytes and modification time in nanoseconds of a model's files.

    These are a file and its parts, or those of a folder.
    """
    # an embedding model has a folder for each step after the layers
    entries = (*path.iterdir(), *path.glob("*/config.json")) if path.is_dir() else ()
    found = (file for file in entries if file.suffix in _MODEL_FILES) if path.is_dir() else part_paths(path)
    files = sorted(file.resolve() for file in found)
    return [(str(file), (status := file.stat()).st_size, status.st_mtime_ns) for file in files if file.is_file()]


def _digest_of_compiler() -> str:
    """Return the sha256 of the compiler's source files."""
    digest = hashlib.sha256()
    for file in sorted(file for folder in _COMPILER for file in (_PACKAGE / folder).rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _is_whole(path: Path) -> bool:
    """Return whether the path has an artifact that can be opened. A damaged one is compiled again."""
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
    """A lock file. It is locked while any process has `descriptor` open, and removed by its owner."""

    path: Path
    descriptor: int
    is_mine: bool = True

    def hand_over(self) -> None:
        """Leave the removal of the file to another process, which has the descriptor."""
        self.is_mine = False


@contextmanager
def _locked(path: Path, when_busy: Callable[[], None]) -> Iterator[_Lock]:
    """Hold a lock on the file `path` within the block, and remove it afterwards."""
    while True:
        lock = _Lock(path, os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
        try:
            try:
                fcntl.flock(lock.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                when_busy()
                fcntl.flock(lock.descriptor, fcntl.LOCK_EX)
            if os.fstat(lock.descriptor).st_nlink == 0:  # the file was removed: others would lock a new one
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
    """Provide a directory in memory for the artifact of `path`. A compiled one stays there until this process ends."""
    from radixlm.compile.in_memory import InMemory
    from radixlm.compile.publish import unpublished_directory

    has_room = shutil.disk_usage(path.parent).free > _SMALL_FILES_BYTES
    directory = unpublished_directory(path if has_room else Path(tempfile.gettempdir()) / path.name)
    memory = InMemory(directory, weights_fd, int(_SHARE_OF_MEMORY * available_memory_bytes()))
    has_artifact = False
    try:
        yield memory
        has_artifact = memory.is_used
    finally:
        if has_artifact:
            atexit.register(shutil.rmtree, directory, ignore_errors=True)
        else:
            shutil.rmtree(directory, ignore_errors=True)
            os.close(weights_fd)
