"""llama.cpp from nothing to its first token: `python -m bench.llama_cpp_start GGUF PROMPT THREADS` prints it.

As quick as it can be asked to: one slot, no warm-up run.
"""

from __future__ import annotations

import os
import sys

import xllamacpp


def main() -> None:
    """Load, complete one token, print, leave."""
    params = xllamacpp.CommonParams()
    params.model.path = sys.argv[1]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[3])
    params.n_parallel, params.n_ctx, params.n_gpu_layers, params.warmup = 1, 2048, 0, False
    params.cache_ram_mib, params.verbosity = 0, -1
    server = xllamacpp.Server(params)
    reply = server.handle_completions({"prompt": sys.argv[2], "n_predict": 1, "temperature": 0})
    print(reply["choices"][0]["text"] or reply, flush=True)
    os._exit(0)  # its threads may not end by themselves


if __name__ == "__main__":
    main()
