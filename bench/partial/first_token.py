"""Measure the time to the first token of requests whose prefix is on disk, with all or a part of its keys and values.

    python -m bench.partial.first_token ARTIFACT DIR [--workload nq] [--disks 25 50] [--ways full 25%] [--append]

Prefixes of about 1,000 tokens, and longer ones of several of them joined, each with questions. Half of the questions
are first sent to one engine, which learns the rows that they attend to and rewrites runs in that order; the store stays
in DIR for the next call. The others are measured: a fresh engine for each disk and way (`bench/partial/ways.py`), which
saves and rewrites nothing; before each request its memory and the page cache are emptied, so that the prefix is on disk
only. The first question of each prefix also reads probe keys and orders, which are in memory for the others: they are
reported separately.

Replies that do not use a part must be those of an engine without a store, to the last bit of their logprobs. `read` is
the bytes read from the store's files, `device` the bytes that the kernel read from disks. `--append` keeps the existing
results of other disks and ways.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from time import perf_counter
from typing import Any

from radixlm.runtime import Completion, Engine, SamplingParams
from radixlm.runtime.artifact import Artifact
from tokenizers import Tokenizer

from ..options import read_options
from ..prompts import Prompts
from ..report.page import publish
from ..results import read_results
from ..store.disks import DISKS_MB_PER_S, device_bytes, disk_files, drop_page_cache, open_store
from .texts import Case, Texts
from .ways import (
    RECOMPUTE,
    WAYS,
    Way,
    engine_of,
    forget_memory,
    known_bytes,
    settle,
)

# by workload: the number of cases in one prefix, and the number of such prefixes
SHAPES: Mapping[str, Sequence[tuple[int, int]]] = {
    "nq": ((1, 4), (3, 2)),
    "text": ((1, 2), (2, 1)),
    "tools": ((1, 4), (3, 2)),
    "bbh": ((1, 4),),
}
MAX_ASKED = 4  # questions of a prefix that are measured
PARAMS = SamplingParams(max_tokens=1, temperature=0.0, logprobs=5)
Json = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """A prefix, and prompts that begin with it."""

    num_joined: int  # cases
    prefix: list[int]
    history: list[list[int]]
    measured: list[list[int]]


@dataclass(frozen=True)
class FirstToken:
    """Measurements of one request."""

    num_joined: int
    is_first: bool  # of its prefix, to this engine
    seconds: float
    read_bytes: int
    device_bytes: int
    disk_tokens: int
    loaded: float | None  # share of the prefix's keys and values; None: the reply is exact
    dropped_mass: float | None  # share of the prefix's keys and values; None: the reply is exact
    reply: str  # a digest of token and logprobs


def main() -> None:
    """Measure, print, write `results/store_partial.json`, which keeps other models' runs."""
    kinds = {"workload": "nq", "disks": tuple(DISKS_MB_PER_S), "ways": tuple(WAYS), "append": False}
    options = read_options(__doc__, "artifact", "directory", **kinds)
    artifact = Artifact.open(options.artifact)
    asked = list(asked_of(artifact, options.workload))
    name = artifact.manifest.name
    directory = options.directory / name / options.workload
    kept = directory / "replies.json"
    replies = json.loads(kept.read_text()) if kept.is_file() else prepare(artifact, directory, asked)
    before = (read_results("store_partial") or {"runs": {}})["runs"].get(name, {"measured": {}})
    measured: Json = before["measured"] if options.append else {}
    for disk, way in [(disk, way) for disk in options.disks for way in options.ways if way != RECOMPUTE]:
        measured[f"{disk} {way}"] = one_way(artifact, directory, WAYS[way], disk, asked, replies)
    if RECOMPUTE in options.ways:
        measured[RECOMPUTE] = one_way(artifact, directory, WAYS[RECOMPUTE], RECOMPUTE, asked, replies)
    publish(
        "store_partial",
        {
            "model": name,
            "workload": options.workload,
            "page_bytes": artifact.manifest.kv.page_bytes,
            "num_tokens": [[one.num_joined, len(one.prefix)] for one in asked],
            "num_history": [len(one.history) for one in asked],
            "measured": measured,
        },
        name,
    )


def asked_of(artifact: Artifact, workload: str) -> Iterator[Asked]:
    """Yield the prefixes of a workload; no two begin with the same page."""
    cases = Texts(Tokenizer.from_str(artifact.tokenizer_json)).cases(workload)
    for num_joined, num_prefixes in SHAPES[workload]:
        for _ in range(num_prefixes):
            yield joined([next(cases) for _ in range(num_joined)])


