"""A GGUF file as a model source.

`gguf_settings.py` reads its metadata, `gguf_tensors.py` its tensors; what llama.cpp's converter renames and reorders is
said by the model families.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from radixlm.runtime.artifact.manifest import SourceInfo
from radixlm.runtime.errors import CorruptSource, SourceError, UnsupportedTokenizer

from ..families.registry import model_config
from ..weights.quantization import Float32, Weight, WeightPlanes
from .checkpoint import END_OF_REPLY, ends_of_reply, sampling_of_gguf, usable_template
from .gguf_file import GGUFFile
from .gguf_settings import ROPE_FACTORS, gguf_settings
from .gguf_tensors import GGUFTensors
from .gguf_tokenizer import build_tokenizer_json, vocabulary_from_gguf
from .model_tensors import ModelTensors
from .source import TensorInfo

_SAMPLE_BYTES = 1024  # of each tensor, in the fingerprint
_EXPECTED_BYTES = 16 << 10  # of each tensor, which begin it: a row says how a matrix is stored


class GGUFSource:
    """A model in one `.gguf` file; a `Source`."""

    def __init__(self, path: Path, *, name: str | None = None) -> None:
        """Raises SourceNotFound, CorruptSource, UnsupportedArchitecture, -Tensor or -Tokenizer."""
        self._file = GGUFFile(path)
        metadata = self._file.metadata
        _refuse_parts(path, metadata)
        self.name = name or path.stem
        settings = gguf_settings(self._file)
        self.config = model_config(settings)
        stored = GGUFTensors(self._file)
        self._tensors = ModelTensors(str(path), self.config, "gguf", stored, ROPE_FACTORS)
        for name in sorted(self._tensors.used):
            stored.check_type(name)
        try:
            vocabulary = vocabulary_from_gguf(metadata)
            num_tokens, num_rows = len(vocabulary.tokens), self.config.vocab_size
            if num_tokens > num_rows:
                raise CorruptSource(f"the tokenizer has {num_tokens} tokens, the embedding {num_rows} rows")
            self.tokenizer_json = build_tokenizer_json(vocabulary)
        except (CorruptSource, UnsupportedTokenizer) as error:
            raise type(error)(f"{path}: {error}") from error
        self.chat_template = usable_template(metadata.get("tokenizer.chat_template"))
        self.bos_token_id = vocabulary.bos_token_id
        self.add_bos_token = vocabulary.add_bos_token and vocabulary.bos_token_id is not None
        self.eos_token_ids = _eos_token_ids(metadata, vocabulary.tokens)
        self.sampling = sampling_of_gguf(metadata)
        self.info = SourceInfo(format="gguf", name=self.name, fingerprint=self._fingerprint())

    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors.infos()

    def read(self, name: str, rows: slice | None = None) -> Weight:
        return self._tensors.read(name, rows)

    def read_planes(self, name: str, rows: slice) -> WeightPlanes | None:
        return self._tensors.read_planes(name, rows)

    def read_float32(self, name: str, rows: slice | None = None) -> Float32:
        return self._tensors.read_float32(name, rows)

    def release(self) -> None:
        self._file.release()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _fingerprint(self) -> str:
        """Over the header, the file's size and the beginning of each tensor."""
        digest = hashlib.sha256(self._file.data[: self._file.header_bytes].data)
        digest.update(len(self._file.data).to_bytes(8, "little"))
        samples = [(tensor.data_offset, min(tensor.n_bytes, _SAMPLE_BYTES)) for tensor in self._file.tensors.values()]
        self._file.expect((start, _EXPECTED_BYTES) for start, _ in samples)
        for start, size in samples:
            digest.update(self._file.data[start:][:size].data)
        return digest.hexdigest()


def _eos_token_ids(metadata: Mapping[str, Any], tokens: list[str] | Any) -> tuple[int, ...]:
    """The declared ends of text, turn and message, and the well-known ones in the vocabulary."""
    declared = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    known = {text: index for index, text in enumerate(tokens) if text in END_OF_REPLY}
    ids = [*declared, *(known[text] for text in ends_of_reply(known))]
    return tuple(dict.fromkeys(index for index in ids if isinstance(index, int) and 0 <= index < len(tokens)))


def _refuse_parts(path: Path, metadata: Mapping[str, Any]) -> None:
    if metadata.get("split.count", 1) not in (0, 1):
        raise SourceError(
            f"{path} is one of {metadata['split.count']} parts; join them with llama-gguf-split --merge first"
        )
