"""Keep a server's memory use constant: all its threads allocate from one arena of glibc's.

By default glibc gives threads that compete for an arena new ones, up to eight per CPU. Memory freed in one arena is not
used by others. Under load a server of 40 worker threads grew by 9 MB a minute, with one arena by nothing. The price is
a lock for which threads wait if they allocate at once. Here one thread computes, and the others tokenize now and then.
Knows glibc; elsewhere it does nothing.
"""

from __future__ import annotations

import ctypes

_M_ARENA_MAX = -8  # from <malloc.h>


def share_one_arena() -> bool:
    """Make all threads of the process share one arena; return whether the C library supports that.

    For commands, not for libraries. Running threads keep their arenas: call it before starting any.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(_M_ARENA_MAX, 1) == 1
