"""An artifact without files: a real tokenizer, a template, and the dimensions of no model in particular."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from radixlm.runtime.artifact import WEIGHTS
from radixlm.runtime.artifact.manifest import (
    FORMAT_VERSION,
    FileInfo,
    KVLayout,
    Manifest,
    ModuleInfo,
    QuantizationInfo,
    SamplingDefaults,
    SourceInfo,
    TargetInfo,
    TokenizerInfo,
)
from radixlm.runtime.artifact.model_config import (
    Attention,
    Dense,
    LayerConfig,
    ModelConfig,
    Rope,
    ScoreHead,
    ShortConvolution,
)
from radixlm.runtime.artifact.text_vectors import EmbeddingInfo, PairTemplate, RerankingInfo
from radixlm.tokenizer_fix import TokenizerProfile, profile_tokenizer

ATTENTION = Attention(num_heads=1, num_kv_heads=1, head_dim=4, scale=0.5, rope=Rope(theta=1e4, rotary_dim=4))

HIDDEN_SIZE = 4
STATE_BYTES = 2 * 4 * 4  # two rows of four numbers


@dataclass(frozen=True)
class FakeArtifact:
    """As `Artifact`, without files."""

    manifest: Manifest
    tokenizer_json: str
    chat_template: str | None
    path: Path = Path("fake.radixlm")
    is_in_memory: bool = False

    @property
    def tokenizer_bytes(self) -> bytes:
        return self.tokenizer_json.encode()


def fake_artifact(
    tokenizer_json: str,
    chat_template: str | None,
    *,
    vocab_size: int,
    bos_token_id: int,
    eos_token_id: int,
    add_bos_token: bool = False,
    context_length: int = 256,
    sampling: SamplingDefaults | None = None,
    is_recurrent: bool = False,
    attention: Attention = ATTENTION,
    embedding: EmbeddingInfo | None = None,
    reranking: RerankingInfo | None = None,
    pairs: PairTemplate | None = None,
) -> FakeArtifact:
    """The artifact of a model that has this tokenizer; if it is recurrent, a layer keeps `STATE_BYTES`."""
    ffn = Dense(intermediate_size=4)
    layers = [LayerConfig(mixer=attention, ffn=ffn)]
    if is_recurrent:
        layers.append(LayerConfig(mixer=ShortConvolution(kernel_size=3), ffn=ffn))
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        name="fake",
        model=ModelConfig(
            architecture="llama",
            vocab_size=vocab_size,
            hidden_size=HIDDEN_SIZE,
            layers=tuple(layers),
            norm_eps=1e-5,
            max_position_embeddings=context_length,
            output="logits" if embedding is None and pairs is None else "hidden",
            score=None if pairs is None else ScoreHead(),
        ),
        context_length=context_length,
        quantization=QuantizationInfo(mode="f32", kinds={}),
        kv=KVLayout.uniform("f32", num_layers=1, num_kv_heads=1, head_dim=4),
        target=TargetInfo(name="native", triple="x86_64-linux-gnu", mcpu="x86-64", features=()),
        module=ModuleInfo(
            entry_points=(),
            max_num_tokens=64,
            max_num_logits=64 if attention.bidirectional else 16,
            workspace_bytes=0,
            top_logits_scratch=1,
            weights_bytes=0,
        ),
        tokenizer=TokenizerInfo(
            bos_token_id=bos_token_id,
            eos_token_ids=(eos_token_id,),
            add_bos_token=add_bos_token,
            profile=_profile(tokenizer_json).to_dict(),
        ),
        sampling=sampling or SamplingDefaults(),
        source=SourceInfo(format="gguf", name="fake", fingerprint="0" * 64),
        files={WEIGHTS: FileInfo(size=0, sha256="0" * 64)},
        embedding=embedding,
        reranking=reranking,
        pairs=pairs,
    )
    return FakeArtifact(manifest, tokenizer_json, chat_template)


@functools.lru_cache(maxsize=16)  # tests make hundreds of artifacts with a few tokenizers
def _profile(tokenizer_json: str) -> TokenizerProfile:
    return profile_tokenizer(tokenizer_json)
