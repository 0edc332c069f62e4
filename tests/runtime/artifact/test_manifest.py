"""The manifest refuses what is out of range before anyone allocates by it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.artifact.manifest import FORMAT_VERSION, KVLayer, KVLayout, Manifest, SamplingDefaults

MAX_TOKENS = 1 << 22


@pytest.fixture(scope="module")
def fields(tiny_artifact: Path) -> dict[str, object]:
    """A real manifest, as plain values."""
    fields: dict[str, object] = json.loads((tiny_artifact / "manifest.json").read_text())
    return fields


def test_a_manifest_survives_being_written_and_read(tiny_artifact: Path) -> None:
    manifest = Artifact.open(tiny_artifact).manifest
    assert msgspec.json.decode(msgspec.json.encode(manifest), type=Manifest) == manifest


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("format_version", FORMAT_VERSION + 1),
        ("name", ""),
        ("name", "x" * 257),
        ("model.architecture", "../llama"),
        ("model.vocab_size", 0),
        ("model.vocab_size", MAX_TOKENS + 1),
        ("model.hidden_size", -1),
        ("model.hidden_size", 1 << 70),
        ("model.hidden_size", 64.5),
        ("model.layers", []),
        ("model.layers.0.mixer.head_dim", 1),
        ("model.norm_eps", 0.0),
        ("model.layers.0.mixer.rope.theta", -1.0),
        ("model.layers.0.mixer.rope.scaling", {"kind": "none"}),
        ("model.layers.0.mixer.rope.scaling", {"kind": "linear", "factor": 0}),
        ("model.layers.0.mixer.kind", "mamba"),
        ("model.layers.0.ffn.function", "cube"),
        ("model.layers.0.norms", "none"),
        ("context_length", 15),
        ("context_length", MAX_TOKENS + 1),
        ("context_length", True),
        ("quantization.mode", "q2"),
        ("kv.dtype", "f64"),
        ("kv.dtype", "int4"),
        ("kv.page_size", 32),
        ("module.max_num_tokens", 0),
        ("module.workspace_bytes", -1),
        ("module.weights_bytes", 1 << 45),
        ("tokenizer.bos_token_id", -1),
        ("sampling.top_p", 1.5),
        ("source.fingerprint", "0" * 63),
        ("source.fingerprint", "G" * 64),
        ("digest", ""),
        ("files", []),
        ("files", {"model.so": {"size": -1, "sha256": "0" * 64}}),
        ("files", {"model.so": {"size": 1, "sha256": "0" * 64, "mode": 511}}),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(fields: dict[str, object], path: str, value: object) -> None:
    with pytest.raises(msgspec.ValidationError, match=path.split(".")[0]):
        _decode(_with(fields, path, value))


def test_a_missing_field_is_refused_wherever_it_is(fields: dict[str, object]) -> None:
    optional = {"model.tie_word_embeddings", "model.embedding_factor", "model.embedding_norm", "model.norm"}
    # None where scales stand beside tensors
    optional |= {"quantization.token_bytes", "quantization.source_token_bytes", "quantization.token_weights"}
    optional |= {"model.residual_factor", "model.logits_factor", "model.logits_soft_cap", "model.output_bias", "digest"}
    optional |= {"model.layer_inputs", "model.mtp", "model.output", "model.dense", "model.encoder_input", "embedding"}
    optional |= {"reranking", "pairs", "lora", "model.score", "module.num_frequent"}
    for path in _struct_fields(fields):
        if path in optional or path.split(".")[0] == "sampling":
            continue
        with pytest.raises(msgspec.ValidationError, match="missing required field"):
            _decode(_with(fields, path, None, remove=True))
    for path in ("mixer", "mixer.head_dim", "mixer.rope.theta", "ffn.intermediate_size"):
        with pytest.raises(msgspec.ValidationError, match="missing required field"):
            _decode(_with(fields, f"model.layers.0.{path}", None, remove=True))


def test_an_artifact_of_before_there_was_min_p_samples_as_it_did(fields: dict[str, object]) -> None:
    older = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
    assert _decode(_with(fields, "sampling", older)).sampling == SamplingDefaults()


@pytest.mark.parametrize("path", ["extra", "model.extra", "kv.extra", "module.extra", "sampling.extra", "source.extra"])
def test_a_field_that_is_not_known_is_refused(fields: dict[str, object], path: str) -> None:
    with pytest.raises(msgspec.ValidationError, match="unknown field `extra`"):
        _decode(_with(fields, path, 1))


@pytest.mark.parametrize(("dtype", "itemsize"), [("f16", 2), ("f32", 4)])
def test_a_page_holds_keys_and_values_of_every_layer(dtype: str, itemsize: int) -> None:
    layout = msgspec.convert(
        {"dtype": dtype, "page_size": 16, "layers": [{"num_kv_heads": 3, "key_dim": 64, "value_dim": 64}] * 30},
        KVLayout,
    )
    assert layout.is_uniform
    assert layout.page_bytes == 30 * 2 * 3 * 64 * 16 * itemsize


@pytest.mark.parametrize(("head_dim", "columns"), [(64, 64), (80, 80), (6, 16)])
def test_a_page_of_codes_holds_scales_too_and_is_aligned(head_dim: int, columns: int) -> None:
    layout = KVLayout.uniform("k12v8", num_layers=30, num_kv_heads=3, head_dim=head_dim)
    each = layout.of_layer(0)
    assert (each.key_items, each.value_items) == (64 + 16 * 2 * head_dim, 64 + 16 * columns)
    assert layout.page_bytes == 30 * 3 * (each.key_items + each.value_items)
    assert each.key_items % 64 == each.value_items % 64 == 0


def test_layers_of_unequal_shape_lie_one_behind_the_other() -> None:
    small = KVLayer(num_kv_heads=2, key_dim=8, value_dim=8)
    large = KVLayer(num_kv_heads=1, key_dim=32, value_dim=16)
    layout = KVLayout(dtype="f16", page_size=16, layers=(small, small, large))
    assert [layout.items_before(layer) for layer in range(3)] == [0, 2 * 2 * 8 * 16, 2 * 2 * 2 * 8 * 16]
    assert layout.page_bytes == (2 * 2 * 2 * 8 + 32 + 16) * 16 * 2
    assert not layout.is_uniform
    assert not KVLayout(dtype="f16", page_size=16, layers=(large, large)).is_uniform
    with pytest.raises(AssertionError, match="different shapes"):
        _ = layout.head_dim


def _decode(fields: dict[str, object]) -> Manifest:
    return msgspec.json.decode(json.dumps(fields), type=Manifest)


def _with(fields: dict[str, object], path: str, value: object, *, remove: bool = False) -> dict[str, object]:
    """A copy in which the field at the dotted `path` is `value`, or gone."""
    changed: dict[str, object] = json.loads(json.dumps(fields))
    parent = changed
    *parents, last = path.split(".")
    for name in parents:
        parent = parent[int(name) if isinstance(parent, list) else name]  # type: ignore[assignment, index]
    if remove:
        del parent[last]
    else:
        parent[last] = value
    return changed


def _struct_fields(fields: dict[str, object], prefix: str = "") -> Iterator[str]:
    """Dotted paths of the fields of all structs; what lies in free dictionaries is none."""
    for name, value in fields.items():
        yield prefix + name
        if isinstance(value, dict) and name not in ("files", "kinds", "profile"):
            yield from _struct_fields(value, f"{prefix}{name}.")
