"""Serve an artifact, reading a share of each prefix on disk, whatever the calibration says, and however long it takes.

    python -m bench.lm_eval.in_parts ARTIFACT STORE --port 8000 --share 0.25

`radixlm serve --kv-budget` reads a prefix whole if a part is no faster or drops too much, and then has it in memory:
few requests of a benchmark would be answered with a part.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import uvicorn
from radixlm.runtime import Engine
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.server import create_app

from ..options import read_options
from ..partial.ways import read_parts_always
from ..store.disks import open_store


def main() -> None:
    """Serve the artifact until the process is ended; of each prefix on disk only the given share is read."""
    options = read_options(__doc__, "artifact", "store", port=8000, share=0.25)
    artifact = Artifact.open(options.artifact)
    with Engine(artifact, store=open_store(artifact, Path(options.store)), kv_budget=options.share) as engine:
        tier: Any = engine._core.tier
        read_parts_always(tier)
        tier.extra.sources.promoter.used = lambda prefix: None  # otherwise prefixes are loaded whole
        uvicorn.run(create_app(engine, model_ids=("model",)), port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
