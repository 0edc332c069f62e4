"""The models that clients pulled, listed in a text file with one name per line.

Knows names of the hub, the file and compiled artifacts; not what loads a model.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from radixlm.runtime.artifact.artifact_use import remove_artifact
from radixlm.runtime.artifact.model_names import ALIAS, HUB, SUFFIX, HubName, is_hub
from radixlm.runtime.errors import (
    ArtifactBusy,
    ArtifactError,
    ArtifactNotFound,
    InvalidParameter,
    RadixLMError,
    SourceNotFound,
)
from radixlm.runtime.router.model_row import ModelSpec
from radixlm.runtime.server.errors import HTTPError
from radixlm.runtime.system import sync_file

from .model_list import ModelEntry

_OLLAMAS_HUB = re.compile(r"^(https://)?(hf\.co|huggingface\.co)/")  # before what we call hf:ORG/NAME


@dataclass(frozen=True)
class PulledModels:
    """A list of models in a file, which any threads of one process read and change.

    Args:
        spec: returns how to load an entry.
        artifacts: returns the artifacts that a model is served from, its own first.
    """

    path: Path
    spec: Callable[[ModelEntry], ModelSpec]
    artifacts: Callable[[ModelSpec], Sequence[Path]]
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    @property
    def names(self) -> list[str]:
        """The names, in the order of the pulls.

        Raises:
            InvalidParameter: the file cannot be read.
        """
        try:
            return self.path.read_text(encoding="utf-8").split() if self.path.exists() else []
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidParameter(f"--allow-pull {self.path} cannot be read: {error}") from error

    def check(self) -> None:
        """Write the file as it is, so that a folder that cannot be written is an error before anything is pulled.

        Raises:
            InvalidParameter: the file cannot be read or written.
        """
        try:
            with self._lock:
                self._write(self.names)
        except HTTPError as error:
            raise InvalidParameter(f"--allow-pull {self.path}: {error}") from error

    @property
    def entries(self) -> list[ModelEntry]:
        """The models to serve."""
        return [_entry(name) for name in self.names]

    def spec_of(self, name: str) -> ModelSpec:
        """Return how to load a model of the hub, or the alias. Paths of this machine are refused.

        Raises:
            HTTPError: 404, the name is neither.
        """
        try:
            return self.spec(_entry(name))
        except OSError as error:  # a name that is too long for a file
            raise HTTPError(404, f"{name!r:.80} is no model", param="model", code="model_not_found") from error
        except (SourceNotFound, ArtifactError, InvalidParameter) as error:
            raise HTTPError(404, str(error), param="model", code="model_not_found") from error

    def has(self, name: str) -> bool:
        """Return whether a client pulled a model."""
        return name in self.names

    def add(self, spec: ModelSpec) -> None:
        """Record that a client pulled a model."""
        with self._lock:
            self._write(dict.fromkeys((*self.names, spec.name)))

    def forget(self, spec: ModelSpec) -> None:
        """Remove the record of a pulled model."""
        with self._lock:
            self._write(name for name in self.names if name != spec.name)

    def remove_artifact(self, spec: ModelSpec, served: Iterable[ModelSpec]) -> None:
        """Remove the artifact of a deleted model, unless it is open or one of the `served` models has the same.

        Downloads stay in the hub's cache.
        """
        own = self.artifacts(spec)[0]
        if own.resolve() not in {path.resolve() for other in served for path in self._known_artifacts(other)}:
            with suppress(ArtifactNotFound, ArtifactBusy):
                remove_artifact(own)

    def _known_artifacts(self, spec: ModelSpec) -> Sequence[Path]:
        """Return the artifacts of a model; none if its files are gone."""
        try:
            return self.artifacts(spec)
        except (RadixLMError, OSError):  # its files are gone
            return ()

    def _write(self, names: Iterable[str]) -> None:
        """Replace the file of pulled models' names, so that it survives a power loss.

        Raises:
            HTTPError: it cannot be written.
        """
        unnamed = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            with unnamed.open("w", encoding="utf-8") as file:
                file.writelines(f"{name}\n" for name in names)
                file.flush()
                sync_file(file.fileno())
            unnamed.replace(self.path)
        except OSError as error:
            message = f"the list of pulled models cannot be written ({error.strerror}); the operator has to look at it"
            raise HTTPError(507, message, code="storage_full") from error
        finally:
            with suppress(OSError):
                unnamed.unlink(missing_ok=True)


def _entry(name: str) -> ModelEntry:
    """Return the model for a name that a client sent.

    >>> _entry("hf.co/org/name-GGUF:Q4_K_M").source, _entry("smollm2").source
    ('hf:org/name-GGUF:Q4_K_M', 'smollm2')

    Raises:
        SourceNotFound: the name is not one of the hub.
    """
    source = _OLLAMAS_HUB.sub(HUB, name)
    if source == ALIAS:
        return ModelEntry(source, name)
    is_path = ".." in source or source.endswith(SUFFIX)
    if not is_hub(source) or is_path or re.search(r"\s", source) or not _has_organization(source):
        raise SourceNotFound(
            f"{name!r:.200} is no model of the hub; pull hf:ORG/NAME, hf:ORG/NAME:Q4_K_M, or the alias {ALIAS}"
        )
    return ModelEntry(source, name)


def _has_organization(source: str) -> bool:
    organization, slash, name = HubName.parse(source).repository.partition("/")
    return bool(organization and slash and name)
