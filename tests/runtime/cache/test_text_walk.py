"""Random talks against a list of everything ever computed: what is reused spells the prompt, and nothing was longer.

The laws: the used ids spell the prompt's bytes between the same special tokens, but for declared aliases; what clients
wrote is encoded as the prompt has it; no other use of what was computed reaches further; no character is cut, no
special token passed over; and `exact` knows nothing of all this.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from radixlm.runtime.cache import text_walk
from radixlm.runtime.cache.page_pool import PagePool
from radixlm.runtime.cache.prefix_cache import PrefixCache
from radixlm.runtime.cache.prefix_match import PrefixMatch
from radixlm.runtime.cache.reply_alias import ReplyAlias
from radixlm.runtime.cache.sequence import Sequence
from radixlm.runtime.cache.text_walk import TextWalk
from radixlm.tokenizer_fix import SpelledPrompt

from .. import toy_tokenizer as toy
from ..fake_pages import FakePages
from ..reuse_oracle import reuses

TEXTS = st.text(alphabet="ab é", max_size=30)
REPLIES = st.text(alphabet="ab é", min_size=1, max_size=30)
LENGTHS = st.lists(st.integers(1, 7), min_size=1, max_size=5)
CONTEXT_LENGTH = 10_000
NAMESPACE = b"n"


@dataclass
class Computed:
    """A sequence: the ids that have KV, and which of them a model made."""

    ids: tuple[int, ...]
    generated: list[bool]


@dataclass(frozen=True)
class Template:
    """Trims replies, and puts white space of its own around them."""

    lead: str
    after: str

    def render(self, reply: str) -> str:
        return self.lead + reply.strip(" ") + self.after


@dataclass
class Talk:
    """Messages of one client: user, model, user, ..."""

    messages: list[str] = field(default_factory=list)

    def prompt(self, template: Template | None) -> list[int]:
        """As its template renders it; without one, with a reply's own white space."""
        ids = [toy.BOS]
        for turn, text in enumerate(self.messages):
            if turn % 2:
                rendered = text if template is None else template.render(text)
                ids += [toy.MODEL, *toy.encode(rendered), toy.END]
            else:
                ids += [toy.USER, *toy.encode(text), toy.END]
        return [*ids, toy.MODEL]


