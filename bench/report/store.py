"""Sections on first tokens of prompts that are on disk. Knows the contents of the JSON files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from radixlm.runtime.artifact.manifest import PAGE_SIZE

from .partial import WORKLOADS
from .tables import Cell, Json, each, met, origin, table

MIN_GAIN = 2.5  # a quarter should be so many times faster than all, where the disk is the bottleneck
BOTTLENECK = 0.75  # the disk is the bottleneck if its bytes take this share of a full load
MAX_LOSS = 1.05  # a request's time may be this multiple of the best exact way
_RECOMPUTE, _FULL, _QUARTER = "recompute", "full", "25%"
_WAYS = {
    _FULL: "all loaded",
    "planner": "as planned",
    "50%": "50%",
    _QUARTER: "25%",
    "25% always": "25% always",
}
_DISKS = {"25": "25 MB/s", "50": "50 MB/s", "100": "100 MB/s", "500": "500 MB/s", "real": "the real one"}


def restart(results: Json) -> Iterator[str]:
    """Yield seconds by disk, and the ratio of the planner's choice to the better of loading and computing."""
    rounds = results["rounds"]
    yield "## The first token after a restart"
    yield (
        f"Seconds from a prompt of {results['num_tokens']:,} tokens to its first token, medians of {len(rounds)} "
        "rounds: computed without a store; loaded from a disk in full; and as the planner decides, which measures disk "
        "and model. A fresh engine and an empty page cache each time; disks other than the real one are throttled by a "
        "token bucket. All replies are the same, to the last bit of their logprobs."
    )

    def seconds(name: str) -> float:
        return median(float(each[name]["seconds"]) for each in rounds)

    computed = seconds("recompute")
    rows = []
    for disk in dict.fromkeys(name.split()[0] for name in rounds[0] if name != "recompute"):
        load, planned = seconds(f"{disk} load"), seconds(f"{disk} planner")
        row = {"disk": disk if disk == "real" else f"{disk} MB/s", "speed": disk, "computed": computed}
        row |= {"load": load, "planned": planned, "better": planned / min(computed, load), "gain": computed / planned}
        row["share"] = median(each[f"{disk} planner"]["disk_tokens"] / results["num_tokens"] for each in rounds)
        rows.append(row)
    yield table(
        {
            "disk": "{disk}",
            "computed": "{computed:.2f}",
            "loaded": "{load:.2f}",
            "as planned": "{planned:.2f}",
            "of it loaded": "{share:.0%}",
            "to the better": "{better:.2f}",
            "times as fast as computed": "{gain:.1f}",
        },
        rows,
    )


def first_token(results: Json) -> Iterator[str]:
    """Yield for each model seconds by disk and way, the gain of a quarter, and the bytes that are read."""
    for run in results["runs"].values():
        yield from _first_token(run)
        yield origin(run)


def _first_token(results: Json) -> Iterator[str]:
    """Yield the section of one model: seconds by disk and way, the gain of a quarter, and the bytes that are read."""
    found = _Measured(results)
    yield f"## The first token with a part of a stored prefix: {results['model']}, {WORKLOADS[results['workload']]}"
    yield (
        f"Seconds to the first token over {len(results['num_tokens'])} prefixes that are on disk only, medians over "
        f"questions that were not asked before; {min(results['num_history'])} to {max(results['num_history'])} others "
        "of each were asked first, and where they looked is the order in which it is stored. Always: whatever the "
        "engine and the calibration think of it. Disks other than the "
        "real one are throttled by a token bucket; the page cache is emptied before each request. Replies that are not "
        "of a part are those of an engine without a store, to the last bit of their logprobs."
    )
    for num_joined in found.shapes:
        yield f"Prefixes of {found.lengths(num_joined, ' to ')} tokens, with probe keys in memory:"
        yield found.seconds_table(num_joined, is_first=False)
        yield "The first question of each, which finds none there:"
        yield found.seconds_table(num_joined, is_first=True)
    yield (
        "A quarter, as the engine decides, beside a full load and the better of that and of computing; the best exact "
        "way may also load and compute from both ends. First is a prefix's first question, later are the others; "
        "parts: how many of the requests had one, the others are answered exactly. It is wanted to be "
        f"{MIN_GAIN} times as fast as a full load that waits for the disk for {BOTTLENECK:.0%} of its time and more."
    )
    yield found.gains_table()
    yield found.bytes_table()
    yield (
        f"Probe keys and orders take {found.known_mib():.4f} MiB of memory a token, its keys and values "
        f"{results['page_bytes'] / PAGE_SIZE / 2**20:.4f}."
    )


