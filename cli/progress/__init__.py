"""Show the progress of a compile on stderr."""

from .display import ProgressDisplay

__all__ = ["ProgressDisplay"]
