"""Read how texts become vectors or scores, from sentence-transformers' files or keys of a GGUF file.

A reranker that is a language model is told by sentence-transformers' files, a GGUF file's pooling, or its name. Knows
files and keys, not tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from msgspec.structs import replace
from radixlm.runtime.artifact.model_config import DenseOutput, ModelConfig, ScoreHead
from radixlm.runtime.artifact.text_vectors import EmbeddingInfo, Pooling, RerankingInfo
from radixlm.runtime.errors import CorruptSource, UnsupportedArchitecture

from .model_files import read_json
from .quantized.tensors import Array
from .source import checked, read_text
from .tensor_files import SafetensorsFile

Json = Mapping[str, Any]
MODULES = "modules.json"
FILES = (MODULES, "config_sentence_transformers.json", "*_Pooling/config.json", "*_LogitScore/config.json", "*_Dense/*")
"""The files of a repository that are read here, as patterns."""
WITHOUT_LOGITS = ("lm_head.*", "output.weight", "output.bias", "cls.*")
"""Tensors that make logits or classes of hidden states."""

_POOLINGS: Mapping[str, Pooling] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_MODE = "pooling_mode_"
_MODES = {"lasttoken": "lasttoken", "mean_tokens": "mean", "cls_token": "cls"}
_GGUF_POOLINGS: Mapping[int, Pooling] = {1: "mean", 2: "cls", 3: "last"}
_GGUF_RANK = 4
_RERANKER = "qwen3-reranker"  # in names of models whose files say nothing of it
_YES, _NO = "yes", "no"
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_TEMPLATE = (  # of Qwen3-Reranker, by its model card
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


def embedding_of_directory(path: Path) -> EmbeddingInfo | None:
    """Return how sentence-transformers' files make vectors; None if there are none, or for a reranker.

    Raises:
        CorruptSource: they are not as they must be.
        UnsupportedArchitecture: a step that they ask for is not known.
    """
    modules = _modules(path)
    names = [name for name, _ in modules]
    if "Pooling" not in names:
        return None
    num_dense = names.count("Dense")
    usual = ["Transformer", "Pooling", *["Dense"] * num_dense, *["Normalize"] * ("Normalize" in names)]
    if names != usual:
        raise UnsupportedArchitecture(
            f"{path}: {MODULES} asks for {', '.join(names)}; supported are {', '.join(usual[:2])}, Dense and Normalize"
        )
    settings = read_json(path / "config_sentence_transformers.json", optional=True)
    prompts, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
    are_texts = isinstance(prompts, Mapping) and all(isinstance(each, str) for each in prompts.values())
    if not are_texts or not isinstance(default, str | None):
        raise CorruptSource(f"{path}: the prompts of config_sentence_transformers.json are no texts; fetch it again")
    return EmbeddingInfo(
        pooling=_pooling(path, read_json(path / dict(modules)["Pooling"] / "config.json")),
        normalize="Normalize" in names,
        prompts=dict(prompts),
        default_prompt=default if default in prompts else None,
    )


def embedding_of_gguf(metadata: Json) -> EmbeddingInfo | None:
    """Return how a GGUF file makes vectors; None if its model writes text, or is a reranker."""
    pooling = _GGUF_POOLINGS.get(_gguf_pooling(metadata))
    return None if pooling is None else EmbeddingInfo(pooling=pooling)


def reranking_of_directory(path: Path, name: str, ids: Mapping[str, int]) -> RerankingInfo | None:
    """Return how a checkpoint called `name` scores documents; None if it is no reranker.

    Args:
        ids: of the tokens, by their texts.
    """
    modules = dict(_modules(path))
    scoring = modules.get("LogitScore") or modules.get("CausalScoreHead")
    if scoring is not None:
        said = read_json(path / scoring / "config.json")
        true_id, false_id = said.get("true_token_id"), said.get("false_token_id")
        if not isinstance(true_id, int) or not isinstance(false_id, int):
            raise UnsupportedArchitecture(f"{path}: a reranker with one token is not supported; take one with two")
        if not {true_id, false_id} <= {*ids.values()}:
            raise CorruptSource(f"{path}: the tokenizer has no tokens {true_id} and {false_id}; fetch it again")
        return _by_qwen(true_id, false_id)
    return reranking_by_name(name, ids)


def reranking_of_gguf(metadata: Json, name: str, ids: Mapping[str, int]) -> RerankingInfo | None:
    """The same of a GGUF file, whose own template comes first."""
    if not ranks(metadata):
        return reranking_by_name(name, ids)
    if _YES not in ids or _NO not in ids:
        raise UnsupportedArchitecture("its classes are not supported: rerankers here answer with yes or no")
    template = metadata.get("tokenizer.chat_template.rerank")
    if isinstance(template, str) and "{query}" in template and "{document}" in template:
        return replace(_by_qwen(ids[_YES], ids[_NO]), template=_with_instruction(template))
    return _by_qwen(ids[_YES], ids[_NO])


@dataclass(frozen=True)
class DenseLayers:
    """The linear layers that sentence-transformers puts behind pooling: here before it, which is the same for means."""

    outputs: tuple[DenseOutput, ...]
    arrays: Mapping[str, Array]

    @classmethod
    def of_directory(cls, path: Path) -> Self:
        """Those of a checkpoint, with none for most.

        Raises:
            UnsupportedArchitecture: one has an activation function.
        """
        outputs: list[DenseOutput] = []
        arrays: dict[str, Array] = {}
        for index, folder in enumerate(folder for name, folder in _modules(path) if name == "Dense"):
            said = read_json(path / folder / "config.json")
            function = str(said.get("activation_function", "Tanh")).rsplit(".", 1)[-1]
            if function != "Identity":
                raise UnsupportedArchitecture(f"{path / folder}: the activation {function} is not supported")
            file = SafetensorsFile(path / folder / "model.safetensors")
            arrays |= {f"dense.{index}.{name.removeprefix('linear.')}": each for name, each in file.tensors.items()}
            dense = {"size": said.get("out_features"), "bias": f"dense.{index}.bias" in arrays}
            outputs.append(checked(str(path / folder), dense, DenseOutput))
        return cls(tuple(outputs), arrays)


def giving_hidden_states(
    config: ModelConfig, dense: tuple[DenseOutput, ...] = (), score: ScoreHead | None = None
) -> ModelConfig:
    """The model without all that makes logits of hidden states, and with linear layers or a head in its place."""
    return replace(
        config,
        output="hidden",
        dense=dense,
        score=score,
        tie_word_embeddings=False,
        logits_factor=1.0,
        logits_soft_cap=None,
        output_bias=False,
        mtp=None,
    )


def require_causal(label: str, config: ModelConfig) -> None:
    """Raise UnsupportedArchitecture for a model whose tokens see those after them, and which makes no vectors."""
    if config.is_bidirectional:
        raise UnsupportedArchitecture(
            f"{label}: tokens see those after them, as in an embedding model, and nothing says how it makes vectors; "
            f"fetch {MODULES} and the folders that it names, too, or a GGUF file that has a pooling_type"
        )


def ranks(metadata: Json) -> bool:
    """Return whether a GGUF file says that its model is a reranker."""
    return _gguf_pooling(metadata) == _GGUF_RANK


def reranking_by_name(name: str, ids: Mapping[str, int]) -> RerankingInfo | None:
    """A model that is called Qwen3-Reranker, and has tokens for yes and no, is one."""
    is_reranker = _RERANKER in name.lower() and _YES in ids and _NO in ids
    return _by_qwen(ids[_YES], ids[_NO]) if is_reranker else None


def _by_qwen(true_id: int, false_id: int) -> RerankingInfo:
    return RerankingInfo(true_id=true_id, false_id=false_id, template=_TEMPLATE, instruction=_INSTRUCTION)


def _with_instruction(template: str) -> str:
    """A template with a place for the instruction, if it has the usual one written out."""
    return template.replace(_INSTRUCTION, "{instruction}", 1)


def _modules(path: Path) -> list[tuple[str, str]]:
    """Names of classes, without their modules, and folders: `[("Transformer", ""), ("Pooling", "1_Pooling")]`."""
    if not (path / MODULES).is_file():
        return []
    try:
        modules = json.loads(read_text(path / MODULES))
        found = [(str(each["type"]).rsplit(".", 1)[-1], str(each["path"])) for each in modules]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptSource(f"{path / MODULES} is no list of modules ({error!r}); fetch it again") from error
    outside = next((folder for _, folder in found if Path(folder).name != folder), None)
    if outside is not None:
        raise CorruptSource(f"{path / MODULES} names {outside!r}, which is no folder beside it")
    return found


def _pooling(path: Path, said: Json) -> Pooling:
    """Return how a model makes one vector of its tokens' vectors, from the settings of its pooling module.

    Raises:
        UnsupportedArchitecture: by several modes, or by one that is not supported.
    """
    mode = said.get("pooling_mode")
    modes = [mode] if isinstance(mode, str) else mode if isinstance(mode, list) else None
    if modes is None:
        said_so = [key.removeprefix(_MODE) for key, value in said.items() if key.startswith(_MODE) and value]
        modes = [_MODES.get(mode, mode) for mode in said_so]
    if len(modes) != 1 or not isinstance(modes[0], str) or modes[0] not in _POOLINGS:
        raise UnsupportedArchitecture(f"{path}: pooling by {modes} is not supported; last, mean and cls are")
    pooling = _POOLINGS[modes[0]]
    if pooling == "mean" and said.get("include_prompt") is False:
        raise UnsupportedArchitecture(f"{path}: means without the prompt's tokens (include_prompt) are not supported")
    return pooling


def _gguf_pooling(metadata: Json) -> int:
    """GGUF's number of a pooling; 0: none."""
    value = metadata.get(f"{metadata.get('general.architecture')}.pooling_type")
    return value if isinstance(value, int) else 0
