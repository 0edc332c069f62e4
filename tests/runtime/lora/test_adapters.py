"""Adapters from their files into the memory of kernels: numbers, digests, and everything that is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from radixlm.compile.families.registry import model_config
from radixlm.compile.lora_layout import lora_layout
from radixlm.compile.sources.huggingface import huggingface_settings
from radixlm.runtime.artifact.lora import LoraDType, LoraInfo
from radixlm.runtime.errors import InvalidAdapter, InvalidParameter
from radixlm.runtime.lora import tensor_files
from radixlm.runtime.lora.adapter_files import read_adapter
from radixlm.runtime.lora.adapters import Adapters
from radixlm.runtime.lora.tensor_files import read_safetensors
from radixlm.runtime.model.memory import AdapterRows
from safetensors.numpy import load_file, save_file

from ...goldens.tiny_adapters import TinyAdapter

LLAMA = TinyAdapter("llama")
FIRST = "base_model.model.model.layers.0.self_attn.q_proj"


def layout(model: str = "llama", dtype: LoraDType = "f32", max_loras: int = 3) -> LoraInfo:
    tiny = TinyAdapter(model).tiny
    return lora_layout(model_config(huggingface_settings(model, tiny.config)), max_loras, 16, dtype)


def loaded(files: dict[str, Path], dtype: LoraDType = "f32") -> tuple[Adapters, AdapterRows]:
    rows = AdapterRows(layout(dtype=dtype), 8)
    return Adapters(files, rows), rows


def numbers(rows: AdapterRows, index: int) -> dict[str, np.ndarray]:
    """`B A` of each matrix, from the memory that kernels read; matrices without a rank are left out."""
    found, most = {}, rows.info.max_rank
    for places in rows.info.places():
        for place in places:
            rank = 16 * int(rows.ranks[index, place.number])
            if rank:
                a = _unpacked(rows.memory[index, place.a_at : place.b_at], place.num_inputs, rows.info.dtype)
                b = _unpacked(rows.memory[index, place.b_at : place.b_at + place.b_items], most, rows.info.dtype)
                found[place.matrix.name] = b[: place.matrix.num_outputs, :rank] @ a[:rank]
    return found


def _unpacked(stored: np.ndarray, num_columns: int, dtype: LoraDType) -> np.ndarray:
    values = stored.view(ml_dtypes.bfloat16) if dtype == "bf16" else stored
    blocks = values.astype(np.float32).reshape(-1, num_columns, 16)
    return blocks.swapaxes(1, 2).reshape(-1, num_columns)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_the_memory_holds_the_numbers_of_the_file(dtype: LoraDType, tmp_path: Path) -> None:
    adapters, rows = loaded({"a": LLAMA.write_peft(tmp_path / "a")}, dtype)
    expected, tolerance = LLAMA.changes(), {"f32": 1e-6, "f16": 1e-3, "bf16": 1e-2}[dtype]
    found = numbers(rows, adapters.named("a").index)
    assert found.keys() == expected.keys()
    for name, change in found.items():
        assert np.abs(change - expected[name]).max() < tolerance * np.abs(expected[name]).max()


_FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**99), max_value=2.0**99)


@given(st.lists(_FINITE, min_size=1))
def test_bf16_is_rounded_to_the_nearest(values: list[float]) -> None:
    from radixlm.runtime.lora.adapters import _rounded

    given_ = np.array(values, np.float32)
    assert np.array_equal(_rounded(given_, "bf16"), given_.astype(ml_dtypes.bfloat16).view(np.uint16))


@pytest.mark.parametrize(("dtype", "number"), [("f16", 65520.0), ("bf16", np.finfo(np.float32).max)])
def test_numbers_beyond_the_type_are_refused(dtype: LoraDType, number: float, tmp_path: Path) -> None:
    folder = LLAMA.write_peft(tmp_path / "a")
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors[f"{FIRST}.lora_B.weight"] = np.full_like(tensors[f"{FIRST}.lora_B.weight"], number)
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(InvalidAdapter, match=rf"q_proj.* has numbers beyond {dtype}; .* --lora-dtype f32"):
        loaded({"a": folder}, dtype)
    loaded({"a": folder}, "f32")


def test_only_the_matrices_of_the_file_have_a_rank(tmp_path: Path) -> None:
    adapter = TinyAdapter("llama", targets=r".*\.(q|v)_proj\.weight")
    adapters, rows = loaded({"a": adapter.write_peft(tmp_path / "a")})
    assert numbers(rows, adapters.named("a").index).keys() == adapter.changes().keys()
    assert (rows.ranks[1:] == 0).all() and not rows.memory[1:].any()


def test_adapters_are_identified_by_their_content(tmp_path: Path) -> None:
    one, other = LLAMA.write_peft(tmp_path / "one"), TinyAdapter("llama", 2).write_peft(tmp_path / "other")
    copy = LLAMA.write_peft(tmp_path / "copy", {"base_model_name_or_path": "elsewhere"})
    scaled = LLAMA.write_peft(tmp_path / "scaled", {"lora_alpha": 2 * LLAMA.alpha})
    adapters, _ = loaded({"a": one, "b": other, "c": copy, "d": scaled})
    a, b, c, d = map(adapters.named, "abcd")
    assert (a.digest, a.index) == (c.digest, c.index)
    assert len({a.digest, b.digest, d.digest}) == 3 and {a.index, b.index, d.index} == {0, 1, 2}
    again, _ = loaded({"a": other})
    assert again.named("a").digest == b.digest  # the same name with other bytes
    gguf_file, _ = loaded({"a": LLAMA.write_gguf(tmp_path / "a.gguf")})
    assert gguf_file.named("a").digest == a.digest


def test_types_of_files_are_read(tmp_path: Path) -> None:
    values = np.array([[1.0, -2.5], [0.25, 3.0]], np.float32)
    kinds = {"f32": values, "f16": values.astype(np.float16), "bf16": values.astype(ml_dtypes.bfloat16)}
    save_file(kinds, tmp_path / "tensors.safetensors")
    found = read_safetensors(tmp_path / "tensors.safetensors")
    assert all(np.array_equal(found[kind].values, values) and found[kind].values.dtype == np.float32 for kind in kinds)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"use_dora": True}, "has DoRA, and an adapter here changes matrices alone"),
        ({"modules_to_save": ["lm_head"]}, "has whole modules"),
        ({"trainable_token_indices": [1]}, "has embeddings of tokens"),
        ({"target_parameters": ["experts.up"]}, "has parameters of experts"),
        ({"bias": "lora_only"}, "has biases"),
        ({"bias": "all", "use_dora": True}, "has DoRA, biases"),
        ({"fan_in_fan_out": True}, "has transposed matrices"),
        ({"alora_invocation_tokens": [1, 2]}, "has an activation by tokens"),
        ({"peft_type": "IA3"}, "is of type 'IA3'; adapters are served that are LoRA"),
        ({"r": 4}, "has rank 5, adapter_config.json says 4"),
        ({"r": "four"}, "adapter_config.json is not PEFT's"),
    ],
)
def test_what_an_adapter_changes_besides_matrices_is_refused(config: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidAdapter, match=why):
        read_adapter(LLAMA.write_peft(tmp_path / "a", config))


Edit = Callable[[dict[str, np.ndarray]], object]


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (
            lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": t[f"{FIRST}.lora_A.weight"]}),
            "no",
        ),
        (
            lambda t: t.update({f"{FIRST}.lora_magnitude_vector": np.ones(4, np.float32)}),
            "is no part of a layer's matrix",
        ),
        (
            lambda t: t.update({"base_model.model.lm_head.weight": np.ones((4, 4), np.float32)}),
            "lm_head.weight, which is",
        ),
        (lambda t: t.pop(f"{FIRST}.lora_B.weight"), "has A alone"),
        (lambda t: t.update({f"{FIRST}.lora_B.weight": np.ones((64, 3), np.float32)}), "which do not fit"),
        (lambda t: t.update({f"{FIRST}.lora_B.weight": np.ones((63, 5), np.float32)}), "has 64 outputs of 64 inputs"),
        (
            lambda t: t.update({f"{FIRST}.lora_B.weight": np.ones((80, 5), np.float32)}),
            "has 80 outputs, the model's 64",
        ),
        (lambda t: t.update({f"{FIRST}.lora_A.weight": np.ones((5, 32), np.float32)}), "has 64 outputs of 64 inputs"),
        (lambda t: t.update({f"{FIRST}.lora_A.weight": np.full((5, 64), np.nan, np.float32)}), "not finite"),
        (lambda t: t.update({f"{FIRST}.lora_A.weight": np.ones((5, 64), np.float64)}), "is stored as F64"),
        (lambda t: t.clear(), "changes no matrix"),
    ],
)
def test_damaged_adapters_are_refused(edit: Edit, why: str, tmp_path: Path) -> None:
    folder = LLAMA.write_peft(tmp_path / "a")
    tensors = load_file(folder / "adapter_model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(InvalidAdapter, match=why):
        loaded({"a": folder})


def test_adapters_of_another_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidAdapter, match="has 64 outputs of 64 inputs; use the adapter's own model"):
        loaded({"a": TinyAdapter("llama3").write_peft(tmp_path / "a")})
    deeper = TinyAdapter("llama").write_peft(tmp_path / "b")
    tensors = load_file(deeper / "adapter_model.safetensors")
    save_file(
        {name.replace("layers.1.", "layers.7."): values for name, values in tensors.items()},
        deeper / "adapter_model.safetensors",
    )
    with pytest.raises(
        InvalidAdapter, match=r"layers.7.mlp.down_proj.weight and 6 others, .* use its own model, 'tiny/"
    ):
        loaded({"b": deeper})


def test_room_is_limited(tmp_path: Path) -> None:
    files = {str(seed): TinyAdapter("llama", seed).write_peft(tmp_path / str(seed)) for seed in range(4)}
    with pytest.raises(InvalidAdapter, match="more than 3 different adapters"):
        loaded(files)
    with pytest.raises(InvalidAdapter, match=r"rank 17, and the artifact has room for 16; .* --max-lora-rank 17"):
        loaded({"a": TinyAdapter("llama", rank=17).write_peft(tmp_path / "wide")})
    with pytest.raises(InvalidAdapter, match=r"no room for LoRA adapters, and there are 1; .* --max-loras 8"):
        Adapters({"a": files["0"]}, None)
    assert Adapters({}, None).names == ()


def test_an_unknown_name_is_told_which_there_are(tmp_path: Path) -> None:
    adapters, _ = loaded({"a": LLAMA.write_peft(tmp_path / "a")})
    with pytest.raises(InvalidParameter, match="lora is 'b', and there are 'a'") as raised:
        adapters.named("b")
    assert raised.value.param == "lora"
    with pytest.raises(InvalidParameter, match="the engine has none"):
        Adapters({}, None).named("b")


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    (tmp_path / "empty").mkdir()
    for name, why in (("text", "is no GGUF file"), ("empty", "cannot be read"), ("missing", "cannot be read")):
        with pytest.raises(InvalidAdapter, match=why):
            read_adapter(tmp_path / name)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(InvalidAdapter, match=r"general.type None and adapter.type None; give a LoRA"):
        read_adapter(tmp_path / "model.gguf")


def test_a_model_is_refused_before_its_tensors_are_read(tmp_path: Path) -> None:
    """The file would be a terabyte if it were whole, and its tensor is of no type that adapters have."""
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "bert")
    writer.add_tensor("token_embd.weight", np.zeros((4, 34), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(tmp_path / "model.gguf", 1 << 40)
    with pytest.raises(InvalidAdapter, match=r"general.type .* give a LoRA"):
        read_adapter(tmp_path / "model.gguf")


@pytest.mark.parametrize("kind", ["peft", "gguf"])
def test_a_file_is_opened_once_and_each_tensor_read_once_and_none_for_the_rank(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = LLAMA.write_peft(tmp_path / "a") if kind == "peft" else LLAMA.write_gguf(tmp_path / "a.gguf")
    opened, converted = list[Path](), list[int]()
    open_, (dtype, convert) = Path.open, tensor_files._FLOATS["F32"]

    def opening(path: Path, *arguments: Any) -> Any:
        opened.append(path)
        return open_(path, *arguments)

    def converting(values: np.ndarray) -> np.ndarray:
        converted.append(len(values))
        return convert(values)

    monkeypatch.setattr(Path, "open", opening)
    monkeypatch.setitem(tensor_files._FLOATS, "F32", (dtype, converting))
    adapter = read_adapter(path)
    assert adapter.rank == 5 and converted == []
    opened.clear()
    loaded({"a": path})
    assert sorted(opened) == (sorted(path.iterdir()) if kind == "peft" else [path])
    assert len(converted) == 2 * len(adapter.changes)


@pytest.mark.parametrize("kind", ["peft", "gguf"])
def test_a_cut_file_is_one_error(kind: str, tmp_path: Path) -> None:
    folder = LLAMA.write_peft(tmp_path / "a") if kind == "peft" else tmp_path
    file = folder / "adapter_model.safetensors" if kind == "peft" else LLAMA.write_gguf(tmp_path / "a.gguf")
    whole = file.read_bytes()
    for length in (0, 3, 9, 40, 200, 1000, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(InvalidAdapter):
            read_adapter(folder if kind == "peft" else file)


def test_a_config_that_is_no_object_is_one_error(tmp_path: Path) -> None:
    folder = LLAMA.write_peft(tmp_path / "a")
    for text in (b"", b"[]", b"{", json.dumps({"r": 1}).encode(), b'{"x":' + b"[" * 10_000, b'{"x": "\xff"}'):
        (folder / "adapter_config.json").write_bytes(text)
        with pytest.raises(InvalidAdapter, match=r"adapter_config.json is not PEFT's"):
            read_adapter(folder)


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b'{"x": 1}',
        b'{"x": {"dtype": "F32"}}',
        b"null",
        b"{",
        b'{"x": {"dtype": "F32", "shape": [0, 1180591620717411303424], "data_offsets": [0, 0]}}',
        b'{"x": {"dtype": "F32", "shape": [%s], "data_offsets": [0, 4]}}' % b",".join([b"1"] * 70),
        b'{"x": {"dtype": "F32", "shape": [2, 2], "data_offsets": [-4, 12]}}',
    ],
)
def test_a_damaged_header_is_named_in_one_sentence(header: bytes, tmp_path: Path) -> None:
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(InvalidAdapter, match="fetch it again"):
        read_safetensors(path)


def test_a_pattern_that_is_none_is_named(tmp_path: Path) -> None:
    folder = LLAMA.write_peft(tmp_path / "a", {"rank_pattern": {"*q_proj": 8}})
    with pytest.raises(InvalidAdapter, match=r"has the pattern '\*q_proj': nothing to repeat"):
        read_adapter(folder)