class _Measured:
    """Contents of `store_partial.json`: by disk and way, requests for prefixes of one shape, first ones and others."""

    def __init__(self, results: Json) -> None:
        self._results, self._measured = results, results["measured"]
        self.shapes = sorted({num_joined for num_joined, _ in results["num_tokens"]})
        self._ways = [way for way in _WAYS if any(name.partition(" ")[2] == way for name in self._measured)]
        self._disks = [disk for disk in _DISKS if f"{disk} {_FULL}" in self._measured]

    def lengths(self, num_joined: int, between: str) -> str:
        """Return the lengths of the prefixes of a shape, in tokens."""
        found = [length for joined, length in self._results["num_tokens"] if joined == num_joined]
        return f"{min(found):,}{between}{max(found):,}"

    def seconds_table(self, num_joined: int, *, is_first: bool) -> str:
        """Return a table with a row for each disk: median seconds of recomputing, and of each way to load."""
        names = {"computed": _RECOMPUTE, **{_WAYS[way]: f"{{disk}} {way}" for way in self._ways}}
        rows = []
        for disk in self._disks:
            values = [
                self._values_of("seconds", name.format(disk=disk), num_joined, is_first) for name in names.values()
            ]
            rows.append({"disk": _DISKS[disk], "seconds": [_median(some, ".3f") for some in values]})
        return table({"disk": "{disk}"} | each(names, "seconds"), rows)

    def gains_table(self) -> str:
        """Return a table by disk, shape and whether memory knew of the prefix; over all requests, also exact ones."""
        has_computed = _RECOMPUTE in self._measured
        disks = [disk for disk in self._disks if has_computed and f"{disk} {_QUARTER}" in self._measured]
        rows = [
            self._gain(disk, num_joined, is_first)
            for disk in disks
            for num_joined in self.shapes
            for is_first in (True, False)
            if self._values_of("seconds", f"{disk} {_QUARTER}", num_joined, is_first)
        ]
        columns: dict[str, Cell] = {"disk, tokens": "{name}", "times as fast as full": "{gain:.2f}"}
        columns[f"{MIN_GAIN} is"] = lambda row: met(row["gain"] >= MIN_GAIN) if row["is_slow"] else ""
        columns |= {"to the better of full and computed": "{loss:.2f}", "to the best exact way": "{exact:.2f}"}
        columns[f"above {MAX_LOSS} of it"] = "{above:.0%}"
        columns |= {"parts": "{parts}", "requests": "{requests}", "estimate of what is dropped": "{dropped}"}
        return table(columns, rows)

    def bytes_table(self) -> str:
        """Return a table by way: MB read from the store's files per request, for the real disk also by the kernel."""
        names = [
            f"{self.lengths(num_joined, '-')}, {what}"
            for num_joined in self.shapes
            for what in ("first request", "later", "later, by the kernel")
        ]
        rows = []
        for way in self._ways:
            cells = []
            for num_joined in self.shapes:
                for is_first in (True, False):
                    read = [
                        self._values_of("read_bytes", f"{disk} {way}", num_joined, is_first) for disk in self._disks
                    ]
                    cells.append([one for some in read for one in some])
                cells.append(self._values_of("device_bytes", f"real {way}", num_joined, False))
            rows.append({"way": _WAYS[way], "mb": [_median([one / 1e6 for one in some], ".1f") for some in cells]})
        return table({"MB read": "{way}"} | each(names, "mb"), rows)

    def known_mib(self) -> float:
        """Return the MiB of memory that orders and probe keys take for each stored token."""
        known = max(one["known_bytes"] for one in self._measured.values())
        num_tokens = sum(length // PAGE_SIZE * PAGE_SIZE for _, length in self._results["num_tokens"])
        return float(known / num_tokens / 2**20)

    def _gain(self, disk: str, num_joined: int, is_first: bool) -> Json:
        """Return a row of the times of partial loads, compared with full ones, recomputing and the planner.

        `gain` is the speedup over a full load. `loss` and `exact` are the time over that of the fastest exact way,
        without and with the planner. `above` is the share of requests slower than `MAX_LOSS` times the latter.
        """
        ways = {
            way: self._values_of("seconds", f"{disk} {way}", num_joined, is_first)
            for way in (_FULL, "planner", _QUARTER)
        }
        computed = median(self._values_of("seconds", _RECOMPUTE, num_joined, is_first))
        full, quarter = median(ways[_FULL]), median(ways[_QUARTER])
        exact = min([computed, full, *([median(ways["planner"])] if ways["planner"] else [])])
        read = self._values_of("read_bytes", f"{disk} {_FULL}", num_joined, is_first)
        disk_s = 0.0 if disk == "real" else median(read) / (float(disk) * 1e6)  # for a full load
        loaded, dropped = (
            self._values_of(field, f"{disk} {_QUARTER}", num_joined, is_first) for field in ("loaded", "dropped_mass")
        )
        estimates = [one for one in dropped if one is not None]
        return {
            "name": f"{_DISKS[disk]}, {self.lengths(num_joined, '-')}, {'first' if is_first else 'later'}",
            "is_slow": disk_s >= BOTTLENECK * full,
            "gain": full / quarter,
            "loss": quarter / min(computed, full),
            "exact": quarter / exact,
            "above": sum(one > MAX_LOSS * exact for one in ways[_QUARTER]) / len(ways[_QUARTER]),
            "parts": sum(one is not None for one in loaded),
            "requests": len(loaded),
            "dropped": f"{sum(estimates) / len(estimates):.3f}" if estimates else "",
        }

    def _values_of(self, field: str, name: str, num_joined: int, is_first: bool) -> list[float]:
        """Return the values of a field of all requests in some groups.

        Args:
            name: disk and way, or `_RECOMPUTE`.
            num_joined: number of texts that a prefix is joined from.
            is_first: first requests of each prefix, before its probe keys are in memory; else the later ones.
        """
        groups = self._measured.get(name, {"groups": []})["groups"]
        mine = [one for one in groups if (one["num_joined"], one["is_first"]) == (num_joined, is_first)]
        return [value for group in mine for value in group[field]]


def _median(values: Sequence[float], spec: str) -> str:
    return format(median(values), spec) if values else ""
