"""When a reply may end, and what it says has ended it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from radixlm.runtime.chat.token_constraint import MinTokens, TokenConstraint, allowed_of
from radixlm.runtime.engine.completion import Completion
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.errors import InvalidParameter

from ..chat.test_token_constraint import Fixed
from ..fake_constraint import ChainConstraint
from ..fake_model import EOS, VOCAB_SIZE, Bench, alone, text_of

DRAWN = SamplingParams(seed=5, max_tokens=20, ignore_eos=True)
IDS = alone(range(9), DRAWN)


def completed(params: SamplingParams, constraint: TokenConstraint | None = None) -> Completion:
    bench = Bench()
    bench.add("a", range(9), params, constraint=constraint)
    bench.run()
    bench.tokens("a")
    last = bench.outputs["a"][-1]
    assert last.completion is not None and last.delta is not None, last.error
    assert last.delta.stop_reason == last.completion.stop_reason
    return last.completion


def test_a_reply_names_the_stop_string_that_ended_it() -> None:
    stops = ("zzz", text_of(IDS[6:9]), text_of(IDS[8:9] * 2))
    completion = completed(SamplingParams(seed=5, max_tokens=20, ignore_eos=True, stop=stops))
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stops[1])


def test_a_reply_names_the_stop_token_that_ended_it() -> None:
    named = IDS[7]
    completion = completed(SamplingParams(seed=5, max_tokens=20, ignore_eos=True, stop_token_ids=(named,)))
    assert (completion.finish_reason, completion.stop_reason) == ("stop", named)
    assert completion.token_ids[-1] == named


def test_the_models_own_end_is_no_stop_of_the_requests() -> None:
    """As vLLM has it, also where the request names the same token."""
    for named in ((), (EOS,)):
        params = SamplingParams(temperature=0.0, logit_bias={EOS: 100.0}, stop_token_ids=named)
        completion = completed(params)
        assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    params = SamplingParams(temperature=0.0, logit_bias={EOS: 100.0}, stop_token_ids=(EOS,), ignore_eos=True)
    assert completed(params).stop_reason == EOS


def test_a_reply_that_is_cut_or_complete_by_its_grammar_names_no_stop() -> None:
    assert completed(DRAWN).stop_reason is None
    whole = completed(DRAWN, ChainConstraint(VOCAB_SIZE, num_tokens=4))
    assert (whole.finish_reason, whole.stop_reason) == ("stop", None)


def test_no_stop_token_comes_before_min_tokens() -> None:
    named = 7
    params = SamplingParams(
        temperature=0.0, logit_bias={EOS: 100.0, named: 90.0}, stop_token_ids=(named,), min_tokens=5, max_tokens=9
    )
    completion = completed(params)
    assert completion.token_ids[5:] == (EOS,) and not {EOS, named} & set(completion.token_ids[:5])
    assert (completion.finish_reason, completion.usage.completion_tokens) == ("stop", 6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_change_nothing_of_a_reply_that_would_not_have_ended(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=20, logit_bias={EOS: -100.0})
    longer = SamplingParams(temperature=temperature, seed=5, max_tokens=20, logit_bias={EOS: -100.0}, min_tokens=20)
    assert completed(longer).token_ids == completed(params).token_ids


def test_a_token_that_ends_nothing_is_not_held_back() -> None:
    params = SamplingParams(temperature=0.0, logit_bias={EOS: 100.0}, ignore_eos=True, min_tokens=3, max_tokens=3)
    assert completed(params).token_ids == (EOS, EOS, EOS)


def test_a_stop_string_is_not_matched_before_min_tokens() -> None:
    early, late = text_of(IDS[2:4]), text_of(IDS[5:8])
    params = SamplingParams(seed=5, max_tokens=20, ignore_eos=True, stop=(early, late), min_tokens=6)
    completion = completed(params)
    assert (completion.text, completion.stop_reason) == (text_of(IDS[:5]), late)


def test_a_stop_string_that_the_last_of_min_tokens_completes_is_text() -> None:
    stop = text_of(IDS[4:6])
    for min_tokens, text in ((5, text_of(IDS[:4])), (6, text_of(IDS))):
        params = SamplingParams(seed=5, max_tokens=20, ignore_eos=True, stop=(stop,), min_tokens=min_tokens)
        assert completed(params).text == text


def test_a_reply_ends_before_the_first_match_of_an_expression() -> None:
    """What a stop string does at the same place: text, reason, tokens and what of them is counted."""
    stop, other = text_of(IDS[6:9]), re.escape(text_of(IDS[9:10] * 3))
    by_string = completed(SamplingParams(seed=5, max_tokens=20, ignore_eos=True, stop=(stop,)))
    pattern = "".join(f"[{re.escape(letter)}]" for letter in stop)
    params = SamplingParams(seed=5, max_tokens=20, ignore_eos=True, stop_regex=(other, pattern))
    by_pattern = completed(params)
    assert (by_pattern.finish_reason, by_pattern.stop_reason) == ("stop", pattern)
    assert replace(by_pattern, stop_reason=stop, timings=by_string.timings) == by_string


def test_an_expression_is_not_matched_before_min_tokens() -> None:
    params = SamplingParams(seed=5, max_tokens=20, ignore_eos=True, stop_regex=("(?s).",), min_tokens=6)
    assert completed(params).text == text_of(IDS[:6])


def test_what_stands_behind_a_match_is_cached_as_far_as_it_was_computed_and_no_further() -> None:
    """The last token of a reply has no keys and values, and no other request takes it for computed."""
    bench, prompt = Bench(), range(40)
    ids = alone(prompt, DRAWN)
    params = SamplingParams(seed=5, max_tokens=20, ignore_eos=True, stop_regex=(re.escape(text_of(ids[10:12])),))
    bench.add("a", prompt, params)
    bench.run()
    assert bench.tokens("a") == ids[:12]
    found = bench.cache.match([*prompt, *ids, 1])
    assert found.num_tokens == 40 + 11


def test_max_tokens_below_min_tokens_are_refused() -> None:
    with pytest.raises(InvalidParameter, match=r"min_tokens is 6.*5") as refused:
        SamplingParams(max_tokens=5, min_tokens=6)
    assert refused.value.param == "min_tokens"
    assert SamplingParams(max_tokens=6, min_tokens=6).min_tokens == 6


def test_a_reply_that_its_grammar_completes_ends_before_min_tokens() -> None:
    params = SamplingParams(seed=5, max_tokens=20, min_tokens=15)
    assert completed(params, ChainConstraint(VOCAB_SIZE, num_tokens=4)).usage.completion_tokens == 4


def test_where_a_grammar_allows_nothing_but_the_end_it_comes_before_min_tokens() -> None:
    params = SamplingParams(seed=5, max_tokens=20, min_tokens=15)
    completion = completed(params, Fixed({EOS}, VOCAB_SIZE))
    assert (completion.token_ids, completion.finish_reason) == ((EOS,), "stop")


def test_where_a_grammar_allows_more_than_the_end_the_reply_goes_on() -> None:
    params = SamplingParams(seed=5, max_tokens=20, min_tokens=8, logit_bias={EOS: 100.0})
    completion = completed(params, Fixed({3, EOS}, VOCAB_SIZE))
    assert completion.token_ids == (*[3] * 8, EOS)


def test_a_reply_whose_every_token_would_end_it_is_not_held_open() -> None:
    held = MinTokens(3, frozenset(range(VOCAB_SIZE)), VOCAB_SIZE)
    assert held.mask() is None
    held = MinTokens(3, frozenset(range(VOCAB_SIZE - 1)), VOCAB_SIZE)
    mask = held.mask()
    assert mask is not None and allowed_of(mask, VOCAB_SIZE).nonzero()[0].tolist() == [VOCAB_SIZE - 1]