class Talks(RuleBasedStateMachine):
    """Clients of one cache."""

    @initialize(template=st.none() | st.builds(Template, *[st.sampled_from(["", " "])] * 2))
    def start(self, template: Template | None) -> None:
        self.cache = PrefixCache(PagePool(20_000))
        self.pages = FakePages()
        self.template = template
        self.computed: list[Computed] = []
        self.made: dict[tuple[int, ...], bool] = {}  # whether a model made the last token of a run that was computed
        self.aliases: dict[tuple[int, ...], list[ReplyAlias]] = {}
        self.talks: list[Talk] = []
        self.raw_texts = [""]

    # What clients do.

    @rule(text=TEXTS, reply=REPLIES, lengths=LENGTHS, ends=st.booleans())
    def begin(self, text: str, reply: str, lengths: list[int], ends: bool) -> None:
        self.talks.append(Talk())
        self.say(self.talks[-1], text, reply, lengths, ends)

    @precondition(lambda self: self.talks)
    @rule(data=st.data(), text=TEXTS, reply=REPLIES, lengths=LENGTHS, ends=st.booleans())
    def go_on(self, data: st.DataObject, text: str, reply: str, lengths: list[int], ends: bool) -> None:
        self.say(self.pick(data), text, reply, lengths, ends)

    @precondition(lambda self: self.talks)
    @rule(data=st.data(), reply=REPLIES, lengths=LENGTHS, ends=st.booleans())
    def ask_again(self, data: st.DataObject, reply: str, lengths: list[int], ends: bool) -> None:
        talk = self.pick(data)
        talk.messages.pop()
        self.answer(talk, reply, lengths, ends)

    @precondition(lambda self: self.talks)
    @rule(data=st.data(), stem=TEXTS, replies=st.lists(REPLIES, min_size=9, max_size=14, unique=True), lengths=LENGTHS)
    def ask_many_times(self, data: st.DataObject, stem: str, replies: list[str], lengths: list[int]) -> None:
        talk = self.pick(data)
        talk.messages.pop()
        for reply in replies:
            other = Talk(list(talk.messages))
            self.answer(other, stem + reply, lengths, True)
        talk.messages = other.messages

    @precondition(lambda self: self.talks)
    @rule(data=st.data(), text=TEXTS, how=st.integers(0, 6), reply=REPLIES, lengths=LENGTHS)
    def go_on_from_another_history(
        self, data: st.DataObject, text: str, how: int, reply: str, lengths: list[int]
    ) -> None:
        talk = Talk(list(self.pick(data).messages))
        messages = talk.messages
        turn = data.draw(st.integers(0, len(messages) - 1), label="turn")
        at = data.draw(st.integers(0, len(messages[turn])), label="at")
        match how:
            case 0:  # a second client goes on with the first one's talk
                pass
            case 1:  # edited
                messages[turn] = messages[turn][:at] + data.draw(TEXTS) + messages[turn][at + 1 :]
            case 2:  # truncated
                messages[turn] = messages[turn][:at]
            case 3:  # quoted
                text = data.draw(st.sampled_from(messages)) + text
            case 4:  # re-ordered
                messages[turn], messages[-1] = messages[-1], messages[turn]
            case 5:  # gone on with
                messages[turn] = messages[turn].strip(" ") + data.draw(TEXTS)
            case _:  # without the first messages
                del messages[: turn // 2 * 2]
        self.talks.append(talk)
        self.say(talk, text, reply, lengths, True)

    @rule(data=st.data(), text=TEXTS, reply=REPLIES, lengths=LENGTHS)
    def complete(self, data: st.DataObject, text: str, reply: str, lengths: list[int]) -> None:
        """A raw completion: nothing stands between what the client wrote and what the model makes of it."""
        before = data.draw(st.sampled_from(self.raw_texts), label="before")
        raw = before[: data.draw(st.integers(0, len(before)), label="keep")] + text or "a"
        self.ask([toy.BOS, *toy.encode(raw)], toy.split(reply.encode(), lengths))
        self.raw_texts = [*self.raw_texts[-5:], raw + reply]

    @precondition(lambda self: self.talks)
    @rule(data=st.data(), text=TEXTS, reply=REPLIES, lengths=LENGTHS)
    def complete_a_reply(self, data: st.DataObject, text: str, reply: str, lengths: list[int]) -> None:
        """A raw completion of a talk whose last reply a template has begun to render."""
        talk = self.pick(data)
        begun = Talk(talk.messages[:-1]).prompt(self.template)
        raw = talk.messages[-1] if self.template is None else self.template.render(talk.messages[-1])
        self.ask([*begun, *toy.encode(raw + text)], toy.split(reply.encode(), lengths))

    @rule(data=st.data(), text=REPLIES, reply=REPLIES, lengths=LENGTHS)
    def complete_ids(self, data: st.DataObject, text: str, reply: str, lengths: list[int]) -> None:
        """A client may send any ids: what is wrong with them stays its own."""
        before = data.draw(st.sampled_from(self.raw_texts), label="before")
        ids = [toy.BOS, *toy.split((before + text).encode(), lengths)]
        self.ask(ids + data.draw(st.lists(st.sampled_from([toy.END, toy.MODEL]), max_size=1)), toy.encode(reply))

    @precondition(lambda self: self.talks)
    @rule(
        data=st.data(),
        text=TEXTS,
        lengths=LENGTHS,
        stray=st.sampled_from([b"\xc3", b"\xa9", b"\xff\0\0\0\1", b"\xff\0\0\0\2"]),
    )
    def be_told_half_a_character(self, data: st.DataObject, text: str, lengths: list[int], stray: bytes) -> None:
        """The reply ends within a character, or in bytes that are none; its text cannot say so."""
        talk = self.pick(data)
        reply = toy.split(text.encode() + stray, lengths)
        talk.messages.append("b")
        self.ask(talk.prompt(self.template), [*reply, toy.END])
        talk.messages.append(text if data.draw(st.booleans()) else toy.decode(reply))

    # How it is answered.

    def pick(self, data: st.DataObject) -> Talk:
        return self.talks[data.draw(st.integers(0, len(self.talks) - 1), label="talk")]

    def say(self, talk: Talk, text: str, reply: str, lengths: list[int], ends: bool) -> None:
        talk.messages.append(text)
        self.answer(talk, reply, lengths, ends)

    def answer(self, talk: Talk, reply: str, lengths: list[int], ends: bool) -> None:
        reply_ids = toy.split(reply.encode(), lengths)
        used = self.ask(talk.prompt(self.template), [*reply_ids, *[toy.END] * ends])
        if self.template is not None:
            alias = ReplyAlias.of(reply_ids, reply, self.template.render(reply))
            if alias is not None:
                self.cache.aliases.record(NAMESPACE, used, alias)
                self.aliases.setdefault(used, []).append(alias)
        talk.messages.append(reply)

    def ask(self, prompt_ids: list[int], reply: list[int]) -> tuple[int, ...]:
        """Match, hold the match to the laws, compute, generate; the prompt ids that were used."""
        prompt = toy.spelled(prompt_ids)
        self.check_exact(prompt_ids)
        match = self.cache.match(prompt_ids, namespace=NAMESPACE, spelled=lambda: prompt)
        self.check_laws(prompt, match)
        sequence = self.cache.open(match, context_length=CONTEXT_LENGTH)
        assert sequence.num_computed == match.num_tokens < len(match.prompt_ids)
        self.pages.check(NAMESPACE, list(match.prompt_ids[: match.num_tokens]), list(sequence.page_ids))
        for token_id in reply:  # the last one never gets KV
            self.compute(sequence)
            sequence.append([token_id])
        self.note(tuple(sequence.token_ids[: sequence.num_computed]), len(match.prompt_ids))
        self.cache.close(sequence)
        self.cache.check()
        return match.prompt_ids

    def compute(self, sequence: Sequence) -> None:
        with self.cache.begin() as transaction:
            reservation = transaction.reserve(sequence, sequence.num_uncomputed)
            self.pages.copy(transaction.copies)
            self.pages.forward(reservation)
            transaction.commit()

    def note(self, ids: tuple[int, ...], num_prompt: int) -> None:
        for length in range(1, len(ids) + 1):
            self.made[ids[:length]] = self.made.get(ids[:length], False) or length > num_prompt
        self.computed.append(Computed(ids, [length > num_prompt for length in range(1, len(ids) + 1)]))

    # The laws.

    def check_exact(self, prompt_ids: list[int]) -> None:
        match = self.cache.match(prompt_ids, namespace=NAMESPACE)
        assert match.prompt_ids == tuple(prompt_ids)
        ours = max((_num_common(computed.ids, prompt_ids) for computed in self.computed), default=0)
        assert match.num_tokens == min(ours, len(prompt_ids) - 1)
        assert set(match.tokens_by_kind) <= {"exact"}

    def check_laws(self, prompt: SpelledPrompt, match: PrefixMatch) -> None:
        used, num_reused = match.prompt_ids, match.num_tokens
        assert sum(match.tokens_by_kind.values()) == num_reused <= len(used) - 1
        if set(match.tokens_by_kind) <= {"exact", "seam"}:
            assert used[:num_reused] == prompt.ids[:num_reused]
        if "alias" not in match.tokens_by_kind:
            assert toy.spell_all(used) == prompt.text
        reused = used[:num_reused]
        flags = [self.made[reused[:length]] for length in range(1, num_reused + 1)]
        allowed = {(found.num_tokens, found.rest) for found in reuses(prompt, reused, flags, self.aliases)}
        assert self.is_allowed(prompt, match, allowed), "ids that the prompt does not have, and no reply either"
        best = max((self.longest(prompt, computed) for computed in self.computed), default=0)
        reach = len(prompt.text) - len(toy.spell_all(used[num_reused:]))
        assert reach >= best or num_reused == len(used) - 1, f"{reach} bytes are reused, {best} could be"

    def is_allowed(self, prompt: SpelledPrompt, match: PrefixMatch, allowed: set[tuple[int, tuple[int, ...]]]) -> bool:
        """Whether the ids are one of the ways, perhaps with the last token, which is computed for its logits."""
        used, num_reused = match.prompt_ids, match.num_tokens
        if (num_reused, used[num_reused:]) in allowed:
            return True
        if num_reused < len(used) - 1 or used not in self.made:
            return False
        flags = [self.made[used[:length]] for length in range(1, len(used) + 1)]
        return any(
            found.num_tokens == len(used) and not found.rest for found in reuses(prompt, used, flags, self.aliases)
        )

    def longest(self, prompt: SpelledPrompt, computed: Computed) -> int:
        flags = [self.made[computed.ids[:length]] for length in range(1, len(computed.ids) + 1)]
        return max(found.reach for found in reuses(prompt, computed.ids, flags, self.aliases))


def _num_common(ours: tuple[int, ...], theirs: list[int]) -> int:
    pairs = zip(ours, theirs, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))


