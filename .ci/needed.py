"""Print the pins of a lock that serving artifacts needs. Run where the lock is installed.

Usage: .ci/needed.py LOCK
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import requires
from pathlib import Path

from distributions import ROOT, split
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

NOT_LOADED = {"huggingface-hub"}  # tokenizers downloads with it, and works without it


def needed(requirements: Iterable[str]) -> set[str]:
    """Return the names of distributions that `requirements` need, directly or through others."""
    found: set[str] = set()
    ahead = list(requirements)
    while ahead:
        requirement = Requirement(ahead.pop())
        name = canonicalize_name(requirement.name)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and name not in found | NOT_LOADED:
            found.add(name)
            ahead += requires(name) or ()
    return found


if __name__ == "__main__":
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    names = needed(split(declared["project"]["dependencies"], declared["tool"]["radixlm"]["compiler"])[0])
    for pin in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines():
        if canonicalize_name(pin.partition("==")[0]) in names:
            print(pin)
