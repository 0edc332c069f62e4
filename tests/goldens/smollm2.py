"""Make `smollm2.npz`: what transformers computes for SmolLM2's dequantized GGUF, and llama.cpp beside it.

    python smollm2.py SmolLM2-135M-Instruct.Q4_1.gguf

Run by `make goldens` (ten minutes, most of them llama.cpp's JSON); needs torch, transformers, gguf and
xllamacpp, which no test does. The file holds
    passage_0 ..               token ids of `smollm2_passages.txt`, fed as they are
    hidden_0 ..                float16 [len, 576], what enters the output matrix: logits = hidden @ embedding.T.
                               So 1,152 bytes give all 49,152 logits of a position; the embedding is in the
                               GGUF that the test compiles. transformers' own output is not rounded so, but
                               KL against it differs by less than 1e-5 nats
    log_probs_0 ..             float32 [len - 1], of each next token: tells whether the embedding is the right one
    llama_cpp_kl_0 ..          float32 [len], KL(transformers || llama.cpp) in nats, over the whole vocabulary
    llama_cpp_agrees_0 ..      bool [len], whether both choose the same next token
    chat_C_prompt_T, _reply_T  greedy chats: all ids that turn T of chat C feeds, and what it answers
    chat_C_margin_T            float32, by how much the chosen logit beats the second
"""

from __future__ import annotations

import gzip
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import xllamacpp
from gguf import GGUFReader, dequantize
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).resolve().parent
TOKENIZER = HERE.parent / "data" / "tokenizers" / "smollm2.json.gz"
END_OF_TURN = "<|im_end|>"
SYSTEM = "You are a helpful assistant."
CHATS = (
    ("What is the capital of France?", "And of Italy?", "Which of the two is older?"),
    ("Write one sentence about the sea.", "Now one about the mountains.", "Join both with the word 'while'."),
    ("Name three fruits.", "Which of them is yellow?", "Thank you!"),
)
LONGEST_REPLY = 48


def main(path: str) -> None:
    tokenizer = Tokenizer.from_str(gzip.decompress(TOKENIZER.read_bytes()).decode())
    reader = GGUFReader(path)
    model = load(reader)
    arrays: dict[str, np.ndarray] = {}
    passages = [tokenizer.encode(text).ids for text in read_passages()]
    llama_cpp = LlamaCpp(path, vocab_size=model.config.vocab_size)
    for i, ids in enumerate(passages):
        hidden = final_hidden(model, ids)
        reference = log_softmax(hidden.astype(np.float32) @ model.lm_head.weight.detach().numpy().T)
        arrays[f"passage_{i}"] = np.array(ids, np.int32)
        arrays[f"hidden_{i}"] = hidden
        arrays[f"log_probs_{i}"] = np.take_along_axis(reference[:-1], np.array(ids[1:])[:, None], 1)[:, 0]
        kl, agrees = zip(*compare(reference, llama_cpp.log_probs(ids)), strict=True)
        arrays[f"llama_cpp_kl_{i}"] = np.array(kl, np.float32)
        arrays[f"llama_cpp_agrees_{i}"] = np.array(agrees)
        print(f"passage {i}: {len(ids)} tokens, llama.cpp: KL {np.mean(kl):.5f}, agrees {np.mean(agrees):.4f}")
    for i, questions in enumerate(CHATS):
        arrays |= chat(model, tokenizer, questions, prefix=f"chat_{i}_")
    np.savez_compressed(HERE / "smollm2.npz", **arrays)
    print(f"{(HERE / 'smollm2.npz').stat().st_size:,} bytes")


def read_passages() -> list[str]:
    text = (HERE / "smollm2_passages.txt").read_text(encoding="utf-8")
    return [passage.removesuffix("\n") for passage in text.split("=====\n")]


