"""Inspect a model source: what it is, whether it compiles, and the size of its artifact; nothing is built or written.

Knows configurations, tensors and sizes. Of a model of the hub only the configuration and the index are fetched.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from radixlm.runtime.artifact.local_models import CONFIG, INDEX, MLC_CONFIG
from radixlm.runtime.artifact.manifest import KVDType, SamplingDefaults
from radixlm.runtime.artifact.model_config import ModelConfig
from radixlm.runtime.artifact.model_names import part_paths
from radixlm.runtime.errors import InvalidParameter, SourceError, SourceNotFound

from .codegen.targets import find_target
from .families.registry import FAMILIES, model_config, weight_shapes
from .kv_layout import KVChoice, context_length, kv_layout, resolved
from .ops.implemented import check_implemented
from .sources import Source, default_model, hub, open_source
from .sources.huggingface import huggingface_settings
from .sources.model_files import GENERATION, open_files, read_json
from .sources.quantized.registry import BESIDE
from .sources.source import sampling_of_generation_config
from .stored_weights import Quantize, StoredWeights, artifact_bytes, artifact_token_bytes, source_token_bytes


@dataclass(frozen=True)
class Inspection:
    """Facts about a source; None if only its weights could tell.

    Attributes:
        refusal: why it cannot be compiled; None if nothing is known against it.
        file_bytes: size of all files of weights. artifact_bytes: size of the artifact's weights, which is also their
            memory.
        file_token_bytes, artifact_token_bytes: bytes of these that are read for each decoded token.
        sampling: the sampling defaults of requests.
        kv_dtype, kv_bytes: KV format if compiled for this machine, and the bytes of 1,000 tokens.
        context_length: default context length of the artifact.
    """

    source: str
    format: str
    family: str
    model: ModelConfig
    refusal: str | None
    num_parameters: int
    sampling: SamplingDefaults
    context_length: int | None
    kv_dtype: KVDType
    kv_bytes: int
    file_bytes: int | None = None
    artifact_bytes: int | None = None
    file_token_bytes: int | None = None
    artifact_token_bytes: int | None = None
    tokenizer: str | None = None
    has_chat_template: bool | None = None


def inspect_source(source: str | Path, *, quantize: Quantize = "keep", kv_dtype: KVChoice = "auto") -> Inspection:
    """Inspect any source that `open_source` takes.

    Raises:
        SourceError: the source is unreadable, is of an unknown family, or has an unsupported tensor.
    """
    if isinstance(source, str) and source.startswith(hub.PREFIX):
        found = hub.find_download(source)
        if found is None and hub.names_gguf(source):
            raise SourceNotFound(f"{source} is not downloaded yet: radixlm pull {source} does so")
        if found is None or found.is_dir():
            return _inspect_hub_model(source, kv_dtype)
    if source == default_model.ALIAS and default_model.cached_model() is None:
        raise SourceNotFound(f"{source} is not downloaded yet: radixlm generate {source} Hello does so (98 MB)")
    with open_source(source) as opened:
        return _inspect_opened(str(source), opened, quantize, kv_dtype)


def _inspect_hub_model(reference: str, kv_dtype: KVChoice) -> Inspection:
    """Inspect a model of the hub by its configuration and index, without its weights."""
    directory = hub.download_files(reference, (CONFIG, GENERATION, MLC_CONFIG, INDEX, *BESIDE))
    files = open_files(directory, reference)
    config = model_config(huggingface_settings(reference, files.config))
    index = read_json(directory / INDEX, optional=True)
    names, metadata = index.get("weight_map"), index.get("metadata")
    files.format_for(names if isinstance(names, Mapping) else ())  # refuses unsupported formats
    total = metadata.get("total_size") if isinstance(metadata, Mapping) else None
    sampling = sampling_of_generation_config(files.generation)
    file_bytes = total if isinstance(total, int) else None
    return _make_inspection(reference, files.layout, config, sampling, kv_dtype, file_bytes=file_bytes)


def _inspect_opened(label: str, source: Source, quantize: Quantize, kv_dtype: KVChoice) -> Inspection:
    """Return the inspection of an opened source: its model, sizes in the file and in an artifact, and tokenizer."""
    config = source.config
    weights = StoredWeights(source, quantize)
    return _make_inspection(
        label,
        source.info.format,
        config,
        source.sampling,
        kv_dtype,
        file_bytes=_file_bytes(label),
        artifact_bytes=artifact_bytes(weights),
        file_token_bytes=source_token_bytes(source),
        artifact_token_bytes=artifact_token_bytes(weights),
        tokenizer=_describe_tokenizer(source.tokenizer_json),
        has_chat_template=source.chat_template is not None,
    )


def _make_inspection(
    label: str, format_: str, config: ModelConfig, sampling: SamplingDefaults, kv_dtype: KVChoice, **sizes: Any
) -> Inspection:
    """Return the inspection of a configuration, with the reason if it cannot be compiled; `sizes` are other fields."""
    refusal, length = None, None
    try:
        length = context_length(config, None)
        check_implemented(label, resolved(config, length))
    except (SourceError, InvalidParameter) as error:
        refusal = str(error)
    layout = kv_layout(config, kv_dtype, find_target("native"))
    return Inspection(
        source=label,
        format=format_,
        family=FAMILIES[config.architecture].title,
        model=config,
        refusal=refusal,
        num_parameters=sum(map(prod, weight_shapes(config).values())),
        sampling=sampling,
        context_length=length,
        kv_dtype=layout.dtype,
        kv_bytes=layout.page_bytes * 1000 // layout.page_size,
        **sizes,
    )


def _file_bytes(source: str) -> int:
    """Return the bytes of a file, or of the files of weights in a directory."""
    path = default_model.cached_model() if source == default_model.ALIAS else Path(source)
    if source.startswith(hub.PREFIX):
        path = hub.find_download(source)
    assert path is not None
    of_directory = (".safetensors", ".bin")
    files = part_paths(path) if path.is_file() else [file for file in path.iterdir() if file.suffix in of_directory]
    return sum(file.stat().st_size for file in files)


def _describe_tokenizer(tokenizer_json: str) -> str:
    """Return a short description of a tokenizer, such as "BPE of 49,152 tokens"."""
    model = json.loads(tokenizer_json)["model"]
    return f"{model.get('type', 'BPE')} of {len(model['vocab']):,} tokens"
