"""A server whose store lies on a slow disk, so that a part of a prefix is worth reading.

    python -m bench.lm_eval.slow_disk ARTIFACT STORE --port 8000 --share 0.25 [--mb-per-s 25]

On a quick disk `radixlm serve --kv-budget` reads prefixes whole: nothing is gained by a part.
"""

from __future__ import annotations

import uvicorn
from radixlm.runtime import Engine
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.server import create_app
from radixlm.runtime.store import OSFiles, PageStore, StoreIdentity

from ..options import read_options
from ..store.throttled_files import ThrottledFiles


def main() -> None:
    """Serve until the process is ended."""
    options = read_options(__doc__, "artifact", "store", port=8000, share=0.25, mb_per_s=25.0)
    artifact = Artifact.open(options.artifact)
    files, identity = ThrottledFiles(OSFiles(), options.mb_per_s * 1e6), StoreIdentity.of(artifact.manifest)
    store = PageStore.open(options.store, identity, max_bytes=8 << 30, files=files)
    with Engine(artifact, store=store, kv_budget=options.share) as engine:
        uvicorn.run(create_app(engine, model_ids=("model",)), port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
