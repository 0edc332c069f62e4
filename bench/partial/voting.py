"""Select rows as IMPRESS does: a few heads are probed, and if they agree, all heads of a layer use their rows.

After "IMPRESS: An Importance-Informed Multi-Tier Prefix KV Storage System" (FAST '25): a layer whose probed heads agree
less than `MIN_AGREEMENT` is loaded whole. It probes three heads of models with as many KV heads as heads; with grouped
heads a KV head's vote is the sum over the heads that share it. Knows queries and keys, no texts.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from radixlm.runtime.extras.approximate.row_selection import largest
from radixlm.runtime.model.batch import Float32Array

from .policies import Order, Scores
from .prefix import Prefix, PrefixModel

MAX_PROBED = 3  # KV heads
MIN_AGREEMENT = 0.6  # Jaccard index, the mean over pairs of probed heads


@dataclass(frozen=True)
class Vote:
    """The rows that the probed heads of each layer select."""

    choice: Order  # [layers, kv_heads, count], the same rows for each head of a layer
    agreement: npt.NDArray[np.float64]  # [layers]

    @property
    def falls_back(self) -> npt.NDArray[np.bool_]:
        """Return for each layer whether IMPRESS would load all rows, because its probed heads disagree: `[layers]`."""
        return self.agreement < MIN_AGREEMENT

    def loaded_share(self, num_tokens: int) -> float:
        """Return the share of the KV of a prefix that is read if layers that fall back are loaded whole.

        In other layers it is the selected rows, and the rest of the probed heads' keys.
        """
        heads, count = self.choice.shape[1:]
        share = count / num_tokens
        share += (1 - share) * min(MAX_PROBED, heads) / heads / 2  # keys are half of what a head has
        return float(np.where(self.falls_back, 1, share).mean())


def probed_heads(num_kv_heads: int) -> list[int]:
    """Return up to `MAX_PROBED` KV heads, as far apart as possible.

    >>> probed_heads(2), probed_heads(3), probed_heads(9)
    ([0, 1], [0, 1, 2], [0, 4, 8])
    """
    return sorted({int(head) for head in np.linspace(0, num_kv_heads - 1, MAX_PROBED).round()})


def seen_by_voters(model: PrefixModel, prefix: Prefix, num_tokens: int) -> Scores:
    """Return the attention of the first `num_tokens` queries of the last run in the probed heads: `[layers, probed,
    tokens]`."""
    queries, heads = model.all_queries(num_tokens), model.layout.num_kv_heads
    group = queries.shape[2] // heads
    mine = [(queries[:, :, head * group : (head + 1) * group], head) for head in probed_heads(heads)]
    return np.stack([attention(some, prefix.rows.keys_of(head)) for some, head in mine], axis=1)


def attention(queries: Float32Array, keys: Float32Array) -> Scores:
    """Return the attention of `queries`, `[layers, rows, group, head_dim]`, to `keys`, `[layers, tokens, head_dim]`, of
    one KV head, summed over rows and the head's group: `[layers, tokens]`."""
    found = np.empty(keys.shape[:2])
    scale = np.float32(keys.shape[-1] ** -0.5)
    for layer, (some, mine) in enumerate(zip(queries, keys, strict=True)):
        weights = some.reshape(-1, keys.shape[-1]) @ mine.T * scale
        weights = np.exp(weights - weights.max(axis=-1, keepdims=True))
        found[layer] = (weights / weights.sum(axis=-1, keepdims=True)).sum(axis=0)
    return found


def select_by_vote(seen: Scores, num_kv_heads: int, count: int) -> Vote:
    """Return the `count` rows of each layer that most probed heads rank among their largest, and the heads' agreement.

    Ties go to the rows with most attention. All KV heads of a layer get the same rows. The agreement of a layer is the
    mean Jaccard index of pairs of heads.

    Args:
        seen: attention of the probed heads, `[layers, probed, tokens]`.
    """
    layers, probed, _ = seen.shape
    own = np.zeros(seen.shape, np.bool_)
    np.put_along_axis(own, largest(seen, count), True, axis=-1)
    pairs = list(itertools.combinations(range(probed), 2))
    agreement = np.ones(layers)
    if pairs:
        both = [(own[:, a] & own[:, b]).sum(axis=-1) / (own[:, a] | own[:, b]).sum(axis=-1) for a, b in pairs]
        agreement = np.mean(both, axis=0)
    share = seen.sum(axis=1) / seen.sum(axis=(1, 2))[:, None]  # below 1: less than a vote
    rows = largest(own.sum(axis=1) + share, count)
    return Vote(np.repeat(rows[:, None], num_kv_heads, axis=1), agreement)
