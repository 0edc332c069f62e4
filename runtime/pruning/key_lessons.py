"""Have what parts are chosen by read when the disk has nothing else to do: probe keys, and which token lies where.

For prefixes whose first asker is better off without a part, because all of that is to be read first; or nobody would
ever have it. Knows parts and the reader, not who waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ..prefix.disk_reader import DiskReader, ReadWork
from .partial_prefix import PartialPrefix

MAX_LESSONS = 8  # that wait


@dataclass(eq=False)
class _Lesson:
    partial: PartialPrefix
    key: bytes  # of the prefix
    namespace: bytes
    is_forgotten: bool = False
    work: ReadWork | None = None


@dataclass
class KeyLessons:
    """`add` what is to be learned, and `advance` between two steps.

    Args:
        close: ends a part; the reader has done with it.
        forget: takes out of memory what is known of a namespace's runs.
    """

    reader: DiskReader
    close: Callable[[PartialPrefix], None]
    forget: Callable[[bytes], None]
    _waiting: deque[_Lesson] = field(default_factory=deque)  # the first may be under way

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_ready(self) -> bool:
        """Whether `advance` would do anything now, if nobody waits for the disk."""
        if not self._waiting:
            return False
        work = self._waiting[0].work
        return self.reader.queued_bytes == 0 if work is None else work.is_done

    @property
    def is_over(self) -> bool:
        """Whether one has ended, whoever waits."""
        return bool(self._waiting) and (work := self._waiting[0].work) is not None and work.is_done

    def add(self, partial: PartialPrefix, key: bytes, namespace: bytes) -> bool:
        """Take a part of the prefix `key`, to be closed here; False: too many wait, or the same does."""
        if len(self._waiting) >= MAX_LESSONS or any(lesson.key == key for lesson in self._waiting):
            return False
        self._waiting.append(_Lesson(partial, key, namespace))
        return True

    def advance(self) -> None:
        """End the lesson that is over, or begin one: nobody waits for the disk."""
        if not self.is_ready:
            return
        lesson = self._waiting[0]
        if lesson.work is None:
            lesson.work = self.reader.submit_work(lesson.partial.learn, num_bytes=lesson.partial.bytes_to_learn)
            return
        self._waiting.popleft()
        self.close(lesson.partial)
        if lesson.is_forgotten:
            self.forget(lesson.namespace)

    def end(self, namespace: bytes | None = None) -> None:
        """Whatever is learned of a namespace, or of all, is not to be known."""
        for lesson in self._waiting:
            lesson.is_forgotten |= namespace is None or lesson.namespace == namespace

    def close_all(self) -> None:
        """Close all files; the reader has ended."""
        while self._waiting:
            self.close(self._waiting.popleft().partial)