def load(reader: GGUFReader) -> LlamaForCausalLM:
    """The model in float32, with Q and K rows brought back from llama.cpp's order."""

    def field(name: str) -> object:
        return reader.fields[f"llama.{name}"].contents()

    config = LlamaConfig(
        vocab_size=field("vocab_size"),
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=field("attention.head_count"),
        num_key_value_heads=field("attention.head_count_kv"),
        max_position_embeddings=field("context_length"),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("rope.freq_base")},
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).float().eval()
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    state = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        kind = tensor.name.split(".")[-2]
        if kind in heads:  # the converter made pairs (0, 1), (2, 3).. of each head's halves
            rows, columns = values.shape
            pairs = values.reshape(heads[kind], rows // heads[kind] // 2, 2, columns)
            values = pairs.swapaxes(1, 2).reshape(rows, columns)
        state[hugging_face_name(tensor.name)] = torch.from_numpy(values.copy())
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected, (missing, unexpected)
    return model


def hugging_face_name(name: str) -> str:
    outside = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    inside = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        **{f"attn_{kind}": f"self_attn.{kind}_proj" for kind in "qkv"},
        "attn_output": "self_attn.o_proj",
        **{f"ffn_{kind}": f"mlp.{kind}_proj" for kind in ("gate", "up", "down")},
    }
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{inside[parts[2]]}.weight"
    return f"{outside[parts[0]]}.weight"


@torch.inference_mode()
def final_hidden(model: LlamaForCausalLM, ids: list[int]) -> np.ndarray:
    """Float16 `[len(ids), hidden]`; the goldens are the logits of these rounded numbers."""
    return model.model(torch.tensor([ids]), use_cache=False).last_hidden_state[0].numpy().astype(np.float16)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


class LlamaCpp:
    """llama.cpp's distributions, one position after the other through its prompt cache; default settings."""

    def __init__(self, path: str, vocab_size: int) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = path
        params.n_ctx, params.n_parallel = 2048, 1
        self.vocab_size = vocab_size
        self.server = xllamacpp.Server(params)

    def log_probs(self, ids: list[int]) -> Iterator[np.ndarray]:
        for length in range(1, len(ids) + 1):
            answer = self.server.handle_completions(
                {
                    "prompt": ids[:length],
                    "n_predict": 1,
                    "n_probs": self.vocab_size,
                    "cache_prompt": True,
                    # a sampled token that is no whole character comes without probabilities: choose one that
                    # is; they are from before the bias
                    "logit_bias": [[260, 1000.0]],
                }
            )
            row = np.full(self.vocab_size, -np.inf)
            for entry in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
                row[entry["id"]] = entry["logprob"]
            yield row


def compare(reference: np.ndarray, others: Iterator[np.ndarray]) -> Iterator[tuple[float, bool]]:
    for ours, theirs in zip(reference, others, strict=True):
        assert np.isfinite(theirs).all()
        theirs = log_softmax(theirs)
        yield float((np.exp(ours) * (ours - theirs)).sum()), bool(ours.argmax() == theirs.argmax())


def chat(
    model: LlamaForCausalLM, tokenizer: Tokenizer, questions: tuple[str, ...], prefix: str
) -> dict[str, np.ndarray]:
    arrays = {}
    history = tokenizer.encode(f"<|im_start|>system\n{SYSTEM}{END_OF_TURN}\n").ids
    for turn, question in enumerate(questions):
        asked = f"<|im_start|>user\n{question}{END_OF_TURN}\n<|im_start|>assistant\n"
        history += tokenizer.encode(asked).ids
        reply, margins = greedy(model, history, end=tokenizer.token_to_id(END_OF_TURN))
        print(f"{question} -> {tokenizer.decode(reply)!r}, smallest margin {min(margins):.3f}")
        arrays[f"{prefix}prompt_{turn}"] = np.array(history, np.int32)
        arrays[f"{prefix}reply_{turn}"] = np.array(reply, np.int32)
        arrays[f"{prefix}margin_{turn}"] = np.array(margins, np.float32)
        history += reply + tokenizer.encode("\n" if reply[-1] == 2 else END_OF_TURN + "\n").ids
    return arrays


@torch.inference_mode()
def greedy(model: LlamaForCausalLM, prompt: list[int], end: int) -> tuple[list[int], list[float]]:
    reply: list[int] = []
    margins: list[float] = []
    feed, past = prompt, None
    while len(reply) < LONGEST_REPLY and end not in reply:
        output = model(torch.tensor([feed]), past_key_values=past, use_cache=True)
        (best, second), (token, _) = (values.tolist() for values in output.logits[0, -1].topk(2))
        reply.append(token)
        margins.append(best - second)
        feed, past = [token], output.past_key_values
    return reply, margins


if __name__ == "__main__":
    main(sys.argv[1])
