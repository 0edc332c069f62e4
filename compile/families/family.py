"""The description of a model family: its names, the source of its numbers, and its layers.

Everything that a family does not define is Llama's. Knows names and numbers, neither file formats nor kernels.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from math import prod
from typing import Any, ClassVar, Literal

from msgspec import structs
from radixlm.runtime.artifact.model_config import LayerConfig, ModelConfig

from ..layers.decoder import Decoder
from ..layers.feed_forward import DenseAndExpertsFeedForward, DenseFeedForward, ExpertsFeedForward
from ..layers.part_names import MTP_ROLES, PartNames
from ..ops.layers import ExpertLinear, Linear, Norm, bias_of
from ..weights.view import View
from .settings import Settings

Format = Literal["huggingface", "gguf"]
Views = tuple[View, ...]
_LAYER = re.compile(r"(?:model\.layers|blk)\.(\d+)\.")


class Family:
    """One family; a subclass sets what differs from Llama and defines `config`.

    Attributes:
        title: common name of these models.
        huggingface: names of its classes (`architectures` of config.json), with their `model_type`.
        gguf: llama.cpp's names of its architectures.
        gguf_of_others: llama.cpp's names that these models share with another family, which reads the files.
        defaults: values of keys that config.json lacks, if the class's differ from Llama's.
        names, gguf_names: names of parts by role, if they differ from `part_names.py`.
        nested: model types of its language models inside multimodal models of a class of another family.
        ignored: patterns (`fnmatch`) of a checkpoint's tensors that the language model does not need.
        has_extra_layers: true if files may have layers after the last, which draft further tokens. The first of them is
            the model's MTP head if all its tensors are stored; others are left out.
        mtp_names: parts of an MTP head's names in a checkpoint, if they differ from those after `model.layers.N.`.
        renamed: patterns (`re`) in names of a checkpoint, and their replacements, one after the other.
        transposed: patterns of a checkpoint's stacks whose rows are inputs; `.weight` is appended to their names.
        flat: patterns of a checkpoint's matrices that are read as one vector.
        neighbouring_pairs: formats in which rows of queries and keys are stored so that neighbours rotate.
        gains_minus_one: formats that store gains of norms (except `plain_gains`) minus one; some tools that convert
            checkpoints add it.
    """

    title: ClassVar[str]
    huggingface: ClassVar[Mapping[str, str]]
    gguf: ClassVar[tuple[str, ...]] = ()
    gguf_of_others: ClassVar[tuple[str, ...]] = ()
    defaults: ClassVar[Mapping[str, Any]] = {}
    names: ClassVar[Mapping[str, str]] = {}
    gguf_names: ClassVar[Mapping[str, str]] = {}
    nested: ClassVar[tuple[str, ...]] = ()
    ignored: ClassVar[tuple[str, ...]] = ()
    has_extra_layers: ClassVar[bool] = False
    mtp_names: ClassVar[Mapping[str, str]] = {}
    renamed: ClassVar[Mapping[str, str]] = {}
    transposed: ClassVar[tuple[str, ...]] = ()
    flat: ClassVar[tuple[str, ...]] = ()
    neighbouring_pairs: ClassVar[tuple[Format, ...]] = ()
    gains_minus_one: ClassVar[tuple[Format, ...]] = ()
    plain_gains: ClassVar[tuple[str, ...]] = ()

    def layer(self, c: Settings, index: int) -> LayerConfig:
        """Return layer `index`, from the settings of a source."""
        return LayerConfig(mixer=c.attention(), ffn=c.dense())

    def config(self, c: Settings) -> ModelConfig:
        """Return the model, from the settings of a source; their keys are config.json's, whatever the source."""
        return c.model(self.layer, mtp=self.mtp(c))

    def mtp(self, c: Settings) -> LayerConfig | None:
        """Return the layer of the MTP head; None if the source has none.

        A sequence's first token has no previous token; no other token sees its row.
        """
        index = c.num_layers
        if not self.has_extra_layers or not self._has_head(c, index):
            return None
        layer = self.mtp_layer(c, index)
        return structs.replace(layer, mixer=structs.replace(layer.mixer, skips_first=True))

    def mtp_layer(self, c: Settings, index: int) -> LayerConfig:
        """Return the layer of the MTP head, from the settings of the model's layer `index`."""
        return self.layer(c, index)

    def _has_head(self, c: Settings, index: int) -> bool:
        """Return whether a source stores all tensors that an MTP head needs."""
        names = PartNames(self.names, self.gguf_names)
        wanted = [names.layer(index, role) for role in ("attention_norm", *MTP_ROLES)]
        in_gguf, of_hub = names.gguf_of, (self._mtp_name(name, index) for name in wanted)
        return c.stored.issuperset((in_gguf[name] for name in wanted) if c.format == "gguf" else of_hub)

    def _mtp_name(self, name: str, index: int) -> str:
        """Return a checkpoint's name of a tensor of the MTP head."""
        before = f"model.layers.{index}."
        if not self.mtp_names or not name.startswith(before):
            return name
        rest = name.removeprefix(before)
        return self.mtp_names.get(rest) or self.mtp_names[""] + rest

    def decoder(self, config: ModelConfig) -> Decoder:
        """Return the model's parts, and how they are joined."""
        return Decoder(config, PartNames(self.names, self.gguf_names))

    def views(
        self, decoder: Decoder, format_: Format, stored: Container[str], *, whole_gains: bool = False
    ) -> dict[str, Views]:
        """Return the stored form of each tensor of the model, by name, in a source with the names `stored`.

        With `whole_gains`, no gains are stored minus one.
        """
        forms = self.forms(decoder, format_)
        names = [name for part in decoder.parts() for name in part.tensors]
        views = {name: _most_stored([form[name] for form in forms if name in form], stored) for name in names}
        if format_ in self.neighbouring_pairs:
            for name, pairs in (each for layer in decoder.all_layers for each in layer.self_attn.pairs()):
                if name in views:
                    views[name] = tuple(replace(view, pairs=pairs) for view in views[name])
        if format_ in self.gains_minus_one and not whole_gains:
            for name in _gains(decoder):
                if not name.endswith(self.plain_gains or ("\n",)):
                    views[name] = tuple(replace(view, plus=1.0) for view in views[name])
        return views

    def forms(self, decoder: Decoder, format_: Format) -> list[dict[str, Views]]:
        """Return the forms in which sources store the model's tensors, by name: each tensor's usual form first.

        `fused` is the form of the family's own checkpoints. Experts may be stored one by one, stacked, or stacked with
        gates and `up` joined.
        """
        plain = {name: self._plain_view(decoder, name, format_) for part in decoder.parts() for name in part.tensors}
        fused = {name: views for name, views in self.fused(decoder, format_).items() if name in plain}
        if format_ == "gguf":
            return [plain | fused]
        forms = [fused, dict(_one_by_one(decoder)), plain, dict(_stacked_gate_up(decoder))]
        return [{name: self._of_head(decoder, views) for name, views in form.items()} for form in forms]

    def _of_head(self, decoder: Decoder, views: Views) -> Views:
        """Return the views of a checkpoint's tensors, with an MTP head's own names."""
        index = decoder.config.num_hidden_layers
        return tuple(replace(view, name=self._mtp_name(view.name, index)) for view in views)

    def checkpoint_rows(self, decoder: Decoder) -> dict[str, int]:
        """Return the possible names of tensors in a checkpoint of the hub, with their numbers of rows."""
        shapes = {name: shape for part in decoder.parts() for name, shape in part.tensors.items()}
        rows: dict[str, int] = {}
        for form in self.forms(decoder, "huggingface"):
            for name, views in form.items():
                size = prod(shapes[name][:-1]) if len(shapes[name]) > 1 else shapes[name][0]
                for view in views:
                    stop = size // len(views) if view.stop is None else view.stop
                    rows[view.name] = max(rows.get(view.name, 0), stop)
        return rows

    def ignores(self, name: str, config: ModelConfig) -> bool:
        """Return whether the language model does not need a stored tensor."""
        layer = _LAYER.match(name)
        is_extra = self.has_extra_layers and layer is not None and int(layer[1]) >= self.num_stored_layers(config)
        return is_extra or any(fnmatch(name, pattern) for pattern in self.ignored)

    def usual_name(self, name: str) -> str:
        """Return a tensor's name in a checkpoint as the model's parts have it."""
        for pattern, new in self.renamed.items():
            name = re.sub(pattern, new, name, count=1)
        return name

    def num_stored_layers(self, config: ModelConfig) -> int:
        """Return the number of layers by a file's count."""
        return config.num_hidden_layers

    def fused(self, decoder: Decoder, format_: Format) -> Mapping[str, Views]:
        """Split tensors of a file that the model has as several: return, by the model's names, their rows in the file.

        A view is a range of rows of a stored tensor. Tensors that are stored alone and unchanged are left out.
        """
        return {}

    def _plain_view(self, decoder: Decoder, name: str, format_: Format) -> Views:
        """Return the view of a tensor that is stored whole, under its own name."""
        return (View(decoder.names.gguf_of[name] if format_ == "gguf" else name),)


