"""Read a LoRA adapter: PEFT's directory, or llama.cpp's GGUF file.

Knows the two formats; not the model's matrices, nor where adapters are in memory. What an adapter changes besides
matrices is refused, because the reply would be another model's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from ..artifact.lora import AdapterFormat
from ..errors import InvalidAdapter
from .tensor_files import StoredTensor, read_gguf, read_safetensors, read_text

_CONFIG: Final = "adapter_config.json"
_WEIGHTS: Final = "adapter_model.safetensors"
_PEFT_NAME = re.compile(
    r"(?:base_model\.model\.)?(?:model\.|language_model\.)*(layers\.\d+\..+)\.lora_([AB])(?:\.default)?\.weight"
)
_GGUF_NAME = re.compile(r"(.+)\.lora_([ab])")


@dataclass(frozen=True)
class LowRank:
    """The change of one matrix: `scale * B A`, with A `[rank, inputs]` and B `[outputs, rank]`."""

    a: StoredTensor
    b: StoredTensor
    scale: float

    @property
    def rank(self) -> int:
        """Number of rows of A."""
        return self.a.shape[0]


@dataclass(frozen=True)
class AdapterFile:
    """An adapter as its file has it.

    Attributes:
        base: the name of the model that it was trained for, if known.
        changes: by the name of the matrix in the format: "model.layers.0.mlp.up_proj.weight", "blk.0.ffn_up.weight".
    """

    path: Path
    format: AdapterFormat
    base: str | None
    changes: Mapping[str, LowRank]

    @property
    def rank(self) -> int:
        """The largest rank."""
        return max(change.rank for change in self.changes.values())


def read_adapter(path: str | Path) -> AdapterFile:
    """Open an adapter of PEFT or of llama.cpp. Its numbers are read when they are used.

    Raises:
        InvalidAdapter: there is none, it is damaged, or it changes more than matrices.
    """
    path = Path(path)
    found = _read_peft(path) if path.is_dir() else _read_gguf(path)
    if found is None:
        raise InvalidAdapter(f"{path} is no GGUF file; give one, or PEFT's folder, which has {_CONFIG}")
    if not found.changes:
        raise InvalidAdapter(f"{path} changes no matrix; give a LoRA adapter")
    return found


class _PeftConfig(msgspec.Struct):
    """The fields of `adapter_config.json` that matter. Those that are refused are listed in `_REFUSED`."""

    peft_type: str
    r: int
    lora_alpha: float
    use_rslora: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    base_model_name_or_path: str | None = None


_REFUSED: Final[Mapping[str, str]] = {
    "use_dora": "DoRA",
    "modules_to_save": "whole modules",
    "trainable_token_indices": "embeddings of tokens",
    "target_parameters": "parameters of experts",
    "layer_replication": "repeated layers",
    "fan_in_fan_out": "transposed matrices",
    "lora_bias": "biases",
    "alora_invocation_tokens": "an activation by tokens (aLoRA)",
    "use_qalora": "pooled inputs (QA-LoRA)",
    "use_bdlora": "block-diagonal matrices",
    "arrow_config": "routing among adapters (Arrow)",
    "velora_config": "compressed activations (VeLoRA)",
}


def _read_peft(path: Path) -> AdapterFile:
    """Read a folder of PEFT.

    Raises:
        InvalidAdapter: it is damaged, no LoRA, or changes more than matrices.
    """
    text = read_text(path / _CONFIG)
    try:
        raw = msgspec.json.decode(text)
        config = msgspec.convert(raw, _PeftConfig)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidAdapter(f"{path / _CONFIG} is not PEFT's ({error}); fetch the adapter again") from None
    if config.peft_type != "LORA":
        raise InvalidAdapter(f"{path} is of type {config.peft_type!r:.40}; adapters are served that are LoRA")
    wrong = [what for key, what in _REFUSED.items() if raw.get(key)]
    if raw.get("bias", "none") != "none":
        wrong.append("biases")
    if wrong:
        raise InvalidAdapter(f"{path} has {', '.join(wrong)}, and an adapter here changes matrices alone; merge it")
    tensors = read_safetensors(path / _WEIGHTS)
    pairs = _pairs(path, tensors, _PEFT_NAME)

    def scale(name: str, rank: int) -> float:
        expected = _of_pattern(config.rank_pattern, name, config.r)
        if rank != expected:
            raise InvalidAdapter(f"{path}: {name} has rank {rank}, {_CONFIG} says {expected}; fetch it again")
        alpha = _of_pattern(config.alpha_pattern, name, config.lora_alpha)
        return alpha / (math.sqrt(rank) if config.use_rslora else rank)

    changes = {f"model.{name}.weight": LowRank(a, b, scale(f"model.{name}", a.shape[0])) for name, (a, b) in pairs}
    return AdapterFile(path, "huggingface", config.base_model_name_or_path, changes)


def _of_pattern(pattern: Mapping[str, Any] | None, module: str, default: float) -> float:
    """Return the value of the first key that matches the end of a module's name, as PEFT does."""
    for key, value in (pattern or {}).items():
        try:
            is_match = re.match(rf"(.*\.)?({key})$", module)
        except re.error as error:
            raise InvalidAdapter(f"{_CONFIG} has the pattern {key!r:.80}: {error}; fetch the adapter again") from None
        if is_match:
            return float(value)
    return default


