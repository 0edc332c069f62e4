"""Write `bench/RESULTS.md` from `bench/results/*.json`: tables, each with machine, commit and command.

    python -m bench.report

Omits what was not measured.
"""

from __future__ import annotations

from ..machine import ROOT
from ..results import RESULTS
from .page import render


def main() -> None:
    """Write the page of all results, `RESULTS.md`."""
    page = ROOT / "bench" / "RESULTS.md"
    page.write_text(render(RESULTS), encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
