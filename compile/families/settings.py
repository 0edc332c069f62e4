"""The settings of a source under Hugging Face's keys, and the configurations built from them.

A family reads both config.json and GGUF's metadata with it. Knows keys and defaults, not files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec
from radixlm.runtime.artifact.model_config import (
    Attention,
    Dense,
    Experts,
    Function,
    LayerConfig,
    ModelConfig,
    Rope,
    RopeScaling,
)
from radixlm.runtime.errors import CorruptSource, UnsupportedArchitecture

from ..layers.number_checks import check_numbers
from .rope_scaling import rope_scaling

LayerType = Literal["full_attention", "sliding_attention"]  # transformers' names

PER_LAYER = "per_layer_config"  # transformers 5's key of the differences of single layers, by number
_MOST_LAYERS = 1024  # limit of manifests
_ROPE_THETA = 10000.0  # default of all classes
_FUNCTIONS: Mapping[str, Function] = {
    "silu": "silu_mul",
    "swish": "silu_mul",
    "gelu": "gelu_mul",
    "gelu_pytorch_tanh": "gelu_tanh_mul",
    "relu2": "relu2_mul",
}


@dataclass(frozen=True)
class Settings:
    """The settings of one model, as its source declares them.

    Attributes:
        label: the source's name in messages.
        format: the format of tensor names.
        architecture: the family's key in the registry; `class_name`: the source's name for it.
        values: by Hugging Face's keys; the value of a key that a GGUF file has per layer is a list.
        stored: names of all tensors, as the source has them.
        rope_factors: divisors of frequencies that are stored as a tensor.
    """

    label: str
    format: Literal["huggingface", "gguf"]
    architecture: str
    class_name: str
    values: Mapping[str, Any]
    stored: frozenset[str] = frozenset()
    rope_factors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def __call__(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or the default if it is missing or null."""
        value = self.values.get(key)
        return default if value is None else value

    def at(self, index: int) -> Settings:
        """Return the settings of one layer, with the differences that transformers 5 lists.

        Raises:
            CorruptSource: a listed layer does not exist.
            UnsupportedArchitecture: a layer leaves parts out.
        """
        own = self._per_layer.get(index)
        if not own:
            return self
        if own.get("skip"):
            raise UnsupportedArchitecture(
                f"{self.label}: {PER_LAYER} has layer {index} skip {own['skip']}, which is not supported"
            )
        return replace(self, values={**self.values, **own})

    @property
    def _per_layer(self) -> Mapping[int, Mapping[str, Any]]:
        """The differences of single layers, by number. Raises CorruptSource if they are invalid."""
        declared = self(PER_LAYER, {})
        layers = {int(key): own for key, own in declared.items()}
        wrong = next((key for key in layers if not 0 <= key < int(self.number("num_hidden_layers"))), None)
        if wrong is not None:
            raise CorruptSource(f"{self.label}: {PER_LAYER} has layer {wrong}; the configuration cannot be right")
        return layers

    def number(self, key: str, default: float | None = None) -> Any:
        """Return the value of a key, which must be a number, or the default.

        Raises:
            CorruptSource: it is not a number, or missing without a default.
        """
        value = self(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CorruptSource(
                f"{self.label}: {key} is {value!r}, must be a number; the configuration cannot be right"
            )
        return value

    def of_layer(self, key: str, index: int, default: Any = None) -> Any:
        """Return the value of a key for one layer; the key may have one value for all layers.

        Raises:
            CorruptSource: it has per-layer values, and none for this layer.
        """
        value = self(key, default)
        if not isinstance(value, list):
            return value
        if index >= len(value):
            found = f"{key} has no value for layer {index}, it has {len(value)}"
            raise CorruptSource(f"{self.label}: {found}; the configuration cannot be right")
        return value[index]

    def layer_is(self, key: str, index: int, kinds: Mapping[str, bool]) -> bool:
        """Return the entry of `kinds` for the word that a key, such as `layer_types`, has for a layer.

        Raises:
            UnsupportedArchitecture: the word is not in `kinds`.
        """
        return self._entry_for(f"{key} of layer {index}", self.of_layer(key, index), kinds)

    def _entry_for(self, what: str, word: Any, kinds: Mapping[str, bool]) -> bool:
        """Return the entry of `kinds` for a word. Raises UnsupportedArchitecture if there is none."""
        if word in kinds:
            return kinds[word]
        only = f"only {' and '.join(kinds)}"
        raise UnsupportedArchitecture(
            f"{self.label}: {what} is {word!r}, which is not supported for {self.architecture}, {only}"
        )

    def slides(self, index: int, *, full_every: int) -> bool:
        """Return whether a layer has a sliding window: as declared, else all layers but each `full_every`th."""
        if self("layer_types"):
            return self.layer_is("layer_types", index, {"sliding_attention": True, "full_attention": False})
        pattern = self("sliding_window_pattern", full_every)
        if isinstance(pattern, str):  # such as LLLG, for local and global
            return self._entry_for(
                "a part of sliding_window_pattern", pattern[index % len(pattern)], {"L": True, "G": False}
            )
        if isinstance(pattern, bool | list):
            return bool(self.of_layer("sliding_window_pattern", index))
        return bool((index + 1) % pattern)

    def refuse(self, *keys: str) -> None:
        """Raise UnsupportedArchitecture if one of these settings is on."""
        for key in keys:
            if self(key):
                raise UnsupportedArchitecture(f"{self.label}: {key} is not supported for {self.architecture}")

    def has_bias(self, gguf_part: str, *, otherwise: bool) -> bool:
        """Return whether a part has a bias: in a GGUF file if layer 0 stores one, for other sources `otherwise`."""
        return f"blk.0.{gguf_part}.bias" in self.stored if self.format == "gguf" else otherwise

    @property
    def num_layers(self) -> int:
        """Number of layers, without those that draft further tokens, which llama.cpp counts, too.

        Raises:
            CorruptSource: there are none, or more than any model has.
        """
        extra = self("nextn_predict_layers", 0) if self.format == "gguf" else 0
        count = int(self.number("num_hidden_layers")) - int(extra)
        if not 1 <= count <= _MOST_LAYERS:
            raise CorruptSource(f"{self.label}: num_hidden_layers is {count}, must be 1 to {_MOST_LAYERS}")
        return count

    @property
    def head_dim(self) -> int:
        """Size of a head: as declared, or the model's width divided by the number of heads."""
        declared = self("head_dim")
        if declared is not None:
            return int(self.number("head_dim"))
        hidden_size, num_heads = self.number("hidden_size"), self.number("num_attention_heads")
        if num_heads < 1:
            raise CorruptSource(f"{self.label}: {hidden_size} values cannot be shared by {num_heads} heads")
        return int(hidden_size // num_heads)

    def function(self, default: str = "silu") -> Function:
        """Return the activation function of gated feed-forward layers, which `hidden_act` names."""
        return self.named_function("hidden_act", self("hidden_activation", self("hidden_act", default)))

    def named_function(self, key: str, name: Any) -> Function:
        """Return the gated function that a key names. Raises UnsupportedArchitecture if it is not known."""
        if name not in _FUNCTIONS:
            known = ", ".join(_FUNCTIONS)
            raise UnsupportedArchitecture(f"{self.label}: {key} {name!r} is not supported, only {known}")
        return _FUNCTIONS[name]

    def rope(
        self,
        of: LayerType = "full_attention",
        *,
        theta: float | None = None,
        rotary_dim: int | None = None,
        **changes: Any,
    ) -> Rope:
        """Return the declared rotary positions; arguments replace fields, `scaling=None` removes the scaling.

        Args:
            of: the type of layers, if types differ.
        """
        declared = self.rope_parameters(of)
        if theta is None:
            theta = declared.get("rope_theta") or self.number("rope_theta", _ROPE_THETA)
        if rotary_dim is None:
            share = declared.get("partial_rotary_factor") or self("partial_rotary_factor", 1.0)
            rotary_dim = int(self("rotary_dim") or self.head_dim * share)
        scaling = changes["scaling"] if "scaling" in changes else self.rope_scaling(rotary_dim, of)
        return Rope(theta=theta, rotary_dim=rotary_dim, scaling=scaling)

    def rope_parameters(self, of: LayerType = "full_attention") -> Mapping[str, Any]:
        """Return `rope_parameters` of newer files, or `rope_scaling` and `rope_theta` of older ones.

        If layer types differ, newer files have one for each; values outside of them are of full attention.
        """
        rope = self("rope_parameters") or self("rope_scaling") or {}
        if not isinstance(rope, Mapping):
            rope = {"rope_type": rope}
        if "full_attention" in rope or "sliding_attention" in rope:
            rope = rope.get(of) or {}
        elif of == "sliding_attention":
            rope = {}
        return rope

    def rope_scaling(self, rotary_dim: int | None = None, of: LayerType = "full_attention") -> RopeScaling | None:
        """Return the scaling of RoPE frequencies, or None. Raises UnsupportedArchitecture for an unknown kind."""
        return rope_scaling(
            self.label,
            self.rope_parameters(of),
            self.rope_factors,
            rotary_dim=self.head_dim if rotary_dim is None else rotary_dim,
            max_position_embeddings=self("max_position_embeddings", 0),
            original=self("original_max_position_embeddings"),
        )

    def attention(self, **changes: Any) -> Attention:
        """Return Llama's attention of these sizes; keyword arguments replace its fields."""
        num_heads, head_dim = self.number("num_attention_heads"), changes.get("head_dim", self.head_dim)
        fields = {
            "num_heads": num_heads,
            "head_dim": head_dim,
            "scale": head_dim**-0.5 if head_dim > 0 else 1.0,
            "bias": self.has_bias("attn_q", otherwise=False),
        }
        if "num_kv_heads" not in changes:
            fields["num_kv_heads"] = self.number("num_key_value_heads", num_heads)
        if "rope" not in changes:
            fields["rope"] = self.rope()
        return Attention(**(fields | changes))

    def dense(self, **changes: Any) -> Dense:
        """Return Llama's feed-forward layer of these sizes; keyword arguments replace its fields."""
        fields: dict[str, Any] = {}
        if "intermediate_size" not in changes:
            fields["intermediate_size"] = self.number("intermediate_size")
        if "function" not in changes:
            fields["function"] = self.function()
        return Dense(**(fields | changes))

    def experts(self, **changes: Any) -> Experts:
        """Return Mixtral's experts of these sizes; keyword arguments replace its fields."""
        counts = (self(key) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
        fields = {
            "num_experts": next((count for count in counts if count is not None), None),
            "num_active": self("num_experts_per_tok"),
            "intermediate_size": self("moe_intermediate_size", self("intermediate_size")),
        }
        if "function" not in changes:
            fields["function"] = self.function()
        fields |= changes
        missing = next((key for key in ("num_experts", "num_active", "intermediate_size") if fields[key] is None), None)
        if missing is not None:
            raise CorruptSource(f"{self.label}: {missing} of experts is not given; the configuration cannot be right")
        return Experts(**fields)

    def model(self, layer: Callable[[Settings, int], LayerConfig], **changes: Any) -> ModelConfig:
        """Return the model with the layers that `layer(settings, index)` returns; keyword arguments replace its fields.

        Every number is checked.

        Raises:
            CorruptSource: a number is out of its range, or heads do not divide.
        """
        fields = {
            "architecture": self.architecture,
            "vocab_size": self("vocab_size"),
            "hidden_size": self("hidden_size"),
            "layers": tuple(layer(self.at(index), index) for index in range(self.num_layers)),
            "norm_eps": self("rms_norm_eps", self("layer_norm_eps", self("norm_eps", 1e-6))),
            "max_position_embeddings": self("max_position_embeddings"),
            "tie_word_embeddings": self("tie_word_embeddings", False),
        }
        try:
            config = msgspec.convert(msgspec.to_builtins(fields | changes), ModelConfig)
        except msgspec.ValidationError as error:
            message = f"{self.label}: {error}; the source's configuration cannot be right"
            raise CorruptSource(message) from error
        if not config.kv_attentions:
            raise UnsupportedArchitecture(f"{self.label}: no layer has attention, which is not supported")
        check_numbers(self.label, config)
        return config
