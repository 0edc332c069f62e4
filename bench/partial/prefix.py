"""Compute the KV of a prefix once, and run queries over all of it, or over selected rows in separate pages.

Knows a runner and pages, no policy. A query's own KV follows that of the prefix and is overwritten by the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.artifact.manifest import PAGE_SIZE
from radixlm.runtime.extras.approximate.attention_scores import PASS_RUN_UP, STRIDE, stride_of
from radixlm.runtime.extras.approximate.calibration.calibration import Calibration
from radixlm.runtime.extras.approximate.packed_keys import PackedKeys, kept_dims
from radixlm.runtime.extras.approximate.row_selection import Probe, probe
from radixlm.runtime.model.batch import Batch, Float32Array
from radixlm.runtime.model.kv_rows import KVRows
from radixlm.runtime.model.model_runner import ModelRunner

from .policies import Order, Scores

MAX_PREFIX, MAX_QUERY = 3072, 512  # tokens
REGION = -(-(MAX_PREFIX + MAX_QUERY) // PAGE_SIZE)  # pages of a prefix, all or a part of it, and a query


@dataclass(frozen=True)
class Exact:
    """The results of a query over the full prefix."""

    logits: Float32Array  # [wanted, vocab]
    mass: Scores  # [layers, kv_heads, prefix tokens], the attention of its rows to the prefix
    learned: Scores  # likewise, the mean over those of its rows that are scored when it is served


class Prefix:
    """`token_ids` of a prefix, computed; the model has room for one, so a new one ends those before.

    Attributes:
        mass: `[layers, kv_heads, tokens]`, the attention of its own tokens to it.
        passed: likewise, the part of that which is known when it is served (`attention_scores.py`).
    """

    def __init__(self, model: PrefixModel, token_ids: Sequence[int]) -> None:
        assert len(token_ids) <= MAX_PREFIX, f"a prefix has {len(token_ids)} tokens"
        self._model, self._ids = model, list(token_ids)
        self.num_tokens = len(self._ids)
        self.passed = self._computed(STRIDE) / (model.counts(self.num_tokens) + PASS_RUN_UP)
        self.mass = self._computed(1)
        self.rows = KVRows.of_pages(model.layout, model.read(self.num_tokens), self.num_tokens)
        self._probe_keys = PackedKeys.of(self.rows.keys_of(model.probe_head), model.probe_dims)

    def exact(self, query: Sequence[int], num_logits: int) -> Exact:
        """Return the last `num_logits` rows of logits over the whole prefix."""
        model, count, learned = self._model, self.num_tokens, None
        if (stride := stride_of(len(query), ends_prompt=True)) > 1:
            model.clear_mass()
            model.run(query, count, count, 0, 0, stride=stride)
            learned = model.mass(count) / model.counts(count)
        model.clear_mass()
        logits = model.run(query, count, count, 0, num_logits).copy()
        mass = model.mass(count)
        return Exact(logits, mass, mass / len(query) if learned is None else learned)

    def partial(self, choice: Order, query: Sequence[int], num_logits: int) -> Float32Array:
        """Return the last `num_logits` rows of logits of a query over the selected rows of the prefix only."""
        self._model.write(REGION, self.rows.take(choice))
        return self._model.run(query, self.num_tokens, choice.shape[-1], REGION, num_logits).copy()

    def probe(self, choice: Order, query: Sequence[int]) -> Scores:
        """Return the attention of the query's rows, run over the selected rows, to each token of the prefix by the keys
        of the probe's head: `[layers, tokens]`, the largest weight over rows of a softmax over unselected rows."""
        return self.probed(choice, query).largest

    def probed(self, choice: Order, query: Sequence[int]) -> Probe:
        """Return the whole result of the probe that `probe` runs."""
        self.partial(choice, query, 0)
        return probe(self._model.queries(len(query)), self._probe_keys, choice[:, self._model.probe_head])

    def _computed(self, stride: int) -> Scores:
        """Compute the prefix, in steps like a prompt's; return the attention of its tokens to it."""
        step = self._model.max_num_tokens
        self._model.clear_mass()
        for start in range(0, self.num_tokens, step):
            self._model.run(self._ids[start : start + step], start, start, 0, 0, stride=stride)
        return self._model.mass(self.num_tokens)


