"""The models whose tokenizers and chat templates are replayed: their weights are not needed.

Knows files, templates and end tokens; `llama2-spaced` is Llama-2 with a generation prompt that ends in a space, as
MLC-LLM and FastChat write it, the others are as their makers publish them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from radixlm.runtime.artifact import Artifact
from radixlm.runtime.artifact.manifest import (
    FORMAT_VERSION,
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
    STATE_ITEM_BYTES,
    Attention,
    Dense,
    GatedDelta,
    LayerConfig,
    ModelConfig,
    Rope,
    ShortConvolution,
)
from radixlm.tokenizer_fix import profile_tokenizer

CONTEXT_LENGTH = 16_384
ATTENTION = Attention(num_heads=1, num_kv_heads=1, head_dim=4, scale=0.5, rope=Rope(theta=1e4, rotary_dim=4))


def _chatml(system: str) -> str:
    """Return a ChatML template with `system` as the default system prompt."""
    begin = "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    default = (
        "{% if loop.first and message.role != 'system' %}<|im_start|>system\n" + system + "<|im_end|>\n{% endif %}"
    )
    ask = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    return "{% for message in messages %}" + default + begin + "{% endfor %}" + ask


def _llama2(ask: str) -> str:
    """Return Llama-2's template; `ask` is what it appends if a reply is to be generated."""
    user = "{{ bos_token + '[INST] ' + message.content.strip() + ' [/INST]' }}"
    model = "{{ ' ' + message.content.strip() + ' ' + eos_token }}"
    turn = "{% if message.role == 'user' %}" + user + "{% else %}" + model + "{% endif %}"
    return "{% for message in messages %}" + turn + "{% endfor %}{% if add_generation_prompt %}" + ask + "{% endif %}"


_LLAMA3 = (
    "{% for message in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)


@dataclass(frozen=True)
class ReplayModel:
    """The facts about a model; `bos` and `end` are texts of special tokens, `end` ends a reply."""

    tokenizer: str  # name of its folder in the real inputs
    template: str
    end: str
    bos: str | None = None


MODELS: Mapping[str, ReplayModel] = {
    "llama2": ReplayModel("llama2-legacy", _llama2(""), "</s>", "<s>"),
    "llama2-spaced": ReplayModel("llama2-legacy", _llama2(" "), "</s>", "<s>"),
    "llama3": ReplayModel("llama3", _LLAMA3, "<|eot_id|>", "<|begin_of_text|>"),
    "qwen2": ReplayModel("qwen2", _chatml("You are a helpful assistant."), "<|im_end|>"),
    "smollm2": ReplayModel(
        "smollm2", _chatml("You are a helpful AI assistant named SmolLM, trained by Hugging Face"), "<|im_end|>"
    ),
}


@dataclass(frozen=True)
class Hybrid:
    """Layers that have states, with one of attention; `state_bytes` are those of all of them."""

    mixer: ShortConvolution | GatedDelta
    num_layers: int
    hidden_size: int

    @property
    def state_bytes(self) -> int:
        return self.num_layers * self.mixer.state_size(self.hidden_size) * STATE_ITEM_BYTES


HYBRIDS: Mapping[str, Hybrid] = {
    "LFM2": Hybrid(ShortConvolution(kernel_size=3), 10, 1024),  # 350M
    "Qwen3.5": Hybrid(
        GatedDelta(num_key_heads=16, num_value_heads=16, key_dim=128, value_dim=128, kernel_size=4), 18, 1024
    ),  # 0.8B
}


@dataclass(frozen=True)
class TalkingArtifact(Artifact):
    """A model without weights, for an engine whose replies are given."""

    tokenizer_text: str
    template: str

    @property
    def tokenizer_json(self) -> str:
        return self.tokenizer_text

    @property
    def tokenizer_bytes(self) -> bytes:
        return self.tokenizer_text.encode()

    @property
    def chat_template(self) -> str:
        return self.template


def artifact(model: ReplayModel, tokenizer_json: str, hybrid: Hybrid | None = None) -> TalkingArtifact:
    """Return the model with its tokenizer; with states if it is `hybrid`."""
    name = Path(f"{model.tokenizer}.radixlm")
    return TalkingArtifact(name, _manifest(model, tokenizer_json, hybrid), tokenizer_json, model.template)


def read_tokenizer(model: ReplayModel, data: Path) -> str:
    """Return the model's tokenizer from the folder of real inputs."""
    return (data / "tokenizers" / model.tokenizer / "tokenizer.json").read_text(encoding="utf-8")


@functools.cache
def _manifest(model: ReplayModel, tokenizer_json: str, hybrid: Hybrid | None) -> Manifest:
    """Return the manifest of a tiny model with a tokenizer; `hybrid` adds layers with states."""
    profile = profile_tokenizer(tokenizer_json)
    mixers = (ATTENTION,) if hybrid is None else (ATTENTION, *(hybrid.mixer,) * hybrid.num_layers)
    ids = {token.text: token.id for token in profile.added_tokens}
    return Manifest(
        format_version=FORMAT_VERSION,
        name=model.tokenizer,
        model=ModelConfig(
            architecture="llama",
            vocab_size=profile.vocab_size,
            hidden_size=4 if hybrid is None else hybrid.hidden_size,
            layers=tuple(LayerConfig(mixer=each, ffn=Dense(intermediate_size=4)) for each in mixers),
            norm_eps=1e-5,
            max_position_embeddings=CONTEXT_LENGTH,
        ),
        context_length=CONTEXT_LENGTH,
        quantization=QuantizationInfo(mode="f32", kinds={}),
        kv=KVLayout.uniform("f32", num_layers=1, num_kv_heads=1, head_dim=4),
        target=TargetInfo(name="native", triple="x86_64-linux-gnu", mcpu="x86-64", features=()),
        module=ModuleInfo(
            entry_points=(),
            max_num_tokens=512,
            max_num_logits=64,
            workspace_bytes=0,
            top_logits_scratch=1,
            weights_bytes=0,
        ),
        tokenizer=TokenizerInfo(
            bos_token_id=None if model.bos is None else ids[model.bos],
            eos_token_ids=(ids[model.end],),
            add_bos_token=model.bos is not None,
            profile=profile.to_dict(),
        ),
        sampling=SamplingDefaults(temperature=0.0),
        source=SourceInfo(format="gguf", name=model.tokenizer, fingerprint="0" * 64),
        files={},
    )
