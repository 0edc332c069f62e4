"""Measure long contexts: prefill and decode at high positions, and a conversation that comes back.

    python -m bench.engine.long_context ARTIFACT DIRECTORY [--tokens 100000] [--rounds 3]

The module alone computes parts of 512 tokens, and single tokens, after contexts whose KV consists of repeated pages,
since their content does not affect the time. The time of the whole prompt is the sum over a line fitted to these parts.
The store in DIRECTORY gets such pages for the whole prompt. Then a fresh engine, with nothing of the store in the
page cache, is asked for its first token, for that of a second conversation with the same beginning, and for that of
one that was edited at nine tenths. Three minutes for two layers of a 4B model; needs memory for two and a half prompts.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from radixlm.runtime import Engine, SamplingParams
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.artifact.manifest import PAGE_SIZE
from radixlm.runtime.model.batch import Batch, UInt8Array
from radixlm.runtime.model.model_runner import ModelRunner
from radixlm.runtime.store import PageKey, PageStore, StoreIdentity
from radixlm.runtime.store.page_key import NO_PARENT
from radixlm.runtime.store.record import BLOCK, padded

from ..options import read_options
from ..prompts import Prompts
from ..report.page import publish
from ..store.disks import drop_page_cache

CONTEXTS = (0, 8_000, 32_000, 64_000, 128_000)
PART, DECODED = 512, 16  # tokens
QUESTION, EDITED_AT, AFTER_EDIT = 64, 0.9, 512  # tokens after the conversation; where it is edited; tokens after that
REPLY = 17
_PORTION = 256  # pages written at a time


def main() -> None:
    """Measure prefill and decode after long contexts, print, and write `results/long_context.json`."""
    options = read_options(__doc__, "artifact", "directory", tokens=100_000, rounds=3)
    artifact = Artifact.open(options.artifact)
    parts, page = measure_parts(artifact, options.rounds)
    options.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.directory) as store:
        back = time_returning(artifact, Path(store), options.tokens, page)
    layout = artifact.manifest.kv
    figures = {"num_tokens": options.tokens, "token_bytes": layout.page_bytes // PAGE_SIZE, "parts": parts, **back}
    computed_s = computed_seconds(parts, options.tokens)
    publish("long_context", figures | {"computed_s": computed_s}, run=f"{artifact.path.stem}, {layout.dtype}")


def measure_parts(artifact: Artifact, rounds: int) -> tuple[list[dict[str, float]], UInt8Array]:
    """Return the median seconds of a prefill of `PART` tokens and a decode step, by context; and a page of real KV."""
    most = artifact.manifest.context_length
    contexts = [context for context in CONTEXTS if context + PART + DECODED <= most]
    num_pages = -(-most // PAGE_SIZE)
    runner = ModelRunner(artifact, num_pages=num_pages)
    ids = np.array(Prompts(1, artifact.manifest.model.vocab_size).ids(most), np.int32)

    def seconds(start: int, stop: int) -> float:
        positions = np.arange(start, stop, dtype=np.int32)
        pages = np.arange(-(-stop // PAGE_SIZE), dtype=np.int32)[None]
        rows = positions - np.int32(start)
        lengths = positions + np.int32(1)
        begun = time.perf_counter()
        runner.forward(Batch(ids[start:stop], positions, positions, rows * 0, pages, lengths, rows[-1:]))
        return time.perf_counter() - begun

    seconds(0, PART)
    page = np.empty((1, artifact.manifest.kv.page_bytes), np.uint8)
    runner.read_pages([1], page)
    for first in range(0, num_pages, _PORTION):
        page_ids = range(first, min(first + _PORTION, num_pages))
        runner.write_pages(page_ids, np.ascontiguousarray(np.repeat(page, len(page_ids), axis=0)))
    found: dict[int, tuple[list[float], list[float]]] = {context: ([], []) for context in contexts}
    for _ in range(rounds):
        for context, (prefill, decode) in found.items():
            prefill.append(seconds(context, context + PART))
            decode += [seconds(at, at + 1) for at in range(context + PART, context + PART + DECODED)]
    runner.close()
    rows = [
        {"context": context, "part_s": statistics.median(prefill), "decode_s": statistics.median(decode)}
        for context, (prefill, decode) in found.items()
    ]
    return rows, page


def computed_seconds(parts: Sequence[dict[str, float]], num_tokens: int) -> float:
    """Return the seconds of a prompt, from a line fitted to the measured parts."""
    slope, fixed = np.polyfit([part["context"] for part in parts], [part["part_s"] for part in parts], 1)
    return float(num_tokens / PART * (fixed + slope * num_tokens / 2))


def time_returning(
    artifact: Artifact, directory: Path, num_tokens: int, page: UInt8Array
) -> dict[str, dict[str, float]]:
    """Return the seconds to first tokens of a conversation after a restart, of a second one, and of an edited one."""
    prompts = Prompts(2, artifact.manifest.model.vocab_size)
    talk = prompts.ids(num_tokens // PAGE_SIZE * PAGE_SIZE)
    edited = [*talk[: int(EDITED_AT * len(talk))], *prompts.ids(AFTER_EDIT)]
    record_bytes = BLOCK + padded(artifact.manifest.kv.page_bytes)
    identity = StoreIdentity.of(artifact.manifest)

    def open_store() -> PageStore:
        return PageStore.open(directory, identity, max_bytes=2 * record_bytes * len(talk) // PAGE_SIZE)

    with open_store() as store:
        for heads in _key_batches(identity, talk):
            store.put(heads, np.repeat(page, len(heads), axis=0))
    drop_page_cache(directory)
    memory = int(2.5 * len(talk)) // PAGE_SIZE * identity.page_bytes
    with Engine(artifact, max_num_seqs=2, kv_cache_bytes=memory, store=open_store()) as engine:
        restarted = _time_request(engine, [*talk, *prompts.ids(QUESTION)])
        second = _time_request(engine, [*talk, *prompts.ids(QUESTION)])
        return {"restarted": restarted, "second": second, "edited": _time_request(engine, edited)}


def _key_batches(identity: StoreIdentity, token_ids: Sequence[int]) -> Iterator[list[PageKey]]:
    """Yield the keys of a prompt's pages, some at a time."""
    heads, parent_key = list[PageKey](), NO_PARENT
    for at in range(0, len(token_ids), PAGE_SIZE):
        heads.append(PageKey.of(identity, b"", parent_key, token_ids[at : at + PAGE_SIZE], bytes(PAGE_SIZE)))
        parent_key = heads[-1].key
        if len(heads) == _PORTION or at + PAGE_SIZE == len(token_ids):
            yield heads
            heads = []


def _time_request(engine: Engine, prompt: list[int]) -> dict[str, float]:
    """Return the seconds to the first token, tokens/s after that, and where the prompt's tokens came from."""
    completion = engine.generate(prompt, SamplingParams(max_tokens=REPLY, temperature=0, ignore_eos=True))
    usage, timings = completion.usage, completion.timings
    assert timings.time_to_first_token_s is not None and timings.decode_tokens_per_s is not None
    return {
        "first_token_s": timings.time_to_first_token_s,
        "decode_tokens_per_s": timings.decode_tokens_per_s,
        "from_disk": sum(usage.disk_tokens_by_kind.values()),
        "cached": usage.cached_tokens,
        "prompt": usage.prompt_tokens,
    }


if __name__ == "__main__":
    main()
