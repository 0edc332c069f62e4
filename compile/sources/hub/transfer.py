"""Fetch one large file over HTTP: resume an interrupted download, and keep the file only if its sha256 is right.

Knows bytes and digests; HTTP, redirects and retries are the hub library's.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.constants import MAX_HTTP_DOWNLOAD_SIZE
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import WeakFileLock, build_hf_headers  # type: ignore[attr-defined]
from huggingface_hub.utils.tqdm import tqdm
from radixlm.runtime.errors import CorruptSource

MAX_BYTES = int(MAX_HTTP_DOWNLOAD_SIZE)  # largest file that the hub sends in one response
_TRIES = 2  # if the digest is wrong, a second try begins anew

Downloaded = Callable[[int, int], None]  # of the received bytes, and the total


@dataclass(frozen=True)
class Transfer:
    """A file of `size` bytes that is downloaded to `path`; until it is verified, its name ends in .partial.

    Processes that fetch the same file take turns by `lock`, which is the library's own.
    """

    url: str
    path: Path
    lock: Path
    size: int
    sha256: str

    def run(self, progress: Downloaded | None = None) -> None:
        """Download the file to `path`; an existing one is only verified, and fetched again if it is wrong.

        Raises:
            CorruptSource: the fetched file has a wrong digest, twice.
            Exception: any error of the library; the received bytes stay for the next try.
        """
        if not self._exists_verified():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.lock.parent.mkdir(parents=True, exist_ok=True)
            with WeakFileLock(self.lock):
                if not self._exists_verified():  # another process may have fetched it meanwhile
                    self._fetch(self.path.with_name(self.path.name + ".partial"), progress)
        if progress is not None:
            progress(self.size, self.size)

    def _exists_verified(self) -> bool:
        """Return whether the file exists with the right digest; remove a wrong one."""
        if not self.path.is_file():
            return False
        if wrong_digest(self.path, self.sha256) is None:
            return True
        self.path.unlink()
        return False

    def _fetch(self, partial: Path, progress: Downloaded | None) -> None:
        """Download the file to `partial`, verify it, and rename it to `path`; a second try starts from nothing.

        Raises:
            CorruptSource: both tries have a wrong digest.
        """
        found = None
        for _ in range(_TRIES):
            self._resume(partial, progress)
            found = wrong_digest(partial, self.sha256)
            if found is None:
                partial.replace(self.path)
                return
            partial.unlink()
        raise CorruptSource(
            f"has sha256 {str(found)[:16]}..., the hub says {self.sha256[:16]}...; fetch it again, or by another way"
        )

    def _resume(self, partial: Path, progress: Downloaded | None) -> None:
        """Download the rest of the file, from the end of the partial one on."""
        with partial.open("ab") as file:
            if file.tell() > self.size:
                file.truncate(0)
            bar = None if progress is None else reporting_bar(progress)
            headers = build_hf_headers() | {"Accept-Encoding": "identity"}
            begin = file.seek(0, io.SEEK_END)
            http_get(self.url, file, resume_size=begin, headers=headers, expected_size=self.size, tqdm_class=bar)


def wrong_digest(path: Path, sha256: str) -> str | None:
    """Return the sha256 of a file if it is not the expected one; None if it is."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    return None if found == sha256 else found


def reporting_bar(progress: Downloaded) -> type[tqdm]:
    """Return a class of progress bars that report bytes to `progress`, and draw nothing.

    The hub counts the same bytes on two bars, as received and as written to disk, and some transports advance only one.
    A third bar counts files.
    """
    done: dict[str, int] = {}  # bytes, by the bar's description at its creation

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            self._name = str(options.get("desc"))
            super().__init__(*args, **options | {"file": io.StringIO(), "disable": False})  # type: ignore[no-untyped-call]

        def display(self, msg: str | None = None, pos: int | None = None) -> bool:
            if self.unit == "B" and self.total:
                done[self._name] = int(self.n)
                progress(max(done.values()), int(self.total))
            return True

    return Bar
