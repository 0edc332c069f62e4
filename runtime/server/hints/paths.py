"""Find the endpoint that a client probably meant by a path that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_MIN_RATIO = 0.8  # of difflib; lower ones are other words


def near_path(path: str, known: Iterable[str]) -> str | None:
    """Return the endpoint that is nearest to a path, or None: one that the path ends with, or that ends with it,
    or the only one that begins with it, or one with a few other letters.

    >>> known = ["/v1/chat/completions", "/v1/completions", "/v1/models"]
    >>> near_path("/v1/v1/chat/completions", known), near_path("/completions", known)
    ('/v1/chat/completions', '/v1/completions')
    >>> near_path("/v1/chat/completion/", known), near_path("/", known), near_path("/favicon.ico", known)
    ('/v1/chat/completions', None, None)
    """
    path = path.lower().rstrip("/")
    if not path:
        return None
    known = sorted(known, key=len)
    if longer := [each for each in known if each.endswith(path)]:
        return longer[0]
    if shorter := [each for each in known if path.endswith(each)]:
        return shorter[-1]
    inner = [each for each in known if each.startswith(f"{path}/")]
    if len(inner) == 1:
        return inner[0]
    return next(iter(difflib.get_close_matches(path[:200], known, n=1, cutoff=_MIN_RATIO)), None)
