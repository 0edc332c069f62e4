"""List what commands have saved on this disk: compiled models, downloads and stores, with size and last use.

`KINDS` is the table of their kinds. Knows folders and locks, not how any of them is made.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from radixlm.runtime.artifact import cache_dir
from radixlm.runtime.artifact.artifact_use import is_open, last_used, remove_artifact
from radixlm.runtime.artifact.compiled_models import compiled_models, names_of
from radixlm.runtime.artifact.model_names import is_hub, short_name
from radixlm.runtime.errors import SourceError


@dataclass(frozen=True)
class Kept:
    """A compiled model, download or store on this disk.

    Attributes:
        name: its unique name.
        model: name of its model, which several may share.
        last_used: seconds since 1970.
        is_open: a process uses it.
        remove: deletes it.
    """

    kind: str
    name: str
    model: str
    path: Path
    num_bytes: int
    last_used: float
    is_open: bool
    remove: Callable[[], None]

    def is_called(self, name: str) -> bool:
        """Return whether `name` means it: its own name, its model's name, or the model's source.

        >>> about = {"path": Path(), "num_bytes": 0, "last_used": 0.0, "is_open": False, "remove": lambda: None}
        >>> kept = Kept("compiled", "tiny-Q8_0-0123456789abcdef", "tiny-Q8_0", **about)
        >>> kept.is_called("hf:org/tiny:Q8_0"), kept.is_called("tiny-Q8_0"), kept.is_called("tiny")
        (True, True, False)
        """
        try:
            return name in (self.name, self.model) or (not is_hub(self.model) and short_name(name) == self.model)
        except SourceError:  # not a name of the hub
            return False


def compiled() -> Iterator[Kept]:
    """Yield the compiled models in the cache folder."""
    for path in compiled_models():
        name, model = names_of(path)
        use = last_used(path)
        remove = partial(remove_artifact, path)
        yield Kept("compiled", name, model, path, _bytes(path), use, is_open(path), remove)


def downloads() -> Iterator[Kept]:
    """Yield the downloads: models in the hub's cache, which other tools may share, and that of the alias."""
    try:
        from radixlm.compile.sources import downloads
    except ModuleNotFoundError:  # an installation without the compiler
        return
    for name, path in downloads():
        remove = partial(shutil.rmtree, path) if path.is_dir() else path.unlink
        yield Kept("download", name, name, path, _bytes(path), _last_changed(path), False, remove)


def stores() -> Iterator[Kept]:
    """Yield the stores that `radixlm agent` has made."""
    for path in sorted((cache_dir() / "stores").glob("*/")):
        remove = partial(_remove_store, path)
        yield Kept("store", path.name, path.name, path, _bytes(path), _last_changed(path), _is_open(path), remove)


KINDS: Mapping[str, Callable[[], Iterable[Kept]]] = {"compiled": compiled, "download": downloads, "store": stores}


def all_kept(kinds: Iterable[str] = KINDS) -> list[Kept]:
    """Return everything of the given kinds."""
    return [kept for kind in kinds for kept in KINDS[kind]()]


def beyond(kept: Sequence[Kept], limit_bytes: int) -> list[Kept]:
    """Return what to remove so that the rest takes at most `limit_bytes`: the least recently used ones, unless open."""
    excess = sum(each.num_bytes for each in kept) - limit_bytes
    chosen = []
    for each in sorted(kept, key=lambda each: each.last_used):
        if excess <= 0:
            break
        if not each.is_open:
            chosen.append(each)
            excess -= each.num_bytes
    return chosen


def _bytes(path: Path) -> int:
    """Return the size of a file, or of all files in a directory. Links count as nothing."""
    return sum(file.lstat().st_size for file in _files(path) if not file.is_symlink())


def _last_changed(path: Path) -> float:
    return max((max(file.lstat().st_mtime, file.lstat().st_atime) for file in _files(path)), default=0.0)


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else [file for file in path.rglob("*") if file.is_symlink() or file.is_file()]


def _is_open(store: Path) -> bool:
    """Return whether a process uses a store, by trying to take the store's lock."""
    from radixlm.runtime.errors import StoreBusy
    from radixlm.runtime.store.files import StoreLock

    try:
        StoreLock.take(store).release()
    except StoreBusy:
        return True
    return False


def _remove_store(path: Path) -> None:
    """Delete a store's folder, under its lock.

    Raises:
        StoreBusy: a process uses the store.
    """
    from radixlm.runtime.store.files import StoreLock

    lock = StoreLock.take(path)
    try:
        shutil.rmtree(path)
    finally:
        lock.release()
