"""`radixlm agent`: a server for one coding agent, and that agent's configuration."""

from __future__ import annotations

from .command import command

__all__ = ["command"]
