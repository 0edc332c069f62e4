"""Compile a model, and print a report: python examples/compile.py smollm2 smollm2.radixlm"""

from __future__ import annotations

import sys

from radixlm.compile import Progress, compile_model


def show(progress: Progress) -> None:
    """Print one line per finished stage."""
    if progress.done == progress.total:
        print(f"{progress.fraction:4.0%} {progress.stage}")


def main(source: str, artifact: str) -> None:
    print(compile_model(source, artifact, quantize="keep", target="native", progress=show))


if __name__ == "__main__":
    main(*sys.argv[1:])