def _read_gguf(path: Path) -> AdapterFile | None:
    """Read an adapter in llama.cpp's GGUF format; None if the file is no GGUF file.

    Raises:
        InvalidAdapter: it is damaged, no LoRA, or is active for a part of the tokens only (aLoRA).
    """

    def require_lora(metadata: Mapping[str, Any]) -> None:
        kind = metadata.get("general.type"), metadata.get("adapter.type")
        if kind != ("adapter", "lora"):
            said = f"general.type {kind[0]!r:.40} and adapter.type {kind[1]!r:.40}"
            raise InvalidAdapter(f"{path} has {said}; give a LoRA")

    found = read_gguf(path, require_lora)
    if found is None:
        return None
    metadata, tensors = found
    if metadata.get("adapter.alora.invocation_tokens"):
        raise InvalidAdapter(f"{path} has {_REFUSED['alora_invocation_tokens']}, which is not served; merge it")
    alpha = metadata.get("adapter.lora.alpha", 0.0)
    if not isinstance(alpha, float) or not math.isfinite(alpha):
        raise InvalidAdapter(f"{path} has adapter.lora.alpha {alpha!r:.40}; it must be a number")
    changes = {
        name: LowRank(a, b, alpha / a.shape[0] if alpha else 1.0) for name, (a, b) in _pairs(path, tensors, _GGUF_NAME)
    }
    return AdapterFile(path, "gguf", metadata.get("general.base_model.0.name"), changes)


def _pairs(
    path: Path, tensors: Mapping[str, StoredTensor], pattern: re.Pattern[str]
) -> Iterator[tuple[str, tuple[StoredTensor, StoredTensor]]]:
    """Yield A and B of each matrix, by its name."""
    found: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        matched = pattern.fullmatch(name)
        if matched is None:
            raise InvalidAdapter(f"{path} has {name}, which is no part of a layer's matrix; such adapters are refused")
        found.setdefault(matched[1], {})[matched[2].upper()] = tensor
    for name, parts in found.items():
        if parts.keys() != {"A", "B"}:
            raise InvalidAdapter(f"{path}: {name} has {' and '.join(parts)} alone; fetch the adapter again")
        a, b = parts["A"], parts["B"]
        if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1] or not a.shape[0]:
            raise InvalidAdapter(f"{path}: {name} has A {list(a.shape)} and B {list(b.shape)}, which do not fit")
        yield name, (a, b)
