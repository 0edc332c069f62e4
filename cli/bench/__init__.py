"""`radixlm bench`: how fast a model is here, beside what the machine can do at most."""

from __future__ import annotations

from .command import command

__all__ = ["command"]
