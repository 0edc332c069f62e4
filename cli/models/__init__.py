"""`radixlm models`, and the commands that download, list and remove models: `pull`, `run`, `list` and `rm`."""

from __future__ import annotations

from .families import command

__all__ = ["command"]
