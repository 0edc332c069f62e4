"""Decode and prompts of a model that keeps states: Qwen3.5-0.8B's shape with random weights in 4 bits.

    python -m bench.hybrid [--rounds 5] [--artifact HYBRID.radixlm]

The share is the bytes that a token reads and writes, weights and state, over what memory gives in the time; bandwidth
is measured around each figure. An artifact that is named is measured, or made if it is not there. Needs the folder of
real inputs for a tokenizer (`RADIXLM_DATA`).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from radixlm.compile import compile_model
from radixlm.compile.codegen.targets import find_target
from radixlm.runtime import Engine, SamplingParams
from radixlm.runtime.artifact import Artifact

from .data import data_dir
from .limits import LimitsMeter
from .options import read_options
from .random_models import write_random_model
from .replay.models import MODELS, read_tokenizer
from .report.page import publish

PROMPT, REPLY = 512, 65
_SPECIAL_IDS = (151_643, 151_645)  # of Qwen2's tokenizer


@dataclass(frozen=True)
class Qwen35Shape:
    """Three layers of the gated delta rule before each of attention."""

    name: str = "qwen3.5-0.8b"
    hidden_size: int = 1024
    intermediate_size: int = 3584
    num_hidden_layers: int = 24
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 256
    num_state_heads: int = 16
    state_dim: int = 128
    vocab_size: int = 248_320
    is_qwen2: bool = False

    def config(self) -> dict[str, object]:
        """What config.json says of it."""
        kinds = ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(self.num_hidden_layers)]
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 4096,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "layer_types": kinds,
            "full_attention_interval": 4,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": self.state_dim,
            "linear_value_head_dim": self.state_dim,
            "linear_num_key_heads": self.num_state_heads,
            "linear_num_value_heads": self.num_state_heads,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000000.0,
                "partial_rotary_factor": 0.25,
                "mrope_section": [11, 11, 10],
            },
        }

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes, as a checkpoint has them."""
        hidden, inner = self.hidden_size, self.intermediate_size
        heads, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        values = self.num_state_heads * self.state_dim
        yield "model.embed_tokens.weight", (self.vocab_size, hidden)
        for layer in range(self.num_hidden_layers):
            at = f"model.layers.{layer}."
            if layer % 4 == 3:
                yield f"{at}self_attn.q_proj.weight", (2 * heads, hidden)
                yield f"{at}self_attn.k_proj.weight", (keys, hidden)
                yield f"{at}self_attn.v_proj.weight", (keys, hidden)
                yield f"{at}self_attn.o_proj.weight", (hidden, heads)
                yield f"{at}self_attn.q_norm.weight", (self.head_dim,)
                yield f"{at}self_attn.k_norm.weight", (self.head_dim,)
            else:
                for name, rows in (("qkv", 3 * values), ("z", values), ("b", self.num_state_heads)):
                    yield f"{at}linear_attn.in_proj_{name}.weight", (rows, hidden)
                yield f"{at}linear_attn.in_proj_a.weight", (self.num_state_heads, hidden)
                yield f"{at}linear_attn.conv1d.weight", (3 * values, 1, 4)
                yield f"{at}linear_attn.dt_bias", (self.num_state_heads,)
                yield f"{at}linear_attn.A_log", (self.num_state_heads,)
                yield f"{at}linear_attn.norm.weight", (self.state_dim,)
                yield f"{at}linear_attn.out_proj.weight", (hidden, values)
            for name, shape in (("gate_proj", (inner, hidden)), ("up_proj", (inner, hidden))):
                yield f"{at}mlp.{name}.weight", shape
            yield f"{at}mlp.down_proj.weight", (hidden, inner)
            yield f"{at}input_layernorm.weight", (hidden,)
            yield f"{at}post_attention_layernorm.weight", (hidden,)
        yield "model.norm.weight", (hidden,)


def main() -> None:
    """Compile, measure and write `results/hybrid.json`."""
    options, shape, model = read_options(__doc__, rounds=5, artifact=Path), Qwen35Shape(), MODELS["qwen2"]
    if options.artifact is not None and options.artifact.exists():
        publish("hybrid", measured(Artifact.open(options.artifact), options.rounds))
        return
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / shape.name
        tokenizer_json = read_tokenizer(model, data_dir())
        write_random_model(shape, source, tokenizer_json, chat_template=model.template, special_ids=_SPECIAL_IDS)
        artifact = Artifact.open(
            compile_model(source, options.artifact or Path(scratch) / "hybrid.radixlm", quantize="q4").path
        )
        publish("hybrid", measured(artifact, options.rounds))


def measured(artifact: Artifact, num_rounds: int) -> dict[str, object]:
    """Medians of the rounds, after one that is not counted."""
    meter, manifest = LimitsMeter(find_target("native")), artifact.manifest
    state_bytes, weights = manifest.model.state_bytes, manifest.quantization.token_bytes
    assert weights is not None, "the compiler counts what a token reads"
    decodes, prefills, shares = list[float](), list[float](), list[float]()
    with Engine(artifact, idle_work=False, match="off") as engine:
        for number in range(num_rounds + 1):
            prompt = [(7 * number + 13 * place) % 1000 for place in range(PROMPT)]
            prefill_s = _seconds(engine, prompt, 1)
            seconds, limits = meter.around(lambda: _seconds(engine, prompt, REPLY))  # noqa: B023
            each_s = (seconds - prefill_s) / (REPLY - 1)
            if number:
                prefills.append(PROMPT / prefill_s)
                decodes.append(1 / each_s)
                shares.append((weights + 2 * state_bytes) / each_s / 1e9 / limits.read_gb_per_s)
    return {
        "model": Qwen35Shape().name,
        "decode": median(decodes),
        "prefill": median(prefills),
        "share": median(shares),
        "weights_bytes": weights,
        "state_bytes": state_bytes,
        "num_rounds": num_rounds,
    }


def _seconds(engine: Engine, prompt: list[int], num_tokens: int) -> float:
    begun = time.perf_counter()
    engine.generate(prompt, SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True))
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
