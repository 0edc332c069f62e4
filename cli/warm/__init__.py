"""`radixlm warm`: prefill prompts into a store, so that first requests are cache hits."""

from __future__ import annotations

from .command import command

__all__ = ["command"]
