"""A text has never fewer tokens than its length says, and none that is much too long is encoded or remembered."""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Callable

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from radixlm.tokenizer_fix import Tokenizer, TooManyTokens
from radixlm.tokenizer_fix.probe import load_tokenizer
from radixlm.tokenizer_fix.text_bound import TextBound
from radixlm.tokenizer_fix.text_encoder import MAX_LONG_TEXTS, Encoder, LongTextTurns

LoadTokenizer = Callable[[str], Tokenizer]
ReadJson = Callable[[str], str]
# What normal forms make shorter, and what tokenizers drop; the longest tokens are runs of spaces.
SHRINKING = st.sampled_from(
    ["\u212a", "\u1100\u1161\u11a8", "\U0001d400", "e\u0301", " " * 300, "\x04", "\ufb01", "字"]
)
bound_of = functools.cache(TextBound.of)
TEXTS = st.lists(SHRINKING | st.text(max_size=8), max_size=30).map("".join)


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(text=TEXTS)
def test_no_text_has_fewer_tokens_than_its_length_says(
    tokenizer: Tokenizer, library: tokenizers.Tokenizer, text: str
) -> None:
    bound = bound_of(library, tokenizer.profile.kind)
    assert bound.fewest_tokens(text) <= len(tokenizer.encode(text, parse_special=True))


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(text=TEXTS)
def test_texts_are_encoded_as_the_library_encodes_them_alone(library: tokenizers.Tokenizer, text: str) -> None:
    expected, encoder = library.encode(text, add_special_tokens=False), Encoder(library, LongTextTurns())
    assert encoder.ids(text) == expected.ids
    assert encoder.ids_and_ends(text) == (expected.ids, [end for _, end in expected.offsets])


@pytest.mark.parametrize(
    ("change", "bound"),
    [
        ({}, (128, 1, 3)),
        ({"normalizer": None}, (128, 1, 1)),
        ({"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}}, (128, 16, 1)),
        ({"normalizer": {"type": "Replace", "pattern": {"Regex": "a+"}, "content": ""}}, (128, 16, 1)),
        ({"added": {"rstrip": True}}, (128, 16, 3)),
    ],
)
def test_what_drops_text_has_a_looser_bound(
    read_json: ReadJson, change: dict[str, dict[str, object]], bound: tuple[int, int, int]
) -> None:
    document = json.loads(read_json("qwen2"))
    document["added_tokens"][0] |= change.pop("added", {})
    found = TextBound.of(load_tokenizer(json.dumps(document | change)), "byte_level_bpe")
    assert (found.bytes_per_token, found.drops, found.shrinks) == bound


def test_a_run_of_unknown_characters_is_one_token_where_bytes_have_none(read_json: ReadJson) -> None:
    document = json.loads(read_json("tiny_spm"))
    assert TextBound.of(load_tokenizer(json.dumps(document)), "sentencepiece").drops == 1
    document["model"]["vocab"]["no byte"] = document["model"]["vocab"].pop("<0x41>")
    assert TextBound.of(load_tokenizer(json.dumps(document)), "sentencepiece").drops == 16


class Counted:
    """Writes down how long the texts are that the library encodes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lengths: list[int] = []
        real = Encoder.encode

        def encode(encoder: Encoder, text: str, max_tokens: int | None = None) -> tokenizers.Encoding:
            self.lengths.append(len(text))
            return real(encoder, text, max_tokens)

        monkeypatch.setattr(Encoder, "encode", encode)


def test_a_text_that_is_much_too_long_is_refused_before_it_is_encoded(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tokenizer.prepare_chat("Hi", seam_of=b"n", max_tokens=1000).ids  # it has asked how words are joined
    encoder = Counted(monkeypatch)
    text = "1 b" * 400_000
    for refused in (
        lambda: tokenizer.encode(text, parse_special=True, max_tokens=1000),
        lambda: tokenizer.prepare_chat(text, seam_of=b"n", max_tokens=1000),
        lambda: tokenizer.prepare_completion(text, max_tokens=1000),
    ):
        with pytest.raises(TooManyTokens) as caught:
            refused()
        assert 1000 < caught.value.num_tokens <= len(text)
    assert not encoder.lengths


def test_a_text_that_is_too_long_is_refused_for_its_beginning(
    read_json: ReadJson, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer(read_json("smollm2"))
    assert tokenizer.prepare_chat("Hi", seam_of=b"n").ids  # it has asked how words are joined
    encoder = Counted(monkeypatch)
    text = "and so it goes on " * 2000
    with pytest.raises(TooManyTokens) as caught:
        tokenizer.prepare_chat(text, seam_of=b"n", max_tokens=1000)
    assert 1000 < caught.value.num_tokens <= len(tokenizer.encode(text))
    assert sum(encoder.lengths) - len(text) <= 8000  # `encode` has encoded it, too
    assert tokenizer.prepare_chat(text[:20_000], seam_of=b"n", max_tokens=10_000).num_known == 0
    with pytest.raises(TooManyTokens) as caught:  # what is known counts
        tokenizer.prepare_chat(text[:20_000] + text, seam_of=b"n", max_tokens=6000)
    assert 6000 < caught.value.num_tokens <= len(tokenizer.encode(text[:20_000] + text))


def test_as_many_tokens_as_are_allowed_are_not_too_many(tokenizer: Tokenizer) -> None:
    text = "Hello, the 1st of these is " * 20
    num_tokens = len(tokenizer.encode(text, parse_special=True))
    for seam_of in (None, b"n"):
        assert len(tokenizer.prepare_completion(text, seam_of=seam_of, max_tokens=num_tokens).ids) == num_tokens
        with pytest.raises(TooManyTokens):
            tokenizer.prepare_completion(text + " more", seam_of=seam_of, max_tokens=num_tokens)
    with pytest.raises(TooManyTokens):
        tokenizer.prepare_completion([0] * 11, max_tokens=10)


def test_other_threads_go_on_while_a_long_text_is_encoded(load_tokenizer: LoadTokenizer) -> None:
    """With the interpreter held nothing is counted; each count lets it go, so that no time is measured."""
    tokenizer = load_tokenizer("smollm2")
    counted, done = 0, threading.Event()
    started = threading.Event()

    def encode() -> None:
        started.set()
        tokenizer.encode("hello 12345 é " * 30_000, parse_special=True)
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    started.wait()
    while not done.is_set():
        time.sleep(0.001)
        counted += 1
    thread.join()
    assert counted > 5  # of hundreds; 1 or 2 where encoding holds the interpreter


def test_few_long_texts_are_encoded_at_once_and_short_ones_wait_for_none() -> None:
    turns = LongTextTurns()
    long = "a" * 100_000
    for _ in range(MAX_LONG_TEXTS):
        turns.for_text(long).__enter__()
    with turns.for_text("short"):
        pass
    assert not _enters_within(turns, long, 0.2)
    turns.for_text(long).__exit__(None, None, None)
    assert _enters_within(turns, long, 60.0)


def _enters_within(turns: LongTextTurns, text: str, seconds: float) -> bool:
    entered = threading.Event()

    def enter() -> None:
        with turns.for_text(text):
            entered.set()

    threading.Thread(target=enter, daemon=True).start()
    return entered.wait(seconds)
