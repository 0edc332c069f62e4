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
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click
from radixlm.runtime.artifact import MANIFEST, Artifact, cache_dir
from radixlm.runtime.artifact.cpu import cpu_features
from radixlm.runtime.errors import ArtifactError, ArtifactNotFound, CompileError

if TYPE_CHECKING:
    from radixlm.compile.in_memory import InMemory

ALIAS, HUB = "smollm2", "hf:"  # what is downloaded, as `compile/sources` has it
SUFFIX = ".radixlm"
_MODEL_FILES = {".json", ".safetensors", ".model", ".jinja", ".bin"}  # of a directory
_PACKAGE = Path(__file__).resolve().parent.parent
_COMPILER = ("compile", "tokenizer_fix", "runtime/artifact")
_KEY_DIGITS = 16
_RADIXLM = (sys.executable, "-P", "-c", "from radixlm.cli.main import main; main()")
_SHARE_OF_MEMORY = 0.6  # of what is available, for weights in memory: unlike a mapped file they cannot be dropped
_SMALL_FILES_BYTES = 64 << 20  # at most, all but the weights

Say = Callable[[str], None]


def artifact_of(
    model: str,
    options: Mapping[str, str],
    say: Say | None = None,
    meanwhile: AbstractContextManager[None] | None = None,
    *,
    written: Callable[[Path], None] | None = None,
    kept: Say | None = None,
    on_disk: bool = False,
) -> Path:
    """Return the artifact of `model`. It is compiled first if the cache folder has none of this source.

    A fresh artifact is in memory: this process can open it until it ends. At idle priority its weights are compared
    with the source, and it is written to the cache folder. Should they differ, this process ends by SIGTERM.

    Args:
        model: an artifact, or what `radixlm compile` takes.
        options: of `radixlm compile`, by their names; only where `model` is no artifact.
        say: gets the lines of the progress; without it the progress goes to the error stream.
        meanwhile: entered while the model is compiled, or another process is waited for that compiles it.
        written: gets the path of a fresh artifact that is complete, while its logits are compared. Nothing that is
            computed with it may be used before this function has returned.
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
    name, key = _name(model), _key(model, options)
    path = cache_dir() / "artifacts" / f"{name}-{key}{SUFFIX}"
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
            if on_disk:
                _compile([*arguments, "--", model], [lock.descriptor], say)
                return path
            with _in_memory(path) as memory:
                status = _Pipe()
                numbers = (memory.weights_fd, memory.limit_bytes, status.writer.fileno())
                place = ("--in-memory", str(memory.directory), *map(str, numbers), str(lock.path))
                descriptors = (lock.descriptor, memory.weights_fd)
                tell_written = None if written is None else partial(written, memory.directory)
                process = _compile([*arguments, *place, "--", model], descriptors, say, status, tell_written)
                if not memory.is_used:  # too large for the memory
                    return path
                lock.hand_over()
                _watch(process, status.reader, kept)
                return memory.directory
    except OSError as error:
        raise CompileError(
            f"{path.parent} cannot be written ({error.strerror or error}); set XDG_CACHE_HOME to another folder, or "
            f"compile to a place of your own: radixlm compile {model} -o {name}{SUFFIX}"
        ) from error


def is_artifact(model: str) -> bool:
    """Whether `model` is one, or is called like one.

    Raises:
        ArtifactNotFound: there is nothing at that path.
    """
    path = Path(model)
    if model.endswith(SUFFIX) or (path / MANIFEST).is_file():
        return True
    if model == ALIAS or model.startswith(HUB) or path.exists():
        return False
    raise ArtifactNotFound(
        f"{model} does not exist; give an artifact, a .gguf file, a model directory, hf:ORG/NAME, or the alias {ALIAS}"
    )


def _name(model: str) -> str:
    """
    >>> _name("hf:Qwen/Qwen2.5-0.5B@main"), _name("models/my model.Q4_K_M.gguf")
    ('Qwen2.5-0.5B', 'my_model.Q4_K_M')
    """
    if model.startswith(HUB):
        last = model.removeprefix(HUB).partition("@")[0].rpartition("/")[2]
    else:
        last = Path(model).resolve().name.removesuffix(".gguf")
    return re.sub(r"[^A-Za-z0-9._-]", "_", last)[:100] or "model"


def _key(model: str, options: Mapping[str, str]) -> str:
    """A digest of all that decides what is compiled: source, options, compiler and processor.

    Files are known by path, size and time. What is downloaded is known by its name: a model of the hub stays the one
    that was compiled first, until another revision is named.
    """
    source = model if model == ALIAS or model.startswith(HUB) else _files(Path(model))
    versions = [importlib.metadata.version(name) for name in ("radixlm", "apache-tvm")]
    decides = [source, sorted(options.items()), versions, _digest_of_compiler(), sorted(cpu_features())]
    return hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:_KEY_DIGITS]


def _files(path: Path) -> list[tuple[str, int, int]]:
    """Path, size in bytes and time in nanoseconds of a file, or of the files of a directory that may be a model's."""
    path = path.resolve()
    files = sorted(file for file in path.iterdir() if file.suffix in _MODEL_FILES) if path.is_dir() else [path]
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
def _in_memory(path: Path) -> Iterator[InMemory]:
    """A place in memory for the artifact of `path`. What a compile left there stays until this process ends."""
    from radixlm.compile.in_memory import InMemory
    from radixlm.compile.publish import unpublished_directory
    from radixlm.runtime.engine.kv_cache_size import available_memory_bytes

    has_room = shutil.disk_usage(path.parent).free > _SMALL_FILES_BYTES
    directory = unpublished_directory(path if has_room else Path(tempfile.gettempdir()) / path.name)
    weights_fd = os.memfd_create("radixlm-weights")
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


