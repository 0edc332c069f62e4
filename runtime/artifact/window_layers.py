"""Find the layers of a model whose KV is read in a sliding window only, and their part of a page.

Knows the manifest. Not which rows are kept, nor why.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Self

from .manifest import KVLayout
from .model_config import ModelConfig, Recurrent


@dataclass(frozen=True)
class WindowLayers:
    """Layers that read no row further back than `window` tokens, the token's own included.

    Attributes:
        parts: for each layer, the bytes of a page before it, and its own.
    """

    window: int
    parts: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, model: ModelConfig, layout: KVLayout) -> Self | None:
        """Return the layers of a model whose KV is read in a sliding window only; None if there are none.

        Also None if the model has recurrent states, because such models resume only after tokens of their own.
        """
        spans = defaultdict[int, list[int | None]](list)  # windows of all layers that read each layer's rows
        for layer, config in enumerate(model.all_layers):
            if not isinstance(config.mixer, Recurrent):
                spans[model.kv_layer(layer)].append(config.mixer.window or config.mixer.chunk)
        windows = {layer: max(map(int, filter(None, found))) for layer, found in spans.items() if all(found)}
        if not windows or model.state_bytes:
            return None
        size = layout.itemsize
        parts = ((layout.items_before(each) * size, layout.of_layer(each).page_items * size) for each in windows)
        return cls(max(windows.values()), tuple(parts))

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in these layers."""
        return sum(size for _, size in self.parts)
