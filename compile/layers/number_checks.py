"""Check that the numbers of a model's configuration agree: heads, groups, experts, factors of RoPE.

The types of `model_config` check each number's own range. Knows no source's keys and no tensors.
"""

from __future__ import annotations

from radixlm.runtime.artifact.model_config import (
    AnyAttention,
    Experts,
    FactorsScaling,
    GatedDelta,
    LongRopeScaling,
    Mamba2,
    Mixer,
    ModelConfig,
    Rope,
)
from radixlm.runtime.errors import CorruptSource


def check_numbers(label: str, config: ModelConfig) -> None:
    """Raise CorruptSource, with the two values that disagree, if heads, experts or factors do not match."""
    for mixer in dict.fromkeys(mixer for layer in config.all_layers for mixer in (layer.mixer, layer.beside)):
        _check_shares(label, mixer)
    for attention in dict.fromkeys(config.attentions):
        _check_heads(label, attention)
    for experts in dict.fromkeys(each.experts for each in config.all_layers):
        if experts is not None:
            _check_experts(label, experts)


def _check_shares(label: str, mixer: Mixer | None) -> None:
    """Raise CorruptSource if key and value heads, or groups, do not divide."""
    if isinstance(mixer, GatedDelta) and mixer.num_value_heads % mixer.num_key_heads:
        heads = f"{mixer.num_value_heads} value heads cannot share {mixer.num_key_heads} key heads"
        raise CorruptSource(f"{label}: {heads}")
    if isinstance(mixer, Mamba2) and mixer.num_heads % mixer.num_groups:
        raise CorruptSource(f"{label}: {mixer.num_heads} heads cannot share {mixer.num_groups} groups")


def _check_heads(label: str, attention: AnyAttention) -> None:
    """Raise CorruptSource if query and KV heads do not divide, or RoPE does not fit a head."""
    if attention.num_heads % attention.num_kv_heads:
        raise CorruptSource(
            f"{label}: {attention.num_heads} attention heads cannot share {attention.num_kv_heads} key-value heads"
        )
    if attention.rope is not None:
        _check_rope(label, attention.rope, attention.head_dim)


def _check_rope(label: str, rope: Rope, head_dim: int) -> None:
    """Raise CorruptSource if the rotated elements do not fit the head, or RoPE's factors these."""
    if rope.rotary_dim % 2:
        raise CorruptSource(f"{label}: a head of {rope.rotary_dim} values cannot be rotated in pairs")
    if rope.rotary_dim > head_dim:
        raise CorruptSource(f"{label}: {rope.rotary_dim} values of a head of {head_dim} cannot be rotated")
    lists: dict[str, tuple[float, ...]] = {}
    if isinstance(rope.scaling, FactorsScaling):
        lists = {"factors": rope.scaling.factors}
    elif isinstance(rope.scaling, LongRopeScaling):
        lists = {"short factors": rope.scaling.short_factors, "long factors": rope.scaling.long_factors}
    for name, factors in lists.items():
        if len(factors) != rope.rotary_dim // 2:
            raise CorruptSource(
                f"{label}: RoPE has {len(factors)} {name}, {rope.rotary_dim // 2} pairs of a head rotate; "
                "the configuration cannot be right"
            )


def _check_experts(label: str, experts: Experts) -> None:
    """Raise CorruptSource if groups and numbers of experts do not match."""
    count, active, router = experts.num_experts, experts.num_active, experts.router
    if count % router.num_groups or router.num_active_groups > router.num_groups:
        raise CorruptSource(
            f"{label}: a token cannot have {router.num_active_groups} of {router.num_groups} groups of {count} experts"
        )
    reach = count // router.num_groups * router.num_active_groups
    if active > reach:
        raise CorruptSource(f"{label}: a token cannot have {active} of {reach} experts")
