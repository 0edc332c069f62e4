"""The section on digests of logits. Knows the contents of the JSON file, not how it was computed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from .tables import Json, origin, table

_DIGITS = 16  # of a digest's 64


def digests(results: Json) -> Iterator[str]:
    """Yield for each model and number of tokens a row; one that has several digests has several rows."""
    yield "## The same bits on every target"
    yield (
        "SHA-256 of the logits after each token, as `radixlm verify-bits` prints it: the first 16 of 64 digits. "
        "Targets of x86-64 ran on this machine, those of Arm in qemu's emulator, its CPU `max`. All targets of a row "
        "have the same weights. Tiny models have random ones."
    )
    rows = []
    for (model, kv, num_tokens, vocab_size), found in by_digest(results["runs"].values()).items():
        for sha256, targets in found.items():
            logits = f"{num_tokens:,} x {vocab_size:,}"
            rows.append(
                {"model": model, "kv": kv, "logits": logits, "sha256": sha256[:_DIGITS], "targets": ", ".join(targets)}
            )
    columns = {"model": "{model}", "KV": "{kv}", "logits": "{logits}", "digest": "{sha256}", "targets": "{targets}"}
    yield table(dict(columns), rows)
    made: dict[str, Json] = {}
    for run in results["runs"].values():
        latest = made.setdefault(run["origin"]["commit"], run["origin"])
        if run["origin"]["date"] > latest["date"]:
            made[run["origin"]["commit"]] = run["origin"]
    for latest in made.values():
        yield origin({"origin": {**latest, "command": "python -m bench.digests"}})


def by_digest(runs: Iterable[Json]) -> dict[tuple[str, str, int, int], dict[str, list[str]]]:
    """Return, by model, KV type, tokens and vocabulary, the targets that computed each digest."""
    found: defaultdict[tuple[str, str, int, int], defaultdict[str, list[str]]]
    found = defaultdict(lambda: defaultdict(list))
    for run in runs:
        key = (run["model"], run["kv_dtype"], run["num_tokens"], run["vocab_size"])
        found[key][run["sha256"]].append(run["target"])
    return {key: dict(digests) for key, digests in found.items()}
