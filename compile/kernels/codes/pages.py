"""Pages of codes as integer products read them, straight from the pool. Knows their layout, not what reads them."""

from __future__ import annotations

from dataclasses import dataclass

from radixlm.runtime.artifact.manifest import PAGE_SIZE
from tvm.script.ir_builder import tirx as T

from ...codegen.builder import prefetch
from ...codegen.vector import Expr, lanes, vector_type
from ..kv_pool import TOKENS_AT_ONCE
from ..kv_spans import StoredPage

_PAIR_BYTES = 4  # of two numbers of a key


@dataclass(frozen=True)
class CodePage:
    """The codes of a page in the pool."""

    stored: StoredPage

    def keys_of(self, d: Expr, token: int, count: int) -> Expr:
        """Numbers 2d and 2d + 1 of the keys of tokens `[token, token + count)`, int16 one beside the other."""
        where = self.stored.keys + d * (PAGE_SIZE * _PAIR_BYTES) + token * _PAIR_BYTES
        return self._read(where, count * _PAIR_BYTES, "int16")

    def values_of(self, group: Expr, column: Expr, first: int, count: int) -> Expr:
        """Of the group-th four tokens, the values' columns from `column` on, int8, the four tokens' side by side; of
        these bytes `[first, first + count)`."""
        columns = self.stored.pool.layout.value_columns
        return self._read(self.stored.values + (group * columns + column) * TOKENS_AT_ONCE + first, count, "int8")

    def key_scales(self) -> Expr:
        """The scales of 16 keys."""
        return self.stored.key_scales()

    def value_scales(self) -> Expr:
        """The scales of 16 values."""
        return self.stored.value_scales()

    def fetch_values(self, d: Expr) -> None:
        """Prefetch a share of the values while numbers 2d and 2d + 1 of the keys are used."""
        if self.stored.next_keys is None:
            return
        layout = self.stored.pool.layout
        size = max(1, layout.value_columns * PAGE_SIZE // (layout.key_dim // 2))
        prefetch(self.stored.pool.pool, self.stored.values + d * size, size, 1)

    def fetch_next_keys(self, group: Expr) -> None:
        """Prefetch a share of the next span's keys while the values of a group of tokens are used."""
        if self.stored.next_keys is not None:
            size = self.stored.pool.layout.key_dim * _PAIR_BYTES // 2 * TOKENS_AT_ONCE
            prefetch(self.stored.pool.pool, self.stored.next_keys + group * size, size, 1)

    def _read(self, where: Expr, num_bytes: int, dtype: str) -> Expr:
        vector = self.stored.pool.pool[lanes(where, num_bytes)]
        return vector if dtype == "int8" else T.reinterpret(vector_type(dtype, num_bytes // 2), vector)
