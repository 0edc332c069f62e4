"""Models whose sizes no tile divides, and whose joined matrices are stored in several ways, agree with NumPy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Type
from radixlm.compile import compile_model
from radixlm.compile.stored_weights import Quantize


@pytest.mark.parametrize("quantize", ["f32", "q8"])
@pytest.mark.parametrize(
    "sizes",  # hidden, intermediate, query heads, KV heads, head_dim
    [
        (64, 172, 3, 1, 8),  # heads * head_dim is no multiple of 16
        (48, 100, 5, 5, 6),  # nor is a head's half a power of two
        (40, 20, 3, 3, 20),
        (32, 64, 1, 1, 2),
    ],
)
def test_odd_sizes_agree_with_numpy(
    make_tiny: Callable[..., Any],
    write_huggingface: Callable[..., Path],
    tmp_path: Path,
    quantize: Quantize,
    sizes: tuple[int, ...],
) -> None:
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    source = write_huggingface(make_tiny(**dict(zip(names, sizes, strict=True))))
    report = compile_model(source, tmp_path / "odd.radixlm", quantize=quantize, kv_dtype="f32")
    assert report.verification.worst_difference < (1e-4 if quantize == "f32" else 0.05)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize(
    "types",
    [
        {"q_proj": Type.Q4_1, "v_proj": Type.Q8_0, "up_proj": Type.Q8_0},  # q | k | v: three kinds, as in Q4_K_M files
        {"k_proj": Type.F16, "gate_proj": Type.BF16},  # integers and floats of the same rows
        {"q_proj": Type.F32, "o_proj": Type.F32, "up_proj": Type.Q5_1},
    ],
    ids=["integers", "k in f16", "q in f32"],
)
def test_matrices_of_several_kinds_agree_with_numpy(
    make_tiny: Callable[..., Any],
    write_gguf: Callable[..., Path],
    tmp_path: Path,
    architecture: str,
    types: dict[str, Type],
) -> None:
    tiny = make_tiny(architecture=architecture, attention_bias=architecture == "qwen2")
    source = write_gguf(tiny, Type.Q4_0, types=types)
    report = compile_model(source, tmp_path / "mixed.radixlm", kv_dtype="f32")
    assert report.verification.worst_difference < 0.1
