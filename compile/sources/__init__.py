"""Where models come from: a GGUF file, a Hugging Face directory, the hub, or an alias.

with open_source("smollm2") as source:
    weight = source.read("model.layers.0.self_attn.q_proj.weight")
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from radixlm.runtime.errors import SourceNotFound

from . import default_model, hub
from .gguf import GGUFSource
from .huggingface import HuggingFaceSource
from .source import Source, TensorInfo

__all__ = ["GGUFSource", "HuggingFaceSource", "Source", "TensorInfo", "open_source"]


def open_source(
    source: str | Path, *, cache_dir: Path | None = None, progress: Callable[[int, int], None] | None = None
) -> Source:
    """Open a `.gguf` file, a Hugging Face directory, `hf:ORG/NAME`, or the alias `smollm2`.

    `cache_dir` is where downloads go (default: `$XDG_CACHE_HOME/radixlm` for the alias, the hub's own cache
    for `hf:`). `progress` gets the bytes of a download that are here and those in all, 0 if unknown, from any thread.
    A file or directory that is really called `smollm2` is given as `./smollm2`. Raises
    SourceError's kinds.
    """
    if source == default_model.ALIAS:
        return GGUFSource(default_model.download(cache_dir, progress=progress), name=default_model.ALIAS)
    if isinstance(source, str) and source.startswith(hub.PREFIX):
        name = source.removeprefix(hub.PREFIX).partition("@")[0].rpartition("/")[2]
        return HuggingFaceSource(hub.download(source, cache_dir=cache_dir, progress=progress), name=name)
    path = Path(source)
    if path.is_dir():
        return HuggingFaceSource(path)
    if path.is_file():
        return GGUFSource(path)
    raise SourceNotFound(
        f"{source} does not exist; "
        f"give a .gguf file, a model directory, hf:ORG/NAME, or the alias {default_model.ALIAS}"
    )
