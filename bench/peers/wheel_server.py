"""Serve llama.cpp as pip installs it, in the wheel `xllamacpp`.

    python -m bench.peers.wheel_server --model GGUF --parallel 8 --ctx-size 1024 --threads 2 --flash-attn on ...

Accepts those options of `llama-server` that `contestants.py` uses. Imports nothing of ours.
"""

from __future__ import annotations

import argparse
import signal

import xllamacpp


def main() -> None:
    """Serve llama.cpp over HTTP until the process is killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    for name in ("--parallel", "--ctx-size", "--threads", "--port"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--flash-attn", choices=["on", "off"], required=True)
    parser.add_argument("--cache-ram", type=int, required=True)
    for name in ("--batch-size", "--ubatch-size"):
        parser.add_argument(name, type=int)
    parser.add_argument("--pooling", choices=["last", "rank"])
    parser.add_argument("--embedding", action="store_true")
    server = xllamacpp.Server(_params(parser.parse_args()))
    print(server.listening_address, flush=True)
    signal.pause()


def _params(options: argparse.Namespace) -> xllamacpp.CommonParams:
    """Return the options of the command line as the library's parameters."""
    params = xllamacpp.CommonParams()
    params.model.path, params.port = options.model, options.port
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
    params.n_parallel, params.n_ctx = options.parallel, options.ctx_size
    if options.ubatch_size:
        params.n_batch, params.n_ubatch = options.batch_size, options.ubatch_size
    if options.embedding:
        poolings = xllamacpp.llama_pooling_type
        last, rank = poolings.LLAMA_POOLING_TYPE_LAST, poolings.LLAMA_POOLING_TYPE_RANK
        params.embedding, params.pooling_type = True, rank if options.pooling == "rank" else last
    params.n_gpu_layers, params.cache_ram_mib, params.verbosity = 0, options.cache_ram, -1
    types = xllamacpp.llama_flash_attn_type
    params.flash_attn_type = (
        types.LLAMA_FLASH_ATTN_TYPE_ENABLED if options.flash_attn == "on" else types.LLAMA_FLASH_ATTN_TYPE_DISABLED
    )
    return params


if __name__ == "__main__":
    main()