class PrefixModel:
    """A runner with pages for a full prefix, and as many for a pruned one, or for more of them.

    Attributes:
        runner: the runner with these pages.
        probe_head: the KV head that is probed, by the artifact's calibration.
        probe_dims: the dimensions of its keys that memory keeps, `[layers, n]`.

    Raises:
        InvalidParameter: the artifact has no calibration, or not its own; `radixlm calibrate` makes one.
    """

    def __init__(self, artifact: Artifact, num_regions: int = 2) -> None:
        manifest = artifact.manifest
        self.layout, self.max_num_tokens = manifest.kv, manifest.module.max_num_tokens
        self.probe_head = Calibration.read(artifact.path, manifest).probe_head
        self.probe_dims = kept_dims(manifest)
        self._group = manifest.model.num_attention_heads // self.layout.num_kv_heads
        self.runner = ModelRunner(artifact, num_pages=num_regions * REGION, keep_scores=True)

    def run(
        self,
        token_ids: Sequence[int],
        position: int,
        kv_length: int,
        first_page: int,
        num_logits: int,
        *,
        stride: int = 1,
    ) -> Float32Array:
        """Compute tokens from `position` on, after `kv_length` rows of the pages from `first_page` on; score one in
        `stride`."""
        count = len(token_ids)
        offsets = np.arange(count, dtype=np.int32)
        rows = offsets + np.int32(kv_length)
        width = -(-(kv_length + count) // PAGE_SIZE)
        table = np.arange(first_page, first_page + width, dtype=np.int32)[None]
        batch = Batch(
            token_ids=np.array(token_ids, np.int32),
            positions=offsets + np.int32(position),
            slots=rows + np.int32(first_page * PAGE_SIZE),
            row_of_token=np.zeros(count, np.int32),
            page_table=table,
            kv_lengths=rows + np.int32(1),
            logit_rows=offsets[count - num_logits :],
        )
        return self.runner.forward_scored(batch, stride=stride)

    def write(self, first_page: int, rows: KVRows) -> None:
        """Write rows into the pages from `first_page` on."""
        pages = rows.to_pages()
        self.runner.write_pages(range(first_page, first_page + len(pages)), pages)

    def read(self, num_tokens: int) -> npt.NDArray[np.uint8]:
        """Return the pages of the full prefix."""
        pages = np.zeros((-(-num_tokens // PAGE_SIZE), self.layout.page_bytes), np.uint8)
        self.runner.read_pages(range(len(pages)), pages)
        return pages

    def clear_mass(self) -> None:
        """Reset all attention."""
        assert self.runner.attention_sums is not None and self.runner.attention_counts is not None
        self.runner.attention_sums[...] = 0
        self.runner.attention_counts[...] = 0

    def mass(self, num_tokens: int) -> Scores:
        """Return a copy of the attention to the full prefix."""
        assert self.runner.attention_sums is not None
        mass = self.runner.attention_sums[:, :, :REGION].reshape(*self.runner.attention_sums.shape[:2], -1)
        return mass[..., :num_tokens].copy()

    def counts(self, num_tokens: int) -> npt.NDArray[np.int32]:
        """Return the number of tokens whose attention `mass` has, by row."""
        assert self.runner.attention_counts is not None
        return self.runner.attention_counts[:REGION].reshape(-1)[:num_tokens].copy()

    def queries(self, num_tokens: int) -> Float32Array:
        """Return the queries of the last run, of the heads that share the probe's."""
        first = self.probe_head * self._group
        return self.all_queries(num_tokens)[:, :, first : first + self._group]

    def all_queries(self, num_tokens: int) -> Float32Array:
        """Return the queries of the last run, of all heads: `[layers, num_tokens, heads, head_dim]`."""
        assert self.runner.queries is not None
        return self.runner.queries[:, :num_tokens]

    def close(self) -> None:
        """Release the runner."""
        self.runner.close()
