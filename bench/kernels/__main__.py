"""Every kernel by itself, beside the limits of the machine as the same process measures them.

    python -m bench.kernels [--only linear]

GB/s counts what a call must read and write, GOP/s its multiplications and additions (16-bit activations are two 8-bit
products). The share is the time that this takes at the limits over the time it took. Bandwidth is that of reading
memory, measured again around each case, for on a shared machine it varies by half. So more than 100 % means that the
case found its rows in caches, or that the machine gave it more bandwidth than the reading loop just before and after.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict

from radixlm.compile.codegen.targets import Target, find_target

from ..limits import LimitsMeter
from ..results import write_results
from .attention import attention_cases
from .case import Case, compile_cases, measure
from .linear import Arena, linear_cases
from .pages import page_cases
from .rows import row_cases

_READS = 4  # runs of the reading loop around each case


def main() -> None:
    """Measure, print, write `results/kernels.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="kernels whose name begins so")
    parser.add_argument("--target", default="native")
    options = parser.parse_args()
    target = find_target(options.target)
    cases = [case for case in all_cases(target) if case.kernel.startswith(options.only)]
    native = compile_cases(cases, target)
    meter = LimitsMeter(target)
    for name, value in asdict(meter.limits).items():
        print(f"{name:28s} {value:10,.1f}")
    results = []
    for case in cases:
        timed, limits = meter.around(lambda: measure(case, native), runs=_READS)  # noqa: B023
        result = timed.beside(limits)
        results.append(asdict(result))
        print(
            f"{result.kernel:38s} {result.size:24s} {result.seconds * 1e6:11,.1f} us {result.gb_per_s:8.1f} GB/s "
            f"{result.gop_per_s:9,.1f} GOP/s {result.share:7.1%}"
        )
    if not options.only:
        write_results("kernels", {"target": target.name, "limits": asdict(meter.limits), "kernels": results})


def all_cases(target: Target) -> Iterator[Case]:
    """The cases of all kernels."""
    arena = Arena()
    yield from linear_cases(target, arena)
    yield from attention_cases(target)
    yield from row_cases(target, arena)
    yield from page_cases()


if __name__ == "__main__":
    main()
