"""Measure the cost of LoRA adapters: decode steps of a model without room for adapters, and with 1 to 8 of them.

    python -m bench.engine.adapters BASE.radixlm ROOM.radixlm [--name NAME] [--rows 8] [--past 200] [--rounds 150]

ROOM is the same model, compiled with `--max-loras 8`. All rows have an adapter of random numbers, of the largest rank
that ROOM has room for, on all matrices or on those of queries and values alone, which is PEFT's default. The steps take
turns; a ratio is the median of the rounds' own, over BASE. Results are kept by NAME, or the model's name.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.artifact.lora import LORA_BLOCK, LoraPlace
from radixlm.runtime.model.batch import Int32Array
from radixlm.runtime.model.model_runner import ModelRunner

from ..kernels.forward import make_batch, pages_of
from ..model_work import decode_work
from ..options import read_options
from ..report.page import publish
from ..timing import in_turns, seconds_of

_TWO = ("q_proj.weight", "v_proj.weight")


def main() -> None:
    """Time decode steps without room for LoRA adapters, and with 0 to 8; write `results/adapters.json`."""
    options = read_options(__doc__, "base", "room", name="", rows=8, past=200, rounds=150)
    step = ("decode", options.rows, options.past)
    base, room = (ModelRunner(Artifact.open(path), num_pages=pages_of(*step)) for path in (options.base, options.room))
    vocab_size = Artifact.open(options.base).manifest.model.vocab_size
    assert room.adapters is not None, f"{options.room} has no room for adapters; compile it with --max-loras"
    memory = room.adapters.memory
    numbers = np.random.default_rng(0).standard_normal(memory.shape, np.float32) * np.float32(0.01)
    memory[:] = numbers.view(np.uint16)[:, 1::2] if memory.dtype == np.uint16 else numbers
    rank = room.adapters.info.max_rank // LORA_BLOCK
    places = [place for group in room.adapters.info.places() for place in group]
    ranks = np.full(len(places), rank, np.int32)
    of_two = np.array([rank * place.matrix.name.endswith(_TWO) for place in places], np.int32)

    def turn(runner: ModelRunner, num_adapters: int, ranks: Int32Array = ranks) -> Callable[[], Sequence[float]]:
        batch = make_batch(*step, vocab_size)
        if num_adapters:
            batch.adapters = np.arange(options.rows, dtype=np.int32) % np.int32(num_adapters)

        def seconds() -> Sequence[float]:
            if runner.adapters is not None:
                runner.adapters.ranks[:] = ranks
            return [seconds_of(partial(runner.forward, batch))]

        return seconds

    ways = {"base": turn(base, 0), "room, no adapter": turn(room, 0)}
    num_read: dict[str, int] = {}  # numbers of adapters that a step reads
    most = min(room.adapters.info.max_loras, options.rows)
    for count in (1, 2, 4, 8):
        if count <= most:
            ways[f"{count} adapter{'s' * (count > 1)}"] = turn(room, count)
            num_read[[*ways][-1]] = count * _numbers(places, ranks)
    ways[f"{most} of q and v"] = turn(room, most, of_two)
    num_read[f"{most} of q and v"] = most * _numbers(places, of_two)
    found = in_turns(ways, options.rounds)
    steps = []
    for name, seconds in found.items():
        ratios = [ours / plain for ours, plain in zip(seconds, found["base"], strict=True)]
        steps.append(
            {
                "step": name,
                "adapter_bytes": num_read.get(name, 0) * memory.itemsize,
                "median_s": statistics.median(seconds),
                "least_s": min(seconds),
                "ratio": statistics.quantiles(ratios, n=4),
            }
        )
    artifact, info = Artifact.open(options.base), room.adapters.info
    figures = {
        "dtype": info.dtype,
        "rank": info.max_rank,
        "num_rows": options.rows,
        "num_past": options.past,
        "step_bytes": int(decode_work(artifact, options.past + 1, options.rows).num_bytes),
        "steps": steps,
    }
    publish("adapters", figures, f"{options.name or artifact.manifest.name}, {info.dtype}")


def _numbers(places: Sequence[LoraPlace], ranks: Int32Array) -> int:
    """Return how many numbers of an adapter with these ranks, in blocks, a step reads."""
    return sum(
        int(blocks) * LORA_BLOCK * (place.num_inputs + place.matrix.num_outputs)
        for place, blocks in zip(places, ranks, strict=True)
    )


if __name__ == "__main__":
    main()
