"""Measure the time to the first token of a long prompt after a restart: computed, loaded, and as the planner decides.

    python -m bench.store.restart ARTIFACT DIR [--tokens 8000] [--disks 25 50] [--append]

DIR holds the store meanwhile; its disk is the real one, the others are the same, throttled by a token bucket. A round
computes the prompt in an engine without a store, has another engine save it, and then sends it to a fresh engine for
each disk and way. Files that were read are dropped from the page cache before each; `device` is what the kernel read
from disk. All replies must be the same, to the last bit of their logprobs. A round takes a minute; `--append` adds one
to the existing ones.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, sleep

from radixlm.runtime import Completion, Engine, SamplingParams
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.prefix.prefill_measure import NAME as PREFILL

from ..options import read_options
from ..prompts import Prompts
from ..report.page import publish
from ..results import read_results
from .disks import DISKS_MB_PER_S, device_bytes, disk_files, drop_page_cache, load_always, open_store
from .throttled_files import ThrottledFiles

PARAMS = SamplingParams(max_tokens=1, temperature=0.0, logprobs=5)


@dataclass(frozen=True)
class FirstToken:
    """One request to a fresh engine."""

    seconds: float
    disk_tokens: int
    read_bytes: int  # from the store's files
    device_bytes: int  # that the kernel read from disks meanwhile


def main() -> None:
    """Measure the time to the first token after a restart; print, and write `results/store_restart.json`."""
    disks = tuple(DISKS_MB_PER_S)
    options = read_options(__doc__, "artifact", "directory", tokens=8000, disks=disks, append=False)
    artifact = Artifact.open(options.artifact)
    before = (read_results("store_restart") or {}) if options.append else {}
    options.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.directory) as store:
        seed = len(before.get("rounds", ()))
        measured = one_round(artifact, Path(store), options.tokens, options.disks, seed=seed)
    layout = artifact.manifest.kv
    publish(
        "store_restart",
        {
            "model": artifact.manifest.name,
            "num_tokens": options.tokens,
            "page_bytes": layout.page_bytes,
            "rounds": [*before.get("rounds", ()), {name: asdict(first) for name, first in measured.items()}],
        },
    )


def one_round(
    artifact: Artifact, directory: Path, num_tokens: int, disks: Sequence[str], *, seed: int
) -> dict[str, FirstToken]:
    """Return the time to the first token by `DISK load` and `DISK planner`, and by `recompute` without a disk.

    `load` loads all pages at any rate; `planner` decides as the engine does. The directory must be empty.
    """
    prompts = Prompts(seed, artifact.manifest.model.vocab_size)
    ids, warm_up = prompts.ids(num_tokens), prompts.ids(256)
    with Engine(artifact, max_num_seqs=2) as engine:
        engine.generate(warm_up, PARAMS)
        measured = {"recompute": _ask(engine, ids, None)}
        expected = engine.generate(ids, PARAMS, namespace=b"cold")
    with Engine(artifact, max_num_seqs=2, store=open_store(artifact, directory)) as engine:
        engine.generate(ids, PARAMS)
        while not (directory / PREFILL).exists():  # the cost of computing is measured in idle time
            sleep(0.1)
    for disk in disks:
        for way in ("load", "planner"):
            drop_page_cache(directory)
            files = disk_files(disk)
            with Engine(artifact, max_num_seqs=2, store=open_store(artifact, directory, files)) as engine:
                if way == "load":
                    _load_always(engine)
                measured[f"{disk} {way}"] = _ask(engine, ids, files, expected)
    return measured


def _ask(
    engine: Engine, ids: list[int], files: ThrottledFiles | None, expected: Completion | None = None
) -> FirstToken:
    read, device = 0 if files is None else files.read_bytes, device_bytes()
    begun = perf_counter()
    completion = engine.generate(ids, PARAMS)
    seconds = perf_counter() - begun
    if expected is not None:
        assert (completion.token_ids, completion.logprobs) == (expected.token_ids, expected.logprobs), "other bits"
    return FirstToken(
        seconds=seconds,
        disk_tokens=sum(completion.usage.disk_tokens_by_kind.values()),
        read_bytes=0 if files is None else files.read_bytes - read,
        device_bytes=device_bytes() - device,
    )


def _load_always(engine: Engine) -> None:
    tier = engine._core.tier
    assert tier is not None
    tier.loader.plan = load_always


if __name__ == "__main__":
    main()
