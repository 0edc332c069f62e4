"""Find the artifact that a name means: a path, or a compiled model of the cache folder by its name in `radixlm list`.

Knows paths and names, not what an artifact holds.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from ..errors import ArtifactNotFound
from .artifact_use import last_used
from .directory import MANIFEST, cache_dir
from .model_names import ALIAS, FORMS, SUFFIX, hub_hint, is_hub

_LEAST_LIKENESS = 0.7  # of a suggested name


def artifacts_dir() -> Path:
    """Return the folder of artifacts that commands have compiled."""
    return cache_dir() / "artifacts"


def compiled_models() -> list[Path]:
    """Return the artifacts in the cache folder, sorted by name. Hidden ones are being written or removed."""
    return sorted(artifacts_dir().glob(f"[!.]*{SUFFIX}"))


def names_of(artifact: Path) -> tuple[str, str]:
    """Return the name of an artifact in the cache folder, and that of its model, which several may share.

    >>> names_of(Path("tiny-Q8_0-0123456789abcdef.radixlm"))
    ('tiny-Q8_0-0123456789abcdef', 'tiny-Q8_0')
    """
    name = artifact.name.removesuffix(SUFFIX)
    return name, name.rpartition("-")[0]


def artifact_named(model: str) -> Path | None:
    """Return the artifact that `model` names; None if it names a model to compile.

    A path is always that path. Of several compiled models with the name, the last used one is chosen.

    Raises:
        ArtifactNotFound: there is nothing at that path, and no compiled model of that name.
    """
    if not model:  # a path without a name is the current directory
        raise ArtifactNotFound(f"the name of the model is empty; {FORMS}")
    path = Path(model)
    if model.endswith(SUFFIX) or (path / MANIFEST).is_file():
        return path
    if model == ALIAS or is_hub(model) or path.exists():
        return None
    compiled = compiled_models()
    if found := [each for each in compiled if model in names_of(each)]:
        return max(found, key=last_used)
    raise ArtifactNotFound(missing_model(model, [name for each in compiled for name in names_of(each)]))


def missing_model(model: str, compiled: list[str]) -> str:
    """Return the error message for a name that matches no model, with a similar name if there is one.

    >>> missing_model("Qwen/Qwen3-4B-GGUF:Q4_K_M", [])[:78]
    'Qwen/Qwen3-4B-GGUF:Q4_K_M does not exist; did you mean hf:Qwen/Qwen3-4B-GGUF:Q'
    >>> missing_model("smolm2", [])[:48], missing_model("Tiny_Q8", ["tiny_q8_0"])[:49]
    ('smolm2 does not exist; did you mean smollm2? Els', 'Tiny_Q8 does not exist; did you mean tiny_q8_0? E')
    """
    known = {name.lower(): name for name in (ALIAS, *compiled)}
    near = difflib.get_close_matches(model.lower(), known, n=1, cutoff=_LEAST_LIKENESS)
    meant = known[near[0]] if near else hub_hint(model)
    return f"{model} does not exist; {f'did you mean {meant}? Else ' if meant else ''}{FORMS}"
