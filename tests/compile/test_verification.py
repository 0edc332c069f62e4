"""Deep models are verified at the cost of one layer of each kind, and what is wrong with them is found all the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from radixlm.compile import compile_model, compiler, verification, weights_file
from radixlm.compile.ops import functions, reference_ops
from radixlm.compile.ops.functions import changes_experts
from radixlm.compile.ops.program import Call, WeightTensor
from radixlm.compile.sources import gguf_blocks
from radixlm.compile.verification import Verification
from radixlm.runtime.artifact.model_config import Experts
from radixlm.runtime.errors import VerificationFailed

from ..goldens.families import FAMILIES
from .conftest import TinyModel
from .test_mixed_gguf import write

MakeTiny = Callable[..., TinyModel]
NUM_LAYERS = 7
EXPERT_WEIGHTS = functions.expert_weights
TIED = WeightTensor("model.embed_tokens.weight.codes")
OTHER = WeightTensor("model.layers.0.self_attn.o_proj.weight.codes")


def q4_and_q6(name: str) -> str:
    """Down-projections of layers 1 and 4 are Q6_K, all else is Q4_K."""
    return "Q6_K" if "down_proj" in name and name.split(".")[2] in "14" else "Q4_K"


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory, make_tiny: MakeTiny) -> Path:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_attention_heads": 4}
    tiny = make_tiny(num_hidden_layers=NUM_LAYERS, **sizes)
    return write(tmp_path_factory.mktemp("deep") / "deep.gguf", tiny, q4_and_q6)


def compiled(source: Path, folder: Path, **options: Any) -> Verification:
    return compile_model(source, folder / "deep.radixlm", **options).verification


def test_the_last_layer_of_each_kind_is_computed(deep: Path, tmp_path: Path) -> None:
    found = compiled(deep, tmp_path)
    assert found.layers == (4, 6)
    assert found.num_rows >= 7 * NUM_LAYERS
    assert found.median_difference < found.tolerance / 2


def test_layers_that_are_left_out_add_nothing(deep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 the module without them and the reference without them are the same model, in parts or at once."""
    monkeypatch.setattr(verification, "_MOST_LAYERS", 1)
    found = compiled(deep, tmp_path, quantize="f32", kv_dtype="f32")
    assert found.layers == (6,)
    assert found.worst_difference < 1e-5
    monkeypatch.setattr(verification, "_FEW_LAYERS", NUM_LAYERS)
    assert compiled(deep, tmp_path, quantize="f32", kv_dtype="f32").layers == tuple(range(NUM_LAYERS))


