"""Measure how each kind of KV affects perplexity and speed, compared with f32 and f16.

    python -m bench.kv_kinds quality [--models smollm2 gemma3 qwen2 --quantize f32 --bytes 24000]
    python -m bench.kv_kinds speed [--models smollm2 qwen2 --target native --rounds 3]

Artifacts are compiled once, into .cache/kv_kinds. `quality` compares distributions over the beginnings of
tinyshakespeare, docs/serving.md and tests/goldens/real_code.txt with those of the same artifact with f32. With
weights in f32 only KV and attention are rounded, so differences come from them alone. `speed`
computes a prompt of 512 tokens, one of 8,000 and single tokens after it, all kinds in turns. Needs the development
dependencies.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from radixlm.compile import compile_model
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.artifact.manifest import PAGE_SIZE, KVDType
from radixlm.runtime.model.batch import Batch
from radixlm.runtime.model.model_runner import ModelRunner
from tokenizers import Tokenizer

from tests.real_models import real_model

from .data import data_dir
from .quality import FILES, logits_of

ROOT = Path(__file__).resolve().parent.parent
MODELS = ("smollm2", "gemma3", "qwen2")
KINDS: tuple[KVDType, ...] = ("f32", "f16", "k12v8")
PROMPT, CHUNK, REPLY = 8000, 512, 64  # tokens
Floats = npt.NDArray[np.float32]


def main() -> None:
    """Measure quality or speed by KV cache type; compile missing artifacts; print a line per type and model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["quality", "speed", "compile"])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--target", default="native")
    parser.add_argument("--quantize", choices=["keep", "f32"], default="keep")
    parser.add_argument("--bytes", type=int, default=4500, help="of each text; default: 4500")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    for model in options.models:
        kinds = KINDS if options.what == "quality" else KINDS[1:]
        artifacts = {kind: _artifact(model, kind, options) for kind in kinds}
        if options.what == "quality":
            _quality(model, artifacts, options.bytes)
        else:
            if options.what == "speed":
                _speed(model, artifacts, options.rounds)


def _artifact(model: str, kind: KVDType, options: argparse.Namespace) -> Artifact:
    """Return a model compiled with a KV cache type, which is compiled once."""
    path = ROOT / ".cache" / "kv_kinds" / f"{model}-{kind}-{options.target}-{options.quantize}.radixlm"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        source = model if model == "smollm2" else real_model(FILES[model])
        compile_model(source, path, kv_dtype=kind, target=options.target, quantize=options.quantize)
    return Artifact.open(path)


