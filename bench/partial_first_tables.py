"""Tables of first tokens over parts of prefixes. Knows what `store_partial.json` holds, not how it was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from radixlm.runtime.artifact.manifest import PAGE_SIZE

from .tables import Json, table

MIN_GAIN = 2.5  # that a quarter is wanted to be quicker than all, where the disk is the bottleneck
BOTTLENECK = 0.75  # of a full load is the time that the disk takes for its bytes: then it is
_RECOMPUTE, _FULL, _QUARTER = "recompute", "full", "25%"


def first_tokens(results: Json, num_joined: int, *, is_first: bool = False) -> str:
    """A row a disk: seconds to the first token, medians of the requests for prefixes of so many cases."""
    measured = results["measured"]
    ways = _ways(measured)
    rows = []
    for disk in _disks(measured):
        seconds = [_seconds(measured, f"{disk} {way}", num_joined, is_first=is_first) for way in ways]
        computed = _seconds(measured, _RECOMPUTE, num_joined, is_first=is_first)
        rows.append([_name(disk), *(_median(some) for some in (computed, *seconds))])
    return table(["disk", "computed", *(_title(way) for way in ways)], rows)


def verdicts(results: Json) -> str:
    """A row a disk and length: how many times as fast as a full load a quarter is, and what it is to the better of
    loading and computing; over all requests, those that were answered exactly with them."""
    measured = results["measured"]
    rows = []
    for disk in _disks(measured):
        for num_joined in _lengths(measured):
            computed = median(_seconds(measured, _RECOMPUTE, num_joined))
            full = median(_seconds(measured, f"{disk} {_FULL}", num_joined))
            quarter = median(_seconds(measured, f"{disk} {_QUARTER}", num_joined))
            others = [
                median(some) for some in (_seconds(measured, f"{disk} {way}", num_joined) for way in _EXACT) if some
            ]
            is_slow = _disk_s(measured, disk, num_joined) >= BOTTLENECK * full
            gain, loss = full / quarter, quarter / min(computed, *others)
            rows.append(
                [
                    f"{_name(disk)}, {_tokens(results, num_joined)}",
                    f"{gain:.2f}",
                    "" if not is_slow else "met" if gain >= MIN_GAIN else "**missed**",
                    f"{quarter / min(computed, full):.2f}",
                    f"{loss:.2f}",
                    *_fallbacks(measured, f"{disk} {_QUARTER}", num_joined),
                ]
            )
    header = ["disk, tokens", "times as fast as full", f"{MIN_GAIN} is", "to the better of full and computed"]
    return table([*header, "to the best exact way", "parts", "requests", "estimate of what is dropped"], rows)


def bytes_read(results: Json) -> str:
    """A row a way: MB asked of the store's files for a request, of the real disk's measurement also the kernel's."""
    measured = results["measured"]
    rows = []
    for way in _ways(measured):
        row = [_title(way)]
        for num_joined in _lengths(measured):
            for is_first in (True, False):
                groups = [
                    group
                    for disk in _disks(measured)
                    for group in _groups(measured, f"{disk} {way}", num_joined)
                    if group["is_first"] == is_first
                ]
                read = [one for group in groups for one in group["read_bytes"]]
                row.append(f"{median(read) / 1e6:.1f}" if read else "")
            device = [
                one
                for group in _groups(measured, f"real {way}", num_joined)
                if not group["is_first"]
                for one in group["device_bytes"]
            ]
            row.append(f"{median(device) / 1e6:.1f}" if device else "")
        rows.append(row)
    columns = [
        f"{_tokens(results, num_joined)}, {what}"
        for num_joined in _lengths(measured)
        for what in ("first request", "later", "later, by the kernel")
    ]
    return table(["MB read", *columns], rows)


def known_mib(results: Json) -> float:
    """What is kept in memory of runs, for each token that is stored."""
    known = max(one["known_bytes"] for one in results["measured"].values())
    num_tokens: int = sum(length // PAGE_SIZE * PAGE_SIZE for _, length in results["num_tokens"])
    return float(known / num_tokens / 2**20)


_EXACT = (_FULL, "planner")
_TITLES = {
    _FULL: "all loaded",
    "planner": "as planned",
    "25% always": "25% always",
    "25% in text": "25% always, as in the text",
}


def _title(way: str) -> str:
    return _TITLES.get(way, way)


def _name(disk: str) -> str:
    return "the real one" if disk == "real" else f"{disk} MB/s"


def _tokens(results: Json, num_joined: int) -> str:
    lengths = [length for joined, length in results["num_tokens"] if joined == num_joined]
    return f"{min(lengths):,}-{max(lengths):,}"


def _disks(measured: Json) -> list[str]:
    order = ["25", "50", "100", "500", "real"]
    return [disk for disk in order if f"{disk} {_FULL}" in measured]


def _ways(measured: Json) -> list[str]:
    names = [name.partition(" ")[2] for name in measured if name != _RECOMPUTE]
    order = [_FULL, "planner", "50%", _QUARTER, "25% always", "25% in text"]
    return [way for way in order if way in names]


def _lengths(measured: Json) -> list[int]:
    return sorted({group["num_joined"] for one in measured.values() for group in one["groups"]})


def _groups(measured: Json, name: str, num_joined: int) -> Iterator[Json]:
    for group in measured.get(name, {"groups": []})["groups"]:
        if group["num_joined"] == num_joined:
            yield group


def _seconds(measured: Json, name: str, num_joined: int, *, is_first: bool = False) -> list[float]:
    """Of the first requests of each prefix, or of the others, for which probe keys are in memory."""
    groups = _groups(measured, name, num_joined)
    return [seconds for group in groups if group["is_first"] == is_first for seconds in group["seconds"]]


def _disk_s(measured: Json, disk: str, num_joined: int) -> float:
    """What a disk of that speed takes for a full load."""
    if disk == "real":
        return 0.0
    read = [one for group in _groups(measured, f"{disk} {_FULL}", num_joined) for one in group["read_bytes"]]
    return float(median(read)) / (float(disk) * 1e6)


def _fallbacks(measured: Json, name: str, num_joined: int) -> list[str]:
    """How many of the later requests had a part, of how many; and the mean estimate."""
    loaded = [one for group in _groups(measured, name, num_joined) if not group["is_first"] for one in group["loaded"]]
    dropped = [
        one
        for group in _groups(measured, name, num_joined)
        if not group["is_first"]
        for one in group["dropped_mass"]
        if one is not None
    ]
    mean = f"{sum(dropped) / len(dropped):.3f}" if dropped else ""
    return [str(sum(one is not None for one in loaded)), str(len(loaded)), mean]


def _median(seconds: Sequence[float]) -> str:
    return f"{median(seconds):.3f}" if seconds else ""