def parts_of(stored: str, linears: Iterable[Linear]) -> Iterator[tuple[str, Views]]:
    """Yield views of matrices and biases that are concatenated in the tensor `stored` and in its bias."""
    start = 0
    for linear in linears:
        stop = start + linear.num_outputs
        yield linear.name, (View(stored, start, stop),)
        yield linear.bias_name, (View(bias_of(stored), start, stop),)
        start = stop


def fused_gate_up(decoder: Decoder) -> Iterator[tuple[str, Views]]:
    """Yield views of joined gates, as llama.cpp's converter leaves them: `ffn_up` has gates' rows before its own."""
    for index, layer in enumerate(decoder.layers):
        assert isinstance(layer.mlp, DenseFeedForward)
        yield from parts_of(f"blk.{index}.ffn_up.weight", layer.mlp.inputs)


def fused_expert_gate_up(gate_up: str, down: str, mlp: object) -> Mapping[str, Views]:
    """Return views of experts that are stored as two stacks.

    One stack has each expert's rows of gates, then those of `up`; the other is `down`.
    """
    assert isinstance(mlp, ExpertsFeedForward) and mlp.spec.gate is not None
    num_experts, size = mlp.spec.up.num_experts, mlp.spec.up.num_outputs
    starts = range(0, 2 * size * num_experts, 2 * size)
    return {
        mlp.spec.gate.name: tuple(View(gate_up, start, start + size) for start in starts),
        mlp.spec.up.name: tuple(View(gate_up, start + size, start + 2 * size) for start in starts),
        mlp.spec.down.name: (View(down),),
    }


