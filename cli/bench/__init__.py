"""`radixlm bench`: measure the speed of a model, compared with the limits of this machine."""

from __future__ import annotations

from .command import command

__all__ = ["command"]
