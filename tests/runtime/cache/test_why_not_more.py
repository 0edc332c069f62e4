"""Where a match ended, in ids and in words: the same text in other ids is called so, and special tokens are no text."""

from __future__ import annotations

import pytest
from radixlm.runtime.cache.page_pool import PagePool
from radixlm.runtime.cache.prefix_cache import PrefixCache
from radixlm.runtime.cache.why_not_more import MAX_IDS_SHOWN, MatchEnd, TextChange, WhyKind, WhyNotMore

SPECIAL = 9
PIECES = [b"", b"H", b"an", b"Han", b"zi", b"anzi", b"Hanzi", b"\xe6\xb1", b"\x89", b"</s>", b"Ha", b"</s"]


def spelled(kind: WhyKind, cached: tuple[int, ...], wanted: tuple[int, ...], is_generated: bool = True) -> WhyNotMore:
    return WhyNotMore(kind, 40, cached, wanted, is_generated).spelled(PIECES.__getitem__, {SPECIAL})


@pytest.mark.parametrize(
    ("cached", "wanted", "kind"),
    [
        ((3, 4), (1, 5), "retokenized"),  # Han|zi, H|anzi
        ((6,), (1, 2, 4), "retokenized"),
        ((3, 4, 9), (6, 1), "retokenized"),  # what comes after may differ
        ((3, 4), (10, 2), "differs"),  # Han|zi, Ha|an
        ((3,), (1,), "differs"),  # as long as it is known, but no token ends where the other one does
        ((1,), (2,), "differs"),
        ((0, 6), (1, 5), "retokenized"),  # an id that spells nothing
        ((0,), (0,), "differs"),
        ((9,), (11, 1), "differs"),  # what looks like a special token is none
        ((3, 9, 4), (6,), "differs"),
        ((), (1,), "differs"),
    ],
)
def test_a_difference_that_is_none_in_the_text_is_called_so(
    cached: tuple[int, ...], wanted: tuple[int, ...], kind: WhyKind
) -> None:
    assert spelled("differs", cached, wanted).kind == kind
    as_client = "not_generated" if kind == "retokenized" else kind
    assert spelled("differs", cached, wanted, is_generated=False).kind == as_client


def test_texts_stand_beside_the_ids_and_half_a_character_is_shown_as_bytes() -> None:
    why = spelled("differs", (3, 7), (7, 8))
    assert (why.cached_text, why.wanted_text) == (r"Han\xe6\xb1", "汉")
    assert str(why) == r"at token 40 the cache has [3, 7] 'Han\\xe6\\xb1', the prompt [7, 8] '汉'"


def test_what_a_client_changed_is_cut_at_the_first_letter_that_differs() -> None:
    match_end = MatchEnd((10, 4), (3, 4, 3), (10, 2, 6))  # Hazi, HanziHan, HaanHanzi
    why = WhyNotMore("differs", 40, (3, 4), (10, 2), match_end=match_end).spelled(PIECES.__getitem__, {SPECIAL})
    assert why.change == TextChange("HaziHa", "nziHan", "anHanzi")
    assert why.withheld().change is None
    same = WhyNotMore("differs", 40, (3, 4), (1, 5), match_end=match_end).spelled(PIECES.__getitem__, {SPECIAL})
    assert (same.kind, same.change) == ("not_generated", None)
    long = TextChange.of(MatchEnd((6,) * 60, (3,) * 60, (4,) * 60), PIECES.__getitem__)
    assert (len(long.before), len(long.was), len(long.now)) == (40, 80, 80)
    assert str(why) == "at token 40 the cache has [3, 4] 'Hanzi', the prompt [10, 2] 'Haan'"
    assert why.before_text == why.withheld().before_text == "Hazi", "the prompt's own text, in whole tokens"


def test_the_text_before_is_the_end_of_the_prompt_in_whole_tokens_whatever_the_cache_has() -> None:
    for kind in ("unseen", "evicted", "differs"):
        why = WhyNotMore(kind, 40, (), (1,), match_end=MatchEnd((3,) * 20, (), (1,)))  # type: ignore[arg-type]
        assert why.before_text is None
        told = why.spelled(PIECES.__getitem__, {SPECIAL})
        assert (told.before_text, told.change) == ("Han" * 13, None), "40 bytes hold 13 of these"
    huge = WhyNotMore("differs", 1, (3,), (1,), match_end=MatchEnd((0,), (3,), (1,)))
    assert huge.spelled(lambda token: b"x" * 50 if token == 0 else b"y", ()).before_text == "x" * 50


@pytest.mark.parametrize("kind", ["differs", "retokenized", "not_generated", "evicted", "unseen", "namespace"])
def test_every_kind_names_position_and_the_prompts_side(kind: WhyKind) -> None:
    line = str(spelled(kind, (3,), (1, 2)))
    assert line.startswith("at token 40 ") and "[1, 2] 'Han'" in line and "\n" not in line


def test_what_is_complete_names_nothing() -> None:
    assert str(spelled("complete", (), ())) == "all that may be reused was"


def test_what_is_off_names_the_policy_and_nothing_of_the_prompt() -> None:
    why = PrefixCache(PagePool(8)).match([1, 2, 3], namespace=None).why_not_more
    assert why == why.spelled(PIECES.__getitem__, {SPECIAL}) == why.withheld() == WhyNotMore("off", 0)
    assert 'match is "off"' in str(why)


def test_no_more_ids_are_shown_than_the_limit_and_none_past_the_end_of_what_is_cached() -> None:
    cache = PrefixCache(PagePool(8))
    sequence = cache.open(cache.match(list(range(44))), context_length=64)
    with cache.begin() as transaction:
        transaction.reserve(sequence, 44)
        transaction.commit()
    cache.close(sequence)
    why = cache.match([*range(20), *[7] * 20]).why_not_more
    assert (why.cached_ids, why.wanted_ids) == (tuple(range(20, 28)), (7,) * MAX_IDS_SHOWN)
    why = cache.match([*range(40), 7, 7]).why_not_more
    assert (why.cached_ids, why.wanted_ids) == ((40, 41, 42, 43), (7, 7))


def test_the_ids_go_on_from_run_to_run() -> None:
    cache = PrefixCache(PagePool(8))
    for prompt in ([*range(14), 100, *range(200, 210)], [*range(16), *range(300, 308)], [*range(20)]):
        sequence = cache.open(cache.match(prompt), context_length=64)
        with cache.begin() as transaction:
            transaction.reserve(sequence, sequence.num_uncomputed)
            transaction.commit()
        cache.close(sequence)
    assert cache.match([*range(13), 7, 7]).why_not_more.cached_ids == (13, 14, 15, 16, 17, 18, 19)
    assert cache.match([*range(14), 100, 200, 7, 7]).why_not_more.cached_ids == tuple(range(201, 209))


def test_it_says_whether_the_model_generated_what_the_cache_goes_on_with() -> None:
    cache = PrefixCache(PagePool(8))
    sequence = cache.open(cache.match([1, 2, 3]), context_length=64)
    for token in (4, 5, 6):
        with cache.begin() as transaction:
            transaction.reserve(sequence, sequence.num_uncomputed)
            transaction.commit()
        sequence.append([token])
    cache.close(sequence)
    assert cache.match([1, 2, 7, 8]).why_not_more == WhyNotMore("differs", 2, (3, 4, 5), (7, 8), is_generated=False)
    assert cache.match([1, 2, 3, 7, 8]).why_not_more == WhyNotMore("differs", 3, (4, 5), (7, 8), is_generated=True)
