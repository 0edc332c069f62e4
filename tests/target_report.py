"""Which compilation targets a test run executed, and which not and why: lines for pytest's closing summary.

A test names its target in its parameters. Without these lines a machine without AVX-512 skips every test of such a
target, and its run looks like one in which they passed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

# Features that neither qemu-user nor unicorn, which is qemu's, emulates. Bochs has AVX-512, but it boots a whole PC.
NOT_EMULATED = ("avx512", "avx_vnni")


def target_lines(
    executed: Iterable[str], skipped: Iterable[str], targets: Mapping[str, Iterable[str]], features: Iterable[str]
) -> list[str]:
    """Return a line of what was executed, and one for each target that was not; none where no test names a target.

    Args:
        executed: names of the tests that ran, with their parameters.
        skipped: names of those that were skipped.
        targets: the features that each target needs.
        features: what this machine's CPU has.
    """
    ran, left_out = _count(executed, targets), _count(skipped, targets)
    if not ran and not left_out:
        return []
    has = set(features)
    missing = {name: [feature for feature in needed if feature not in has] for name, needed in targets.items()}
    # a test can name a target without running it, so what the CPU lacks decides first
    done = [name for name in targets if ran[name] and not missing[name]]
    lines = ["executed: " + (", ".join(f"{name} ({ran[name]} tests)" for name in done) or "none")]
    for name in targets:
        if name in done or not (ran[name] or left_out[name]):
            continue
        reason = f"this CPU lacks {', '.join(missing[name])}" if missing[name] else "all its tests were skipped"
        if any(feature.startswith(NOT_EMULATED) for feature in missing[name]):
            reason += "; no emulator that Debian or PyPI has for programs runs it"
        lines.append(f"NOT executed: {name} ({left_out[name]} tests skipped): {reason}")
    return lines


def names_of(test: str, targets: Iterable[str]) -> set[str]:
    """Return the targets that a test's parameters name.

    >>> names_of("test_x.py::test_rows[kind=q4-target=x86-64-v3-vnni]", ["x86-64", "x86-64-v3", "x86-64-v3-vnni"])
    {'x86-64-v3-vnni'}
    """
    parameters = test.partition("[")[2]
    longest_first = sorted(targets, key=len, reverse=True)
    return set(re.findall("|".join(map(re.escape, longest_first)), parameters))


def _count(tests: Iterable[str], targets: Iterable[str]) -> Counter[str]:
    names = list(targets)
    return Counter(name for test in tests for name in names_of(test, names))
