"""Measure every kernel alone, compared with the machine's limits as measured in the same process.

    python -m bench.kernels [--only linear]

GB/s counts what a call must read and write, GOP/s its multiplications and additions (16-bit activations are two 8-bit
products). The share is the time that this takes at the limits divided by the time it took. Bandwidth is that of reading
memory, measured again around each case, because on a shared machine it varies by half. So more than 100 % means that
the case found its rows in caches, or that the machine gave it more bandwidth than the reading loop just before and
after.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from radixlm.compile.codegen.targets import Target, find_target

from ..limits import LimitsMeter
from ..options import read_options
from ..report.page import publish
from .attention import attention_cases
from .case import Case, compile_cases, measure
from .linear import Arena, linear_cases
from .pages import page_cases
from .rows import row_cases

_READS = 4  # runs of the reading loop around each case


def main() -> None:
    """Measure, print, write `results/kernels.json` unless only some kernels are measured."""
    options = read_options(__doc__, only="", target="native")
    target = find_target(options.target)
    cases = [case for case in all_cases(target) if case.kernel.startswith(options.only)]
    native = compile_cases(cases, target)
    meter = LimitsMeter(target)
    results = []
    for case in cases:
        timed, limits = meter.around(lambda: measure(case, native), runs=_READS)  # noqa: B023
        results.append(asdict(timed.result(limits)))
        print({name: value for name, value in results[-1].items() if options.only or name == "kernel"}, flush=True)
    if not options.only:
        publish("kernels", {"target": target.name, "limits": asdict(meter.limits), "kernels": results})


def all_cases(target: Target) -> Iterator[Case]:
    """Yield the cases of all kernels."""
    arena = Arena()
    yield from linear_cases(target, arena)
    yield from attention_cases(target)
    yield from row_cases(target, arena)
    yield from page_cases()


if __name__ == "__main__":
    main()
