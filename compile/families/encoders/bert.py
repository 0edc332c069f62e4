"""BERT (Devlin et al., 2018) and XLM-RoBERTa (Conneau et al., 2019): encoders with learned positions.

Among them are the embedding models bge, e5 and all-MiniLM, and bge-m3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from radixlm.runtime.artifact.model_config import EncoderInput, LayerConfig, ModelConfig, ScoreHead
from radixlm.runtime.errors import UnsupportedArchitecture

from ...layers.decoder import Decoder
from ...weights.view import View
from ..family import Family, Format, Views
from ..settings import Settings

_CLASSIFIER = "ForSequenceClassification"  # ends names of classes
_USUAL_LABELS = 2  # of classes of transformers that say nothing else
_GGUF_RANK = 4  # the pooling of llama.cpp's rerankers


class Encoder(Family):
    """The base of encoders: names of their embeddings, and the first token type for all tokens.

    They have no output matrix. Classes that have one, or a pooler, have more tensors, which are ignored.
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        "layer_norm_eps": 1e-12,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
        "pad_token_id": 0,
    }
    names = {
        "embedding": "model.embeddings.word_embeddings.weight",
        "token_type": "model.embeddings.token_type_embeddings.weight",
        "positions": "model.embeddings.position_embeddings.weight",
        "embedding_norm": "model.embeddings.LayerNorm.weight",
    }
    gguf_names = {"attention_post_norm": "attn_output_norm.weight", "ffn_post_norm": "layer_output_norm.weight"}
    renamed = {
        r"^(?:bert|roberta|nomic_bert|model)\.": "",  # of classes that have an encoder
        r"^encoder\.layers?\.": "layers.",
        r"^": "model.",
    }
    ignored: ClassVar[tuple[str, ...]] = (
        "model.pooler.*",
        "model.cls.*",
        "model.classifier.*",
        "model.lm_head.*",
        "model.embeddings.position_ids",
    )

    def fused(self, decoder: Decoder, format_: Format) -> Mapping[str, Views]:
        """Return the first row of the table of token types, by the model's name, or the two rows that pairs have."""
        entering = decoder.encoder_input
        if entering is None or entering.token_type is None:
            return {}
        (view,) = self._plain_view(decoder, entering.token_type.name, format_)
        return {entering.token_type.name: (View(view.name, 0, 1 if entering.separator_id is None else 2),)}

    def has_token_type(self, c: Settings) -> bool:
        """Return whether tokens have a type; a GGUF file stores the types if so."""
        return "token_types.weight" in c.stored if c.format == "gguf" else bool(c.number("type_vocab_size"))

    def scores(self, c: Settings) -> bool:
        """Return whether the source is a reranker: a class that gives each text one number.

        Raises:
            UnsupportedArchitecture: it gives each text several.
        """
        if c.format == "gguf":
            if c("pooling_type") != _GGUF_RANK:
                return False
            labels = c("classifier.output_labels")
            num_labels = len(labels) if isinstance(labels, list) else 1  # equal ones come as one
        else:
            if not c.class_name.endswith(_CLASSIFIER):
                return False
            num_labels = len(c("id2label", ())) or c.number("num_labels", _USUAL_LABELS)
        if num_labels != 1:
            raise UnsupportedArchitecture(
                f"{c.label}: it sorts texts into {num_labels} classes; supported are rerankers, which have one"
            )
        return True


class Bert(Encoder):
    """BERT: all matrices have biases, and none has a gate."""

    title = "BERT"
    huggingface = {"BertForSequenceClassification": "bert", "BertForMaskedLM": "bert", "BertModel": "bert"}
    gguf: ClassVar[tuple[str, ...]] = ("bert",)
    names = {
        **Encoder.names,
        "q": "attention.self.query.weight",
        "k": "attention.self.key.weight",
        "v": "attention.self.value.weight",
        "o": "attention.output.dense.weight",
        "attention_post_norm": "attention.output.LayerNorm.weight",
        "up": "intermediate.dense.weight",
        "down": "output.dense.weight",
        "ffn_post_norm": "output.LayerNorm.weight",
    }
    renamed = {**Encoder.renamed, r"\.gamma$": ".weight", r"\.beta$": ".bias"}  # TensorFlow wrote the first ones

    def layer(self, c: Settings, index: int) -> LayerConfig:
        """Return a layer without rotary positions."""
        c.refuse("is_decoder", "add_cross_attention")
        attention = c.attention(rope=None, bias=True, output_bias=True, bidirectional=True)
        function = c.function("gelu").removesuffix("_mul")
        return LayerConfig(mixer=attention, ffn=c.dense(function=function, bias=True), norms="sum")

    def config(self, c: Settings) -> ModelConfig:
        """Return the model; a sequence has as many tokens as there are positions from `first_position` on."""
        kind = c("position_embedding_type", "absolute")
        if kind != "absolute":
            raise UnsupportedArchitecture(f"{c.label}: positions of type {kind!r} are not supported, only absolute")
        first = self.first_position(c)
        return c.model(
            self.layer,
            norm="layer_bias",
            norm_eps=c.number("layer_norm_eps"),
            max_position_embeddings=c.number("max_position_embeddings") - first,
            encoder_input=EncoderInput(positions=True, first_position=first, token_type=self.has_token_type(c)),
            score=self.head(c),
        )

    def head(self, c: Settings) -> ScoreHead | None:
        """Return the head of a reranker: a linear layer after the pooler. None for other models.

        Raises:
            UnsupportedArchitecture: the pooler is missing, or there are several classes.
        """
        if not self.scores(c):
            return None
        if c.format == "gguf" and "cls.weight" not in c.stored:
            raise UnsupportedArchitecture(
                f"{c.label}: the reranker's pooler (cls.weight) is missing, because llama.cpp's converter leaves out "
                "that of BERT; take the checkpoint that it was made of"
            )
        return ScoreHead()

    def first_position(self, c: Settings) -> int:
        """Return the row of a sequence's first token among the positions."""
        return 0


class XLMRoberta(Bert):
    """XLM-RoBERTa and RoBERTa: rows of positions up to that of the padding token belong to no token.

    llama.cpp's converter leaves these rows out, and calls the model `bert`.
    """

    title = "XLM-RoBERTa"
    huggingface = {
        "XLMRobertaForSequenceClassification": "xlm-roberta",
        "XLMRobertaForMaskedLM": "xlm-roberta",
        "XLMRobertaModel": "xlm-roberta",
        "RobertaForSequenceClassification": "roberta",
        "RobertaForMaskedLM": "roberta",
        "RobertaModel": "roberta",
    }
    gguf = ()
    gguf_of_others = ("bert",)
    names = {
        **Bert.names,
        "score_dense": "model.classifier.dense.weight",
        "score": "model.classifier.out_proj.weight",
    }
    defaults = {**Bert.defaults, "layer_norm_eps": 1e-5, "pad_token_id": 1}

    def first_position(self, c: Settings) -> int:
        """Return the row after that of the padding token."""
        return int(c.number("pad_token_id")) + 1
