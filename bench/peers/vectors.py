"""Embeddings and rerank beside llama.cpp: the shapes of Qwen3-Embedding and Qwen3-Reranker 0.6B with random weights.

    python -m bench.peers.vectors [--what embeddings rerank] [--rounds 3] [--layers 28] [--wheel]

Both servers read the same file in Q8_0. An embedding request has 32 texts of 200 tokens. A rerank request has 50
documents of 200 tokens, and a query of 250, so that the head that all prompts share has 300. All texts are new in each
round. Two texts or documents warm a server up. llama.cpp gets 8 slots and steps of 2,048 tokens; `make bench-vectors`
builds it. `--wheel` takes it as the wheel `xllamacpp` has it, for AVX2. Files are written to `.cache/sizes` and kept.

Take all 28 layers for a comparison: most of llama.cpp's time with 2 layers does not depend on their number.
"""

from __future__ import annotations

import random
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from radixlm.runtime.artifact.cpu import default_num_threads

from ..options import read_options
from ..processes import RADIXLM
from ..prompts import Prompts
from ..report.page import publish
from ..served import Client, ServedProcess
from ..timing import seconds_of
from .other_engines import words_of
from .shapes import SHAPES
from .sizes import shape_file

_COUNTS = {"embeddings": 32, "rerank": 50}  # of texts or documents in a request
_NUM_WARM = 2
_TEXT_TOKENS, _QUERY_TOKENS = 200, 250
_SLOTS, _STEP = 8, 2048  # of llama.cpp
_STARTS_WITHIN_S = 1800.0  # a first start compiles
_MODELS = {"embeddings": "qwen3-embedding-0.6b", "rerank": "qwen3-reranker-0.6b"}
_POOLINGS = {"embeddings": "last", "rerank": "rank"}
Command = tuple[str, ...]


def main() -> None:
    """Measure, print, write `results/vectors.json`, which keeps the last run of each request and number of layers."""
    options = read_options(
        __doc__, what=tuple(_MODELS), rounds=3, layers=28, wheel=False, cache=".cache", llama_server=Path
    )
    built = options.llama_server or Path(options.cache) / "llama.cpp" / "llama-server"
    peer = (sys.executable, "-m", "bench.peers.wheel_server") if options.wheel else (str(built.resolve()),)
    for what in options.what:
        whole = SHAPES[_MODELS[what]]
        gguf = shape_file(whole.with_layers(options.layers), Path(options.cache).resolve())
        figures = compare(what, gguf, peer, options.rounds)
        run = f"{what}, {whole.name}, {options.layers} of {whole.num_layers} layers"
        publish("vectors", figures, run=run)


def compare(what: str, gguf: Path, peer: Command, rounds: int) -> dict[str, Any]:
    """Return the seconds of embedding or rerank requests to each server, which runs alone on the machine.

    Args:
        what: `embeddings` or `rerank`.
        peer: command of llama.cpp's server.
    """
    threads = str(default_num_threads())
    llama_cpp = (
        *(*peer, "--model", str(gguf), "--threads", threads, "--parallel", str(_SLOTS), "--cache-ram", "0"),
        *("--ctx-size", str(_SLOTS * _STEP), "--ubatch-size", str(_STEP), "--batch-size", str(_STEP)),
        *("--flash-attn", "on", "--embedding", "--pooling", _POOLINGS[what]),
    )
    commands = {"radixlm": (RADIXLM, "serve", str(gguf)), "llama.cpp": llama_cpp}
    words, count = words_of(gguf), _COUNTS[what]
    values: dict[str, list[float]] = defaultdict(list)
    for name, command in commands.items():
        with ServedProcess(command, starts_within_s=_STARTS_WITHIN_S) as server:
            client = Client(server.port)
            _seconds(what, client, words, _NUM_WARM, seed=0)
            for number in range(rounds):
                values[name].append(_seconds(what, client, words, count, seed=number + 1))
                print(f"{name}, {what}: {values[name][-1]:.1f} s", flush=True)
    return {"model": gguf.name, "threads": int(threads), "num_tokens": count * _TEXT_TOKENS, "values": dict(values)}


def _seconds(what: str, client: Client, words: Sequence[str], count: int, seed: int) -> float:
    """Return the seconds of one request for `count` texts or documents; each seed makes others."""
    if what == "embeddings":
        prompts = Prompts(seed).batch(count, _TEXT_TOKENS)
        return seconds_of(lambda: client.json("POST", "/v1/embeddings", {"input": prompts}))
    draw = random.Random(seed)
    query, *documents = ("".join(draw.choices(words, k=count)) for count in (_QUERY_TOKENS, *[_TEXT_TOKENS] * count))
    return seconds_of(lambda: client.json("POST", "/v1/rerank", {"query": query, "documents": documents}))


if __name__ == "__main__":
    main()
