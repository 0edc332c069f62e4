"""Write an agent's file, once: what was there before is kept beside it.

Knows bytes and paths, not what agents read.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_file(path: Path, text: str) -> Path | None:
    """Let `path` hold `text`, readable by its owner alone, for an API key may be in it.

    What held another text is renamed to the first free one of `NAME.bak`, `NAME.bak.1` and so on.

    Returns:
        The backup; None if there is none, for there was no file, or one that holds this text already.

    Raises:
        OSError: it cannot be written; nothing was changed then.
    """
    if path.is_file() and path.read_text(encoding="utf-8", errors="replace") == text:
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, written = tempfile.mkstemp(prefix=path.name, dir=path.parent)  # with mode 0600
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        backup = _kept(path) if path.exists() else None
        os.replace(written, path)
    except BaseException:
        Path(written).unlink(missing_ok=True)
        raise
    return backup


def _kept(path: Path) -> Path:
    """A second name of what `path` holds."""
    number = 0
    while True:
        backup = path.with_name(f"{path.name}.bak.{number}" if number else f"{path.name}.bak")
        try:
            os.link(path, backup)
            return backup
        except FileExistsError:
            number += 1
