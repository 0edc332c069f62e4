"""`radixlm warm`: what agents ask first, computed before they ask."""

from __future__ import annotations

from .command import command

__all__ = ["command"]
