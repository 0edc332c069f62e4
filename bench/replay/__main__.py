"""How much of conversations is computed again, counted at the model's door: the ids that are passed to `forward`.

    python -m bench.replay [--conversations N]

OASST conversations from the folder of real inputs (`RADIXLM_DATA`), each with the tokenizers and templates of five
models, replies that begin and are split in different ways, and each policy of the cache; five minutes on two cores. The
ideal is all after the last token whose KV can exist. `others` feeds and matches the ids of the rendered text, as
engines do that key their cache by token ids. Then 60 of them among clients who change what was said.
"""

from __future__ import annotations

import argparse
import dataclasses
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from ..data import data_dir
from ..results import write_results
from .models import MODELS
from .talks import Replayed, replay_model

BAR = 1.01


def main() -> None:
    """Replay, print and write `bench/results/replay.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, help="only the first N")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    arguments = parser.parse_args()
    rows: list[Replayed] = []
    changed: dict[str, Any] = {}
    with ProcessPoolExecutor(2) as pool:
        jobs = {name: pool.submit(replay_model, name, data_dir(), arguments.conversations) for name in arguments.models}
        for name, job in jobs.items():
            replayed, held = job.result()
            rows += replayed
            changed[name] = {"text": dict(vars(held))}
            for row in replayed:
                print(f"{name:14} {row.replies:7} {row.policy:7} {row.ratio:8.4f}", flush=True)
            short, asked = held.num_short.total(), held.num_requests.total()
            print(f"{name:14} {short} of {asked} requests reused less than they must", flush=True)
    missed = [row for row in rows if row.policy == "text" and row.ratio > BAR]
    figures = [{**dataclasses.asdict(row), "ratio": row.ratio} for row in rows]
    print(write_results("replay", {"bar": BAR, "is_met": not missed, "rows": figures, "changed": changed}))


if __name__ == "__main__":
    main()
