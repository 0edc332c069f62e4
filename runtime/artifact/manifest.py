"""The description of an artifact, `manifest.json`, with every number range-checked.

Knows types and ranges, not files; `directory.py` compares it with the files on disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, Literal

import msgspec

from .lora import LoraInfo
from .model_config import ContextLength, Dimension, HeadDim, Heads, ModelConfig, Strict
from .text_vectors import EmbeddingInfo, PairTemplate, RerankingInfo

FORMAT_VERSION: Final = 5
PAGE_SIZE: Final = 16
"""Tokens in a page of KV: as many as fill one vector. Kernels depend on it: another size needs new kernels."""
TOP_LOGITS: Final = 64  # number of most likely tokens that `top_logits` finds in each row of logits
WEIGHT_BLOCK: Final = 256  # tokens of a row whose weights the module adds at once
MAX_POSITION: Final = 1 << 30  # positions are lower, for RoPE
SCALE_BYTES: Final = 4  # per row of codes
UNSEALED: Final = "0" * 64  # replaces the manifest's own digest while that is computed

TokenId = Annotated[int, msgspec.Meta(ge=0, le=1 << 22)]
Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 44)]
Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
NumericClass = Literal["fma", "no-fma"]
"""`fma`: a product and a sum are rounded once, by one instruction; `no-fma`: twice."""
KVDType = Literal["f16", "f32", "k12v8"]
_ITEM_BYTES: Final[dict[KVDType, int]] = {"f16": 2, "f32": 4, "k12v8": 1}
_CACHE_LINE: Final = 64  # bytes
_CODE_COLUMNS: Final = 16  # columns of values that one vector multiplies


class KVLayer(Strict, frozen=True, kw_only=True):
    """The KV of one layer: each token has `key_dim` and `value_dim` numbers for each head.

    With `values_in_keys` a value is the first `value_dim` numbers of its key, and is not stored again.
    """

    num_kv_heads: Heads
    key_dim: HeadDim
    value_dim: HeadDim
    values_in_keys: bool = False


@dataclass(frozen=True)
class LayerLayout:
    """The layout of one layer's KV in a page: `[2, kv_heads, items]`, the first half keys, the second values.

    If values are a part of the keys, there is no second half. A head's keys are stored transposed, `[key_dim,
    PAGE_SIZE]`, values as `[PAGE_SIZE, value_dim]`.

    With k12v8 a row, that is, a token's key or value of one head, is its codes times a scale. Keys have 12 bits, in
    int16, and values 8. The float32 scales of the `PAGE_SIZE` rows come before the codes, and padding to a cache line
    after them, so that both are aligned. As float16 the scales would be half a line, be rounded once more and overflow.
    Codes that are multiplied together are adjacent: keys are `[key_dim / 2, PAGE_SIZE, 2]`, values `[PAGE_SIZE / 4,
    columns, 4]`. The columns of values are padded to a multiple of 16.
    """

    dtype: KVDType
    num_kv_heads: int
    key_dim: int
    value_dim: int
    values_in_keys: bool = False

    @property
    def head_dim(self) -> int:
        """Numbers in a key, if a value has as many."""
        assert self.key_dim == self.value_dim, f"keys have {self.key_dim} numbers, values {self.value_dim}"
        return self.key_dim

    @property
    def head_items(self) -> int:
        """Pool items for the keys of one head in a page, or for its values, if both are equal."""
        return self._items(self.head_dim)

    @property
    def key_items(self) -> int:
        """Pool items for the keys of one head in a page."""
        return self._items(2 * self.key_dim if self.has_codes else self.key_dim)

    @property
    def value_items(self) -> int:
        """Pool items for the values of one head in a page, not counting keys."""
        return 0 if self.values_in_keys else self._items(self.value_columns)

    @property
    def value_columns(self) -> int:
        """Numbers that a value takes in a page, padding included."""
        return -(-self.value_dim // _CODE_COLUMNS) * _CODE_COLUMNS if self.has_codes else self.value_dim

    @property
    def page_items(self) -> int:
        """Pool items for this layer's part of a page."""
        return self.num_kv_heads * (self.key_items + self.value_items)

    @property
    def num_scale_items(self) -> int:
        """Items before the first key or value, which hold the rows' scales."""
        return PAGE_SIZE * SCALE_BYTES if self.has_codes else 0

    @property
    def has_codes(self) -> bool:
        """Return whether a row is integer codes with a scale, which integer products read directly."""
        return self.dtype == "k12v8"

    @property
    def itemsize(self) -> int:
        """Bytes of an item."""
        return _ITEM_BYTES[self.dtype]

    def _items(self, dim: int) -> int:
        codes = PAGE_SIZE * dim
        return self.num_scale_items + (-(-codes // _CACHE_LINE) * _CACHE_LINE if self.has_codes else codes)


class KVLayout(Strict, frozen=True, kw_only=True):
    """The layout of KV in the pool: layer by layer all pages, each laid out as in `LayerLayout`, with items of `dtype`.

    `layers` are those that keep KV of their own. If all are equal (`is_uniform`) the pool is `[layers, pages, 2,
    kv_heads, head_items]`, with one number of heads and of items for all.
    """

    dtype: KVDType
    page_size: Literal[16]
    layers: Annotated[tuple[KVLayer, ...], msgspec.Meta(min_length=1, max_length=1024)]

    @classmethod
    def uniform(cls, dtype: KVDType, *, num_layers: int, num_kv_heads: int, head_dim: int) -> KVLayout:
        """Return the layout of equal layers whose keys are as wide as their values."""
        layer = KVLayer(num_kv_heads=num_kv_heads, key_dim=head_dim, value_dim=head_dim)
        return cls(dtype=dtype, page_size=PAGE_SIZE, layers=(layer,) * num_layers)

    def of_layer(self, layer: int) -> LayerLayout:
        """Return the layout of one layer's part of a page."""
        shape = self.layers[layer]
        return LayerLayout(self.dtype, shape.num_kv_heads, shape.key_dim, shape.value_dim, shape.values_in_keys)

    def items_before(self, layer: int) -> int:
        """Return the items of a page in the layers before this one.

        The layer begins at this number times `num_pages`.
        """
        return sum(self.of_layer(before).page_items for before in range(layer))

    @property
    def is_uniform(self) -> bool:
        """Return whether all layers are equal, with values of their own that are as wide as the keys."""
        first = self.layers[0]
        is_plain = first.key_dim == first.value_dim and not first.values_in_keys
        return is_plain and all(layer == first for layer in self.layers)

    @property
    def page_items(self) -> int:
        """Items of one page over all layers, keys and values."""
        return self.items_before(len(self.layers))

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers, keys and values."""
        return self.page_items * self.itemsize

    @property
    def num_layers(self) -> int:
        """Number of layers that keep KV."""
        return len(self.layers)

    @property
    def num_kv_heads(self) -> int:
        """Number of KV heads of each layer of a uniform pool."""
        return self._each.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Numbers in a key or value of a uniform pool."""
        return self._each.head_dim

    @property
    def head_items(self) -> int:
        """`LayerLayout.head_items` of a uniform pool."""
        return self._each.head_items

    @property
    def num_scale_items(self) -> int:
        """Items before the first key or value, which hold the rows' scales."""
        return self.of_layer(0).num_scale_items

    @property
    def has_codes(self) -> bool:
        """Return whether rows are integer codes with a scale each."""
        return self.of_layer(0).has_codes

    @property
    def itemsize(self) -> int:
        """Bytes of an item."""
        return _ITEM_BYTES[self.dtype]

    @property
    def _each(self) -> LayerLayout:
        assert self.is_uniform, "the layers keep keys and values of different shapes"
        return self.of_layer(0)


class TargetInfo(Strict, frozen=True, kw_only=True):
    """The target that the module was compiled for; `features` are names from `cpu.py` that the machine must have."""

    name: str
    triple: str
    mcpu: str
    features: tuple[str, ...]

    @property
    def numeric_class(self) -> NumericClass:
        """Class of targets that compute bit-identical logits from the same weights and token ids."""
        return "fma" if "fma" in self.features or not self.triple.startswith("x86_64") else "no-fma"


class ModuleInfo(Strict, frozen=True, kw_only=True):
    """Limits and memory needs of the compiled entry points."""

    entry_points: tuple[str, ...]
    max_num_tokens: Dimension  # rows of token_ids in one forward
    max_num_logits: Dimension  # rows of logits in one forward
    workspace_bytes: Bytes
    top_logits_scratch: Dimension  # float32 numbers of scratch memory that `top_logits` needs for each row
    weights_bytes: Bytes  # bytes of the data section of weights.safetensors
    num_frequent: Dimension | msgspec.UnsetType = msgspec.UNSET  # first tokens, among which `draft_frequent` drafts


class TensorKindInfo(Strict, frozen=True, kw_only=True):
    """All weights stored as one kind, and the rounding error of storing them so."""

    count: Annotated[int, msgspec.Meta(ge=0)]
    bytes: Bytes
    source: tuple[str, ...]  # the source's own types, such as "Q4_1"
    # root mean square of the rounding errors, over that of the source's numbers; 0.0 is exact
    relative_error: Annotated[float, msgspec.Meta(ge=0.0)]


class QuantizationInfo(Strict, frozen=True, kw_only=True):
    """The storage of weights, and the bytes of weights that each decoded token reads, here and in the source.

    `token_weights` is the number of matrix elements among them. None if unknown.
    """

    mode: Literal["keep", "q4", "q8", "f16", "f32"]
    kinds: dict[str, TensorKindInfo]
    token_bytes: Bytes | None = None
    source_token_bytes: Bytes | None = None
    token_weights: Annotated[int, msgspec.Meta(ge=0, le=1 << 44)] | None = None


class SamplingDefaults(Strict, frozen=True, kw_only=True):
    """Sampling parameters for requests that do not set them. The default of each field has no effect.

    An artifact has the values that the model's makers recommend, and `USUAL_SAMPLING` for the rest. Artifacts compiled
    before `min_p` existed have none.
    """

    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=100.0)] = 1.0
    top_p: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=0)] = 0
    min_p: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.0
    repetition_penalty: Annotated[float, msgspec.Meta(ge=0.01, le=100.0)] = 1.0


USUAL_SAMPLING: Final = SamplingDefaults(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)  # as in llama.cpp


class TokenizerInfo(Strict, frozen=True, kw_only=True):
    """Token ids with a meaning, and the `TokenizerProfile` as `tokenizer_fix` made it."""

    bos_token_id: TokenId | None
    eos_token_ids: tuple[TokenId, ...]  # end a reply; the first is the tokenizer's own, which chat templates write
    add_bos_token: bool
    profile: dict[str, object]


class FileInfo(Strict, frozen=True, kw_only=True):
    """Size and digest of one file of the artifact."""

    size: Bytes
    sha256: Sha256


class SourceInfo(Strict, frozen=True, kw_only=True):
    """The source that the model was compiled from."""

    format: Literal["gguf", "huggingface", "mlc"]
    name: str
    fingerprint: Sha256


class Manifest(Strict, frozen=True, kw_only=True):
    """The complete `manifest.json`. Models with `embedding` return hidden states instead of logits, `pairs` scores."""

    format_version: Literal[5]
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    model: ModelConfig
    context_length: ContextLength
    quantization: QuantizationInfo
    kv: KVLayout
    target: TargetInfo
    module: ModuleInfo
    tokenizer: TokenizerInfo
    sampling: SamplingDefaults
    source: SourceInfo
    files: dict[str, FileInfo]
    embedding: EmbeddingInfo | None = None
    reranking: RerankingInfo | None = None
    pairs: PairTemplate | None = None
    lora: LoraInfo | msgspec.UnsetType = msgspec.UNSET  # of artifacts that have room for adapters
    digest: Sha256 = UNSEALED  # of manifest.json itself, computed with zeros here

    @property
    def writes_text(self) -> bool:
        """False for embedding models, and for rerankers with a head."""
        return self.model.output == "logits"