@pytest.mark.parametrize("layer", [0, 4, 6])
def test_a_tensor_of_another_layer_is_found_in_any_layer(
    deep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layer: int
) -> None:
    """The writer takes one layer's output matrix for another's, which has the same shape and type."""
    name, other = (f"model.layers.{index}.self_attn.o_proj.weight" for index in (layer, (layer + 2) % NUM_LAYERS))
    real = weights_file.WeightsWriter._pack

    def packed(self: Any, strip: Any) -> Any:
        return real(self, replace(strip, name=other) if strip.name == name else strip)

    monkeypatch.setattr(weights_file.WeightsWriter, "_pack", packed)
    with pytest.raises(VerificationFailed, match=rf"layers\.{layer}\.self_attn\.o_proj\.weight .* differs"):
        compiled(deep, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_kernel_that_computes_something_else_is_found(
    deep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference takes another function than the kernels of every layer were built with."""
    real = compiler.check_logits

    def check(*args: Any) -> Any:
        monkeypatch.setitem(functions.GATED_FUNCTIONS, "silu_mul", lambda gate, up: gate * up)
        return real(*args)

    monkeypatch.setattr(compiler, "check_logits", check)
    with pytest.raises(VerificationFailed, match="logits after layers 6 differ from the NumPy evaluation"):
        compiled(deep, tmp_path, quantize="f32", kv_dtype="f32")


def test_a_large_vocabulary_is_compared_in_runs() -> None:
    runs = verification._compared_tokens(151_936)
    assert runs is not None and len(runs) == 64
    assert all(run.stop - run.start == 64 for run in runs) and runs[0].start >= 0 and runs[-1].stop <= 151_936
    assert all(run.stop <= after.start for run, after in pairwise(runs))
    assert verification._compared_tokens(8192) is None


@pytest.mark.parametrize("quantize", ["keep", "q8"])
@pytest.mark.parametrize("expert", [0, 3])
def test_one_bad_expert_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantize: str, expert: int) -> None:
    """The writer takes another expert's rows for those of one expert in one layer."""
    source = FAMILIES["qwen3_moe"].write(tmp_path / "source")
    name = "model.layers.1.mlp.experts.down_proj.weight"
    real, seen = weights_file.WeightsWriter._pack, []

    def packed(self: Any, strip: Any) -> Any:
        size = strip.matrix.parts[0][1]
        if strip.name == name and strip.rows.start // size == expert:
            seen.append(strip)
            other = (expert + 1) % strip.matrix.num_experts
            moved = (other - expert) * size
            strip = replace(strip, rows=slice(strip.rows.start + moved, strip.rows.stop + moved))
        return real(self, strip)

    monkeypatch.setattr(weights_file.WeightsWriter, "_pack", packed)
    with pytest.raises(VerificationFailed, match=rf"{name}.* differs"):
        compiled(source, tmp_path, quantize=quantize)
    assert seen


def mixture(folder: Path, num_layers: int, **config: Any) -> Path:
    """A narrow mixture whose layers are as many as those of a real one."""
    family = FAMILIES["qwen3_moe"]
    return replace(family, config=family.config | {"num_hidden_layers": num_layers} | config).write(folder / "source")


DEPTHS = pytest.mark.parametrize("num_layers", [2, 24, 48])


@DEPTHS
@pytest.mark.parametrize("quantize", ["keep", "q8"])
def test_a_deep_mixture_is_no_further_from_the_reference_than_a_shallow_one(
    tmp_path: Path, num_layers: int, quantize: str
) -> None:
    found = compiled(mixture(tmp_path, num_layers), tmp_path, quantize=quantize)
    assert found.median_difference < found.tolerance / 2
    assert found.worst_difference < 5 * found.tolerance / 2
    assert found.layers[-1] == num_layers - 1


@DEPTHS
def test_weights_of_another_expert_are_found_in_a_layer_of_any_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_layers: int
) -> None:
    """The writer takes the next layer's router, which has the same shape and type."""
    name = f"model.layers.{num_layers // 2}.mlp.gate.weight"
    other = f"model.layers.{num_layers // 2 - 1}.mlp.gate.weight"
    real = weights_file.WeightsWriter._pack

    def packed(self: Any, strip: Any) -> Any:
        return real(self, replace(strip, name=other) if strip.name == name else strip)

    monkeypatch.setattr(weights_file.WeightsWriter, "_pack", packed)
    with pytest.raises(VerificationFailed, match=rf"{name}.* differs"):
        compiled(mixture(tmp_path, num_layers), tmp_path)


def other_experts(logits: Any, *rest: Any) -> Any:
    chosen, weights = EXPERT_WEIGHTS(logits, *rest)
    return (chosen + 1) % logits.shape[-1], weights


def half_weights(*arguments: Any) -> Any:
    chosen, weights = EXPERT_WEIGHTS(*arguments)
    return chosen, weights / 2


@DEPTHS
@pytest.mark.parametrize("fault", [other_experts, half_weights])
def test_a_router_that_chooses_or_weighs_otherwise_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_layers: int, fault: Any
) -> None:
    """That tokens near a tie are spared does not spare it."""
    source = mixture(tmp_path, num_layers)
    monkeypatch.setattr(reference_ops, "expert_weights", fault)
    with pytest.raises(VerificationFailed, match="differ from the NumPy evaluation"):
        compiled(source, tmp_path)


