"""Print tables, and format the rows and numbers that several commands share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from radixlm.runtime.artifact.manifest import Manifest, SamplingDefaults
    from radixlm.runtime.artifact.model_config import AnyAttention, ModelConfig


def print_rows(rows: Iterable[tuple[str, str]]) -> None:
    """Print names in one column and values in another."""
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        click.echo(f"{name:<{width}}  {value}".rstrip())


def layer_rows(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yield the rows that describe a model's layers."""
    yield "layers", f"{model.num_hidden_layers} of {model.hidden_size}, feed-forward {model.intermediate_size}"
    yield "heads", "; ".join(dict.fromkeys(map(_heads, model.attentions)))
    windows = Counter(each.window for each in model.attentions if each.window is not None)
    if windows:
        yield "windows", "; ".join(f"{count} layers see {window:,} tokens" for window, count in windows.items())
    if model.state_bytes:
        count = sum(layer.recurrent is not None for layer in model.layers)
        yield "states", f"{count} recurrent layers, {size(model.state_bytes)} per sequence"
    ffns = [layer.experts for layer in model.layers if layer.experts is not None]
    experts = Counter((each.num_experts, each.num_active) for each in ffns)
    if experts:
        yield (
            "experts",
            "; ".join(f"{n} of {of} per token, in {count} layers" for (of, n), count in experts.items()),
        )
    shared = sum(each.shared_kv is not None for each in model.attentions)
    if shared:
        yield "shared", f"{shared} layers use the KV of other layers"
    if model.layer_inputs is not None:
        yield "layer inputs", f"{model.layer_inputs.size} numbers per token and layer"
    if model.mtp is not None:
        yield "MTP head", "drafts tokens (--speculate mtp)"
    yield "vocabulary", f"{model.vocab_size:,}"


def conversations(has_template: bool, *, writes: bool = True) -> str:
    """Describe whether a model supports chats; `writes` says whether it writes any text."""
    if not writes:
        return "no: it writes no text"
    return "yes" if has_template else "no: it has no chat template, and supports completions only"


def sampling(defaults: SamplingDefaults) -> str:
    """Describe the model's default sampling parameters.

    >>> from radixlm.runtime.artifact.manifest import USUAL_SAMPLING
    >>> sampling(USUAL_SAMPLING)
    'temperature 0.8, top-p 0.95, top-k 40, min-p 0.05, repetition-penalty 1, unless a request sets them'
    """
    values = (f"{name.replace('_', '-')} {getattr(defaults, name):g}" for name in defaults.__struct_fields__)
    return f"{', '.join(values)}, unless a request sets them"


def _heads(mixer: AnyAttention) -> str:
    """Return the text of a layer's attention heads: their number and size, and those of KV."""
    from radixlm.runtime.artifact.model_config import LatentAttention

    if isinstance(mixer, LatentAttention):
        return f"{mixer.num_heads} of {mixer.query_size}, one latent row of {mixer.head_dim} for all"
    return f"{mixer.num_heads} of {mixer.head_dim}, {mixer.num_kv_heads} for keys and values"


def size(num_bytes: int) -> str:
    """Return a number of bytes in a suitable unit.

    >>> size(98_362_432), size(512)
    ('98.4 MB', '512 B')
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:,.1f} {unit}"
    return f"{num_bytes} B"


def token_bytes(of_artifact: int, of_source: int | None) -> str:
    """Describe how many bytes of weights decoding one token reads.

    >>> token_bytes(393_000_000, 392_000_000)
    "393.0 MB of the artifact, 1.00 times the file's 392.0 MB"
    """
    read = f"{size(of_artifact)} of the artifact"
    return f"{read}, {of_artifact / of_source:.2f} times the file's {size(of_source)}" if of_source else read


_POOLED = {"last": "the last token's hidden state", "mean": "the mean of hidden states", "cls": "the first token's"}


def vector_rows(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield the rows that describe an embedding model or reranker; none for other models."""
    if (info := manifest.embedding) is not None:
        normalized = ", normalized" if info.normalize else ""
        prompts = f"; prompts: {', '.join(info.prompts)}" if info.prompts else ""
        yield "embeddings", f"{manifest.model.num_outputs} dimensions: {_POOLED[info.pooling]}{normalized}{prompts}"
    if (ranking := manifest.reranking) is not None:
        yield "reranking", f"by the logits of the tokens {ranking.true_id} and {ranking.false_id}"
    if manifest.pairs is not None:
        yield "reranking", "by a head that scores a query and a document together"
