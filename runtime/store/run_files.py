"""The files of ordered runs in a directory: written, taken in again, overwritten and removed.

Knows what one file must be to be a whole run, and in which order it is written so that a crash leaves none that only
looks like one: under its final name with its header last, after everything else is on disk. Which run is wanted, the
store of them knows.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import msgspec

from ..artifact.manifest import KVLayout
from ..errors import StoreError
from .files import Files, read_all, write_all
from .ordered_file import RunHeader, body_of, header_of
from .ordered_layout import OrderedLayout
from .ordered_reader import read_header
from .ordered_run import OrderedRun
from .page_key import PageKey, StoreIdentity, unpack_tokens

_LOGGER = logging.getLogger(__name__)
_NAME: Final = re.compile(r"ordered-([0-9]{10})\.run")
_PAGE_TOKENS_BYTES: Final = 64
_MAX_ZEROS: Final = 1 << 24  # bytes at once


@dataclass(eq=False)
class RunFile:
    """A file that was whole when it was written or taken in."""

    header: RunHeader
    path: Path
    num_bytes: int
    page_keys: tuple[bytes, ...]  # of this model's runs
    last_used: int = 0  # a number that rises with each use

    @property
    def place(self) -> tuple[bytes, bytes]:
        """What is before the run, and its last page: one run is found there."""
        return self.header.parent_key, self.header.key


class RunFiles:
    """Reads and writes whole files; raises OSError where the disk fails."""

    def __init__(self, directory: Path, identity: StoreIdentity, files: Files) -> None:
        self.directory = directory
        self.identity = identity
        self._files = files

    @cached_property
    def kv(self) -> KVLayout:
        """How a page of this model lies in memory.

        Raises:
            StoreError: the identity does not say.
        """
        try:
            return msgspec.json.decode(self.identity.kv_layout, type=KVLayout)
        except msgspec.MsgspecError as error:
            raise StoreError(f"pages of {self.identity.kv_layout!r:.80} cannot be ordered: {error}") from None

    def layout(self, header: RunHeader) -> OrderedLayout:
        """Where in its file everything of a run of this model is."""
        return OrderedLayout(self.kv, header.num_pages * self.kv.page_size, header.chunk_size)

    def numbered(self) -> list[tuple[int, Path]]:
        """What is named like a run, the oldest first."""
        found = {int(match[1]): path for path in self.directory.iterdir() if (match := _NAME.fullmatch(path.name))}
        return sorted(found.items())

    def take_in(self, number: int, path: Path) -> RunFile | None:
        """A file as the run that it says it is; one that is not whole is removed."""
        fd = self._files.open(path)
        try:
            header, num_bytes = read_header(self._files, fd), self._files.size(fd)
        finally:
            self._files.close(fd)
        page_keys = None if header is None or header.number != number else self._page_keys(header, num_bytes)
        if header is None or page_keys is None:
            _LOGGER.warning("%s is no whole run of pages; it is removed, and their exact copies are used", path)
            self._files.unlink(path)
            return None
        return RunFile(header, path, num_bytes, page_keys)

    def write(self, number: int, heads: Sequence[PageKey], run: OrderedRun, layout: OrderedLayout) -> RunFile:
        """A new file, which outlives a loss of power when this returns; none if it raises."""
        header = header_of(run, layout, number, self.identity.digest, heads)
        path = self.directory / f"ordered-{number:010d}.run"
        fd = self._files.open(path, create=True)
        try:
            offset = layout.header_bytes
            for part in body_of(run, layout, header):
                offset += write_all(self._files, fd, part, offset)
            self._files.fdatasync(fd)
            write_all(self._files, fd, [header.encode()], 0)
            self._files.fdatasync(fd)
            self._files.fsync_dir(self.directory)
            self._files.drop_cache(fd, 0, layout.num_bytes)
        except BaseException:
            with contextlib.suppress(OSError):
                self._files.unlink(path)
            raise
        finally:
            self._files.close(fd)
        return RunFile(header, path, layout.num_bytes, tuple(head.key for head in heads))

    def header_on_disk(self, fd: int, layout: OrderedLayout) -> RunHeader | None:
        """What an open file says of itself now; None if that is no whole header."""
        header = bytearray(layout.header_bytes)
        got = read_all(self._files, fd, [header], 0)
        return RunHeader.decode(header) if got == len(header) else None

    def erase(self, file: RunFile) -> None:
        """Overwrite a file with zeros, if it is still there."""
        try:
            fd = self._files.open(file.path)
        except FileNotFoundError:
            return
        try:
            for offset in range(0, file.num_bytes, _MAX_ZEROS):
                write_all(self._files, fd, [bytes(min(_MAX_ZEROS, file.num_bytes - offset))], offset)
            self._files.fdatasync(fd)
        finally:
            self._files.close(fd)

    def remove(self, file: RunFile) -> None:
        """Remove a file; it may be gone already, and who has it open goes on."""
        with contextlib.suppress(FileNotFoundError):
            self._files.unlink(file.path)

    def _page_keys(self, header: RunHeader, num_bytes: int) -> tuple[bytes, ...] | None:
        """The keys of a run's pages, by its tokens; None if it is not what it says."""
        if header.identity_digest != self.identity.digest:
            return ()
        keys = [header.parent_key]
        for first in range(0, len(header.tokens), _PAGE_TOKENS_BYTES):
            token_ids = unpack_tokens(header.tokens[first : first + _PAGE_TOKENS_BYTES])
            keys.append(PageKey.of(self.identity, header.namespace, keys[-1], token_ids, bytes(16)).key)
        try:
            is_whole = self.layout(header).num_bytes == num_bytes
        except StoreError:
            return None
        return tuple(keys[1:]) if is_whole and keys[-1] == header.key else None
