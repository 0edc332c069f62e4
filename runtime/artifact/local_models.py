"""Recognize models among files and folders: artifacts, GGUF files, and directories of checkpoints.

Reads names and headers, no weights. `compile/sources` says whether a model can be compiled.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from ..errors import CorruptSource, SourceNotFound
from .directory import MANIFEST, Artifact, read_manifest
from .gguf_header import check_gguf_header, require_content
from .model_names import ALIAS, SUFFIX, is_hub, part_names, part_paths

CONFIG, MLC_CONFIG = "config.json", "mlc-chat-config.json"
ADAPTER = "adapter_config.json"  # of a directory that is no model
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_PROJECTOR = "mmproj"  # prefix of GGUF files that belong to another model
_MAX_NAMED = 5  # models of a folder in a message
_LENGTH_BYTES = 8  # of the length of a safetensors header
_MAX_HEADER_BYTES = 100 << 20  # as the safetensors library allows


def is_model_directory(path: Path) -> bool:
    """Return whether a directory is a model, and no folder of models."""
    return _is_artifact(path) or any(os.path.isfile(path / name) for name in (CONFIG, MLC_CONFIG))


def models_in(folder: Path) -> list[Path]:
    """Return the models of a folder, sorted: artifacts, directories with a model, and GGUF files.

    Projectors and later parts of split files are none.
    """
    return [path for path in sorted(folder.iterdir()) if _is_model(path)]


def unreadable_in(folder: Path) -> list[Path]:
    """Return the directories of a folder that this user may not read, sorted, unless their names say what they are."""
    return [path for path in sorted(folder.iterdir()) if path.is_dir() and not _is_model(path) and not _may_read(path)]


def check_named(model: str) -> None:
    """Check the model that `model` names if it is a path on this machine. Raises as `check_model`."""
    if model != ALIAS and not is_hub(model) and (path := Path(model)).exists():
        check_model(path)


def check_model(path: Path) -> None:
    """Raise if the model at `path` is certainly unusable, by its names and headers alone.

    Raises:
        SourceError: a file is missing, truncated, of another kind, or may not be read; of a folder of models, the
            message names some.
        ArtifactError: it is an artifact that is damaged, or was compiled for another CPU.
    """
    if path.exists() and not _may_read(path):
        raise SourceNotFound(f"{path} may not be read by this user; change its permissions")
    if _is_artifact(path):
        artifact = Artifact(path, read_manifest(path))
        artifact.check_sizes()
        artifact.check_cpu()
    elif path.is_dir():
        _check_directory(path)
    else:
        for part in part_paths(path):
            check_gguf_header(part)


def no_model(path: Path) -> SourceNotFound:
    """Return the error for a directory that is no model. It names the models in it."""
    if (path / ADAPTER).is_file():
        return SourceNotFound(f"{path} is an adapter (LoRA), and no model; merge it into its model, and give that")
    found = [each.name for each in models_in(path)]
    if not found:
        return SourceNotFound(f"{path} is no model: it has no {CONFIG}; give a .gguf file or a model directory")
    more = f" and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else ""
    return SourceNotFound(
        f"{path} is a folder of models, and no model: give one of them, such as {path / found[0]}, or serve them all: "
        f"radixlm serve --models {path} (it has {', '.join(found[:_MAX_NAMED])}{more})"
    )


def no_weights(path: Path) -> SourceNotFound:
    """Return the error for the directory of a checkpoint without weights that can be read."""
    is_pickled = any(path.glob("*.bin")) or any(path.glob("*.pth"))
    hint = "its weights are pickled, convert them to safetensors" if is_pickled else f"it has no {WEIGHTS}"
    return SourceNotFound(f"{path} is no model that can be read: {hint}")


def missing_shard(path: Path, name: str) -> CorruptSource:
    """Return the error for the directory of a checkpoint without a file that its index names."""
    return CorruptSource(f"{path}: {name} is missing, {INDEX} asks for it; fetch it again")


def _is_model(path: Path) -> bool:
    """Return whether an entry of a folder is a model of its own."""
    if path.is_dir():
        return is_model_directory(path)
    is_first = part_names(path.name)[0] == path.name
    return path.suffix.lower() == ".gguf" and is_first and not path.name.startswith(_PROJECTOR)


def _is_artifact(path: Path) -> bool:
    """Return whether a path is an artifact, by its name or its manifest."""
    return path.name.endswith(SUFFIX) or os.path.isfile(path / MANIFEST)


def _may_read(path: Path) -> bool:
    """Return whether this user may read a file, or list and enter a directory."""
    return os.access(path, os.R_OK | os.X_OK if path.is_dir() else os.R_OK)


def _check_directory(path: Path) -> None:
    """Raise a SourceError if a checkpoint is incomplete or damaged, or the directory is none."""
    if not is_model_directory(path):
        raise no_model(path)
    config = path / CONFIG
    if not config.is_file():  # MLC's, whose shards have no headers
        return
    require_content(config)
    try:
        json.loads(config.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CorruptSource(f"{config} is no JSON ({error}); fetch it again") from error
    if not any((path / name).is_file() for name in (WEIGHTS, INDEX)):
        raise no_weights(path)
    for file in _weights_of(path):
        _check_safetensors(file)


def _weights_of(path: Path) -> list[Path]:
    """Return the safetensors files that the compiler opens; none if their index is damaged, which it reports itself.

    Raises:
        CorruptSource: a file that the index names is missing.
    """
    if (path / WEIGHTS).is_file():
        return [path / WEIGHTS]
    try:
        names = {str(name) for name in json.loads((path / INDEX).read_bytes())["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []
    for name in sorted(names):
        if not (path / name).is_file():
            raise missing_shard(path, name)
    return [path / name for name in sorted(names)]


def _check_safetensors(path: Path) -> None:
    """Raise CorruptSource if a file ends before its last tensor does, or its header is damaged."""
    require_content(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        header = file.read(min(length, _MAX_HEADER_BYTES))
    needed = _LENGTH_BYTES + length
    if size >= needed:
        needed += _data_bytes(path, header)
    if needed > size:
        raise CorruptSource(f"{path} is truncated: it has {size:,} bytes and needs {needed:,}; fetch it again")


def _data_bytes(path: Path, header: bytes) -> int:
    """Return the bytes of all tensors of a safetensors file. Raises CorruptSource if the header is damaged."""
    try:
        entries = json.loads(header)
        ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
        return int(max(ends, default=0))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        raise CorruptSource(f"{path} is no safetensors file: its header is damaged; fetch it again") from None