def _most_stored(forms: Sequence[Views], stored: Container[str]) -> Views:
    """Return the form with the largest stored share; the first one on ties."""
    return max(forms, key=lambda views: sum(view.name in stored for view in views) / len(views))


def _one_by_one(decoder: Decoder) -> Iterator[tuple[str, Views]]:
    """Yield views of experts whose matrices are stored one by one, `experts.3.up_proj.weight`."""
    for part in decoder.parts():
        if isinstance(part, ExpertLinear):
            for name in part.tensors:
                before, after = name.split(".experts.")
                yield name, tuple(View(f"{before}.experts.{i}.{after}") for i in range(part.num_experts))


def _stacked_gate_up(decoder: Decoder) -> Iterator[tuple[str, Views]]:
    """Yield views of each layer's experts as two stacks, `experts.gate_up_proj.weight` and that of `down`."""
    for layer in decoder.all_layers:
        mlp = layer.mlp.experts if isinstance(layer.mlp, DenseAndExpertsFeedForward) else layer.mlp
        if isinstance(mlp, ExpertsFeedForward) and mlp.spec.gate is not None:
            stem = mlp.spec.gate.name.partition(".experts.")[0]
            yield from fused_expert_gate_up(f"{stem}.experts.gate_up_proj.weight", mlp.spec.down.name, mlp).items()


def _gains(decoder: Decoder) -> Iterator[str]:
    """Yield the names of all gains of norms."""
    yield from (part.name for part in decoder.parts() if isinstance(part, Norm) and part.has_gain)
