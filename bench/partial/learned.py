"""How much of the order in which a prefix is stored outlives a restart, and the questions after it.

    python -m bench.partial.learned ARTIFACT [--workload nq] [--joined 4] [--loads]

Two engines are asked nine questions about one prefix, and nine others; one of them is restarted in between. Printed
is, as a mean over layers and heads, the share of the stored order's first eighth that is in the first eighth
afterwards, and whether both engines end with the same order. With `--loads` what is on disk is loaded, even if
computing it is as quick.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from radixlm.runtime import Engine, SamplingParams
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.prefix.disk_index import DiskIndex
from radixlm.runtime.store import PageStore
from tokenizers import Tokenizer

from ..options import read_options
from ..store.disks import load_always, open_store
from .first_token import joined
from .texts import Texts
from .ways import settle

NUM_QUESTIONS = 9  # before and after
PARAMS = SamplingParams(max_tokens=1, temperature=0.0)
Order = NDArray[np.uint16]


def main() -> None:
    """Measure and print."""
    options = read_options(__doc__, "artifact", workload="nq", joined=4, loads=False)
    artifact = Artifact.open(options.artifact)
    cases = Texts(Tokenizer.from_str(artifact.tokenizer_json)).cases(options.workload)
    some = joined([next(cases) for _ in range(options.joined)])
    prompts = [*some.history, *some.measured]
    assert len(prompts) >= 2 * NUM_QUESTIONS, "a question that is asked twice is no use of its rows: join more"
    first, then = prompts[:NUM_QUESTIONS], prompts[NUM_QUESTIONS : 2 * NUM_QUESTIONS]
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        once = ask(artifact, directory / "once", [first, then], decides=not options.loads)
        twice = [
            *ask(artifact, directory / "twice", [first], decides=not options.loads),
            *ask(artifact, directory / "twice", [then], decides=not options.loads),
        ]
    for name, (before, after) in {"one process": once, "restarted": twice}.items():
        print(f"{name}: {kept(before, after):.3f} of the first eighth of {before.shape[-1]} tokens stays")
    print("both end with the same order:", kept(once[1], twice[1]), np.array_equal(once[1], twice[1]))


def ask(artifact: Artifact, directory: Path, parts: Sequence[Sequence[list[int]]], *, decides: bool) -> list[Order]:
    """Ask the prompts of one part after the other; the order on disk after each part."""
    directory.mkdir(parents=True, exist_ok=True)
    orders = []
    with Engine(artifact, max_num_seqs=2, store=open_store(artifact, directory / "store"), kv_budget=1.0) as engine:
        if not decides:
            engine._core.tier.loader.plan = load_always  # type: ignore[union-attr]
        for prompts in parts:
            for number, prompt in enumerate(prompts):
                usage = engine.generate(prompt, PARAMS).usage
                settle(engine)
                if not number:
                    print("of the first prompt came from disk:", usage.disk_tokens_by_kind, flush=True)
            tier = engine._core.tier
            assert tier is not None
            orders.append(order_of(tier.store, tier.index, prompts[0]))
    return orders


def order_of(store: PageStore, index: DiskIndex, prompt: list[int]) -> Order:
    """The order of the longest run of a prompt."""
    namespace = next(store.heads()).namespace
    heads = index.run(namespace, tuple(prompt), 0, len(index.keys(namespace, prompt)))
    run = None if heads is None else store.open_ordered(heads)
    assert run is not None, "the prefix has no run"
    order = run.order()
    run.close()
    assert order is not None
    return order


def kept(before: Order, after: Order) -> float:
    """The share of the first eighth of `before` that is in the first eighth of `after`."""
    count = before.shape[-1] // 8
    pairs = zip(before[..., :count].reshape(-1, count), after[..., :count].reshape(-1, count), strict=True)
    return float(np.mean([len(set(one.tolist()) & set(other.tolist())) / count for one, other in pairs]))


if __name__ == "__main__":
    main()
