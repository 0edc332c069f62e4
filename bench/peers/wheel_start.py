"""The wheel's llama.cpp from nothing to its first token, which is printed, and what it was built for on standard error.

    python -m bench.peers.wheel_start --model GGUF --prompt TEXT --threads 2

`llama-completion` does the same of a build. As quick as it can be asked to: one slot, no warm-up run.
"""

from __future__ import annotations

import argparse
import os
import sys

import xllamacpp


def main() -> None:
    """Load, complete one token, print, leave."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path = options.model
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
    params.n_parallel, params.n_ctx, params.n_gpu_layers, params.warmup = 1, 2048, 0, False
    params.cache_ram_mib, params.verbosity = 0, -1
    server = xllamacpp.Server(params)
    reply = server.handle_completions({"prompt": options.prompt, "n_predict": 1, "temperature": 0})
    print(reply["choices"][0]["text"] or reply, flush=True)
    print(xllamacpp.get_system_info(), file=sys.stderr, flush=True)
    os._exit(0)  # its threads may not end by themselves


if __name__ == "__main__":
    main()
