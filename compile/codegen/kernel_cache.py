"""Keep compiled objects on disk, so that a kernel is compiled once per machine.

Knows keys and bytes, not TVM.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from radixlm.runtime.artifact import cache_dir

_LIMIT_BYTES = 512 << 20  # about 25,000 kernels
_DIGEST_BYTES = 32
_USED_AGAIN_S = 3600.0  # the recorded time of last use is at most this old
_ABANDONED_S = 3600.0  # a temporary file this old was left by a killed process
_PRUNED_AGAIN_S = 3600.0  # an hour of compiling writes a few hundred megabytes at most
_PRUNED = ".pruned"  # the file whose modification time is the time of the last prune
_KEY = re.compile(r"[0-9a-f]{16,64}")
_PREFIX = ".new-"  # of temporary files
_TEMPORARY = re.compile(re.escape(_PREFIX) + ".*")


@dataclass(frozen=True)
class CacheStats:
    """Number of objects in a cache, and their bytes on disk."""

    num_objects: int
    num_bytes: int


@dataclass(frozen=True)
class KernelCache:
    """A folder of objects by key, shared between processes without locks.

    Each file is written whole, then renamed. It holds the SHA-256 digest of an object, then the object. A damaged file
    counts as missing. Disk errors make the cache slower, never wrong: `get` returns None and `put` does nothing.

    >>> import tempfile
    >>> cache = KernelCache(Path(tempfile.mkdtemp()))
    >>> cache.put("0123456789abcdef", b"object")
    >>> cache.get("0123456789abcdef")
    b'object'

    Attributes:
        limit_bytes: size to which `prune` shrinks the cache.
    """

    directory: Path
    limit_bytes: int = _LIMIT_BYTES

    @classmethod
    def of_user(cls) -> KernelCache:
        """Return the user's cache: `$RADIXLM_KERNEL_CACHE` if it is set, or `$XDG_CACHE_HOME/radixlm/kernels`."""
        return cls(Path(os.environ.get("RADIXLM_KERNEL_CACHE") or cache_dir() / "kernels"))

    def get(self, key: str) -> bytes | None:
        """Return the object of `key`, or None if it is missing or damaged."""
        path = self._path(key)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        content = data[_DIGEST_BYTES:]
        if hashlib.sha256(content).digest() != data[:_DIGEST_BYTES]:
            return None
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < time.time() - _USED_AGAIN_S:
                os.utime(path)
        return content

    def put(self, key: str, content: bytes) -> None:
        """Store an object; if two processes store the same key, the later one wins."""
        path = self._path(key)
        with contextlib.suppress(OSError):
            self.directory.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(prefix=_PREFIX, dir=self.directory)
            try:
                with open(descriptor, "wb") as file:
                    file.write(hashlib.sha256(content).digest() + content)
                os.rename(temporary, path)
            except BaseException:
                os.unlink(temporary)
                raise

    def stats(self) -> CacheStats:
        """Return the number of objects and their bytes."""
        sizes = [size for _, _, size in self._files(_KEY)]
        return CacheStats(len(sizes), sum(sizes))

    def prune(self) -> CacheStats:
        """Remove the least recently used objects beyond `limit_bytes`. Returns the removed objects' statistics."""
        for written, path, _ in list(self._files(_TEMPORARY)):
            if written < time.time() - _ABANDONED_S:
                _is_removed(path)
        objects = sorted(self._files(_KEY))
        excess = sum(size for _, _, size in objects) - self.limit_bytes
        num_removed = num_bytes = 0
        for _, path, size in objects:
            if num_bytes >= excess:
                break
            if _is_removed(path):
                num_removed, num_bytes = num_removed + 1, num_bytes + size
        return CacheStats(num_removed, num_bytes)

    def prune_hourly(self) -> CacheStats:
        """Prune unless a process did so within the hour, because listing 20,000 objects takes a third of a second."""
        stamp = self.directory / _PRUNED
        with contextlib.suppress(OSError):
            if 0 <= time.time() - stamp.stat().st_mtime < _PRUNED_AGAIN_S:
                return CacheStats(0, 0)
        with contextlib.suppress(OSError):
            stamp.touch()
        return self.prune()

    def clear(self) -> CacheStats:
        """Remove every object. Returns the removed objects' statistics."""
        return KernelCache(self.directory, limit_bytes=0).prune()

    def _path(self, key: str) -> Path:
        """Return the path of a key's file."""
        assert _KEY.fullmatch(key), f"{key!r} is no key"
        return self.directory / key

    def _files(self, pattern: re.Pattern[str]) -> Iterator[tuple[float, Path, int]]:
        """Yield time of last use, path and bytes of the files whose names match.

        Other processes may remove some of them meanwhile.
        """
        with contextlib.suppress(OSError):
            for entry in os.scandir(self.directory):
                with contextlib.suppress(OSError):
                    if pattern.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                        status = entry.stat(follow_symlinks=False)
                        yield status.st_mtime, Path(entry.path), status.st_size


def _is_removed(path: Path) -> bool:
    """Remove a file. Returns whether this process removed it; another may have, or the folder is read-only."""
    try:
        path.unlink()
    except OSError:
        return False
    return True