def joined(cases: Sequence[Case]) -> Asked:
    """Return one prefix that joins all cases, and their questions.

    Every other question is history; up to `MAX_ASKED` of the rest are measured.
    """
    prefix = [token for case in cases for token in case.prefix]
    prompts = [prefix + query.ids for case in cases for query in case.queries]
    others = prompts[1::2]
    return Asked(len(cases), prefix, prompts[::2], others[:: -(-len(others) // MAX_ASKED)])


def prepare(artifact: Artifact, directory: Path, asked: Sequence[Asked]) -> list[list[str]]:
    """Run the history and store the results in the order of importance; return the exact replies to the measured
    questions, which are also kept there."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    store = open_store(artifact, directory / "store")
    with Engine(artifact, max_num_seqs=2, store=store, kv_budget=1.0) as engine:
        for one in asked:
            for prompt in one.history:
                engine.generate(prompt, PARAMS)
                settle(engine)
        print(engine.stats().tier, flush=True)
    with Engine(artifact, max_num_seqs=2) as engine:
        replies = [[digest(engine.generate(prompt, PARAMS)) for prompt in one.measured] for one in asked]
    (directory / "replies.json").write_text(json.dumps(replies))
    return replies


def one_way(
    artifact: Artifact,
    directory: Path,
    way: Way,
    disk: str,
    asked: Sequence[Asked],
    replies: Sequence[Sequence[str]],
) -> Json:
    """Measure the time to the first token of each question by one way to provide KV, on one kind of disk.

    The questions of all prefixes come in turns. `replies` are digests of the exact replies, which must be equal unless
    a part of the prefix was loaded.
    """
    files = disk_files(disk if way.has_store else "real")
    found: list[FirstToken] = []
    drop_page_cache(directory)
    with engine_of(way, artifact, directory, files) as engine:
        engine.generate(Prompts(0, artifact.manifest.model.vocab_size).ids(256), PARAMS)
        for number in range(MAX_ASKED):
            for one, exact in zip(asked, replies, strict=True):
                if number < len(one.measured):
                    if way.has_store:
                        settle(engine)
                    forget_memory(engine)
                    drop_page_cache(directory)
                    read, device, begun = files.read_bytes, device_bytes(), perf_counter()
                    completion = engine.generate(one.measured[number], PARAMS, kv_budget=way.kv_budget)
                    seconds = perf_counter() - begun
                    usage, reply = completion.usage, digest(completion)
                    assert usage.pruning is not None or reply == exact[number], (
                        "a reply is not exact, and does not say so"
                    )
                    found.append(
                        FirstToken(
                            num_joined=one.num_joined,
                            is_first=number == 0,
                            seconds=seconds,
                            read_bytes=files.read_bytes - read,
                            device_bytes=device_bytes() - device,
                            disk_tokens=sum(usage.disk_tokens_by_kind.values()),
                            loaded=None if usage.pruning is None else usage.pruning.loaded,
                            dropped_mass=None if usage.pruning is None else usage.pruning.dropped_mass,
                            reply=reply,
                        )
                    )
        tier = engine.stats().tier
        known = known_bytes(engine) if way.has_store else 0
    result: Json = {
        "known_bytes": known,
        "counts": {} if tier is None else {name: value for name, value in asdict(tier).items() if "num_" in name},
        "groups": list(groups(found)),
    }
    print(disk, way, result["counts"], flush=True)
    return result


def groups(found: Sequence[FirstToken]) -> Iterator[Json]:
    """Yield measurements grouped by the shape of the prefix, and by whether it was the prefix's first request."""
    for num_joined, is_first in dict.fromkeys((one.num_joined, one.is_first) for one in found):
        mine = [one for one in found if (one.num_joined, one.is_first) == (num_joined, is_first)]
        yield {
            "num_joined": num_joined,
            "is_first": is_first,
            **{
                name: [getattr(one, name) for one in mine]
                for name in ("seconds", "read_bytes", "device_bytes", "disk_tokens", "loaded", "dropped_mass")
            },
        }


def digest(completion: Completion) -> str:
    """Return a digest of tokens and logprobs, every bit of them."""
    return blake2b(repr((completion.token_ids, completion.logprobs)).encode(), digest_size=8).hexdigest()


if __name__ == "__main__":
    main()
