"""Read the models of `radixlm serve --models`: names, folders, and TOML files with options for each model.

Knows files and names. `worker_flags.py` knows flags.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from radixlm.runtime.artifact.compiled_models import artifact_named
from radixlm.runtime.artifact.local_models import is_model_directory, models_in
from radixlm.runtime.artifact.model_names import SUFFIX, short_name, whole_stem
from radixlm.runtime.errors import ArtifactNotFound, InvalidParameter

_MODEL = "model"  # name of the tables in a TOML file
_OWN = ("source", "name", "aliases", "pinned", "lora")


@dataclass(frozen=True)
class ModelEntry:
    """A model to serve, as named on the command line or in a TOML file.

    Attributes:
        name: name for clients; None: derived from the source.
        loras: paths of its LoRA adapters, by name.
        options: other options of `radixlm serve`, by flags without dashes.
        place: where the model was named, for errors.
        is_found: true if only its folder was named: the others are served without it if it is unusable.
    """

    source: str
    name: str | None = None
    aliases: tuple[str, ...] = ()
    is_pinned: bool = False
    loras: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, object] | None = None
    place: str = "--models"
    is_found: bool = False

    @property
    def client_name(self) -> str:
        """The model's name for clients: the given one, or that of its file or folder. A link has its own name."""
        path = os.path.abspath(self.source)  # not resolved
        own = whole_stem(path) if os.path.exists(path) else short_name(self.source)
        return self.name or own.removesuffix(SUFFIX)

    @property
    def flags(self) -> list[str]:
        """The options as command-line arguments."""
        loras = (argument for name, path in self.loras.items() for argument in ("--lora", f"{name}={path}"))
        return [*loras, *(each for name, value in (self.options or {}).items() for each in _arguments(name, value))]


def read_models(given: Sequence[str]) -> list[ModelEntry]:
    """Return the models of `--models` in order; each argument is a model, a folder of models, or a TOML file.

    Raises:
        ArtifactNotFound: a path does not exist.
        InvalidParameter: a folder has no model, or a TOML file is invalid.
    """
    return [entry for each in given for entry in _read(each)]


def _read(given: str) -> Iterator[ModelEntry]:
    """Yield the models of one argument: a TOML file's, a folder's, or the model itself.

    Raises:
        ArtifactNotFound: it does not exist.
        InvalidParameter: a folder has no model, or a TOML file is invalid.
    """
    path = Path(given)
    if path.suffix == ".toml" and path.is_file():
        yield from _in_toml(path)
    elif path.is_dir() and not is_model_directory(path):
        found = [ModelEntry(str(each), is_found=True) for each in models_in(path)]
        if not found:
            raise InvalidParameter(
                f"{path} has no model; put artifacts (NAME{SUFFIX}), .gguf files or model directories there"
            )
        yield from found
    else:
        try:
            artifact_named(given)  # raises if the name is invalid
        except ArtifactNotFound as error:
            raise ArtifactNotFound(f"{error}; --models also takes a folder of models, or a TOML file") from error
        yield ModelEntry(given)


def _in_toml(path: Path) -> Iterator[ModelEntry]:
    """Yield the models of a TOML file.

    Raises:
        InvalidParameter: it cannot be read, or has anything but tables of models.
    """
    try:
        read = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidParameter(f"{path} cannot be read: {error}") from error
    tables = read.pop(_MODEL, [])
    if read or not isinstance(tables, list) or not tables or not all(isinstance(each, dict) for each in tables):
        known = f"[[{_MODEL}]] tables, each with a source"
        raise InvalidParameter(f"{path} has {', '.join(read) or 'no model'}; it must have {known}, and nothing else")
    for number, table in enumerate(tables, 1):
        yield _in_table(f"{path}, model {number}", table, path.parent)


def _in_table(place: str, table: Mapping[str, Any], folder: Path) -> ModelEntry:
    """Return the model that a table of a TOML file describes.

    Args:
        place: names the table in errors.
        folder: that of the file; a source that exists there is relative to it.

    Raises:
        ArtifactNotFound: the source does not exist.
        InvalidParameter: a value is missing or has another type.
    """
    text, texts, switch = (str, "a text"), (list, "a list of texts"), (bool, "true or false")
    kinds = {"source": text, "name": text, "aliases": texts, "pinned": switch, "lora": (dict, "a table of paths")}
    for name, (kind, wanted) in kinds.items():
        if name in table and not isinstance(table[name], kind):
            raise InvalidParameter(f"{place}: {name} is {table[name]!r:.60}; it must be {wanted}")
    aliases = table.get("aliases", [])
    if (
        not table.get("source")
        or table.get("name") == ""
        or not all(isinstance(each, str) and each for each in aliases)
    ):
        raise InvalidParameter(f"{place}: give a source, and names that are not empty")
    source = _beside(table["source"], folder)
    try:
        artifact_named(source)
    except InvalidParameter:
        raise
    except Exception as error:
        raise type(error)(f"{place}: {error}") from error
    options = {name: value for name, value in table.items() if name not in _OWN}
    return ModelEntry(
        source,
        table.get("name"),
        aliases=tuple(aliases),
        is_pinned=table.get("pinned", False),
        loras={name: _adapter(place, name, path, folder) for name, path in table.get("lora", {}).items()},
        options=options,
        place=place,
    )


def _adapter(place: str, name: str, path: object, folder: Path) -> str:
    """Return the path of an adapter that exists. Raises InvalidParameter."""
    if not name or "=" in name or not isinstance(path, str) or not path:
        raise InvalidParameter(f"{place}: lora has {name!r:.60} = {path!r:.60}; give a name without '=', and a path")
    found = _beside(path, folder)
    if not os.path.exists(found):
        raise InvalidParameter(f"{place}: the LoRA adapter {name!r:.60} is {path!r:.200}, which does not exist")
    return found


def _beside(given: str, folder: Path) -> str:
    """Return a path relative to the folder of the TOML file, if there is such a file, else what was given."""
    relative = folder / given
    return str(relative) if relative.exists() else given


def _arguments(name: str, value: object) -> Iterator[str]:
    """Yield the command line's arguments for an option of a TOML table."""
    flag = f"--{name.replace('_', '-')}"
    if value is True:
        yield flag
    elif value is False:
        yield f"--no-{flag[2:]}"
    elif isinstance(value, list):
        for each in value:
            yield from (flag, str(each))
    else:
        yield from (flag, json.dumps(value) if isinstance(value, dict) else str(value))
