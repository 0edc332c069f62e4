"""An artifact's description of itself, `manifest.json`, with every number range-checked.

Knows types and ranges, not files; `directory.py` compares it with the files on disk.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

FORMAT_VERSION: Final = 2
PAGE_SIZE: Final = 16  # tokens in a page of KV
TOP_LOGITS: Final = 64  # the most likely tokens that `top_logits` finds in each row of logits
MAX_POSITION: Final = 1 << 30  # positions are below, for RoPE
SCALE_BYTES: Final = 4  # of an int8 row of KV
UNSEALED: Final = "0" * 64  # in place of the manifest's own digest while that is computed

Dimension = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
VocabSize = Annotated[int, msgspec.Meta(ge=1, le=1 << 22)]
ContextLength = Annotated[int, msgspec.Meta(ge=16, le=1 << 22)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=1 << 22)]
Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 44)]
Positive = Annotated[float, msgspec.Meta(gt=0.0)]
Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
Architecture = Annotated[str, msgspec.Meta(pattern="^[a-z0-9_]{1,32}$")]
KVDType = Literal["f16", "f32", "int8"]
_ITEM_BYTES: Final[dict[KVDType, int]] = {"f16": 2, "f32": 4, "int8": 1}
_CACHE_LINE: Final = 64  # bytes


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class RopeScaling(_Strict, frozen=True, kw_only=True):
    """How rotary frequencies are stretched. `linear` uses `factor` alone; `llama3` (Llama 3.1 and later) all four.

    `factors` gives divisors per frequency, as GGUF stores them in `rope_freqs.weight`; it replaces the rest.
    """

    type: Literal["linear", "llama3", "factors"]
    factor: Positive = 1.0
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    original_max_position_embeddings: ContextLength = 8192
    factors: tuple[Positive, ...] = ()


class ModelConfig(_Strict, frozen=True, kw_only=True):
    """The dimensions of a decoder, under Hugging Face's names."""

    architecture: Architecture  # "llama" or "qwen2": the registry's key
    vocab_size: VocabSize
    hidden_size: Dimension
    intermediate_size: Dimension
    num_hidden_layers: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    num_attention_heads: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    num_key_value_heads: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    head_dim: Annotated[int, msgspec.Meta(ge=2, le=1024)]
    rms_norm_eps: Positive
    rope_theta: Positive
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: ContextLength
    sliding_window: ContextLength | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # a bias on q, k and v


class KVLayout(_Strict, frozen=True, kw_only=True):
    """How keys and values lie in a page of `PAGE_SIZE` tokens.

    The pool is `[layers, pages, 2, kv_heads, head_items]` of `dtype`; a head's keys lie transposed, `[head_dim,
    PAGE_SIZE]`, values as `[PAGE_SIZE, head_dim]`. With int8 a row (a token's key or value of one head) is `head_dim`
    codes times a scale: before the codes are the float32 scales of the `PAGE_SIZE` rows, and behind them what fills up
    a cache line, so that both are aligned. As float16 the scales would be half a line, round once more and overflow.
    """

    dtype: KVDType
    page_size: Literal[16]
    num_layers: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    num_kv_heads: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    head_dim: Annotated[int, msgspec.Meta(ge=2, le=1024)]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers, keys and values."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_items * self.itemsize

    @property
    def head_items(self) -> int:
        """Items of the pool that hold the keys of one head in a page, or the values."""
        codes = self.page_size * self.head_dim
        return self.num_scale_items + (-(-codes // _CACHE_LINE) * _CACHE_LINE if self.has_scales else codes)

    @property
    def num_scale_items(self) -> int:
        """Items before the first key or value, which hold the rows' scales."""
        return self.page_size * SCALE_BYTES if self.has_scales else 0

    @property
    def has_scales(self) -> bool:
        """Whether each row has a scale."""
        return self.dtype == "int8"

    @property
    def itemsize(self) -> int:
        """Bytes of an item."""
        return _ITEM_BYTES[self.dtype]


class TargetInfo(_Strict, frozen=True, kw_only=True):
    """What the module was compiled for; `features` are names of `cpu.py` that the machine must have."""

    name: str
    triple: str
    mcpu: str
    features: tuple[str, ...]


class ModuleInfo(_Strict, frozen=True, kw_only=True):
    """Limits of the compiled entry points, and what they need."""

    entry_points: tuple[str, ...]
    max_num_tokens: Dimension  # rows of token_ids in one forward
    max_num_logits: Dimension  # rows of logits in one forward
    workspace_bytes: Bytes
    top_logits_scratch: Dimension  # float32 of scratch that `top_logits` needs for each row
    weights_bytes: Bytes  # bytes of the data section of weights.safetensors


class TensorKindInfo(_Strict, frozen=True, kw_only=True):
    """All weights stored as one kind, and what it cost to store them so."""

    count: Annotated[int, msgspec.Meta(ge=0)]
    bytes: Bytes
    source: tuple[str, ...]  # the source's own types, such as "Q4_1"
    # root mean square of what rounding changed, over that of the source's numbers; 0.0 is exact
    relative_error: Annotated[float, msgspec.Meta(ge=0.0)]


class QuantizationInfo(_Strict, frozen=True, kw_only=True):
    """How weights are stored."""

    mode: Literal["keep", "q4", "q8", "f16", "f32"]
    kinds: dict[str, TensorKindInfo]


class SamplingDefaults(_Strict, frozen=True, kw_only=True):
    """What the model's makers recommend (generation_config.json)."""

    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=100.0)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=0)] = 0
    repetition_penalty: Positive = 1.0


class TokenizerInfo(_Strict, frozen=True, kw_only=True):
    """Ids with a meaning, and the `TokenizerProfile` as `tokenizer_fix` made it."""

    bos_token_id: TokenId | None
    eos_token_ids: tuple[TokenId, ...]  # end a reply; the first is the tokenizer's own, which chat templates write
    add_bos_token: bool
    profile: dict[str, object]


class FileInfo(_Strict, frozen=True, kw_only=True):
    """One file of the artifact."""

    size: Bytes
    sha256: Sha256


class SourceInfo(_Strict, frozen=True, kw_only=True):
    """Where the model came from."""

    format: Literal["gguf", "huggingface"]
    name: str
    fingerprint: Sha256


class Manifest(_Strict, frozen=True, kw_only=True):
    """The whole of `manifest.json`."""

    format_version: Literal[2]
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
    digest: Sha256 = UNSEALED  # of manifest.json itself, with zeros here
