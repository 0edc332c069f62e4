"""Tables of what partial loading costs in quality. Knows what the JSON files hold, not how it was measured."""

from __future__ import annotations

from .tables import Json, table


def qualities(results: Json) -> str:
    """A line for each policy and share of rows."""
    rows = [
        [
            f"{row['budget']:.0%}",
            row["policy"],
            f"{row['kl']:.3f} ± {row['kl_error']:.3f}",
            _ratio(row),
            f"{row['agreement']:.0%}",
            f"{row['perplexity']:.4g}",
            f"{row['dropped']:.1%}",
        ]
        for row in results["rows"]
    ]
    full = results["rows"][0]["full_perplexity"]
    header = ["rows", "chosen by", "KL, nats", "of first+recent's", "top-1"]
    header += [f"perplexity (full {full:.4g})", "attention dropped"]
    return table(header, rows)


def needles(results: Json) -> str:
    """The same for answers to what nobody asked before."""
    depths = list(results["rows"][0]["found_by_depth"])
    rows = [
        [
            f"{row['budget']:.0%}",
            row["policy"],
            f"{row['found']:.2f}",
            f"{row['answered'] / row['full_answered']:.2f}",
            *(f"{row['found_by_depth'][depth]:.2f}" for depth in depths),
            f"{row['kl']:.3f} ± {row['kl_error']:.3f}",
            _ratio(row),
        ]
        for row in results["rows"]
    ]
    full = results["rows"][0]
    header = ["rows", "chosen by", f"found (full {full['full_found']:.2f})", "probability over full's"]
    header += [*(f"found at {float(depth):.0%}" for depth in depths), "KL, nats", "of first+recent's"]
    return table(header, rows)


def _ratio(row: Json) -> str:
    """Empty in results of before ratios were kept."""
    return f"{row['kl_ratio']:.2f} ± {row['kl_ratio_error']:.2f}" if "kl_ratio" in row else ""


def scored(results: Json) -> str:
    """Milliseconds of steps."""
    rows = [
        [
            row["step"],
            f"{row['forward_s'] * 1e3:.2f}",
            f"{row['scored_s'] * 1e3:.2f}",
            f"{row['scored_over_forward']:.2f}",
            f"{row['before_over_forward']:.3f}" if "before_over_forward" in row else "",
        ]
        for row in results["rows"]
    ]
    return table(["step", "forward, ms", "scored, ms", "scored over forward", "before over forward"], rows)
