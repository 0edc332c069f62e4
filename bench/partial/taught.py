"""Measure what is learned from partly served requests: the attention of later questions to the rows stored first.

    python -m bench.partial.taught ARTIFACT [--workload nq] [--prefixes 2]

Three engines answer two questions of a prefix, and then others: one exactly, one with a quarter of the rows, one none.
Printed is the share of the attention on the prefix of two held-out questions that falls on the first eighth of each
order, as a mean over layers and heads.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from radixlm.runtime import Engine, SamplingParams
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.extras.approximate.records.row_records import RowRecords
from tokenizers import Tokenizer

from ..options import read_options
from ..store.disks import load_always, open_store
from .first_token import joined
from .texts import Texts
from .ways import forget_memory, read_parts_always, settle

NUM_FIRST, NUM_HELD_OUT = 2, 2
WAYS = {"exact": 1.0, "a quarter": 0.25, "none": None}
PARAMS = SamplingParams(max_tokens=1, temperature=0.0)


def main() -> None:
    """Print, for each way to answer, the attention of held-out questions to the first eighth of the stored order."""
    options = read_options(__doc__, "artifact", workload="nq", prefixes=2)
    artifact = Artifact.open(options.artifact)
    cases = Texts(Tokenizer.from_str(artifact.tokenizer_json)).cases(options.workload)
    for _ in range(options.prefixes):
        some = joined([next(cases)])
        prompts = [*some.history, *some.measured]
        with tempfile.TemporaryDirectory() as temporary:
            orders = {
                name: taught(artifact, Path(temporary) / name, prompts[:-NUM_HELD_OUT], share)
                for name, share in WAYS.items()
            }
            seen = [
                attention(artifact, Path(temporary) / "none", one, orders["none"]) for one in prompts[-NUM_HELD_OUT:]
            ]
        for name, order in orders.items():
            first = order[..., : order.shape[-1] // 8]
            shares = [(np.take_along_axis(one, first, -1).sum(-1) / one.sum(-1)).mean() for one in seen]
            print(f"{len(prompts) - NUM_HELD_OUT - NUM_FIRST} questions, {name}:", *(f"{one:.3f}" for one in shares))


def taught(artifact: Artifact, directory: Path, prompts: Sequence[list[int]], share: float | None) -> NDArray[np.int64]:
    """Return the order of a prefix's rows, `[layers, kv_heads, tokens]`, after questions with that share of them."""
    directory.mkdir()
    with Engine(artifact, max_num_seqs=2, store=open_store(artifact, directory / "store"), kv_budget=1.0) as engine:
        tier: Any = engine._core.tier
        tier.extra.sources.promoter.used = lambda prefix: None
        for prompt in prompts[:NUM_FIRST]:
            engine.generate(prompt, PARAMS)
            settle(engine)
        read_parts_always(tier)
        for prompt in () if share is None else prompts[NUM_FIRST:]:
            if share is not None and share < 1:
                forget_memory(engine)
            engine.generate(prompt, PARAMS, kv_budget=share)
            settle(engine)
        engine._loop.call(lambda core: tier.extra.observer.close())
        settle(engine)
        namespace = next(tier.store.page_keys()).namespace
        heads = tier.index.run(namespace, tuple(prompts[0]), 0, len(tier.index.keys(namespace, prompts[0])))
        known = max(
            (found.scores for found in RowRecords.of(tier.store).scores.read(heads)), key=lambda scores: scores.num_uses
        )
    scores = known.history / np.maximum(known.weight, np.finfo(np.float32).tiny) + known.first
    return np.argsort(-scores, axis=-1)


def attention(artifact: Artifact, directory: Path, prompt: list[int], order: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the attention of an exactly answered question to each row of its prefix."""
    with Engine(artifact, max_num_seqs=2, store=open_store(artifact, directory / "store"), kv_budget=1.0) as engine:
        tier: Any = engine._core.tier
        tier.loader.plan = load_always
        tier.extra.observer.keeper.look_up = lambda *_: None  # so that it learns from this question alone
        engine.generate(prompt, PARAMS)
        namespace = next(tier.store.page_keys()).namespace
        pages = tier.cache.tree.find(namespace, prompt[: order.shape[-1]]).pages
        seen: NDArray[np.float32] = tier.extra.observer.scores._history[:, :, pages].reshape(order.shape)
        return seen


if __name__ == "__main__":
    main()
