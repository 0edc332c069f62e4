"""Open models from a GGUF file, a Hugging Face directory, the hub, or by the alias `smollm2`.

with open_source("smollm2") as source:
    weight = source.read("model.layers.0.self_attn.q_proj.weight")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from radixlm.runtime import artifact
from radixlm.runtime.artifact.compiled_models import missing_model
from radixlm.runtime.artifact.model_names import HubName, is_hub
from radixlm.runtime.errors import SourceNotFound

from . import default_model, hub
from .gguf import GGUFSource
from .huggingface import HuggingFaceSource
from .source import Source, TensorInfo

__all__ = ["GGUFSource", "HuggingFaceSource", "Source", "TensorInfo", "download", "downloads", "open_source"]


def download(model: str, *, progress: Callable[[int, int], None] | None = None) -> Path:
    """Return the path of a downloaded model; its files are fetched unless they are in the cache.

    Raises:
        SourceNotFound: the model is unavailable, or is a path of the user's own.
        CorruptSource: a fetched file is damaged.
    """
    if model == default_model.ALIAS:
        return default_model.download(progress=progress)
    if is_hub(model):
        return hub.download(model, progress=progress)
    raise SourceNotFound(f"{model} is not downloaded by name; give hf:ORG/NAME, or the alias {default_model.ALIAS}")


def downloads() -> Iterator[tuple[str, Path]]:
    """Yield downloaded models: names, and their files or folders."""
    alias = artifact.cache_dir() / default_model.FILE_NAME
    if alias.is_file():
        yield default_model.ALIAS, alias
    yield from hub.repositories()


def open_source(
    source: str | Path, *, cache_dir: Path | None = None, progress: Callable[[int, int], None] | None = None
) -> Source:
    """Open a `.gguf` file, a Hugging Face directory, a name that begins with `hf:`, or the alias `smollm2`.

    A file or directory that is called `smollm2` is given as `./smollm2`.

    Args:
        cache_dir: folder of downloads (default: `$XDG_CACHE_HOME/radixlm` for the alias, the hub's own cache for
            `hf:`).
        progress: called from any thread with the downloaded bytes and the total, 0 if unknown.

    Raises:
        SourceError: one of its subclasses says why the source cannot be opened.
    """
    if source == default_model.ALIAS:
        return GGUFSource(default_model.download(cache_dir, progress=progress), name=default_model.ALIAS)
    if isinstance(source, str) and source.startswith(hub.PREFIX):
        found = hub.download(source, cache_dir=cache_dir, progress=progress)
        opens = GGUFSource if found.is_file() else HuggingFaceSource
        return opens(found, name=HubName.parse(source).short)
    path = Path(source)
    if path.is_dir():
        return HuggingFaceSource(path)
    if path.is_file():
        return GGUFSource(path)
    raise SourceNotFound(missing_model(str(source), []))
