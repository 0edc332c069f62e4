"""llama.cpp's server beside the replays: the same requests, and how many tokens of their prompts it computes.

Its model has the replayed tokenizer and template, and weights of zeros: what is computed does not depend on them. What
it says cannot be prescribed. So each request asks for one token, and the reply that the history has is put behind the
prompt afterwards, as ids, by a request that is not counted. The server's slot then holds what it would hold if that had
been generated. The prompt is the text that the server itself has made of the request.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import gguf
import numpy as np

from ..replay.models import CONTEXT_LENGTH, TalkingArtifact
from ..served import Client, Json, ServedProcess

Asked = tuple[str, Json]
"""The path and the body of a request."""

_WIDTH = 32
_LENGTHS = ("max_tokens", "max_output_tokens")  # of a reply, as the dialects call it
_OPTIONS = ("--parallel", "1", "--ctx-size", str(CONTEXT_LENGTH), "--threads", "1", "--jinja")
_TELLS_PROMPTS = {"LLAMA_SERVER_SLOTS_DEBUG": "1"}


class LlamaCppReplay:
    """`program`, which is `llama-server`, with a model that is written to `scratch`."""

    def __init__(self, program: Path, artifact: TalkingArtifact, scratch: Path) -> None:
        self._model = scratch / "weightless.gguf"
        write_weightless(self._model, artifact)
        self._command = (str(program), "--model", str(self._model), *_OPTIONS)

    def play(self, asked: Sequence[Asked], replies: Sequence[str]) -> int:
        """Tokens computed of all prompts of a loop but the first, on a fresh server with its defaults.

        `replies` are what the model said to each, without the token that ended it.
        """
        computed: list[int] = []
        with ServedProcess(self._command, environment=_TELLS_PROMPTS) as server, closing(Client(server.port)) as client:
            for (path, body), reply in zip(asked, replies, strict=True):
                one_token = {name: 1 for name in _LENGTHS if name in body}
                computed.append(num_computed(client.json("POST", path, {**body, **one_token})))
                [slot] = client.read("/slots")
                held = [id for text in (slot["prompt"], reply) for id in _ids(client, text)]
                client.json("POST", "/completion", {"prompt": held, "n_predict": 0})
        return sum(computed[1:])


def num_computed(answer: Json) -> int:
    """Tokens of the prompt that were not cached, as the usage of any dialect has them.

    >>> num_computed({"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 7}}})
    2
    >>> num_computed({"usage": {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 7}}})
    2
    >>> num_computed({"usage": {"input_tokens": 2, "cache_read_input_tokens": 7}})
    2
    """
    usage = answer["usage"]
    for kind in ("prompt", "input"):
        if details := usage.get(f"{kind}_tokens_details"):
            return int(usage[f"{kind}_tokens"]) - int(details["cached_tokens"])
    return int(usage["input_tokens"])


def write_weightless(path: Path, artifact: TalkingArtifact) -> None:
    """A Qwen2 of one layer of zeros as a GGUF file."""
    spec = json.loads(artifact.tokenizer_json)
    tokens = {id: (text, gguf.TokenType.NORMAL) for text, id in spec["model"]["vocab"].items()}
    for added in spec["added_tokens"]:
        type_ = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        tokens[added["id"]] = (added["content"], type_)
    texts, types = zip(*(tokens[id] for id in range(len(tokens))), strict=True)
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(1)
    writer.add_context_length(CONTEXT_LENGTH)
    writer.add_embedding_length(_WIDTH)
    writer.add_feed_forward_length(_WIDTH)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(texts)
    writer.add_token_types(types)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in spec["model"]["merges"]])
    writer.add_eos_token_id(artifact.manifest.tokenizer.eos_token_ids[0])
    writer.add_chat_template(artifact.chat_template)
    square, row = np.zeros((_WIDTH, _WIDTH), np.float32), np.zeros(_WIDTH, np.float32)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", square)
    for name in ("attn_q", "attn_k", "attn_v"):
        writer.add_tensor(f"blk.0.{name}.bias", row)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", row + 1)
    writer.add_tensor("token_embd.weight", np.zeros((len(texts), _WIDTH), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _ids(client: Client, text: str) -> list[int]:
    found: list[int] = client.json("POST", "/tokenize", {"content": text, "parse_special": True})["tokens"]
    return found
