"""What a prompt's last space costs the next turn: four cases, on Llama-2's recorded chats and where they are not."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from radixlm.tokenizer_fix import PreparedPrompt, Tokenizer

LoadTokenizer = Callable[[str], Tokenizer]


@dataclass(frozen=True)
class Case:
    """A row of the table: how the first prompt is prepared, how the reply begins, what the next prompt reuses."""

    suffix: str
    reply: str
    recorded: str  # the first letter of the scenario's name in llama2_29871_scenarios.json
    reuses_reply: bool


CASES = [
    Case("kept", "▁The", "C", reuses_reply=True),
    Case("kept", "The", "B", reuses_reply=False),
    Case("stripped", "▁The", "D", reuses_reply=True),
    Case("stripped", "The", "E", reuses_reply=False),
]


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.suffix}-{case.reply}")
@pytest.mark.parametrize(
    ("name", "turns"),
    [
        ("tiny_spm", ("[INST] Hi [/INST] ", "</s><s>[INST] Hi [/INST] ")),
        ("smollm2", ("User: Hi\nAssistant: ", "<|im_end|>\nUser: Hi\nAssistant: ")),
        ("qwen2", ("User: Hi\nAssistant: ", "<|im_end|>\nUser: Hi\nAssistant: ")),
        ("llama2-legacy", ("<s>[INST] Hi [/INST] ", "</s><s>[INST] Hi [/INST] ")),
        ("llama2-nonlegacy", ("<s>[INST] Hi [/INST] ", "</s><s>[INST] Hi [/INST] ")),
        ("llama3", ("User: Hi\nAssistant: ", "<|end_of_text|>\nUser: Hi\nAssistant: ")),
    ],
)
def test_what_the_next_prompt_reuses(
    load_tokenizer: LoadTokenizer, case: Case, name: str, turns: tuple[str, str]
) -> None:
    tokenizer = load_tokenizer(name)
    prepare = tokenizer.prepare_chat if case.suffix == "stripped" else tokenizer.prepare_completion
    first = prepare(turns[0])
    reply = [piece_id(tokenizer, piece) for piece in (case.reply, "▁capital")]
    said = stream(tokenizer, first, reply)

    second = prepare(turns[0] + said + turns[1])

    held = [*first.ids, *reply]
    suffix_start = len(tokenizer.prepare_chat(turns[0]).ids)
    assert common_prefix(held, second.ids) == (len(held) if case.reuses_reply else suffix_start)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.suffix}-{case.reply}")
def test_what_recorded_llama2_chats_reuse(vectors: Path, load_tokenizer: LoadTokenizer, case: Case) -> None:
    recorded = scenario(vectors, case.recorded)
    tokenizer = load_tokenizer("llama2-legacy")
    if case.suffix == "stripped":  # recorded with a template that has no space there
        first = tokenizer.prepare_chat("<s>" + recorded["prompt1"] + " ")
    else:
        first = tokenizer.prepare_completion("<s>" + recorded["prompt1"])
    assert list(first.ids) == recorded["prompt1_ids"]
    said = stream(tokenizer, first, recorded["generated_ids"])
    assert said == recorded["returned_text"]

    # The template puts a space before a reply in history, whether the generation prompt had one or not.
    head, _, tail = recorded["prompt2"].partition(recorded["returned_text"])
    assert head.endswith("[/INST] ")
    second = tokenizer.prepare_completion("<s>" + head + said + tail)
    assert list(second.ids) == recorded["prompt2_ids"]

    assert common_prefix([*first.ids, *recorded["generated_ids"]], second.ids) == recorded["lcp"]
    assert (recorded["lcp"] == recorded["len_cached"]) == case.reuses_reply


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.suffix}-{case.reply}")
def test_the_recorded_ids_themselves_say_so(vectors: Path, case: Case) -> None:
    recorded = scenario(vectors, case.recorded)
    held = recorded["prompt1_ids"] + recorded["generated_ids"]
    assert common_prefix(held, recorded["prompt2_ids"]) == recorded["lcp"]
    assert (recorded["lcp"] == len(held)) == case.reuses_reply


def test_stripping_makes_the_recorded_chat_ideal(vectors: Path, load_tokenizer: LoadTokenizer) -> None:
    recorded = scenario(vectors, "A")  # the suffix in the prompt, '▁The' generated
    tokenizer = load_tokenizer("llama2-legacy")
    first = tokenizer.prepare_chat("<s>" + recorded["prompt1"])
    second = tokenizer.prepare_chat("<s>" + recorded["prompt2"])
    assert stream(tokenizer, first, recorded["generated_ids"]) == recorded["returned_text"]
    reused = common_prefix([*first.ids, *recorded["generated_ids"]], second.ids)
    assert len(second.ids) - reused == recorded["ideal_prefill"] < recorded["prefill_needed"]


def test_a_chat_loses_a_lone_space_and_nothing_else(tokenizer: Tokenizer) -> None:
    prepared = tokenizer.prepare_chat("Hello: ")
    assert prepared.ids == tuple(tokenizer.encode("Hello:", parse_special=True))
    assert prepared.num_match == len(prepared.ids)
    assert prepared.swallow_leading_space
    for rendered in ("Hello:", "Hello:  ", "Hello:\n", " ", ""):
        prepared = tokenizer.prepare_chat(rendered)
        assert prepared.ids == tuple(tokenizer.encode(rendered, parse_special=True))
        assert not prepared.swallow_leading_space


def test_a_completion_is_fed_as_written_and_matched_without_its_last_space(tokenizer: Tokenizer) -> None:
    ids = tuple(tokenizer.encode("Hello: "))
    for prompt in ("Hello: ", list(ids)):
        prepared = tokenizer.prepare_completion(prompt)
        assert prepared.ids == ids
        assert prepared.num_match == len(ids) - 1
        assert not prepared.swallow_leading_space
    assert tokenizer.prepare_completion("Hello:").num_match == len(ids) - 1
    assert tokenizer.prepare_completion("") == PreparedPrompt((), 0, False, "")


def piece_id(tokenizer: Tokenizer, text: str) -> int:
    """The id of a piece, written with '▁' for the space."""
    spelled = text.replace("▁", " ").encode()
    ids = (one for one in range(tokenizer.vocab_size) if one not in tokenizer.profile.special_ids)
    return next(token_id for token_id in ids if tokenizer.token_bytes(token_id) == spelled)


def stream(tokenizer: Tokenizer, prompt: PreparedPrompt, reply: Sequence[int]) -> str:
    decoder = tokenizer.stream(prompt_ids=prompt.ids, swallow_leading_space=prompt.swallow_leading_space)
    return "".join(map(decoder.push, reply)) + decoder.finish()


def scenario(vectors: Path, letter: str) -> dict[str, Any]:
    scenarios = json.loads((vectors / "llama2_29871_scenarios.json").read_text(encoding="utf-8"))
    return next(one for one in scenarios if one["case"].startswith(letter + ":"))
