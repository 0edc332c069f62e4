"""Make `tiny/*.npz`: what transformers computes for the tiny families of `families/`.

    python -m tests.goldens.make_families [NAME ...]

Run from the repository, in the environment of `requirements.txt`. Each file holds
    digest                        of the weights
    columns                       int16 [C], the tokens of which logits are kept, the same in all files
    prompt_0, prompt_1, ...       token ids
    rows_0, ...                   positions of which logits are kept
    logits_0, ...                 float32 [len(rows), C]
    llama_cpp                     largest difference from llama.cpp's logits of the same checkpoint as GGUF, or NaN

A golden is made only if it can be held to: rounding keys and values to float16 must move no logit by half the
tolerance, no router may be near a tie, and every feature of `TinyFamily.offs` must move logits far when it is off.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np

from .families import FAMILIES, TinyFamily
from .llama_cpp import LlamaCpp, Unknown
from .oracle import Logits, Oracle, distance, quiet
from .tiny_models import TinyModel
from .tiny_outputs import FOLDER

NUM_COLUMNS = 96
LARGEST_F16 = 1e-3  # half of what a test allows with keys and values in float16
LARGEST_F32 = 2e-5  # a fifth of what a test allows in float32
SMALLEST_OFF = 2e-2  # ten times what a test allows
SMALLEST_GAP = 1e-3  # of a router's last chosen score and the next
LARGEST_LLAMA_CPP = 2e-3
Problems = list[str]


def main(names: list[str]) -> None:
    quiet()
    if search := "--seed" in names:
        names.remove("--seed")
    failed = [name for name in names or FAMILIES if not make(FAMILIES[name], search)]
    if failed:
        raise SystemExit(f"not made: {', '.join(failed)}")


def make(tiny: TinyFamily, search: bool) -> bool:
    if search:
        tiny = with_good_seed(tiny)
    oracle = Oracle(tiny)
    golden = oracle.logits()
    problems = stability(oracle, golden) + blindness(tiny, golden)
    second, found = witness(tiny, golden)
    for problem in problems + found:
        print(f"  {tiny.name}: {problem}")
    if problems or found:
        return False
    path = FOLDER / f"{tiny.name}.npz"
    np.savez_compressed(path, digest=tiny.digest(), llama_cpp=np.float32(second), **kept(tiny, golden))
    print(f"{tiny.name}: {path.stat().st_size:,} bytes, llama.cpp {second:.1e}", flush=True)
    return True


def with_good_seed(tiny: TinyFamily) -> TinyFamily:
    """The checkpoint with the first seed from its own on whose routers are nowhere near a tie."""
    for seed in range(tiny.seed, tiny.seed + 16000, 40):
        tiny = replace(tiny, seed=seed)
        if Oracle(tiny).router_gap() > SMALLEST_GAP:
            print(f"  {tiny.name}: seed {seed}")
            return tiny
    raise SystemExit(f"{tiny.name}: no seed is good")


def stability(oracle: Oracle, golden: Logits) -> Problems:
    """Whether rounding moves logits by little."""
    gap = oracle.router_gap()
    if gap < SMALLEST_GAP:
        return [f"a router is {gap:.1e} from a tie; choose another seed"]
    f16 = distance(oracle.logits_with_f16_kv(), golden)
    f32 = distance(oracle.logits_in_float64(), golden)
    limits = (("float16 KV", f16, LARGEST_F16), ("float32", f32, LARGEST_F32))
    print(f"  {oracle.tiny.name}: float16 KV {f16:.1e}, float32 {f32:.1e}, routers {gap:.1e}", flush=True)
    return [f"{what} moves logits by {far:.1e}, at most {limit:.1e}" for what, far, limit in limits if far > limit]


def blindness(tiny: TinyFamily, golden: Logits) -> Problems:
    """Features that the golden does not see."""
    problems = []
    for off in tiny.offs:
        far = distance(Oracle(tiny, off).logits(), golden)
        print(f"  {tiny.name} without {off.feature}: {far:.1e}", flush=True)
        if not far > SMALLEST_OFF:
            problems.append(f"{off.feature} off moves logits by {far:.1e} only")
    return problems


def witness(tiny: TinyModel, golden: Logits) -> tuple[float, Problems]:
    """How far llama.cpp is, given the same checkpoint as GGUF."""
    try:
        with LlamaCpp(tiny) as other:
            far = [other.distance(ids, rows(ids), whole) for ids, whole in zip(tiny.prompts(), golden, strict=True)]
    except Unknown as why:
        print(f"  {tiny.name}: no second witness, {why}")
        return float("nan"), []
    worst = max(far)
    return worst, [f"llama.cpp is {worst:.1e} off: {far}"] if not worst < LARGEST_LLAMA_CPP else []


def rows(ids: list[int]) -> np.ndarray:
    """Positions of a prompt that are kept: all of a short one."""
    return np.arange(len(ids)) if len(ids) < 10 else np.linspace(0, len(ids) - 1, 9, dtype=np.int64)


def kept(tiny: TinyFamily, golden: Logits) -> dict[str, np.ndarray]:
    """The arrays of a golden file but its digest."""
    columns = np.sort(np.random.default_rng(0).permutation(tiny.vocab_size)[:NUM_COLUMNS])
    arrays = {"columns": columns.astype(np.int16)}
    for i, (ids, logits) in enumerate(zip(tiny.prompts(), golden, strict=True)):
        arrays |= {f"prompt_{i}": np.array(ids, np.int32), f"rows_{i}": rows(ids).astype(np.int32)}
        arrays[f"logits_{i}"] = logits[rows(ids)][:, columns]
    return arrays


if __name__ == "__main__":
    main(sys.argv[1:])
