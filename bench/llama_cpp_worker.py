"""llama.cpp, as it is measured: its own server of the PyPI wheel `xllamacpp`, in a process of its own.

    python -m bench.llama_cpp_worker GGUF --num-parallel 8 --context 512 --threads 2 --flash-attention on

Imports nothing of ours. Times are llama.cpp's own where it gives them (they leave out its parsing and queueing), else
when its callback is called.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import xllamacpp

from .steady import steady_tokens_per_s
from .worker import serve


class LlamaCpp:
    """The measurements, as `radixlm_worker.RadixLM` has them."""

    def __init__(self, gguf: str, num_parallel: int, context: int, threads: int, flash_attention: bool) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = gguf
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.n_parallel, params.n_ctx = num_parallel, num_parallel * context
        params.n_gpu_layers = 0
        types = xllamacpp.llama_flash_attn_type
        params.flash_attn_type = (
            types.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash_attention else types.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        params.cache_ram_mib = 0  # a second tier of prompts, which would cost copies and serve no measurement here
        params.verbosity = -1
        self._server = xllamacpp.Server(params)

    def prefill(self, prompt: Sequence[int]) -> float:
        """Seconds of the prompt, by llama.cpp's own clock."""
        timings = self._complete(prompt, 1, cache=False)["timings"]
        assert timings["prompt_n"] == len(prompt), timings
        return float(timings["prompt_ms"]) / 1e3

    def decode(self, prompt: Sequence[int], num_tokens: int) -> float:
        """Tokens a second after the first, by llama.cpp's own clock, which starts when the first is there."""
        timings = self._complete(prompt, num_tokens, cache=False)["timings"]
        assert timings["predicted_n"] == num_tokens, timings
        return (num_tokens - 1) / float(timings["predicted_ms"]) * 1e3

    def streams(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        """Tokens a second of all prompts together, while all decode.

        A token that ends in half a character comes without a chunk of its own: chunks are counted, and stand for all.
        """
        times: list[list[float]] = [[] for _ in prompts]

        def run(prompt: Sequence[int], mine: list[float]) -> None:
            def on_chunk(chunk: Any) -> bool:
                mine.append(time.perf_counter())
                return False  # go on

            self._complete(prompt, num_tokens, cache=False, on_chunk=on_chunk)
            mine.pop()  # the last chunk has the statistics

        threads = [threading.Thread(target=run, args=arguments) for arguments in zip(prompts, times, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        num_chunks = sum(map(len, times))
        assert num_chunks > 0.9 * num_tokens * len(prompts), num_chunks
        return steady_tokens_per_s(times) * (num_tokens * len(prompts) / num_chunks)

    def resume(self, prefix: Sequence[int], suffix: Sequence[int]) -> float:
        """Seconds to the first token of `prefix + suffix`, when `prefix` was a prompt just before."""
        self._complete(prefix, 1, cache=True)
        chunks: list[tuple[float, Any]] = []

        def on_chunk(chunk: Any) -> bool:
            chunks.append((time.perf_counter(), chunk))
            return False

        start = time.perf_counter()
        self._complete([*prefix, *suffix], 2, cache=True, on_chunk=on_chunk)
        assert chunks[-1][1]["timings"]["cache_n"] >= len(prefix), chunks[-1]
        return chunks[0][0] - start

    def system_info(self) -> str:
        """The instruction sets that the wheel was built for."""
        return str(xllamacpp.get_system_info())

    def _complete(
        self, prompt: Sequence[int], num_tokens: int, *, cache: bool, on_chunk: Callable[[Any], bool] | None = None
    ) -> Any:
        request = {
            "prompt": list(prompt),
            "n_predict": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": cache,
            "stream": on_chunk is not None,
        }
        return self._server.handle_completions(request, *([on_chunk] if on_chunk else []))


def main() -> None:
    """Serve until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf")
    parser.add_argument("--num-parallel", type=int, default=1)
    parser.add_argument("--context", type=int, default=4096, help="tokens of each stream")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--flash-attention", choices=["on", "off"], default="on")
    options = parser.parse_args()
    llama_cpp = LlamaCpp(
        options.gguf, options.num_parallel, options.context, options.threads, options.flash_attention == "on"
    )
    serve({name: getattr(llama_cpp, name) for name in ("prefill", "decode", "streams", "resume", "system_info")})
    os._exit(0)  # its threads may not end by themselves


if __name__ == "__main__":
    main()