TestTalks = Talks.TestCase
TestTalks.settings = settings(
    max_examples=40, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize("most", [1, 2, 256])
def test_a_search_that_is_cut_short_finds_no_less_than_the_prompts_own_ids(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(text_walk, "MAX_FUTILE_RUNS", most)
    cache, own = PrefixCache(PagePool(100)), toy.encode("a b" * 60)
    piece = max(toy.ID_OF[piece] for piece in toy.PIECES if b"a ba ba b".startswith(piece))
    assert piece > own[0], "siblings of higher ids are followed first"
    for prompt, reply in ((own, []), *(([], [piece, *toy.encode("b" * (20 + number))]) for number in range(4))):
        sequence = cache.open(cache.match([toy.BOS, *prompt], namespace=NAMESPACE), context_length=1000)
        sequence.append(reply)
        with cache.begin() as transaction:
            transaction.reserve(sequence, sequence.num_uncomputed)
            transaction.commit()
        cache.close(sequence)
    asked = toy.spelled([toy.BOS, *own, toy.END, toy.USER])
    match = cache.match(asked.ids, namespace=NAMESPACE, spelled=lambda: asked)
    assert match.num_tokens == len(own) + 1


def test_thousands_of_replies_that_spell_the_same_text_are_not_all_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, chance = PrefixCache(PagePool(20_000)), random.Random(1)
    asked = [toy.BOS, *toy.encode("ab"), toy.MODEL]
    for _ in range(1000):
        match = cache.match(asked, namespace=NAMESPACE)
        sequence = cache.open(match, context_length=CONTEXT_LENGTH)
        sequence.append(toy.split(b" " * 300, [chance.randrange(1, 8) for _ in range(100)])[:40])
        with cache.begin() as transaction:
            transaction.reserve(sequence, sequence.num_uncomputed)
            transaction.commit()
        cache.close(sequence)
    followed: list[int] = []
    follow = TextWalk._follow_run

    def noted(walk: TextWalk, visit: Any) -> None:
        follow(walk, visit)
        followed.append(walk._best_reach)

    monkeypatch.setattr(TextWalk, "_follow_run", noted)
    prompt = toy.spelled([*asked, *toy.encode(" " * 300), toy.END, toy.USER])
    match = cache.match(prompt.ids, namespace=NAMESPACE, spelled=lambda: prompt)
    num_better = len(set(followed))
    assert len(followed) <= text_walk.MAX_FUTILE_RUNS * num_better < 4000 and len(followed) < 600
    assert match.tokens_by_kind["text"] > 16
