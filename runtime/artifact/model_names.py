"""Parse names of models: an artifact, a GGUF file, a model directory, a repository of the hub, or the alias.

Reads no file and asks no server. `compile/sources` or `Artifact.open` opens the model of a name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import SourceNotFound

ALIAS = "smollm2"
HUB = "hf:"
SUFFIX = ".radixlm"
FORMS = f"give an artifact, a .gguf file, a model directory, hf:ORG/NAME, or the alias {ALIAS}"
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?(@[\w./-]+)?|[\w.-]+/[\w.-]+/[\w./-]+\.gguf(@[\w./-]+)?")
_SPECIAL = re.compile(r"[^A-Za-z0-9._-]")
_MAX_LENGTH = 100


@dataclass(frozen=True)
class HubName:
    """A model of the hub: `hf:ORG/NAME`, then `:QUANTIZATION` or `/FILE.gguf`, then `@REVISION`.

    >>> HubName.parse("hf:org/name:Q4_K_M@main")
    HubName(repository='org/name', quantization='Q4_K_M', file=None, revision='main')
    >>> HubName.parse("hf:org/name/sub/model.gguf").file
    'sub/model.gguf'
    """

    repository: str
    quantization: str | None = None
    file: str | None = None
    revision: str | None = None

    @classmethod
    def parse(cls, name: str) -> HubName:
        """Parse a name that begins with `hf:`.

        Raises:
            SourceNotFound: it has another form, for instance a path that is no .gguf file.
        """
        model, _, revision = name.removeprefix(HUB).partition("@")
        model, colon, quantization = model.partition(":")
        repository, file = model, None
        if model.count("/") > 1:
            organization, short, file = model.split("/", 2)
            repository = f"{organization}/{short}"
        if (file is not None and (colon or not file.lower().endswith(".gguf"))) or (colon and not quantization):
            raise SourceNotFound(
                f"{name} names no model of the hub; give hf:ORG/NAME, hf:ORG/NAME:Q4_K_M or hf:ORG/NAME/FILE.gguf; "
                "check the name"
            )
        return cls(repository, quantization or None, file, revision or None)

    @property
    def short(self) -> str:
        """Short name of the model: its repository's last word, or its file's name."""
        if self.file is not None:
            return whole_stem(self.file)
        last = self.repository.rpartition("/")[2]
        return last if self.quantization is None else f"{last}-{self.quantization}"


def is_hub(model: str) -> bool:
    """Return whether `model` is a name of the hub."""
    return model.startswith(HUB)


def hub_hint(model: str) -> str | None:
    """Return `model` as a name of the hub; None if it cannot be one.

    >>> hub_hint("Qwen/Qwen3-4B-GGUF:Q4_K_M"), hub_hint("nowhere.gguf")
    ('hf:Qwen/Qwen3-4B-GGUF:Q4_K_M', None)
    """
    return f"{HUB}{model}" if _REPOSITORY.fullmatch(model) else None


def no_chat_template(model: str) -> str:
    """Return the error message for a chat with a model that has no chat template."""
    return f'{model} has no chat template; continue a text instead: radixlm generate {model} "Once upon"'


def short_name(model: str) -> str:
    """Return the name of `model` for servers and files.

    >>> short_name("hf:Qwen/Qwen2.5-0.5B@main"), short_name("models/my model.Q4_K_M.gguf")
    ('Qwen2.5-0.5B', 'my_model.Q4_K_M')
    >>> short_name("hf:org/name-GGUF:Q4_K_M"), short_name("big-00001-of-00003.gguf")
    ('name-GGUF-Q4_K_M', 'big')
    """
    last = HubName.parse(model).short if is_hub(model) else whole_stem(Path(model).resolve().name)
    return _SPECIAL.sub("_", last)[:_MAX_LENGTH] or "model"


def whole_stem(file: str) -> str:
    """Return the name of a file without folders, the number of a part and `.gguf`."""
    name = file.rpartition("/")[2]
    part = _PART.fullmatch(name)
    return part[1] if part else re.sub(r"\.gguf$", "", name, flags=re.IGNORECASE)


def part_names(file: str) -> list[str]:
    """Return the names of all parts of the split GGUF file that `file` belongs to; for any other file its own name.

    >>> part_names("a/big-00002-of-00002.gguf"), part_names("small.gguf")
    (['a/big-00001-of-00002.gguf', 'a/big-00002-of-00002.gguf'], ['small.gguf'])
    """
    part = _PART.fullmatch(file)
    if part is None:
        return [file]
    stem, _, count, suffix = part.groups()
    return [f"{stem}-{number:05d}-of-{count}{suffix}" for number in range(1, int(count) + 1)]


def part_paths(path: Path) -> list[Path]:
    """Return the files that make up the model of `path`, whether they exist or not: its parts, or itself."""
    return [path.with_name(name) for name in part_names(path.name)]