def test_a_near_tie_is_where_a_small_change_of_logits_chooses_others() -> None:
    experts = Experts(num_experts=4, num_active=2, intermediate_size=32)
    spread = np.array([1.0, -1.0, 0.0, 0.0])
    for gap, expected in ((0.0, True), (0.03, True), (0.05, False)):
        logits = (spread + np.array([0.0, 0.0, gap, 0.0]) * spread.std())[None].astype(np.float32)
        assert changes_experts(logits, experts, None, 0.02).tolist() == [expected]


def another_matrix(calls: list[Call], places: list[int]) -> None:
    """The middle layer multiplies with the matrix of the one before it."""
    middle = len(places) // 2
    calls[places[middle]] = replace(calls[places[middle]], arguments=calls[places[middle - 1]].arguments)


def another_kernel(calls: list[Call], places: list[int]) -> None:
    """The middle layer does not add what it computed: it multiplies, and keeps that to itself."""
    del calls[places[len(places) // 2] + 1]


def other_keys(calls: list[Call], places: list[int]) -> None:
    """The middle layer attends to keys and values of the one before it."""
    attends = [n for n, call in enumerate(calls) if isinstance(call.key, tuple) and call.key[0] == "attention"]
    middle = attends[len(places) // 2]
    calls[middle] = replace(calls[middle], arguments=calls[attends[len(places) // 2 - 1]].arguments)


@DEPTHS
@pytest.mark.parametrize("fault", [another_matrix, another_kernel, other_keys])
def test_a_program_that_is_wrong_in_one_layer_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_layers: int, fault: Callable[[list[Call], list[int]], None]
) -> None:
    """Only the last layer of a kind is computed: of the others it is known that they make the same calls."""
    real = compiler.build_module

    def build(program: Any, *arguments: Any) -> Any:
        name = "self_attn.o_proj.weight.codes"
        is_output = [
            any(isinstance(a, WeightTensor) and a.name.endswith(name) for a in call.arguments) for call in program.calls
        ]
        places = [place for place, found in enumerate(is_output) if found]
        assert len(places) == num_layers
        fault(program.calls, places)
        return real(program, *arguments)

    source = mixture(tmp_path, num_layers)
    monkeypatch.setattr(compiler, "build_module", build)
    with pytest.raises(VerificationFailed, match=r"calls other kernels|have their rows at|differ from the NumPy"):
        compiled(source, tmp_path, quantize="q8")


def test_an_output_matrix_that_is_not_the_embeddings_is_found(
    tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tied model multiplies its last rows with a matrix of a layer instead."""
    real = compiler.build_module

    def build(program: Any, *args: Any) -> Any:
        places = [index for index, call in enumerate(program.calls) if TIED in call.arguments]
        assert len(places) >= 2  # the lookup, and the output matrix
        head = program.calls[places[-1]]
        wrong = tuple(OTHER if argument == TIED else argument for argument in head.arguments)
        program.calls[places[-1]] = replace(head, arguments=wrong)
        return real(program, *args)

    monkeypatch.setattr(compiler, "build_module", build)
    with pytest.raises(VerificationFailed, match=r"differ from the NumPy evaluation|leaves a tensor out"):
        compiled(tiny_source, tmp_path, quantize="f32", kv_dtype="f32")


def test_codes_that_are_decoded_in_another_order_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_tiny: MakeTiny
) -> None:
    """The decoder writes the file and is the reference, too: only the format's own formula shows its faults."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_attention_heads": 4}
    source = write(tmp_path / "grid.gguf", make_tiny(num_hidden_layers=2, **sizes), lambda name: "IQ3_S")
    blocks = gguf_blocks._BLOCKS["IQ3_S"]
    assert isinstance(blocks, gguf_blocks._Grid)

    def reversed_codes(data: Any) -> Any:
        parts = blocks.parts(data)
        return replace(parts, codes=np.ascontiguousarray(parts.codes[:, ::-1]))

    monkeypatch.setitem(gguf_blocks._BLOCKS, "IQ3_S", replace(blocks, parts=reversed_codes))
    with pytest.raises(VerificationFailed, match=r"IQ3_S.* has a relative error of 1\.4"):
        compiled(source, tmp_path)
