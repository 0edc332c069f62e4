"""Choose a GGUF file of a repository by its quantization.

Knows names of files alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from radixlm.runtime.artifact.model_names import part_names, whole_stem
from radixlm.runtime.errors import SourceNotFound

USUAL = ("Q4_K_M", "Q8_0")  # default choices, if a repository has several and none is named
_LABEL = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q|TQ)\d\w*|BF16|F?P?16|F32|(?:UD-)?(?:MX|NV)FP4\w*)$", re.IGNORECASE)
_OTHERS = re.compile(r"mmproj|imatrix", re.IGNORECASE)  # projectors and statistics, which are no language models
_MAX_LISTED = 20


def choose_gguf(names: Iterable[str], quantization: str | None, reference: str) -> list[str]:
    """Return the names of the GGUF file of a quantization, or of all its parts.

    Without a quantization: of the first of `USUAL` that the repository has, or of its only model.

    >>> choose_gguf(["a.Q8_0.gguf", "a.Q4_K_M.gguf"], None, "hf:org/a")
    ['a.Q4_K_M.gguf']
    >>> choose_gguf(["big-q8_0-00001-of-00002.gguf", "big-q8_0-00002-of-00002.gguf"], "Q8_0", "hf:org/big")
    ['big-q8_0-00001-of-00002.gguf', 'big-q8_0-00002-of-00002.gguf']

    Raises:
        SourceNotFound: there is none, or several; the error lists them.
    """
    names = list(names)
    models = _models(names)
    if not models:
        raise SourceNotFound(f"{reference} has no .gguf file; give its repository without a quantization")
    wanted = [quantization] if quantization is not None else list(USUAL)
    for label in wanted:
        found = [name for name in models if quantization_of(name).upper() == label.upper()]
        if len(found) == 1:
            return part_names(found[0])
        if len(found) > 1:
            raise SourceNotFound(
                f"{reference} has {len(found)} files in {label}; name one: {_file_references(reference, found)}"
            )
    if quantization is None and len(models) == 1:
        return part_names(models[0])
    said = f"has no file in {quantization}" if quantization is not None else "has several files, none the usual one"
    raise SourceNotFound(f"{reference} {said}; it has {list_quantizations(names)}")


def quantization_of(name: str) -> str:
    """Return the quantization in the name of a file; "" if there is none.

    >>> quantization_of("sub/Model-UD-Q4_K_XL-00001-of-00002.gguf"), quantization_of("model.f16.gguf")
    ('UD-Q4_K_XL', 'f16')
    """
    label = _LABEL.search(whole_stem(name))
    return label[1] if label else ""


def list_quantizations(names: Iterable[str]) -> str:
    """Return the quantizations of a repository's GGUF files as a list for an error message; names if they have none."""
    models = _models(names)
    found = list(dict.fromkeys(quantization_of(name) or name for name in models))
    more = f" and {len(found) - _MAX_LISTED} more" if len(found) > _MAX_LISTED else ""
    return (", ".join(found[:_MAX_LISTED]) or "no .gguf file") + more


def _models(names: Iterable[str]) -> list[str]:
    """Return the GGUF files that are language models; only the first part of a split one."""
    found = (name for name in names if name.lower().endswith(".gguf") and not _OTHERS.search(name))
    return list(dict.fromkeys(part_names(name)[0] for name in sorted(found)))


def _file_references(reference: str, files: list[str]) -> str:
    """Return references that each choose one GGUF file, `hf:org/name/FILE@revision`, joined for an error message."""
    repository, at, revision = reference.partition("@")
    repository = repository.rpartition(":")[0] if repository.count(":") > 1 else repository
    return " or ".join(f"{repository}/{file}{at}{revision}" for file in files[:_MAX_LISTED])
