"""A Hugging Face directory reads as it was written, or says in one line why not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from msgspec.structs import replace
from radixlm.compile.sources import open_source
from radixlm.runtime.artifact.manifest import USUAL_SAMPLING, SamplingDefaults
from radixlm.runtime.artifact.model_config import LinearScaling, Llama3Scaling, Rope
from radixlm.runtime.errors import (
    CorruptSource,
    SourceNotFound,
    UnsupportedArchitecture,
    UnsupportedTensor,
)
from safetensors.numpy import save_file
from tokenizers import Tokenizer

Make = Callable[..., Any]


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_every_tensor_is_read_as_it_was_written(
    dtype: Any, num_shards: int, make_tiny: Make, write_huggingface: Make
) -> None:
    tiny = make_tiny(architecture="qwen2", attention_bias=True)
    with open_source(write_huggingface(tiny, dtype, num_shards)) as source:
        assert source.config == tiny.config
        assert source.tensors().keys() == tiny.weights.keys()
        for name, weight in tiny.weights.items():
            np.testing.assert_array_equal(source.read(name).codes, weight.astype(dtype))
            np.testing.assert_array_equal(
                source.read_float32(name, slice(2, 5)), weight[2:5].astype(dtype).astype(np.float32)
            )


def test_ids_template_and_name_come_from_their_files(make_tiny: Make, write_huggingface: Make) -> None:
    path = write_huggingface(make_tiny())
    (path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2, 0], "temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.01})
    )
    with open_source(path) as source:
        assert (source.name, source.bos_token_id, source.eos_token_ids) == ("tiny-hf", 1, (2, 0))
        assert source.chat_template == "{% for m in messages %}{{ m.content }}{% endfor %}"
        assert source.sampling == SamplingDefaults(temperature=0.7, top_p=0.8, top_k=20, min_p=0.01)
        assert not source.add_bos_token


@pytest.mark.parametrize(
    ("said", "changes"),
    [
        ({}, {}),
        ({"temperature": None, "max_new_tokens": 7}, {}),
        ({"temperature": 0.6}, {"temperature": 0.6}),
        ({"temperature": 1, "top_k": 0, "top_p": 1.0}, {"temperature": 1.0, "top_k": 0, "top_p": 1.0}),
        ({"min_p": 0.0, "repetition_penalty": 1.1}, {"min_p": 0.0, "repetition_penalty": 1.1}),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        ({"do_sample": True}, {}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"temperature": -5, "top_k": "many", "top_p": 2, "repetition_penalty": 0, "min_p": [0.1]}, {}),
    ],
)
def test_what_generation_config_does_not_say_of_sampling_is_as_usual(
    said: dict[str, Any], changes: dict[str, Any], make_tiny: Make, write_huggingface: Make
) -> None:
    path = write_huggingface(make_tiny())
    (path / "generation_config.json").write_text(json.dumps(said))
    with open_source(path) as source:
        assert source.sampling == replace(USUAL_SAMPLING, **changes)


def test_a_template_file_wins_over_the_one_in_the_configuration(make_tiny: Make, write_huggingface: Make) -> None:
    path = write_huggingface(make_tiny())
    (path / "chat_template.jinja").write_text("from the file")
    assert open_source(path).chat_template == "from the file"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"chat_template.json": {"chat_template": "seen"}}, "seen"),
        ({"processor_config.json": {"chat_template": "seen"}}, "seen"),
        ({"processor_config.json": {"image_seq_length": 64}}, None),
        ({"chat_template.json": {"chat_template": [{"name": "default", "template": "a"}]}}, "a"),
        ({"tokenizer_config.json": {"chat_template": {"tool_use": "b", "default": "a"}}}, "a"),
        ({"tokenizer_config.json": {"chat_template": ""}, "chat_template.json": {"chat_template": "seen"}}, "seen"),
        ({"tokenizer_config.json": {"chat_template": "own"}, "chat_template.json": {"chat_template": "seen"}}, "own"),
        ({"tokenizer_config.json": {"chat_template": " "}}, None),
        ({"tokenizer_config.json": {"chat_template": "own"}, "processor_config.json": ["is not read"]}, "own"),
    ],
)
def test_a_chat_template_is_found_where_repositories_put_it(
    files: dict[str, Any], expected: str | None, make_tiny: Make, write_huggingface: Make
) -> None:
    path = write_huggingface(make_tiny())
    for name, said in {"tokenizer_config.json": {}, **files}.items():
        (path / name).write_text(json.dumps(said))
    assert open_source(path).chat_template == expected


def test_a_byte_order_mark_is_no_part_of_a_text(make_tiny: Make, write_huggingface: Make) -> None:
    path = write_huggingface(make_tiny())
    expected = open_source(path)
    (path / "chat_template.jinja").write_text(str(expected.chat_template))
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (path / name).write_bytes(b"\xef\xbb\xbf" + (path / name).read_bytes())
    found = open_source(path)
    assert (found.config, found.tokenizer_json) == (expected.config, expected.tokenizer_json)
    assert found.chat_template == expected.chat_template


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
)
def test_a_pointer_of_git_says_how_to_get_the_file(name: str, make_tiny: Make, write_huggingface: Make) -> None:
    path = write_huggingface(make_tiny())
    (path / name).write_text(POINTER)
    with pytest.raises(CorruptSource, match=rf"{name} is a Git LFS pointer.* run git lfs pull in {path}"):
        open_source(path)


def test_a_pointer_of_git_in_place_of_weights_says_how_to_get_them(
    tmp_path: Path, make_tiny: Make, write_huggingface: Make
) -> None:
    path = write_huggingface(make_tiny())
    for file in (path / "model.safetensors", tmp_path / "model.gguf"):
        file.write_text(POINTER)
        with pytest.raises(CorruptSource, match="run git lfs pull"):
            open_source(path if file.parent == path else file)


@pytest.mark.parametrize(
    ("name", "said"), [("adapter_config.json", "an adapter .LoRA."), ("manifest.json", "an artifact: it is compiled")]
)
def test_a_directory_of_another_kind_is_told_apart(name: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(SourceNotFound, match=said):
        open_source(tmp_path)


def test_bos_is_added_where_the_post_processor_adds_it(make_tiny: Make, write_huggingface: Make) -> None:
    path = write_huggingface(make_tiny())
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    bos = "<|im_start|>"
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos: {"id": bos, "ids": [1], "tokens": [bos]}},
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert open_source(path).add_bos_token


def test_mistral_keeps_its_sliding_window(make_tiny: Make, write_huggingface: Make) -> None:
    changes = {"architectures": ["MistralForCausalLM"], "sliding_window": 64}
    with open_source(write_huggingface(make_tiny(), **changes)) as source:
        assert (source.config.architecture, source.config.attentions[0].window) == ("llama", 64)


@pytest.mark.parametrize("used", [False, True])
def test_qwen2_has_a_window_only_where_it_is_used(used: bool, make_tiny: Make, write_huggingface: Make) -> None:
    tiny = make_tiny(architecture="qwen2", attention_bias=True)
    path = write_huggingface(tiny, sliding_window=64, use_sliding_window=used, max_window_layers=1)
    windows = [attention.window for attention in open_source(path).config.attentions]
    assert windows == ([None, 64] if used else [None, None])


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, Llama3Scaling(**LLAMA3)),
        (
            {
                "rope_theta": None,
                "rope_parameters": {"rope_type": "llama3", "rope_theta": 5000.0, **LLAMA3},
            },
            Llama3Scaling(**LLAMA3),
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, LinearScaling(factor=2.0)),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}, None),
    ],
)
def test_both_spellings_of_rope_are_read(
    changes: dict[str, Any], expected: Llama3Scaling | LinearScaling | None, make_tiny: Make, write_huggingface: Make
) -> None:
    config = open_source(write_huggingface(make_tiny(), **changes)).config
    assert config.ropes == (Rope(theta=5000.0, rotary_dim=16, scaling=expected),)


def test_a_tied_models_output_matrix_and_old_frequencies_are_left_out(make_tiny: Make, write_huggingface: Make) -> None:
    tiny = make_tiny(tie_word_embeddings=True)
    names = set(tiny.weights)
    tiny.weights["lm_head.weight"] = tiny.weights["model.embed_tokens.weight"]
    tiny.weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    assert open_source(write_huggingface(tiny)).tensors().keys() == names


@pytest.mark.parametrize("said", [{}, {"tie_word_embeddings": True}])
def test_a_stored_output_matrix_that_is_not_the_embedding_is_used(
    said: dict[str, Any], make_tiny: Make, write_huggingface: Make
) -> None:
    tiny = make_tiny()
    with open_source(write_huggingface(tiny, **said)) as source:
        assert not source.config.tie_word_embeddings
        np.testing.assert_array_equal(source.read_float32("lm_head.weight"), tiny.weights["lm_head.weight"])


@pytest.mark.parametrize("type_", [np.float64, np.int32])
def test_an_output_matrix_of_a_type_that_is_not_read_is_named(
    type_: Any, make_tiny: Make, write_huggingface: Make
) -> None:
    """Even where the configuration says that it is the embedding, with which it cannot be compared."""
    tiny = make_tiny(tie_word_embeddings=True)
    path = write_huggingface(tiny)
    output = tiny.weights["model.embed_tokens.weight"].astype(type_)
    save_file({**tiny.weights, "lm_head.weight": output}, path / "model.safetensors")
    with pytest.raises(UnsupportedTensor, match=r"lm_head.weight is stored as [FI]\d\d"):
        open_source(path)


@pytest.mark.parametrize(
    ("outer", "text"), [(True, False), (False, True), (True, None), (None, True), (True, True)], ids=str
)
def test_an_output_matrix_is_the_embedding_where_either_level_says_so_and_none_is_stored(
    outer: bool | None, text: bool | None, make_tiny: Make, write_huggingface: Make
) -> None:
    """transformers 5 goes by the outer one, other versions by the inner one."""
    path = write_huggingface(make_tiny(tie_word_embeddings=True))
    config = json.loads((path / "config.json").read_text())
    nested = {**config, "model_type": "mistral", "tie_word_embeddings": text}
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": nested, "tie_word_embeddings": outer}
    (path / "config.json").write_text(json.dumps(whole))
    assert open_source(path).config.tie_word_embeddings


def test_an_output_matrix_that_is_missing_says_how_to_tie_it(make_tiny: Make, write_huggingface: Make) -> None:
    path = write_huggingface(make_tiny(tie_word_embeddings=True), tie_word_embeddings=False)
    with pytest.raises(CorruptSource, match=r'lm_head.weight is missing.*add "tie_word_embeddings": true if it is'):
        open_source(path)


@pytest.mark.parametrize("wrapper", ["_orig_mod.", "module.", "module._orig_mod."])
def test_names_that_a_wrapper_of_pytorch_begins_are_the_models_own(
    wrapper: str, make_tiny: Make, write_huggingface: Make
) -> None:
    tiny = make_tiny()
    path = write_huggingface(tiny)
    tiny.weights = {f"{wrapper}{name}": array for name, array in tiny.weights.items()}
    write_huggingface(tiny)
    assert open_source(path).config == make_tiny().config


def test_the_first_end_is_the_tokenizers_own_whatever_generation_config_names_first(
    make_tiny: Make, write_huggingface: Make
) -> None:
    """Llama 3.1's generation_config begins with <|end_of_text|>, and templates write the tokenizer's <|eot_id|>."""
    path = write_huggingface(make_tiny(), eos_token_id=[0, 2])
    for first in ([0, 2], [0], 0):
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": first}))
        with open_source(path) as source:
            assert source.eos_token_ids == (2, 0)


def test_a_sentencepiece_model_stands_in_for_tokenizer_json(
    data_dir: Path, make_tiny: Make, write_huggingface: Make
) -> None:
    path = write_huggingface(make_tiny(vocab_size=32000))
    (path / "tokenizer.json").unlink()
    (path / "tokenizer_config.json").unlink()
    folder = data_dir / "tokenizers/llama2-legacy"
    (path / "tokenizer.model").write_bytes((folder / "tokenizer.model").read_bytes())
    with open_source(path) as source:
        expected = (folder / "tokenizer.json").read_text("utf-8")
        assert Tokenizer.from_str(source.tokenizer_json).to_str() == Tokenizer.from_str(expected).to_str()
        assert source.add_bos_token and (source.bos_token_id, source.eos_token_ids) == (1, (2,))


def test_stories260k_opens(data_dir: Path) -> None:
    with open_source(data_dir / "models/stories260K-hf") as source:
        assert (source.config.num_hidden_layers, source.config.head_dim) == (5, 8)
        assert source.config.tie_word_embeddings and source.eos_token_ids == (2,)


# What cannot be used.


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, UnsupportedArchitecture, r"Gemma.*the nearest is Gemma"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 4.0}}, UnsupportedArchitecture, "'spiral'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, CorruptSource, "low_freq_factor"),
        ({"attention_bias": True}, UnsupportedArchitecture, "attention_bias"),
        ({"hidden_act": "xielu"}, UnsupportedArchitecture, "xielu"),
        ({"quantization_config": {"quant_method": "hqq"}}, UnsupportedTensor, "by hqq are not read; read are gptq"),
        ({"hidden_size": "64"}, CorruptSource, "hidden_size"),
        ({"hidden_size": -64}, CorruptSource, "hidden_size"),
        ({"num_key_value_heads": 3}, CorruptSource, "3 key-value heads"),
        ({"num_hidden_layers": 3}, CorruptSource, "model.layers.2.*is missing"),
        ({"num_hidden_layers": 1}, UnsupportedArchitecture, "model.layers.1.*no place"),
        ({"intermediate_size": 128}, CorruptSource, r"\[96, 64\].*\[128, 64\]"),
    ],
)
def test_settings_that_cannot_be_run_are_named(
    changes: dict[str, Any],
    error: type[Exception],
    message: str,
    make_tiny: Make,
    write_huggingface: Make,
) -> None:
    with pytest.raises(error, match=message) as caught:
        open_source(write_huggingface(make_tiny(), **changes))
    assert "\n" not in str(caught.value)


def test_a_directory_that_is_no_model_says_so(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFound, match=r"no config\.json"):
        open_source(tmp_path)


def test_pickled_weights_are_not_read(make_tiny: Make, write_huggingface: Make) -> None:
    path = write_huggingface(make_tiny())
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(SourceNotFound, match="pickled"):
        open_source(path)


def test_weights_of_another_type_are_named(make_tiny: Make, write_huggingface: Make) -> None:
    tiny = make_tiny()
    path = write_huggingface(tiny, np.int8)
    with pytest.raises(UnsupportedTensor, match=r"stored as I8.*F32, F16, BF16"):
        open_source(path)


def test_safetensors_cut_anywhere_are_corrupt(make_tiny: Make, write_huggingface: Make) -> None:
    path = write_huggingface(make_tiny()) / "model.safetensors"
    whole = path.read_bytes()
    for length in (0, 4, 8, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptSource) as caught:
            open_source(path.parent)
        assert "\n" not in str(caught.value)


def overlapping(header: dict[str, Any], name: str) -> None:
    start, stop = header[name]["data_offsets"]
    header[name]["data_offsets"] = [start + 4, stop]


def with_the_bytes_of_another(header: dict[str, Any], name: str) -> None:
    header[name]["data_offsets"] = next(entry for key, entry in header.items() if key != name)["data_offsets"]


def with_a_huge_shape(header: dict[str, Any], name: str) -> None:
    header[name]["shape"] = [1 << 40, 1 << 40]


def with_a_negative_shape(header: dict[str, Any], name: str) -> None:
    header[name]["shape"] = [-1, -header[name]["shape"][0]]


def with_a_name_of_two_lines(header: dict[str, Any], name: str) -> None:
    header[f"{name}\nand more"] = header[name]
    overlapping(header, f"{name}\nand more")


def without_offsets(header: dict[str, Any], name: str) -> None:
    del header[name]["data_offsets"]


@pytest.mark.parametrize(
    "damage",
    [
        overlapping,
        with_the_bytes_of_another,
        with_a_huge_shape,
        with_a_negative_shape,
        with_a_name_of_two_lines,
        without_offsets,
    ],
)
def test_a_header_that_disagrees_with_the_data_is_corrupt(
    damage: Callable[[dict[str, Any], str], None], make_tiny: Make, write_huggingface: Make
) -> None:
    path = write_huggingface(make_tiny()) / "model.safetensors"
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    header.pop("__metadata__")
    damage(header, "model.norm.weight")
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + length :])
    with pytest.raises(CorruptSource) as caught:
        open_source(path.parent)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "start", [b"", b"\xff" * 8, (1 << 40).to_bytes(8, "little"), (4).to_bytes(8, "little") + b"[[[["]
)
def test_a_file_that_begins_with_something_else_is_corrupt(
    start: bytes, make_tiny: Make, write_huggingface: Make
) -> None:
    path = write_huggingface(make_tiny()) / "model.safetensors"
    path.write_bytes(start + path.read_bytes()[len(start) or 1 :])
    with pytest.raises(CorruptSource) as caught:
        open_source(path.parent)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.norm.weight"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_number_that_no_weight_can_have_is_found_where_it_is_read(
    dtype: Any, name: str, number: float, make_tiny: Make, write_huggingface: Make
) -> None:
    tiny = make_tiny()
    tiny.weights[name].reshape(-1)[-1] = number
    with np.errstate(over="ignore"), open_source(write_huggingface(tiny, dtype)) as source:
        for read in (source.read, source.read_float32):
            with pytest.raises(CorruptSource, match=rf"{name} \((F32|F16|BF16)\) has numbers of (nan|inf|3)"):
                read(name)


def test_a_missing_shard_is_named(make_tiny: Make, write_huggingface: Make) -> None:
    path = write_huggingface(make_tiny(), num_shards=2)
    (path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CorruptSource, match=r"model-00002-of-00002\.safetensors is missing"):
        open_source(path)


def test_a_shard_outside_the_directory_is_not_opened(make_tiny: Make, write_huggingface: Make) -> None:
    path = write_huggingface(make_tiny(), num_shards=2)
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))
    with pytest.raises(CorruptSource, match="no safetensors file beside it"):
        open_source(path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_damaged_json_is_corrupt(name: str, make_tiny: Make, write_huggingface: Make) -> None:
    path = write_huggingface(make_tiny())
    (path / name).write_text('{"cut')
    with pytest.raises(CorruptSource, match=name):
        open_source(path)


def test_a_tokenizer_larger_than_the_embedding_is_corrupt(make_tiny: Make, write_huggingface: Make) -> None:
    with pytest.raises(CorruptSource, match="the tokenizer has id 30, the embedding 20 rows"):
        open_source(write_huggingface(make_tiny(vocab_size=20)))


def write_added(path: Path, content: str, index: int, *, template: bool = False) -> None:
    """Add a special token to the tokenizer.json in `path`; with `template`, it is inserted before each text."""
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": index, "content": content})
    if template:
        names = {"<|im_start|>": 1, content: index}
        text = {"Sequence": {"id": "A", "type_id": 0}}
        inserted = [{"SpecialToken": {"id": name, "type_id": 0}} for name in names]
        processor = {
            "type": "TemplateProcessing",
            "single": [*inserted, text],
            "pair": [*inserted, text, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {name: {"id": name, "ids": [each], "tokens": [name]} for name, each in names.items()},
        }
        tokenizer["post_processor"] = {"type": "Sequence", "processors": [processor]}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))


@pytest.mark.parametrize("template", [False, True])
def test_an_added_token_without_a_row_in_the_embedding_is_dropped(
    template: bool, make_tiny: Make, write_huggingface: Make
) -> None:
    """As google/gemma-3-1b-it has one for images, which a model of text cannot have."""
    tiny = make_tiny()
    path = write_huggingface(tiny)
    write_added(path, "<image_é>", tiny.config.vocab_size, template=template)
    with open_source(path) as source:
        assert "<image_é>" not in source.tokenizer_json
        assert (source.bos_token_id, source.eos_token_ids, source.add_bos_token) == (1, (2, 0), template)
        tokenizer = Tokenizer.from_str(source.tokenizer_json)
    encoded = tokenizer.encode("the<image_é>the<|im_end|>")
    assert encoded.tokens == [*["<|im_start|>"] * template, "th", "e", *"image", "th", "e", "<|im_end|>"]
    assert tokenizer.get_vocab_size() == tiny.config.vocab_size


@pytest.mark.parametrize("content", ["<|eot_id|>", "<begin>", "<end>"])
def test_a_token_that_begins_or_ends_texts_needs_a_row_in_the_embedding(
    content: str, make_tiny: Make, write_huggingface: Make
) -> None:
    tiny = make_tiny()
    size = tiny.config.vocab_size
    path = write_huggingface(tiny, **({"eos_token_id": [2, size]} if content == "<end>" else {}))
    write_added(path, content, size)
    if content == "<begin>":
        (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": content, "eos_token": "<|im_end|>"}))
    with pytest.raises(CorruptSource, match=f"the tokenizer has id {size}, the embedding {size} rows"):
        open_source(path)
