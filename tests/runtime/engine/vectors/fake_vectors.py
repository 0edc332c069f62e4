"""Engines over fake models that give hidden states or scores, each of which hangs on the exact KV that it sees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs
from radixlm.runtime.artifact.text_vectors import EmbeddingInfo, PairTemplate, RerankingInfo
from radixlm.runtime.engine.engine import Engine

from ...fake_artifact import ATTENTION, HIDDEN_SIZE, fake_artifact
from ...fake_model import FakeModel, digest, logits_of

TOKENIZER = Path(__file__).resolve().parents[3] / "data" / "tokenizers" / "tiny_spm.json"
VOCAB_SIZE = 500
YES, NO = 30, 31
RERANKING = RerankingInfo(
    true_id=YES,
    false_id=NO,
    template="<s>Is it {instruction}?\nQuery: {query}\nDocument: {document}</s>answer",
    instruction="useful",
)

PAIRS = PairTemplate(before=(1,), between=(2, 2), after=(2,))


@contextmanager
def vector_engine(
    embedding: EmbeddingInfo | None = None,
    reranking: RerankingInfo | None = None,
    pairs: PairTemplate | None = None,
    *,
    num_pages: int = 200,
    context_length: int = 256,
    bidirectional: bool = False,
    **options: Any,
) -> Iterator[tuple[Engine, FakeModel]]:
    """An engine, and its model, which counts the tokens that it computes."""
    models: list[FakeModel] = []

    def open_runner(artifact: object, num_pages: int, num_threads: int | None) -> FakeModel:
        width = 1 if pairs is not None else VOCAB_SIZE if embedding is None else HIDDEN_SIZE
        models.append(FakeModel(num_pages, width))
        return models[0]

    artifact = fake_artifact(
        TOKENIZER.read_text(encoding="utf-8"),
        None,
        vocab_size=VOCAB_SIZE,
        bos_token_id=1,
        eos_token_id=2,
        context_length=context_length,
        attention=structs.replace(ATTENTION, bidirectional=bidirectional),
        embedding=embedding,
        reranking=reranking,
        pairs=pairs,
    )
    pages = {"kv_cache_bytes": num_pages * artifact.manifest.kv.page_bytes}
    options = {"max_num_seqs": 8, "idle_work": False, **pages, **options}
    with Engine(artifact, open_runner=open_runner, **options) as engine:  # type: ignore[arg-type]
        yield engine, models[0]


def states_alone(ids: Sequence[int], width: int) -> np.ndarray:
    """What the model gives of each token of a text that it computes alone, float64 `[len(ids), width]`."""
    rows = np.zeros(0, np.uint64)
    for position, token_id in enumerate(ids):
        rows = np.append(rows, np.uint64(digest(rows, token_id, position)))
    return np.array([logits_of(int(row), width) for row in rows], np.float64)
