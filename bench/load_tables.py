"""Tables of what impatient clients did to a server. Knows what `load.json` holds, not how it was found."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .tables import Json, table

_MIB = 1 << 20


def loads(results: Json) -> str:
    """One column for each run: what became of the requests, how fast, and what was wrong afterwards."""
    runs = list(results["runs"].values())
    header = ["", *(f"{run['model']}, {run['num_streams']} streams" for run in runs)]
    return table(header, [[title, *(cell(run) for run in runs)] for title, cell in _ROWS.items()])


def refusals(results: Json) -> str:
    """How often each kind of request was refused, by status."""
    runs = list(results["runs"].values())
    kinds = sorted({kind for run in runs for kind in run["refused"]})
    header = ["status and reason", *(f"{run['model']}, {run['num_streams']} streams" for run in runs)]
    return table(header, [[kind, *(f"{run['refused'].get(kind, 0):,}" for run in runs)] for kind in kinds])


def origins(results: Json) -> str:
    """When and of what each run was."""
    lines = [
        f"{run['model']}, {run['num_streams']} streams: `{run['origin']['command']}`, commit "
        f"{run['origin']['commit']}, {run['origin']['date']}."
        for run in results["runs"].values()
    ]
    return "  \n".join(lines)


def _seconds(times: Mapping[str, float]) -> str:
    return f"{_time(times['p50'])} / {_time(times['p99'])}"


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


def _survivors(run: Json) -> str:
    same = run["num_compared"] - run["num_different_survivors"]
    return f"{same} of {run['num_compared']} ({run['num_greedy_compared']} greedy)"


def _memory(run: Json) -> str:
    memory = run["memory"]
    sizes = " → ".join(f"{memory[name] / _MIB:.1f}" for name in ("warm_bytes", "end_bytes"))
    return f"{sizes}, {memory['bytes_per_s'] * 60 / _MIB:+.2f} a minute"


def _wrong(run: Json) -> str:
    count = run["num_faults"] + run["num_hung"] + run["num_failed"]
    return "none" if not count else f"**{count}**"


_ROWS: Mapping[str, Callable[[Json], str]] = {
    "seconds": lambda run: f"{run['seconds']:.0f}",
    "KV pool, tokens": lambda run: f"{run['num_pages'] * 16:,}",
    "answered": lambda run: f"{sum(run['answered'].values()):,}",
    "refused as they should be": lambda run: f"{sum(run['refused'].values()):,}",
    "of them for a full queue": lambda run: f"{run['refused'].get('429 queue full', 0):,}",
    "clients that left": lambda run: f"{sum(run['left'].values()):,}",
    "of them in mid-stream": lambda run: f"{run['left'].get('leave in mid-stream', 0):,}",
    "wrong, failed or hung": _wrong,
    "survivors the same alone": _survivors,
    "preemptions": lambda run: f"{run['num_preemptions']:,}",
    "evicted pages": lambda run: f"{run['num_evicted_pages']:,}",
    "lost pages": lambda run: str(sum(run["leaks"].values())),
    "tokens a second": lambda run: f"{run['tokens_per_s']:.0f}",
    "prompt tokens from the cache": lambda run: f"{run['cached_share']:.0%}",
    "first token, p50 / p99": lambda run: _seconds(run["first_token_s"]),
    "between tokens, p50 / p99": lambda run: _seconds(run["between_tokens_s"]),
    "`/health`, p50 / p99": lambda run: _seconds(run["health_s"]),
    "memory warm → end, MiB": _memory,
    "all held": lambda run: "yes" if run["is_met"] else "**no**",
}
