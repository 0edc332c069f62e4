"""Find the format of a checkpoint's matrices from the settings in its files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from radixlm.runtime.errors import UnsupportedTensor

from .compressed import CompressedTensors
from .floats import FP8, GptOssBlocks, ModelOptFP4
from .gptq import AWQ, GPTQ
from .mlx import MLX
from .tensors import Format, number

# Files next to config.json in which tools store the settings, if config.json has none.
BESIDE = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
SUPPORTED = "gptq, awq (gemm), compressed-tensors, fp8, mxfp4, modelopt (FP8, NVFP4), MLX and MLC"

Json = Mapping[str, Any]


def find_format(label: str, config: Json, beside: Mapping[str, Json], names: Iterable[str]) -> Format | None:
    """Return the format that `config` (config.json) or another file describes; None for plain floats.

    Args:
        beside: content of each file of `BESIDE`, {} if it does not exist.
        names: names of the arrays.

    Raises:
        UnsupportedTensor: a method, a layout or a size is unsupported.
    """
    settings = config.get("quantization_config")
    if settings is None and isinstance(config.get("quantization"), Mapping):
        settings = config["quantization"]
    if settings is None:
        return _beside(label, beside)
    if not isinstance(settings, Mapping):
        raise UnsupportedTensor(f"{label}: a quantization of {settings!r} is not read; read are {SUPPORTED}")
    method = settings.get("quant_method")
    if method is None and "group_size" in settings and "bits" in settings:
        return MLX(label, settings)
    match method:
        case "gptq":
            return GPTQ.of(label, settings)
        case "awq":
            return AWQ.of(label, settings)
        case "compressed-tensors":
            return CompressedTensors.of(label, settings)
        case "fp8" | "fbgemm_fp8":
            return _fp8(label, settings, names)
        case "mxfp4":
            return GptOssBlocks()
        case "modelopt":
            return _modelopt(label, settings)
        case "bitsandbytes":
            raise UnsupportedTensor(
                f"{label}: weights quantized by bitsandbytes are not read; compile the original model with "
                "--quantize q4 or q8, or take a GGUF file"
            )
    raise UnsupportedTensor(
        f"{label}: weights quantized by {method} are not read; read are {SUPPORTED}; "
        "take such a checkpoint, the original model, or a GGUF file"
    )


def _beside(label: str, beside: Mapping[str, Json]) -> Format | None:
    """Return AutoGPTQ's settings, AutoAWQ's old ones under their own names, or ModelOpt's: the first that exist."""
    gptq, awq, modelopt = (beside.get(name) or {} for name in BESIDE)
    if gptq:
        return GPTQ.of(label, gptq)
    if awq:
        own = {"bits": "w_bit", "group_size": "q_group_size"}
        return AWQ.of(label, {**awq, **{key: awq[name] for key, name in own.items() if name in awq}})
    quantization = modelopt.get("quantization")
    return _modelopt(label, quantization) if isinstance(quantization, Mapping) else None


def _fp8(label: str, settings: Json, names: Iterable[str]) -> FP8:
    """Return the FP8 format with the scales' suffix that occurs in the names."""
    marker = ".weight_scale_inv" if any(name.endswith(".weight_scale_inv") for name in names) else ".weight_scale"
    block = settings.get("weight_block_size") or (128, 128)
    if not isinstance(block, list | tuple) or len(block) != 2:
        raise UnsupportedTensor(f"{label}: weight_block_size {block!r} is not read, only two numbers")
    sides = dict(enumerate(block))
    rows, inputs = (number(label, {"weight_block_size": sides[side]}, "weight_block_size") for side in sides)
    return FP8(marker, (max(1, rows), max(1, inputs)))


def _modelopt(label: str, settings: Json) -> Format:
    """Return ModelOpt's format. Raises UnsupportedTensor for an unsupported algorithm."""
    algorithm = settings.get("quant_algo")
    if algorithm == "FP8":
        return FP8(".weight_scale")
    if algorithm == "NVFP4":
        return ModelOptFP4()
    raise UnsupportedTensor(f"{label}: ModelOpt's quant_algo {algorithm!r} is not read, only FP8 and NVFP4")
