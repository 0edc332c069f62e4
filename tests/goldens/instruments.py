"""Make what tests/instruments holds lm-evaluation-harness's scores of SmolLM2 to: what transformers says.

    python instruments.py SmolLM2-135M-Instruct.Q4_1.gguf

Run by `make goldens`; needs torch, transformers and gguf. Weights are the file's, dequantized, in float32. Writes to
tests/instruments/tasks
    passages.jsonl   the texts of `smollm2_passages.txt`
    replies.jsonl    prompts of `smollm2.npz`'s chats, and the first 16 tokens of the greedy replies to them; those
                     where a step's best logit is less than `CLOSE_CALL` above the second are left out
    scores.json      the loglikelihood of each choice of facts.jsonl behind its question, and of each passage behind the
                     token that begins a text, in nats
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader
from smollm2 import TOKENIZER, load, read_passages
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

TASKS = Path(__file__).resolve().parent.parent / "instruments" / "tasks"
BEGIN = 1  # the token that lm-evaluation-harness puts before a text
LENGTH = 16
CLOSE_CALL = 0.5  # logits: 8-bit inputs move them by 0.3 (root mean square)


def main(path: str) -> None:
    tokenizer = Tokenizer.from_str(gzip.decompress(TOKENIZER.read_bytes()).decode())
    model = load(GGUFReader(path))
    passages = read_passages()
    lines("passages", [{"text": text} for text in passages])
    facts = [json.loads(line) for line in (TASKS / "facts.jsonl").read_text(encoding="utf-8").splitlines()]
    scores = {
        "facts": [
            [choice_score(model, tokenizer, fact["question"], each) for each in fact["choices"]] for fact in facts
        ],
        "passages": [score(model, [BEGIN], tokenizer.encode(text).ids) for text in passages],
    }
    (TASKS / "scores.json").write_text(json.dumps(scores, indent=1) + "\n", encoding="utf-8")
    lines("replies", list(replies(tokenizer)))


def lines(name: str, values: list[dict[str, object]]) -> None:
    text = "".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values)
    (TASKS / f"{name}.jsonl").write_text(text, encoding="utf-8")


def choice_score(model: LlamaForCausalLM, tokenizer: Tokenizer, question: str, choice: str) -> float:
    """As the harness cuts it: the ids behind as many as the question alone has."""
    before, whole = tokenizer.encode(question).ids, tokenizer.encode(f"{question} {choice}").ids
    return score(model, whole[: len(before)], whole[len(before) :])


@torch.inference_mode()
def score(model: LlamaForCausalLM, before: list[int], ids: list[int]) -> float:
    logits = model(torch.tensor([before + ids])).logits[0, len(before) - 1 : -1]
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    return float(logprobs[torch.arange(len(ids)), torch.tensor(ids)].sum())


def replies(tokenizer: Tokenizer) -> Iterator[dict[str, str]]:
    """Of the greedy chats in `smollm2.npz`, those whose first tokens are no close call."""
    with np.load(Path(__file__).resolve().parent / "smollm2.npz") as file:
        chats = dict(file)
    for name in sorted(name for name in chats if "_prompt_" in name):
        ids, margins = (chats[name.replace("_prompt_", f"_{kind}_")].tolist() for kind in ("reply", "margin"))
        prompt = tokenizer.decode(chats[name].tolist(), skip_special_tokens=False)
        text = tokenizer.decode(ids[:LENGTH])
        is_sure = min(margins[:LENGTH]) > CLOSE_CALL and "\n" not in text
        if is_sure and tokenizer.encode(prompt).ids == chats[name].tolist():
            yield {"prompt": prompt, "reply": text}


if __name__ == "__main__":
    main(sys.argv[1])