def _quality(model: str, artifacts: dict[KVDType, Artifact], num_bytes: int) -> None:
    """Print perplexity, and distance from f32, of each KV cache type, over the beginnings of three texts."""
    shakespeare = data_dir() / "prompts" / "tinyshakespeare.txt"
    paths = (shakespeare, ROOT / "docs" / "serving.md", ROOT / "tests" / "goldens" / "real_code.txt")
    texts = [path.read_bytes()[:num_bytes].decode(errors="ignore") for path in paths]
    info = artifacts["f32"].manifest.tokenizer
    tokenizer = Tokenizer.from_str(artifacts["f32"].tokenizer_json)
    first = [info.bos_token_id] if info.add_bos_token and info.bos_token_id is not None else []
    ids = [[*first, *tokenizer.encode(text, add_special_tokens=False).ids] for text in texts]
    num_pages = -(-max(map(len, ids)) // PAGE_SIZE)
    runners = [ModelRunner(artifact, num_pages=num_pages) for artifact in artifacts.values()]
    parts = [part for text in ids for part in _compared(runners, text)]
    surprise, kl, agrees = (np.concatenate(part, axis=1) for part in zip(*parts, strict=True))
    count = surprise.shape[1]
    for i, kind in enumerate(artifacts):
        more = surprise[i] - surprise[0]
        ratio, error = np.exp(more.mean()), 2 * more.std() / count**0.5
        print(
            f"{model} {kind}: {count} tokens, perplexity {np.exp(surprise[i].mean()):.3f}, {ratio:.4f} ± {error:.4f} "
            f"of f32's; KL {kl[i].mean():.6f}; same most likely token {agrees[i].mean():.2%}",
            flush=True,
        )


def _compared(runners: list[ModelRunner], ids: list[int]) -> Iterator[tuple[Floats, Floats, Floats]]:
    """Yield, by runner and position: surprise of the next token, KL to the first runner, whether their best agree."""
    at = 1
    for chunks in zip(*(logits_of(runner, ids[:-1]) for runner in runners), strict=True):
        after = np.array(ids[at : at + len(chunks[0])])
        at += len(after)
        rows = [_log_probabilities(logits) for logits in chunks]
        exact = np.exp(rows[0])
        yield (
            np.stack([-row[np.arange(len(after)), after] for row in rows]),
            np.stack([(exact * (rows[0] - row)).sum(-1) for row in rows]),
            np.stack([(row.argmax(-1) == rows[0].argmax(-1)).astype(np.float32) for row in rows]),
        )


def _log_probabilities(logits: Floats) -> Floats:
    less: Floats = logits - logits.max(-1, keepdims=True)
    less -= np.log(np.exp(less).sum(-1, keepdims=True))
    return less


def _speed(model: str, artifacts: dict[KVDType, Artifact], rounds: int) -> None:
    """Print tokens per second of prefill and decode for two KV cache types, and their ratio."""
    num_pages = -(-(PROMPT + REPLY) // PAGE_SIZE)
    runners = {kind: ModelRunner(artifact, num_pages=num_pages) for kind, artifact in artifacts.items()}
    ids = np.random.default_rng(1).integers(300, 5000, PROMPT + REPLY).astype(np.int32)

    def forward(runner: ModelRunner, start: int, stop: int) -> None:
        positions = np.arange(start, stop, dtype=np.int32)
        pages = np.arange(num_pages, dtype=np.int32)[None]
        last = np.array([stop - start - 1], np.int32)
        batch = Batch(ids[start:stop], positions, positions, positions * 0, pages, positions + np.int32(1), last)
        runner.forward(batch)

    def short(runner: ModelRunner) -> None:
        forward(runner, 0, CHUNK)

    def long(runner: ModelRunner) -> None:
        for start in range(0, PROMPT, CHUNK):
            forward(runner, start, min(start + CHUNK, PROMPT))

    def decode(runner: ModelRunner) -> None:
        for start in range(PROMPT, PROMPT + REPLY):
            forward(runner, start, start + 1)

    def shallow_decode(runner: ModelRunner) -> None:
        for start in range(128, 128 + REPLY):
            forward(runner, start, start + 1)

    steps: dict[str, tuple[Callable[[ModelRunner], None], int, int]] = {
        "prompt of 512": (short, CHUNK, 5),
        "decode after 128": (shallow_decode, REPLY, 2),
        "prompt of 8,000": (long, PROMPT, 1),
        "decode after 8,000": (decode, REPLY, 2),
    }
    for runner in runners.values():
        short(runner)
    for name, (step, num_tokens, repeat) in steps.items():
        seconds: dict[KVDType, list[float]] = {kind: [] for kind in runners}
        for _ in range(rounds * repeat):
            for kind, runner in runners.items():
                start = time.perf_counter()
                step(runner)
                seconds[kind].append(time.perf_counter() - start)
        medians = {kind: statistics.median(values) for kind, values in seconds.items()}
        exact, codes = medians.values()
        pairs = [first / second for first, second in zip(*seconds.values(), strict=True)]
        speeds = ", ".join(f"{kind} {num_tokens / median:.0f} tokens/s" for kind, median in medians.items())
        print(f"{model} {name}: {speeds}, ratio {exact / codes:.2f} ({min(pairs):.2f} to {max(pairs):.2f})", flush=True)


if __name__ == "__main__":
    main()
