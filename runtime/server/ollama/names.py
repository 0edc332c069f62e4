"""Names of models in Ollama's format: `NAME:TAG`, in which a missing tag means `latest`.

Knows names, not models.
"""

from __future__ import annotations

_LATEST = ":latest"


def tagged(name: str) -> str:
    """Return a name with its tag.

    >>> tagged("smollm2"), tagged("qwen3:4b"), tagged("hf:Qwen/Qwen3-0.6B-GGUF")
    ('smollm2:latest', 'qwen3:4b', 'hf:Qwen/Qwen3-0.6B-GGUF:latest')
    """
    return name if ":" in name.rpartition("/")[2] else name + _LATEST


def spellings(name: str) -> tuple[str, ...]:
    """Return all names of the same model, the given one first.

    >>> spellings("smollm2"), spellings("smollm2:latest"), spellings("qwen3:4b")
    (('smollm2', 'smollm2:latest'), ('smollm2:latest', 'smollm2'), ('qwen3:4b',))
    """
    if name.endswith(_LATEST):
        return name, name.removesuffix(_LATEST)
    return tuple(dict.fromkeys((name, tagged(name))))
