"""`radixlm explain-cache`: what each turn of a conversation finds cached, and why not more."""

from __future__ import annotations

from .command import command

__all__ = ["command"]