class _Pipe:
    """Both ends of a pipe; lines are read one by one, and no more than a line at once."""

    def __init__(self) -> None:
        reader, writer = os.pipe()
        self.reader = os.fdopen(reader, "rb", buffering=0)
        self.writer = os.fdopen(writer, "wb", buffering=0)


def _watch(process: subprocess.Popen[str], status: BinaryIO, kept: Say | None) -> None:
    """Have a thread tell `kept` whether the artifact is in the cache folder. Wrong weights end this process, which is
    told without `kept`, too."""
    from radixlm.compile.in_memory import NOT_KEPT, WRONG

    def watch() -> None:
        with status:
            said = status.readline().decode().rstrip()
        said = said or f"{NOT_KEPT}: the process that writes it to the disk was killed"
        process.wait()
        if said.startswith(WRONG):
            (kept or partial(click.echo, err=True))(f"Error: {said.removeprefix(WRONG).lstrip()}")
            os.kill(os.getpid(), signal.SIGTERM)
        elif kept is not None:
            kept(said)

    threading.Thread(target=watch, name="radixlm-kept", daemon=True).start()


def _compile(
    arguments: Sequence[str],
    descriptors: Sequence[int],
    say: Say | None,
    status: _Pipe | None = None,
    written: Callable[[], None] | None = None,
) -> subprocess.Popen[str]:
    """Run `radixlm compile` to its end, or until it says that the artifact can be used.

    Until then it ends with this process, but for a SIGKILL.

    Args:
        descriptors: which it has while it runs.
        status: through which it says that.
        written: called when it says that the artifact is complete.
    """
    from radixlm.compile.in_memory import WRITTEN

    debug = click.get_current_context().find_root().params.get("debug")
    command = [*_RADIXLM, *(["--debug"] if debug else []), "compile", *arguments]
    # In a session of its own Ctrl-C reaches it once, from here, and not in the midst of its tidying up.
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=None if say is None else subprocess.PIPE,
        text=True,
        pass_fds=(*descriptors, *([] if status is None else [status.writer.fileno()])),
        start_new_session=True,
    )
    said, is_ready = "", False
    try:
        if status is not None:
            status.writer.close()
        for line in process.stderr or ():
            said = line.rstrip()
            if say is not None and not said.startswith("Error: "):
                say(said)
        while status is not None and (told := status.reader.readline().decode().rstrip()):
            if told != WRITTEN:
                is_ready = True
                break
            if written is not None:
                written()
        code = 0 if is_ready else process.wait()
    finally:
        if not is_ready and process.poll() is None:
            process.terminate()
            process.wait()
    if code < 0:
        raise CompileError(f"compiling was killed by signal {-code}; if memory was short, compile on a larger machine")
    if code and say is not None:
        raise CompileError(said.removeprefix("Error: "))
    if code:
        raise click.exceptions.Exit(code)
    return process
