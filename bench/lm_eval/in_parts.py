"""A server that reads a share of each prefix on disk, whatever the calibration thinks of it, and however long it takes.

    python -m bench.lm_eval.in_parts ARTIFACT STORE --port 8000 --share 0.25

`radixlm serve --kv-budget` reads a prefix whole where a part is no quicker or drops too much, and has it in memory
then: few requests of a benchmark would be answered over a part.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import uvicorn
from radixlm.runtime import Engine
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.server import create_app

from ..options import read_options
from ..partial.ways import PatientRates, choose_always
from ..store.disks import load_always, open_store


def main() -> None:
    """Serve until the process is ended."""
    options = read_options(__doc__, "artifact", "store", port=8000, share=0.25)
    artifact = Artifact.open(options.artifact)
    with Engine(artifact, store=open_store(artifact, Path(options.store)), kv_budget=options.share) as engine:
        read_parts(engine)
        uvicorn.run(create_app(engine, model_ids=("model",)), port=options.port, log_level="warning")


def read_parts(engine: Engine) -> None:
    """Have the engine read the share it was told and no more, and bring no prefix to memory for later."""
    tier: Any = engine._core.tier
    tier.loader.plan, tier.chosen.sources.plan = load_always, choose_always
    tier._rows._rates = tier.chosen.sources.rates = PatientRates()
    tier.chosen.sources.least_share, tier.chosen.sources.max_dropped_attention = 0.0, 1.0
    tier.chosen.sources.promoter.used = lambda prefix: None


if __name__ == "__main__":
    main()
