"""`radixlm explain-cache`: show how much of each turn's prompt is cached, and why the cached prefix ends."""

from __future__ import annotations

from .command import command

__all__ = ["command"]
