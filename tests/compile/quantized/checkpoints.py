"""Directories of the tiny random model with quantized matrices, as each format has them, and what their numbers are."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ..conftest import TinyModel, write_safetensors
from .packing import packed

Arrays = dict[str, np.ndarray]
Rng = np.random.Generator
GROUP = 32


def drawn(rng: Rng, shape: tuple[int, int], bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes `[N, K]`, and scales `[N, K / 32]` for which values are about as large as those of a trained matrix."""
    codes = rng.integers(0, 1 << bits, shape)
    spread = (1 << bits) * shape[1] ** 0.5
    return codes, (rng.uniform(2, 4, (shape[0], shape[1] // GROUP)) / spread).astype(np.float16)


def each(scales: np.ndarray) -> np.ndarray:
    return scales.astype(np.float32).repeat(GROUP, axis=1)


def gptq(rng: Rng, shape: tuple[int, int], order: np.ndarray | None = None) -> tuple[Arrays, np.ndarray]:
    codes, scales = drawn(rng, shape, 4)
    g_idx = np.arange(shape[1]) // GROUP if order is None else order
    arrays = {
        ".qweight": np.ascontiguousarray(packed(codes, 4).T),
        ".qzeros": packed(np.full(scales.T.shape, 7), 4),
        ".scales": np.ascontiguousarray(scales.T),
        ".g_idx": g_idx.astype(np.int32),
        ".bias": np.zeros(shape[0], np.float16),
    }
    return arrays, (codes - 8).astype(np.float32) * scales.astype(np.float32)[:, g_idx]


def gptq_sorted(rng: Rng, shape: tuple[int, int]) -> tuple[Arrays, np.ndarray]:
    return gptq(rng, shape, rng.permutation(np.arange(shape[1]) // GROUP))


def awq(rng: Rng, shape: tuple[int, int]) -> tuple[Arrays, np.ndarray]:
    codes, scales = drawn(rng, shape, 4)
    zeros = rng.integers(6, 10, scales.shape)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def words(values: np.ndarray) -> np.ndarray:
        return packed(values.reshape(len(values), -1, 8)[..., order].reshape(values.shape), 4)

    arrays = {".qweight": words(codes.T), ".qzeros": words(zeros.T), ".scales": np.ascontiguousarray(scales.T)}
    return arrays, (codes - zeros.repeat(GROUP, axis=1)).astype(np.float32) * each(scales)


def compressed(rng: Rng, shape: tuple[int, int]) -> tuple[Arrays, np.ndarray]:
    codes, scales = drawn(rng, shape, 4)
    scales = scales.astype(ml_dtypes.bfloat16)
    arrays = {".weight_packed": packed(codes, 4), ".weight_scale": scales, ".weight_shape": np.array(shape)}
    return arrays, (codes - 8).astype(np.float32) * each(scales)


def compressed_int(rng: Rng, shape: tuple[int, int]) -> tuple[Arrays, np.ndarray]:
    codes, zeros = rng.integers(-128, 128, shape), rng.integers(-20, 20, (shape[0], 1))
    scales = (rng.uniform(2, 4, (shape[0], 1)) / (256 * shape[1] ** 0.5)).astype(ml_dtypes.bfloat16)
    arrays = {".weight": codes.astype(np.int8), ".weight_scale": scales, ".weight_zero_point": zeros.astype(np.int8)}
    return arrays, (codes - zeros).astype(np.float32) * scales.astype(np.float32)


def compressed_fp8(rng: Rng, shape: tuple[int, int]) -> tuple[Arrays, np.ndarray]:
    codes = rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)
    scales = (rng.uniform(1, 2, (shape[0], 1)) * shape[1] ** -0.5).astype(ml_dtypes.bfloat16)
    return {".weight": codes, ".weight_scale": scales}, codes.astype(np.float32) * scales.astype(np.float32)


def mlx(rng: Rng, shape: tuple[int, int]) -> tuple[Arrays, np.ndarray]:
    codes, scales = drawn(rng, shape, 4)
    biases = (-scales.astype(np.float32) * 7.5).astype(np.float16)
    arrays = {".weight": packed(codes, 4).view(np.uint32), ".scales": scales, ".biases": biases}
    return arrays, each(scales) * codes.astype(np.float32) + each(biases)


def fp8(rng: Rng, shape: tuple[int, int]) -> tuple[Arrays, np.ndarray]:
    codes = rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)
    scale = np.full([-(-size // 128) for size in shape], shape[1] ** -0.5, np.float32)
    return {".weight": codes, ".weight_scale_inv": scale}, codes.astype(np.float32) * np.float32(shape[1] ** -0.5)


def fbgemm(rng: Rng, shape: tuple[int, int]) -> tuple[Arrays, np.ndarray]:
    codes = rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)
    scale = (rng.uniform(1, 2, (shape[0], 1)) * shape[1] ** -0.5).astype(np.float32)
    return {".weight": codes, ".weight_scale": scale}, codes.astype(np.float32) * scale


def modelopt_fp8(rng: Rng, shape: tuple[int, int]) -> tuple[Arrays, np.ndarray]:
    codes, scale = rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn), np.float32(shape[1] ** -0.5)
    arrays = {".weight": codes, ".weight_scale": np.array(scale), ".input_scale": np.array(np.float32(0.5))}
    return arrays, codes.astype(np.float32) * scale


def mxfp8(rng: Rng, shape: tuple[int, int]) -> tuple[Arrays, np.ndarray]:
    codes = rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)
    exponents = rng.integers(122, 126, (shape[0], shape[1] // GROUP))
    powers = np.exp2(exponents - 127.0).astype(np.float32).repeat(GROUP, axis=1)
    return {".weight": codes, ".weight_scale": exponents.astype(np.uint8)}, codes.astype(np.float32) * powers


_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def modelopt_nvfp4(rng: Rng, shape: tuple[int, int]) -> tuple[Arrays, np.ndarray]:
    codes = rng.integers(0, 16, shape).astype(np.uint8)
    scales = rng.uniform(100, 400, (shape[0], shape[1] // 16)).astype(ml_dtypes.float8_e4m3fn)
    factor = np.float32(shape[1] ** -0.5 / 1000)
    arrays = {
        ".weight": codes[:, ::2] | codes[:, 1::2] << 4,
        ".weight_scale": scales,
        ".weight_scale_2": np.array(factor),
        ".input_scale": np.array(np.float32(0.5)),
    }
    return arrays, _FP4[codes] * scales.astype(np.float32).repeat(16, axis=1) * factor


def mlc(rng: Rng, shape: tuple[int, int]) -> tuple[Arrays, np.ndarray]:
    codes, scales = drawn(rng, shape, 4)
    codes = codes.clip(0, 14)
    arrays = {".q_weight": packed(codes, 4).view(np.uint32), ".q_scale": scales}
    return arrays, (codes - 7).astype(np.float32) * each(scales)


Quantize = Callable[[Rng, tuple[int, int]], tuple[Arrays, np.ndarray]]
FORMATS: dict[str, tuple[Quantize, Mapping[str, Any]]] = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True}),
    "gptq sorted": (gptq_sorted, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "compressed-tensors": (
        compressed,
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": {"num_bits": 4}}},
        },
    ),
    "compressed-tensors int": (
        compressed_int,
        {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "config_groups": {
                "group_0": {"weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}}
            },
        },
    ),
    "compressed-tensors fp8": (
        compressed_fp8,
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
        },
    ),
    "mlx": (mlx, {"bits": 4, "group_size": GROUP}),
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "fbgemm fp8": (
        fbgemm,
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
    ),
    "modelopt fp8": (modelopt_fp8, {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}),
    "modelopt nvfp4": (modelopt_nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}),
    "mxfp8": (
        mxfp8,
        {
            "quant_method": "compressed-tensors",
            "format": "mxfp8-quantized",
            "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "group_size": 32}}},
        },
    ),
}
UNQUANTIZED = ("embed_tokens", "lm_head", "norm")


def quantized(weights: Arrays, quantize: Quantize) -> tuple[Arrays, Arrays]:
    """Arrays of a file, and the float32 numbers of the model's tensors; embeddings and norms stay float16."""
    rng = np.random.default_rng(3)
    arrays: Arrays = {}
    expected: Arrays = {}
    for name, weight in weights.items():
        if weight.ndim == 1 or any(word in name for word in UNQUANTIZED):
            scaled = weight * (0.1 if "lm_head" in name else 1)
            arrays[name] = scaled.astype(np.float16)
            expected[name] = arrays[name].astype(np.float32)
            continue
        parts, expected[name] = quantize(rng, weight.shape)
        arrays |= {name.removesuffix(".weight") + ending: part for ending, part in parts.items()}
    return arrays, expected


def write_checkpoint(path: Path, tiny: TinyModel, format_: str) -> Arrays:
    """Replace the weights of the Hugging Face directory `path`; return the numbers that they are now."""
    quantize, settings = FORMATS[format_]
    arrays, expected = quantized(tiny.weights, quantize)
    write_safetensors(path / "model.safetensors", arrays)
    config = json.loads((path / "config.json").read_text())
    key = "quantization" if format_ == "mlx" else "quantization_config"
    (path / "config.json").write_text(json.dumps(config | {key: settings}))
    return expected


def write_mlc(path: Path, tiny: TinyModel, quantization: str = "q4f16_1") -> Arrays:
    """Turn the Hugging Face directory `path` into one of MLC's, with its matrices fused; return their numbers."""
    fused = dict(tiny.weights)
    for layer in range(tiny.config.num_hidden_layers):
        for joined, parts in (
            ("self_attn.qkv_proj", ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
            ("mlp.gate_up_proj", ["mlp.gate_proj", "mlp.up_proj"]),
        ):
            prefix = f"model.layers.{layer}."
            matrices = [fused.pop(f"{prefix}{part}.weight") for part in parts]
            fused[f"{prefix}{joined}.weight"] = np.concatenate(matrices)
    arrays, numbers = quantized(fused, mlc)
    config = json.loads((path / "config.json").read_text())
    chat = {
        "model_type": config["model_type"],
        "quantization": quantization,
        "model_config": {
            **{key: config[key] for key in config if key not in ("architectures", "rope_theta", "model_type")},
            "position_embedding_base": config["rope_theta"],
            "context_window_size": config["max_position_embeddings"],
        },
        "conv_template": {"name": "chatml"},
        "eos_token_id": [2],
        "bos_token_id": 1,
        "temperature": 0.5,
    }
    (path / "mlc-chat-config.json").write_text(json.dumps(chat))
    (path / "config.json").unlink()
    (path / "model.safetensors").unlink()
    write_tensor_cache(path, arrays)
    return numbers


def write_tensor_cache(path: Path, arrays: Arrays) -> None:
    """MLC's index of arrays, and one shard with all of them."""
    names = {np.dtype(np.uint32): "uint32", np.dtype(np.float16): "float16", np.dtype(np.float32): "float32"}
    data, records = b"", []
    for name, array in arrays.items():
        record = {"name": name, "shape": array.shape, "dtype": names[array.dtype], "format": "raw"}
        records.append(record | {"nbytes": array.nbytes, "byteOffset": len(data)})
        data += array.tobytes()
    (path / "params_shard_0.bin").write_bytes(data)
    shard = {"dataPath": "params_shard_0.bin", "format": "raw-shard", "nbytes": len(data), "records": records}
    (path / "tensor-cache.json").write_text(json.dumps({"records": [shard]}))
