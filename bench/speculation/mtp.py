"""Simulate an MTP head that is right with a given probability, and make models that have one.

Models have random weights in 4 bits, in Qwen3.5-0.8B's shape, which has states, and in a GLM of 0.6 billion
parameters, which has none; both with the number of tokens of the real family. A random head is never right. So each
reply is computed without drafts at first, and then the head's logits are replaced by the reply's next token, for as
many drafts as are to be right: the head is computed all the same. Random replies have frequent tokens only. Real text
has others, so a head that drafts among frequent tokens is right a little less often.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from radixlm.compile import compile_model
from radixlm.runtime import Completion, Engine, SamplingParams
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.model.batch import Batch, Float32Array
from radixlm.runtime.model.model_runner import ModelRunner

from ..hybrid.shape import Qwen35Shape
from ..random_models import write_random_model
from .ours import Figures, Pair

NUM_TOKENS = 200  # of a reply
_SURE = 50.0  # the logit of the head's replaced token; all others are 0
_FREQUENT = 0.95  # share of the tokens of English text and code (LOG, "Drafts among frequent tokens")


@dataclass(frozen=True)
class QwenShape(Qwen35Shape):
    """Qwen3.5-0.8B with its head."""

    name: str = "qwen3.5-0.8b-mtp-248k"

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield names and shapes of the model's tensors, and of its MTP head's.

        The head has one layer like the model's last, and a matrix and norms for its input and output.
        """
        last, hidden = f"model.layers.{self.num_hidden_layers - 1}.", self.hidden_size
        for name, shape in super().tensors():
            yield name, shape
            if name.startswith(last):
                yield name.replace(last, "mtp.layers.0."), shape
        yield "mtp.fc.weight", (hidden, 2 * hidden)
        for name in ("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "norm.weight"):
            yield f"mtp.{name}", (hidden,)


@dataclass(frozen=True)
class GlmShape:
    """A GLM-4.5 of dense layers, with its head."""

    vocab_size: int = 151_552
    name: str = "glm-0.6b-mtp-152k"
    hidden_size: int = 1024
    intermediate_size: int = 4096
    num_hidden_layers: int = 24
    is_qwen2: bool = True  # a last norm of both signs

    def config(self) -> dict[str, object]:
        """Return the contents of config.json."""
        return {
            "architectures": ["Glm4MoeForCausalLM"],
            "model_type": "glm4_moe",
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "max_position_embeddings": 4096,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "first_k_dense_replace": 1 + self.num_hidden_layers,
            "num_nextn_predict_layers": 1,
            "tie_word_embeddings": True,
        }

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield names and shapes, as in a checkpoint."""
        hidden, inner, last = self.hidden_size, self.intermediate_size, f"model.layers.{self.num_hidden_layers}."
        yield "model.embed_tokens.weight", (self.vocab_size, hidden)
        for layer in range(self.num_hidden_layers + 1):
            at = f"model.layers.{layer}."
            for name, rows, columns in (
                ("q", 1024, hidden),
                ("k", 256, hidden),
                ("v", 256, hidden),
                ("o", hidden, 1024),
            ):
                yield f"{at}self_attn.{name}_proj.weight", (rows, columns)
            for name, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
                yield f"{at}mlp.{name}_proj.weight", (rows, columns)
            yield f"{at}input_layernorm.weight", (hidden,)
            yield f"{at}post_attention_layernorm.weight", (hidden,)
        yield "model.norm.weight", (hidden,)
        yield f"{last}eh_proj.weight", (hidden, 2 * hidden)
        for name in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight"):
            yield f"{last}{name}", (hidden,)


@dataclass
class ScriptedHead:
    """The reply that the head is to draft, and how often it does."""

    right: float
    token_ids: Sequence[int] = ()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Replace the logits of heads within the block."""
        chance, draft = random.Random(0), ModelRunner.draft

        def scripted_draft(runner: ModelRunner, batch: Batch, *, is_frequent: bool = False) -> Float32Array:
            logits, arrays = draft(runner, batch, is_frequent=is_frequent), batch.arrays
            right = self.right * (_FREQUENT if is_frequent else 1.0)
            for row, place in enumerate(arrays.logit_rows):
                following = int(arrays.positions[place]) + 1
                if following < len(self.token_ids):
                    is_right = chance.random() < right
                    logits[row, : runner.num_frequent if is_frequent else None] = 0.0
                    logits[row, self.token_ids[following] if is_right else 0] = _SURE
            return logits

        with patch.object(ModelRunner, "draft", scripted_draft):
            yield


def measure_shapes(tokenizer: Path, right: float, rounds: int, folder: Path) -> Iterator[tuple[str, Figures]]:
    """Measure each shape of model; yield its name and its rows: see `measure_shape`.

    Models are written into `folder` with random weights, and the tokenizer of the artifact `tokenizer`.
    """
    for shape in (GlmShape(), QwenShape(vocab_size=248_320)):
        artifact = folder / f"{shape.name}.radixlm"
        if not artifact.exists():
            source = folder / shape.name
            if not source.exists():
                write_random_model(shape, source, (tokenizer / "tokenizer.json").read_text("utf-8"))
            compile_model(source, artifact, quantize="q4")
        yield shape.name, measure_shape(artifact, right, rounds)


def measure_shape(path: Path, right: float, rounds: int) -> Figures:
    """Measure rounds of a model with and without its MTP head, whose drafts are right with probability `right`.

    Returns a row for each round, by a description, after one that is not counted.
    """
    head, artifact = ScriptedHead(right), Artifact.open(path)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    options: dict[str, Any] = {"idle_work": False, "kv_cache_bytes": 256 << 20, "max_num_seqs": 4}
    with (
        Engine(artifact, speculate="off", **options) as plain,
        Engine(artifact, speculate="mtp", **options) as drafting,
        head.in_use(),
    ):
        rows = []
        for number in range(rounds + 1):
            prompt = [(7 * number + 13 * place) % 1000 + 100 for place in range(64)]

            def reply(engine: Engine, prompt: list[int] = prompt) -> list[Completion]:
                found = engine.generate(prompt, params)
                head.token_ids = [*prompt, *found.token_ids]
                return [found]

            rows.append(Pair(plain, drafting).measure(reply, is_drafting_first=False))
    return {f"a head that is right {right:.0%} of the time, simulated": rows[1:]}
