"""Keep a server's memory flat: all its threads allocate from one arena of glibc's.

By default glibc gives each thread that meets another one an arena of its own, up to eight for each processor, and what
is freed in one is not used by others: under load a server of 40 worker threads grew by 9 MB a minute, with one arena
by nothing. The price is a lock that threads wait for when they allocate at once: here one thread computes, and the
others tokenize now and then. Knows glibc; elsewhere it does nothing.
"""

from __future__ import annotations

import ctypes

_M_ARENA_MAX = -8  # of <malloc.h>


def share_one_arena() -> bool:
    """For the whole process, and so for a command to choose, not for a library; whether the C library heard it.

    Threads that are running keep what they have: call it before there are any.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(_M_ARENA_MAX, 1) == 1
