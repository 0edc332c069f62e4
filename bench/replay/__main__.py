"""Count how much of conversations is computed again: the ids that are passed to `forward`.

    python -m bench.replay [--conversations N]

OASST conversations from the folder of real inputs (`RADIXLM_DATA`), each with the tokenizers and templates of five
models, replies that begin and are divided in different ways, and each policy of the cache; five minutes on two cores.
The ideal is all tokens after the last one whose KV can exist. `others` computes and matches the ids of the rendered
text, as engines do that key their cache by token ids.
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import ProcessPoolExecutor

from ..data import data_dir
from ..options import read_options
from ..report.page import publish
from .models import MODELS
from .talks import replay_model

BAR = 1.01


def main() -> None:
    """Replay conversations, and count the tokens computed again; print, and write `bench/results/replay.json`."""
    options = read_options(__doc__, conversations=int, models=tuple(MODELS))
    with ProcessPoolExecutor(2) as pool:
        jobs = [pool.submit(replay_model, name, data_dir(), options.conversations) for name in options.models]
        rows = [row for job in jobs for row in job.result()]
    is_met = all(row.ratio <= BAR for row in rows if row.policy == "text")
    figures = [{**dataclasses.asdict(row), "ratio": row.ratio} for row in rows]
    publish("replay", {"bar": BAR, "is_met": is_met, "rows": figures})


if __name__ == "__main__":
    main()
