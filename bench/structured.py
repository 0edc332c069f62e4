"""What structured replies cost: a mask per token, a step of the engine, a grammar's compilation.

    python -m bench.structured ARTIFACT

Prints; what was measured is in LOG.md. Times are medians, of tokens or of rounds in turns.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from radixlm.runtime.artifact.manifest import TOP_LOGITS
from radixlm.runtime.chat.grammar import Grammar
from radixlm.runtime.chat.token_constraint import ConstraintSource, TokenConstraint
from radixlm.runtime.chat.tool_format import HERMES, Tool
from radixlm.runtime.engine.engine import Engine, SamplingParams
from radixlm.runtime.engine.sampler import SamplerState, sample
from radixlm.runtime.model.batch import TopLogits

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"type": "array"}},
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TEXT = '{"name": "Ada Lovelace of London and Somerset", "age": 36, "tags": ["poet", "analyst", {"of": [1, 2.5, null]}]}'
CALL = Tool("get_weather", {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]})
CASES: dict[str, tuple[Grammar, str]] = {
    "schema": (Grammar.json_schema(SCHEMA), TEXT),
    "any object": (Grammar.json_object(), TEXT),
    "regex": (Grammar("regex", r"\d{4}-\d\d-\d\d( [A-Z][a-z]+)+\."), "1815-12-10 Ada Lovelace Of London."),
    "tools, words": (HERMES.grammar([CALL], "auto") or Grammar.json_object(), "It is sunny in Oslo today, as always."),
    "tools, a call": (
        HERMES.grammar([CALL], "auto") or Grammar.json_object(),
        HERMES.text_of([("get_weather", '{"city": "Oslo"}')]),
    ),
}
NUM_TOKENS = 96


def main(path: str) -> None:
    """Measure one artifact."""
    with Engine(path, max_num_seqs=8) as engine:
        started = time.perf_counter()
        engine.grammars.warm_up()
        print(f"first use: {time.perf_counter() - started:.2f} s; a grammar after it:")
        for name, (grammar, text) in CASES.items():
            started = time.perf_counter()
            source = engine.grammars.compile(grammar)
            compiled_ms = (time.perf_counter() - started) * 1e3
            print(f"  {name}: compiled in {compiled_ms:.0f} ms; {_per_token(engine, source, text)}")
        _sampling(engine)
        _decoding(engine)


def _per_token(engine: Engine, source: ConstraintSource, text: str) -> str:
    """Microseconds of `mask` and `accept`, over all tokens of a text and five times it."""
    masks, accepts = [], []
    for _ in range(5):
        constraint = source.start()
        for token_id in engine.tokenizer.encode_inside(text):
            masks.append(_us(constraint.mask))
            accepts.append(_us(partial(constraint.accept, token_id)))
    return (
        f"mask {statistics.median(masks):.0f} us (99 %: {np.quantile(masks, 0.99):.0f}, most: {max(masks):.0f}), "
        f"accept {statistics.median(accepts):.1f} us"
    )


def _sampling(engine: Engine) -> None:
    """Microseconds a row of `sample`, the mask computed before, by how much may come."""
    vocab_size = engine.tokenizer.vocab_size
    logits = np.random.default_rng(1).normal(size=(1, vocab_size)).astype(np.float32) * 3
    order = np.argsort(-logits, kind="stable")[:, :TOP_LOGITS].astype(np.int32)
    top = TopLogits(np.take_along_axis(logits, order, 1), order, np.ones(1, np.int32))
    string = engine.grammars.compile(CASES["schema"][0]).start()
    for token_id in engine.tokenizer.encode_inside('{"name": "A'):
        string.accept(token_id)
    start = engine.grammars.compile(CASES["schema"][0]).start()
    for wish, params in {"greedy": SamplingParams(temperature=0.0), "top-p 0.9": SamplingParams(top_p=0.9)}.items():
        cases: dict[str, TokenConstraint | None] = {"free": None, "in a string": string, "three tokens": start}
        times = {}
        for name, constraint in cases.items():
            state = SamplerState(params, (), vocab_size, constraint)
            times[name] = statistics.median(_us(partial(sample, logits, top, [state])) for _ in range(400))
        print(f"sample, {wish}: " + ", ".join(f"{name} {value:.0f} us" for name, value in times.items()))


def _decoding(engine: Engine) -> None:
    """Milliseconds a step of the same replies in turns: free, and held to what allows them all."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    free = Grammar("regex", "(.|\n)*")  # allows all, and so costs all that a mask does
    for num_seqs in (1, 8):
        times: dict[str, list[float]] = {"free": [], "structured": [], "free beside structured": []}
        for _ in range(5):
            times["free"].append(_ms_per_step(engine, params, [None] * num_seqs))
            times["structured"].append(_ms_per_step(engine, params, [free] * num_seqs))
            if num_seqs > 1:
                half = num_seqs // 2
                times["free beside structured"].append(_ms_per_step(engine, params, [None] * half + [free] * half))
        line = ", ".join(f"{name} {statistics.median(values):.3f}" for name, values in times.items() if values)
        print(f"{num_seqs} sequences, ms a step: {line}")


def _ms_per_step(engine: Engine, params: SamplingParams, grammars: list[Grammar | None]) -> float:
    """From the first token of the last to begin to the end, over the steps between."""
    prompt = engine.encode("The history of the analytical engine begins")
    streams = [engine.stream(prompt, params, constraint=grammar) for grammar in grammars]
    for stream in streams:
        next(stream)
    started = time.perf_counter()
    lengths = [len(stream.result().token_ids) for stream in streams]
    return (time.perf_counter() - started) * 1e3 / (max(lengths) - 1)


def _us(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1e6


if __name__ == "__main__":
    main(sys.argv[1])
