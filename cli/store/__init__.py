"""`radixlm store`: what is on disk, whether it is right, and how a prompt's pages are carried elsewhere."""

from __future__ import annotations

from .commands import command

__all__ = ["command"]
