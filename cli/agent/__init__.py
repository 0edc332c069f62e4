"""`radixlm agent`: serve a model to a coding agent, and write the agent's settings."""

from __future__ import annotations

from .command import command

__all__ = ["command"]
