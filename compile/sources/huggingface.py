"""A directory in Hugging Face's layout as a model source: config.json, safetensors, tokenizer.

Knows which file holds what; `huggingface_config.py` reads the configuration.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from radixlm.runtime.artifact.manifest import SamplingDefaults, SourceInfo
from radixlm.runtime.errors import CorruptSource, SourceNotFound, UnsupportedTensor

from ..weights.quantization import Float32, Weight, WeightKind
from .checkpoint import check_tensors, checked
from .huggingface_config import model_config
from .huggingface_tokenizer import HuggingFaceTokenizer
from .safetensors_file import SafetensorsFile
from .source import TensorInfo

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_KINDS = {"F32": WeightKind("f32"), "F16": WeightKind("f16"), "BF16": WeightKind("bf16")}
_SAMPLE_BYTES = 1024  # of each tensor, in the fingerprint


class HuggingFaceSource:
    """A model in a directory of safetensors; a `Source`."""

    def __init__(self, path: Path, *, name: str | None = None) -> None:
        """Raises SourceNotFound where the directory is no model, other SourceErrors for what is wrong."""
        if not (path / "config.json").is_file():
            raise SourceNotFound(f"{path} is no model: it has no config.json; give a .gguf file or a model directory")
        self.name = name or path.resolve().name
        config = read_json(path / "config.json")
        generation = read_json(path / "generation_config.json", optional=True)
        self.config = model_config(str(path), config)
        self._files = _open_weights(path)
        self._file_of = _without_extras(self._files, tied=self.config.tie_word_embeddings)
        self._check_types(path)
        check_tensors(str(path), self.config, self.tensors())
        tokenizer = HuggingFaceTokenizer(path, config, generation, vocab_size=self.config.vocab_size)
        self.tokenizer_json = tokenizer.json
        self.chat_template = tokenizer.chat_template
        self.bos_token_id = tokenizer.bos_token_id
        self.eos_token_ids = tokenizer.eos_token_ids
        self.add_bos_token = tokenizer.add_bos_token
        self.sampling = _sampling(path, generation)
        self.info = SourceInfo(format="huggingface", name=self.name, fingerprint=self._fingerprint(config))

    def tensors(self) -> Mapping[str, TensorInfo]:
        stored = {name: file.tensors[name] for name, file in self._file_of.items()}
        return {name: TensorInfo(tensor.shape, tensor.dtype) for name, tensor in stored.items()}

    def read(self, name: str, rows: slice | None = None) -> Weight:
        file = self._file_of[name]
        return Weight(_KINDS[file.tensors[name].dtype], file.values(name, rows))

    def read_float32(self, name: str, rows: slice | None = None) -> Float32:
        return self.read(name, rows).dequantize()

    def close(self) -> None:
        for file in self._files:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _check_types(self, path: Path) -> None:
        for name, info in self.tensors().items():
            if info.type not in _KINDS:
                raise UnsupportedTensor(
                    f"{path}: {name} is stored as {info.type}, supported are {', '.join(_KINDS)}; "
                    "take the original model, or a GGUF file"
                )

    def _fingerprint(self, config: Mapping[str, Any]) -> str:
        """Over configuration, tokenizer, headers, sizes and the beginning of each tensor."""
        digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
        digest.update(hashlib.sha256(self.tokenizer_json.encode()).digest())
        for file in self._files:
            digest.update(hashlib.sha256(file.header).digest() + file.size.to_bytes(8, "little"))
        for name in sorted(self._file_of):
            digest.update(self._file_of[name].sample(name, _SAMPLE_BYTES))
        return digest.hexdigest()


def read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """A JSON object; {} for an optional file that is not there. Raises CorruptSource for anything else."""
    if optional and not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SourceNotFound(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CorruptSource(f"{path} is no JSON ({error}); fetch it again") from error
    if not isinstance(value, dict):
        raise CorruptSource(f"{path} holds no JSON object; fetch it again")
    return value


def _open_weights(path: Path) -> list[SafetensorsFile]:
    if (path / WEIGHTS).is_file():
        return [SafetensorsFile(path / WEIGHTS)]
    if not (path / INDEX).is_file():
        pickled = any(path.glob("*.bin")) or any(path.glob("*.pth"))
        hint = "its weights are pickled, convert them to safetensors" if pickled else f"it has no {WEIGHTS}"
        raise SourceNotFound(f"{path} is no model that can be read: {hint}")
    weight_map = read_json(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptSource(f"{path / INDEX} has no weight_map; fetch it again")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CorruptSource(f"{path / INDEX} names {name!r}, which is no safetensors file beside it")
        if not (path / name).is_file():
            raise CorruptSource(f"{path}: {name} is missing, {INDEX} asks for it; fetch it again")
    files = [SafetensorsFile(path / name) for name in names]
    stored = {name for file in files for name in file.tensors}
    for name in weight_map:
        if name not in stored:
            raise CorruptSource(f"{path}: {name} is in no shard, {INDEX} says {weight_map[name]}; fetch it again")
    return files


def _without_extras(files: list[SafetensorsFile], *, tied: bool) -> dict[str, SafetensorsFile]:
    """The file of each tensor, without those that carry no weight of their own.

    Old checkpoints store RoPE's frequencies; some store a tied output matrix, which transformers ignores too.
    """
    return {
        name: file
        for file in files
        for name in file.tensors
        if not name.endswith(".rotary_emb.inv_freq") and not (tied and name == "lm_head.weight")
    }


def _sampling(path: Path, generation: Mapping[str, Any]) -> SamplingDefaults:
    keys = ("temperature", "top_p", "top_k", "repetition_penalty")
    given = {key: generation[key] for key in keys if generation.get(key) is not None}
    return checked(str(path / "generation_config.json"), given, SamplingDefaults)
