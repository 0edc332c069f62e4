"""The supported model families. A new one is a file here and a line in `FAMILIES`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches

from radixlm.runtime.artifact.model_config import ModelConfig
from radixlm.runtime.errors import CorruptSource, SourceError, UnsupportedArchitecture

from ..layers.decoder import Decoder
from .cohere2 import Cohere2
from .deepseek import DeepSeekV2, DeepSeekV3, Glm4MoELite, Mistral4
from .encoders.bert import Bert, XLMRoberta
from .encoders.modernbert import ModernBert
from .encoders.nomic_bert import NomicBert
from .ernie import Ernie, ErnieMoE
from .exaone4 import Exaone4
from .family import Family
from .gemma import Gemma2, Gemma3
from .gemma4 import Gemma4, Gemma4Unified
from .glm4 import Glm4, Glm4MoE
from .gpt_oss import GptOss
from .granite import Granite, GraniteMoE
from .hunyuan import HunyuanDense, HunyuanMoE
from .hybrid.falcon_h1 import FalconH1
from .hybrid.granite4 import Granite4H
from .hybrid.lfm2 import Lfm2, Lfm2MoE
from .hybrid.nemotron_h import NemotronH
from .hybrid.qwen3_5 import Qwen3Next, Qwen35, Qwen35MoE
from .llama import Llama, SmolLM3
from .meta import Llama4, MuseGlimmer
from .mistral import MiniMaxM2, Mistral3, Mixtral
from .olmo import Olmo2, Olmo3, Olmoe
from .phi3 import Phi3
from .qwen2 import Qwen2, SeedOss
from .qwen3 import Qwen3, Qwen3MoE
from .settings import Settings
from .stablelm import StableLM

# Families by `ModelConfig.architecture`.
FAMILIES: dict[str, Family] = {
    "llama": Llama(),
    "qwen2": Qwen2(),
    "qwen3": Qwen3(),
    "gemma2": Gemma2(),
    "gemma3": Gemma3(),
    "gemma4": Gemma4(),
    "gemma4_unified": Gemma4Unified(),
    "phi3": Phi3(),
    "granite": Granite(),
    "smollm3": SmolLM3(),
    "olmo2": Olmo2(),
    "olmo3": Olmo3(),
    "glm4": Glm4(),
    "ministral3": Mistral3(),
    "exaone4": Exaone4(),
    "hunyuan_v1_dense": HunyuanDense(),
    "seed_oss": SeedOss(),
    "ernie4_5": Ernie(),
    "stablelm": StableLM(),
    "cohere2": Cohere2(),
    "muse_glimmer": MuseGlimmer(),
    "qwen3_moe": Qwen3MoE(),
    "gpt_oss": GptOss(),
    "mixtral": Mixtral(),
    "olmoe": Olmoe(),
    "granitemoe": GraniteMoE(),
    "glm4_moe": Glm4MoE(),
    "ernie4_5_moe": ErnieMoE(),
    "hunyuan_v1_moe": HunyuanMoE(),
    "minimax_m2": MiniMaxM2(),
    "deepseek_v2": DeepSeekV2(),
    "glm4_moe_lite": Glm4MoELite(),
    "deepseek_v3": DeepSeekV3(),  # the last of those that are `deepseek2` in GGUF, which reads their files
    "mistral4": Mistral4(),
    "llama4": Llama4(),
    "qwen3_next": Qwen3Next(),
    "qwen3_5": Qwen35(),
    "qwen3_5_moe": Qwen35MoE(),
    "granitemoehybrid": Granite4H(),
    "nemotron_h": NemotronH(),
    "falcon_h1": FalconH1(),
    "lfm2": Lfm2(),
    "lfm2_moe": Lfm2MoE(),
    "xlm_roberta": XLMRoberta(),
    "bert": Bert(),
    "nomic_bert": NomicBert(),
    "modernbert": ModernBert(),
}

_NEAR = 0.65  # least similarity of a name to be suggested
# errors that values of a wrong type cause
_WRONG = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError)


def model_config(settings: Settings) -> ModelConfig:
    """Return the model that a source describes.

    Raises:
        CorruptSource: a value of the description is impossible for such a model, or two disagree.
        UnsupportedArchitecture: the model has an unsupported feature.
    """
    family = FAMILIES[settings.architecture]
    try:
        return family.config(settings)
    except _WRONG as error:
        wrong = " or ".join(f"{key} {settings.values[key]!r}" for key in _wrong_keys(family, settings))
        why = f"it has {wrong}" if wrong else " ".join(str(error).split())
        raise CorruptSource(f"{settings.label}: the configuration cannot be right ({why[:200]})") from error


def _wrong_keys(family: Family, settings: Settings) -> Iterator[str]:
    """Yield the keys without any one of which the configuration is valid."""
    for key in settings.values:
        rest = {other: value for other, value in settings.values.items() if other != key}
        with suppress(SourceError, *_WRONG):
            family.config(replace(settings, values=rest))
            yield key


def unsupported(label: str, name: object) -> UnsupportedArchitecture:
    """Return the error for an architecture of no family.

    It names the nearest one, by class, model type or llama.cpp's name.
    """
    titles = {
        _stem(known): family.title
        for family in FAMILIES.values()
        for known in (*family.huggingface, *family.huggingface.values(), *family.gguf)
    }
    stem = _stem(str(name or ""))
    near = get_close_matches(stem, titles, n=3, cutoff=_NEAR)
    best = near or (get_close_matches(stem, titles, n=1, cutoff=0.0) if stem else [])
    named = " or ".join(dict.fromkeys(titles[known] for known in best))
    hint = f"the nearest {'' if near else 'by name '}is {named}, and " if named else ""
    return UnsupportedArchitecture(
        f"{label}: architecture {name!r} is not supported; {hint}radixlm models lists those that are"
    )


def _stem(name: str) -> str:
    """Return the name of an architecture without the usual suffixes, for comparison."""
    return name.lower().removesuffix("forcausallm").removesuffix("forconditionalgeneration")


def decoder_of(config: ModelConfig) -> Decoder:
    """Return the parts of a model, and how they are joined."""
    return FAMILIES[config.architecture].decoder(config)


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of all weights of a model; matrices are `[out, in]`, stacks `[experts, out, in]`."""
    return {name: shape for part in decoder_of(config).parts() for name, shape in part.tensors.items()}
