"""How many values JSON has, counted while its bytes come: decoding them holds the interpreter, the longer the more.

Knows quotes, commas and brackets, not whether they are JSON.
"""

from __future__ import annotations

_BORDERS = b",[{"  # a value that is not the first of an array or an object stands behind one of these


class JSONSize:
    """Counts one text, which comes in pieces of any length.

    >>> size = JSONSize()
    >>> for piece in (b'{"a,b": [1, 2', b', "[,]"]}'):
    ...     size.add(piece)
    >>> size.num_values  # the object, the array, 2 and the text
    4
    """

    def __init__(self) -> None:
        self.num_values = 0
        self._is_in_text = False
        self._is_escaped = False  # a backslash ended the last piece

    def add(self, piece: bytes) -> None:
        """Count the values that begin in the next piece."""
        if self._is_escaped and piece:
            piece, self._is_escaped = piece[1:], False
        if b"\\" in piece:  # `\\"` ends a text, `\"` does not
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
            self._is_escaped = piece.endswith(b"\\")
        parts = piece.split(b'"')
        outside = b" ".join(parts[self._is_in_text :: 2])
        self.num_values += len(outside) - len(outside.translate(None, _BORDERS))
        self._is_in_text ^= len(parts) % 2 == 0
