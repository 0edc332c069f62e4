"""Grammars of clients: what follows one is always of its language, and what is too much work is refused in time."""

from __future__ import annotations

import copy
import gzip
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import jsonschema
import pytest
from radixlm.runtime.chat import grammar_trial, grammar_trial_process
from radixlm.runtime.chat import grammars as grammars_module
from radixlm.runtime.chat.grammar import MAX_GRAMMAR_LENGTH, Grammar
from radixlm.runtime.chat.grammar_trial import GrammarTrial, OutOfTime
from radixlm.runtime.chat.grammar_trial_process import TokenBytes
from radixlm.runtime.chat.grammar_vocabulary import GrammarVocabulary
from radixlm.runtime.chat.grammars import MAX_REFUSED, MAX_WAITING, CompiledGrammar, Grammars
from radixlm.runtime.chat.token_constraint import allowed_of
from radixlm.runtime.errors import ConstraintFailed, EngineClosed, EngineError, GrammarsOverloaded, InvalidGrammar
from radixlm.tokenizer_fix import Tokenizer

from ..grammar_walk import allowed_ids, say

TOKENIZERS = Path(__file__).resolve().parents[2] / "data" / "tokenizers"
EOS = {"smollm2": (2,), "qwen2": (151645, 151643)}

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "né"]}, "minItems": 1, "maxItems": 3},
        "at": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/place"}]},
    },
    "required": ["name", "age", "tags", "at"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "y": {"type": "boolean"}, "z": {"const": 3}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
SCHEMAS = [
    PERSON,
    {"type": "array", "items": {"type": "integer", "multipleOf": 3}, "minItems": 2, "maxItems": 4},
    {"type": "string", "pattern": "^[A-Z]{2}-\\d{1,4}$"},
    {"type": "object", "properties": {"d": {"type": "string", "format": "date"}}, "required": ["d"]},
    {"enum": ["one", 2, None, {"three": [3]}]},
    {"type": "object", "additionalProperties": {"type": "integer"}, "required": ["k"]},
]


class Bench:
    """A real tokenizer and its grammars."""

    def __init__(self, name: str, **options: float) -> None:
        self.eos = EOS[name]
        text = gzip.decompress((TOKENIZERS / f"{name}.json.gz").read_bytes()).decode()
        self.tokenizer = Tokenizer(text)
        self.vocabulary = GrammarVocabulary(
            self.tokenizer, vocab_size=self.tokenizer.vocab_size, eos_token_ids=self.eos
        )
        self.id_of = {token: token_id for token_id, token in enumerate(self.vocabulary.tokens)}
        self.grammars = self.open(**options)

    def open(self, **options: float) -> Grammars:
        """Patient ones unless told otherwise: what is found out is not to depend on how busy the machine is."""
        options = {"answer_limit_s": 600.0, **options}
        return Grammars(lambda: copy.copy(self.vocabulary), self.eos, **options)  # type: ignore[arg-type]

    def said(self, grammar: Grammar, seed: int) -> str | None:
        constraint = self.grammars.compile(grammar).start()
        return say(constraint, self.tokenizer, self.eos, random.Random(seed), max_tokens=1500)

    def follows(self, grammar: Grammar, text: str) -> bool:
        """Whether this could be said and end there, each time by the longest token that may come."""
        constraint, rest = self.grammars.compile(grammar).start(), text.encode()
        while rest and not constraint.is_finished:
            allowed = allowed_of(constraint.mask(), self.tokenizer.vocab_size)
            found = [self.id_of[rest[:n]] for n in range(min(len(rest), 40), 0, -1) if rest[:n] in self.id_of]
            token = next((token for token in found if allowed[token]), None)
            if token is None:
                return False
            constraint.accept(token)
            rest = rest[len(self.tokenizer.token_bytes(token)) :]
        if rest:
            return False
        return constraint.is_finished or bool(allowed_of(constraint.mask(), self.tokenizer.vocab_size)[self.eos[0]])


@pytest.fixture(scope="module", params=["smollm2", "qwen2"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = Bench(request.param)
    yield bench
    bench.grammars.close()


@pytest.fixture(scope="module")
def small() -> Iterator[Bench]:
    bench = Bench("smollm2")
    yield bench
    bench.grammars.close()


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: str(sorted(schema)))
def test_whatever_is_said_is_valid_by_its_schema(bench: Bench, schema: dict[str, object]) -> None:
    said = [bench.said(Grammar.json_schema(schema), seed) for seed in range(6)]
    texts = [text for text in said if text is not None]
    for text in texts:
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
    assert len(texts) >= 3 and len(set(texts)) > 1


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        ({"properties": {"a": {"properties": {"b": {}}}}}, 2),
        ({"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"properties": {"b": {}}, "required": ["b"]}}}, 1),
        ({"anyOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}, 2),
        ({"properties": {"properties": {"type": "string"}}}, 1),
        ({"properties": {"a": {"const": {"properties": {"b": {}}}}}}, 1),
        ({"properties": {"a": {}}, "additionalProperties": {"type": "string"}}, 0),
        ({"properties": {"a": {}}, "required": ["b"]}, 0),
        ({"properties": {"a": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, 0),
        ({"required": ["c"], "anyOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}, 0),
        ({"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}, 0),
        ({"$ref": "#/$defs/a", "properties": {"b": {}}, "$defs": {"a": {"properties": {"a": {}}}}}, 0),
        ({"type": "object", "properties": {}}, 0),
        ({"properties": {"if": {"enum": ["not", "allOf"]}, "allOf": {"default": "not"}}}, 1),
        ({"properties": {"a": {}}, "required": [["a"]]}, 0),
        ({"properties": {"a": {}}, "enum": [{"a": 1, "b": 2}]}, 0),
        ({"$ref": "#/$defs/a", "additionalProperties": True, "$defs": {"a": {"properties": {"a": {}}}}}, 0),
        ({"items": {"properties": {"a": {}}}, "anyOf": [{"items": {"properties": {"b": {}}}}]}, 0),
        ({"properties": {"a": {"properties": {"x": {}}}}, "patternProperties": {"^a": {"required": ["y"]}}}, 0),
        ({"properties": {"a": {"$ref": "#/components/a"}}, "components": {"a": {"properties": {"b": {}}}}}, 0),
        ({"properties": {"a": {}}, "dependentRequired": {"a": ["b"]}}, 0),
        ({"oneOf": [{"properties": {"a": {}}}, {"properties": {"a": {}, "b": {}}}]}, 0),
        ({"properties": {str(number): {"properties": {"a": {}}} for number in range(3500)}}, 0),  # it would be too long
    ],
    ids=lambda given: f"{given!s:.80}",
)
def test_objects_have_the_members_that_a_schema_names(schema: dict[str, object], closed: int) -> None:
    text = Grammar.json_schema(schema).text
    assert text.count('"additionalProperties":false') == closed
    left = json.loads(text.replace(',"additionalProperties":false', ""))
    assert left == schema


def test_a_reply_ends_with_the_members_that_its_schema_names(small: Bench) -> None:
    schema = {"type": "object", "properties": {"age": {"type": "boolean"}}, "required": ["age"]}
    said = [small.said(Grammar.json_schema(schema), seed) for seed in range(20)]
    assert all(text is not None and [*json.loads(text)] == ["age"] for text in said)


def test_any_json_object_is_an_object(bench: Bench) -> None:
    texts = [text for seed in range(8) if (text := bench.said(Grammar.json_object(), seed)) is not None]
    assert texts and all(isinstance(json.loads(text), dict) for text in texts)


def test_a_regular_expression_is_matched_whole(bench: Bench) -> None:
    for pattern in (r"\d{3}-[a-f]+", r"(yes|no)( maybe){0,2}", r"[^\n\"]{1,20}é+", r"ab*c?"):
        texts = [text for seed in range(8) if (text := bench.said(Grammar("regex", pattern), seed)) is not None]
        assert texts and all(re.fullmatch(pattern, text) for text in texts)


def test_digits_are_those_of_ascii(bench: Bench) -> None:
    patterns = (Grammar("regex", r"\d"), Grammar.json_schema({"type": "string", "pattern": r"^\d$"}))
    for grammar, text in zip(patterns, ("{}", '"{}"'), strict=True):
        assert bench.follows(grammar, text.format("7"))
        assert not bench.follows(grammar, text.format("\u0667"))
    assert bench.follows(Grammar("regex", ""), "") and not bench.follows(Grammar("regex", ""), "a")
    assert bench.follows(Grammar("regex", "a/b[/]"), "a/b/")


def test_choices_and_both_kinds_of_grammar_are_followed(bench: Bench) -> None:
    choices = ['a "quoted" one', "two\nlines", "three", "drei 漢字"]
    assert {bench.said(Grammar.choice(choices), seed) for seed in range(30)} == set(choices)
    gbnf, lark = 'root ::= "<" [0-9]+ ">" root | "."', 'start: "<" /[0-9]+/ ">" start | "."'
    for text in (gbnf, lark):
        said = [bench.said(Grammar("grammar", text), seed) for seed in range(8)]
        assert all(re.fullmatch(r"(<[0-9]+>)*\.", text) for text in said if text is not None)
        assert bench.follows(Grammar("grammar", text), "<12><3>.")
        assert not bench.follows(Grammar("grammar", text), "<12><3>")


def test_a_text_with_special_tokens_in_it_is_said_in_plain_ones(bench: Bench) -> None:
    constraint = bench.grammars.compile(Grammar("regex", "(.|\n)*")).start()
    allowed = set(allowed_ids(constraint, bench.tokenizer))
    assert allowed & bench.tokenizer.profile.special_ids == set(bench.eos)  # a reply may end, and nothing else
    name = bench.tokenizer.token_bytes(bench.eos[0]).decode()
    quoted = bench.grammars.compile(Grammar.choice([f"say {name}!"])).start()
    text = say(quoted, bench.tokenizer, bench.eos, random.Random(1))
    assert text == f"say {name}!"


def test_a_forced_text_that_the_tokenizer_would_normalize_is_said_as_it_is(bench: Bench) -> None:
    decomposed = "e\u0301a ﬁ"  # Qwen2's tokenizer composes the first two
    assert bench.said(Grammar.choice([decomposed]), 0) == decomposed


def test_white_space_has_an_end(bench: Bench) -> None:
    constraint = bench.grammars.compile(Grammar.json_object()).start()
    [opening, *_] = bench.tokenizer.encode("{")
    [blank] = bench.tokenizer.encode_inside("\n")
    constraint.accept(opening)
    num_blanks = 0
    while blank in allowed_ids(constraint, bench.tokenizer):
        constraint.accept(blank)
        num_blanks += 1
    assert num_blanks == 24


def test_a_foreign_token_fails_the_reply_and_no_other(small: Bench) -> None:
    compiled = small.grammars.compile(Grammar("regex", "a+"))
    [a], [b] = small.tokenizer.encode("a"), small.tokenizer.encode("b")
    one, other = compiled.start(), compiled.start()
    one.accept(a)
    with pytest.raises(ConstraintFailed, match="cannot follow its grammar"):
        one.accept(b)
    with pytest.raises(ConstraintFailed):
        one.mask()
    other.accept(a)
    assert a in allowed_ids(other, small.tokenizer)
    assert b not in allowed_ids(compiled.start(), small.tokenizer)


def test_replies_of_one_grammar_do_not_share_their_state(small: Bench) -> None:
    for grammar in (Grammar.json_schema(PERSON), Grammar("regex", r"(ab|cd){1,30}")):
        compiled = small.grammars.compile(grammar)
        replies = [compiled.start() for _ in range(100)]  # more than one matcher is copied for
        said = [say(reply, small.tokenizer, small.eos, random.Random(seed % 5)) for seed, reply in enumerate(replies)]
        assert said == [said[seed % 5] for seed in range(100)]


def test_forced_tokens_are_what_must_come_and_tell_without_going_there(bench: Bench) -> None:
    schema = {"type": "object", "properties": {"file_name": {"type": "boolean"}}, "required": ["file_name"]}
    schema["additionalProperties"] = False
    constraint = bench.grammars.compile(Grammar.json_schema(schema)).start()
    for byte in b'{"':
        assert constraint.forced() == () or byte == ord("{")
        constraint.accept(bench.id_of[bytes([byte])])
    forced = constraint.forced()
    spelled = b"".join(bench.vocabulary.tokens[token_id] for token_id in forced)
    assert len(forced) >= 1 and b'file_name"'.startswith(spelled) and spelled.startswith(b"file")
    wrong = bench.id_of[b"x"]
    assert constraint.num_allowed([*forced, wrong]) == len(forced) and constraint.num_allowed([wrong]) == 0
    forked = constraint.fork()
    for token_id in forced:
        forked.accept(token_id)
    assert constraint.forced() == forced != forked.forced()
    constraint.accept(forced[0])
    assert constraint.forced() == forced[1:]


# Hostile ones. Each is refused or harmless, and the process that they are tried in lives on.

DOUBLED = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(60)} | {"a60": {"type": "string"}}
CHAIN = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(4000)} | {"a4000": {"type": "string"}}
WRONG = {
    "a parenthesis is open": Grammar("regex", "(a"),
    "looks ahead": Grammar("regex", "(?=a)b"),
    "matches nothing": Grammar("regex", r"[^\s\S]"),
    "deep groups": Grammar("regex", "(" * 50_000 + "a" + ")" * 50_000),
    "deep stars": Grammar("regex", "(" * 5000 + "a" + ")*" * 5000),
    "no type": Grammar.json_schema({"type": "nonsense"}),
    "not a schema": Grammar("json_schema", "[1]"),
    "not JSON": Grammar("json_schema", "{"),
    "nothing is valid": Grammar.json_schema({"type": "integer", "minimum": 5, "maximum": 3}),
    "refers to itself": Grammar.json_schema({"$ref": "#"}),
    "refers to a server": Grammar.json_schema({"$ref": "http://127.0.0.1:9/schema.json"}),
    "refers to a file": Grammar.json_schema({"$ref": "file:///etc/passwd"}),
    "deep arrays": Grammar("json_schema", '{"type":"array","items":' * 5000 + "{}" + "}" * 5000),
    "a chain that no stack holds": Grammar.json_schema({"$ref": "#/$defs/a0", "$defs": CHAIN}),
    "seven seconds of arithmetic": Grammar.json_schema({"type": "integer", "multipleOf": 1000003}),
    "a product of alternatives": Grammar.json_schema(
        {"allOf": [{"anyOf": [{"properties": {f"p{i}_{j}": {"const": j}}} for j in range(10)]} for i in range(12)]}
    ),
    "terminals that double": Grammar(
        "grammar", "start: A0\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(40)) + '\nA40: "x"'
    ),
    "rules in a chain": Grammar(
        "grammar", "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(9000)) + '\na9000: "x"'
    ),
    "rules in a circle": Grammar("grammar", "start: start"),
    "no start": Grammar("grammar", 'other: "a"'),
    "nothing at all": Grammar("grammar", ""),
    "keywords that cannot be enforced": Grammar.json_schema({"type": "array", "uniqueItems": True}),
}
HARMLESS = {
    "a star of a star": Grammar("regex", "(a+)+$"),
    "repeated repetitions": Grammar("regex", "((((a{1,100}){1,100}){1,100}){1,100}){1,100}"),
    "an exponential automaton": Grammar("regex", "(a|b)*a(a|b){1000}"),
    "words upon words": Grammar("regex", r"(\w+\s?){1,500}"),
    "a billion items": Grammar.json_schema({"type": "array", "minItems": 10**9, "items": {"enum": [1, 2]}}),
    "a billion characters": Grammar.json_schema({"type": "string", "minLength": 10**9}),
    "schemas that double": Grammar.json_schema({"$ref": "#/$defs/a0", "$defs": DOUBLED}),
    "rules that double": Grammar(
        "grammar", "start: a0\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(60)) + '\na60: "x" | "y" | '
    ),
    "an ambiguous grammar": Grammar("grammar", 'start: start start | "a" | "b" | '),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_or_too_much_is_refused(small: Bench, name: str) -> None:
    with pytest.raises(InvalidGrammar, match="cannot be used"):
        small.grammars.compile(WRONG[name])
    assert small.follows(Grammar("regex", "after [a-z ]{1,40}"), "after that")


@pytest.mark.parametrize("name", HARMLESS)
def test_what_only_looks_dangerous_is_followed_for_as_long_as_it_goes(small: Bench, name: str) -> None:
    """Into `ConstraintFailed` it may run, for the work of a mask is counted; out of memory or stack, never."""
    constraint = small.grammars.compile(HARMLESS[name]).start()
    chance = random.Random(name)
    try:
        for _ in range(60):
            allowed = [token for token in allowed_ids(constraint, small.tokenizer) if token not in small.eos]
            if not allowed:
                break
            constraint.accept(chance.choice(allowed))
    except ConstraintFailed:
        with pytest.raises(ConstraintFailed):  # and stays so
            constraint.mask()


def test_the_time_limit_is_named(small: Bench) -> None:
    with pytest.raises(InvalidGrammar, match=r"takes more than 0\.25 s"):
        small.grammars.compile(WRONG["seven seconds of arithmetic"])


def test_a_refused_grammar_is_refused_again_without_another_trial(small: Bench) -> None:
    grammars = small.open(time_limit_s=0.05)
    grammar = WRONG["seven seconds of arithmetic"]
    with pytest.raises(InvalidGrammar) as first:
        grammars.compile(grammar)
    grammars.close()
    with pytest.raises(InvalidGrammar) as second:
        grammars.compile(grammar)
    assert str(first.value) == str(second.value) and first.value is not second.value


def test_a_lenient_schema_ignores_what_cannot_be_enforced(small: Bench) -> None:
    schema = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "maxItems": 2}
    with pytest.raises(InvalidGrammar, match="uniqueItems"):
        small.grammars.compile(Grammar.json_schema(schema))
    assert small.follows(Grammar.json_schema(schema, is_strict=False), "[1, 1]")


def test_too_long_a_grammar_is_not_looked_at() -> None:
    with pytest.raises(InvalidGrammar, match=f"has {MAX_GRAMMAR_LENGTH + 1} characters"):
        Grammar("regex", "a" * (MAX_GRAMMAR_LENGTH + 1))


# The cache, and the process.


def test_only_the_latest_used_grammars_are_kept(small: Bench) -> None:
    grammars = small.open(max_grammars=3)
    try:
        compiled = {name: grammars.compile(Grammar("regex", name)) for name in "abc"}
        assert grammars.compile(Grammar("regex", "a")) is compiled["a"]
        grammars.compile(Grammar("regex", "d"))
        assert len(grammars) == 3
        assert grammars.compile(Grammar("regex", "a")) is compiled["a"]
        assert grammars.compile(Grammar("regex", "b")) is not compiled["b"]
    finally:
        grammars.close()


def test_what_kept_grammars_take_is_bounded_by_the_length_of_their_texts(
    small: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred long lists of tools took a gigabyte, and kept it."""
    monkeypatch.setattr(grammars_module, "MAX_CHARACTERS", 10_000)
    grammars = small.open(max_grammars=10)
    try:
        for number in range(6):
            grammars.compile(Grammar("regex", f"({number}|{'ab' * 1500})"))
            assert 1 <= len(grammars) <= 3
        for number in range(12):
            grammars.compile(Grammar("regex", str(number)))
        assert len(grammars) == 10
    finally:
        grammars.close()


def test_a_grammar_that_a_reply_cannot_follow_any_further_is_not_kept(small: Bench) -> None:
    """Each of 60 left 18 MB of states behind, as long as there were not 128 others."""
    grammars = small.open()
    try:
        constraint = grammars.compile(Grammar("regex", "abc")).start()
        with pytest.raises(ConstraintFailed):
            constraint.accept(small.id_of[b"x"])
        assert len(grammars) == 0
        assert (
            say(grammars.compile(Grammar("regex", "abc")).start(), small.tokenizer, small.eos, random.Random(1))
            == "abc"
        )
    finally:
        grammars.close()


def test_what_kept_grammars_remember_is_bounded_by_the_masks_that_they_computed(
    small: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars_module, "MAX_MASKS", 40)
    grammars = small.open()
    try:
        for letter in "abcdef":
            compiled = grammars.compile(Grammar("regex", f"{letter}{{20}}"))
            for seed in range(3):
                say(compiled.start(), small.tokenizer, small.eos, random.Random(seed))
            assert compiled.work.num_masks <= 40, "a matcher that has met much is replaced"
        grammars.compile(Grammar("regex", "f{20}"))
        kept = [each.work.num_masks for each in grammars._compiled.values()]
        assert sum(kept) <= 40 and 1 <= len(kept) < 6
    finally:
        grammars.close()


def test_many_threads_compile_at_once(small: Bench) -> None:
    grammars = small.open()
    try:
        with ThreadPoolExecutor(8) as pool:
            made = list(pool.map(lambda i: grammars.compile(Grammar("regex", f"x{i % 6}")), range(48)))
        for i, compiled in enumerate(made):
            assert say(compiled.start(), small.tokenizer, small.eos, random.Random(i)) == f"x{i % 6}"
    finally:
        grammars.close()


class Held:
    """Grammars whose trials do not end before they may."""

    def __init__(self, grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
        grammars.warm_up()
        self.grammars = grammars
        self.quick, self.thorough = grammars.lanes
        self.tried: list[str] = []
        self._go_on = threading.Event()
        self._compiled = self.quick.trial.compiled
        monkeypatch.setattr(self.quick.trial, "compiled", self._wait)

    def ask(self, pool: ThreadPoolExecutor, client: str, *names: str) -> list[Future[CompiledGrammar]]:
        """Ask for several, and return when they all wait or are tried."""
        asked = []
        for name in names:
            num_asked = self._num_asked(client) + 1
            asked.append(pool.submit(self.grammars.compile, Grammar("regex", name), client=client))
            while self._num_asked(client) < num_asked and not asked[-1].done():
                time.sleep(0.001)
        return asked

    def go_on(self) -> None:
        self._go_on.set()

    def _num_asked(self, client: str) -> int:
        return self.quick.lock.num_waiting_of(client) + len(self.tried)

    def _wait(self, grammar: Grammar, *, real_limit_s: float) -> str:
        self.tried.append(grammar.text)
        assert self._go_on.wait(30)
        return self._compiled(grammar, real_limit_s=60.0)


@pytest.fixture
def held(small: Bench, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    held = Held(small.open(), monkeypatch)
    yield held
    held.go_on()
    held.grammars.close()


def test_who_comes_when_too_many_wait_is_told_at_once(held: Held) -> None:
    with ThreadPoolExecutor(MAX_WAITING + 1) as pool:
        waiting = held.ask(pool, "one", *(f"x{i}" for i in range(MAX_WAITING + 1)))
        with pytest.raises(GrammarsOverloaded, match=f"{MAX_WAITING} others wait") as refused:
            held.grammars.compile(Grammar("regex", "y"), client="one")
        assert refused.value.retry_after_s == 1
        held.go_on()
        assert all(future.result() for future in waiting)
    assert held.grammars.compile(Grammar("regex", "y"), client="one")


def test_seventy_grammars_of_one_client_come_after_the_first_of_another(held: Held) -> None:
    with ThreadPoolExecutor(MAX_WAITING + 2) as pool:
        many = held.ask(pool, "one", *(f"x{i}" for i in range(MAX_WAITING + 1)))
        [few] = held.ask(pool, "another", "y")
        with pytest.raises(GrammarsOverloaded):  # the latest made room
            many[-1].result(timeout=30)
        held.go_on()
        assert few.result() and all(future.result() for future in many[:-1])
    assert held.tried.index("y") <= 2


def test_who_waits_too_long_is_told_to_come_again(small: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(small.open(answer_limit_s=0.02), monkeypatch)
    with ThreadPoolExecutor(2) as pool:
        first, second = held.ask(pool, "one", "x", "y")
        with pytest.raises(GrammarsOverloaded):
            second.result(timeout=30)
        held.go_on()
        assert first.result()
    held.grammars.close()


def test_a_grammar_that_many_ask_for_at_once_is_tried_once(held: Held) -> None:
    with ThreadPoolExecutor(8) as pool:
        same = held.ask(pool, "one", *["x"] * 8)
        held.go_on()
        assert len({id(future.result()) for future in same}) == 1
    assert held.tried == ["x"]


def test_a_slow_grammar_delays_no_quick_one(small: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind 70 hostile schemas, a good one waited half a minute."""
    grammars = small.open()
    grammars.warm_up()
    go_on, entered = threading.Event(), threading.Event()
    thorough = grammars.lanes[1].trial
    compiled = thorough.compiled

    def late(grammar: Grammar, *, real_limit_s: float) -> str:
        entered.set()
        assert go_on.wait(30)
        return compiled(grammar, real_limit_s=200.0)

    monkeypatch.setattr(thorough, "compiled", late)
    bombs = [Grammar.json_schema({"type": "integer", "multipleOf": 1000003 + 2 * i}) for i in range(3)]
    try:
        with ThreadPoolExecutor(3) as pool:
            waiting = [pool.submit(grammars.compile, bomb) for bomb in bombs]
            assert entered.wait(30)
            assert grammars.compile(Grammar("regex", "quick"))
            assert not any(future.done() for future in waiting)
            go_on.set()
            errors = [future.exception(timeout=200) for future in waiting]
            # who had entered is told so; on a busy machine the time of others is up before their turn
            assert any("takes more than" in str(error) for error in errors)
            assert all(isinstance(error, InvalidGrammar | GrammarsOverloaded) for error in errors)
    finally:
        go_on.set()
        grammars.close()


def test_slow_trials_stand_back_for_replies(small: Bench) -> None:
    grammars = small.open()
    grammars.warm_up()
    assert grammars.lanes[1].trial.process_id is None, "memory for it is taken by the first slow grammar"
    with pytest.raises(InvalidGrammar, match="takes more than"):
        grammars.compile(Grammar.json_schema({"type": "integer", "multipleOf": 1000003}))
    process_ids = [lane.trial.process_id for lane in grammars.lanes]
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert [os.getpriority(os.PRIO_PROCESS, process_id) for process_id in process_ids if process_id] == [own, 19]
    grammars.close()


def niceness_of_threads(process_id: int) -> set[int]:
    found = set()
    for path in Path(f"/proc/{process_id}/task").iterdir():
        with suppress(ProcessLookupError):  # a thread that ended meanwhile
            found.add(os.getpriority(os.PRIO_PROCESS, int(path.name)))
    return found


def test_what_no_request_waits_for_is_started_with_the_lowest_priority(
    small: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_trial, "_PATIENCE_S", 200.0)  # a starved machine takes so long to start it
    grammars = small.open()
    quick = grammars.lanes[0].trial
    pieces = grammars.pieces_of_warm_up()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(next, pieces)
        seen: set[int] = set()
        while not first.done():
            if quick.process_id is not None:
                seen |= niceness_of_threads(quick.process_id)
            time.sleep(0.001)
        first.result()
    assert 19 in seen
    own = os.getpriority(os.PRIO_PROCESS, 0)  # 19 where all tests have the lowest priority
    process_id = quick.process_id
    assert process_id is not None
    deadline = time.monotonic() + 30.0  # a thread that was joined is listed until the system has ended it
    while niceness_of_threads(process_id) != {own}:
        assert time.monotonic() < deadline, "a thread keeps the lowest priority"
        time.sleep(0.001)
    assert sum(1 for _ in pieces) == 0
    assert grammars.lanes[1].trial.process_id is None, "it waits for a slow grammar"
    assert grammars.compile(Grammar("regex", "a"))
    grammars.close()


def test_a_request_does_not_wait_for_a_start_of_the_lowest_priority(small: Bench) -> None:
    """On a busy machine it would wait for minutes."""
    grammars = small.open()
    trial = grammars.lanes[0].trial
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(next, grammars.pieces_of_warm_up())
        while (process_id := trial.process_id) is None:
            time.sleep(0.0001)
        os.kill(process_id, signal.SIGSTOP)  # it gets no processor at all
        assert not slow.done()
        assert grammars.compile(Grammar("regex", "a"))
        with pytest.raises(EngineError, match="does not start"):
            slow.result(timeout=30)
    assert trial.process_id not in (None, process_id)
    grammars.close()


def test_closing_does_not_wait_for_a_start_either(small: Bench) -> None:
    grammars = small.open()
    trial = grammars.lanes[0].trial
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(next, grammars.pieces_of_warm_up())
        while (process_id := trial.process_id) is None:
            time.sleep(0.0001)
        os.kill(process_id, signal.SIGSTOP)
        grammars.close()
        with pytest.raises(EngineError):
            slow.result(timeout=30)
    with pytest.raises(EngineClosed):
        next(grammars.pieces_of_warm_up())


def test_a_trial_ends_in_real_time_too(small: Bench) -> None:
    grammars = small.open(time_limit_s=20.0)
    grammars.warm_up()
    with pytest.raises(OutOfTime) as late:
        grammars.lanes[1].trial.compiled(WRONG["seven seconds of arithmetic"], real_limit_s=0.0)
    assert late.value.is_busy
    grammars.close()


def test_a_busy_machine_is_not_the_grammars_fault(small: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(grammar: Grammar, *, real_limit_s: float) -> str:
        raise OutOfTime(is_busy=True)

    grammars = small.open()
    try:
        grammars.warm_up()
        for lane in grammars.lanes:
            monkeypatch.setattr(lane.trial, "compiled", busy)
        with pytest.raises(GrammarsOverloaded):
            grammars.compile(Grammar("regex", "a"))
        monkeypatch.undo()
        assert grammars.compile(Grammar("regex", "a"))
    finally:
        grammars.close()


def test_refused_grammars_do_not_drive_out_good_ones(small: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, tried = small.open(max_grammars=1), []
    compiled = GrammarTrial.compiled

    def counted(trial: GrammarTrial, grammar: Grammar, *, real_limit_s: float) -> str:
        tried.append(grammar.text)
        return compiled(trial, grammar, real_limit_s=real_limit_s)

    monkeypatch.setattr(GrammarTrial, "compiled", counted)
    try:
        good = grammars.compile(Grammar("regex", "a"))
        for i in [*range(MAX_REFUSED + 1), MAX_REFUSED, 1, 0]:  # the first was forgotten for the last
            with pytest.raises(InvalidGrammar):
                grammars.compile(Grammar("regex", f"({i}"))
        assert grammars.compile(Grammar("regex", "a")) is good
        assert tried == ["a", *(f"({i}" for i in range(MAX_REFUSED + 1)), "(0"]
    finally:
        grammars.close()


def test_a_trial_process_that_dies_is_started_again(small: Bench) -> None:
    grammars = small.open()
    grammars.compile(Grammar("regex", "a"))
    trial = grammars.lanes[0].trial
    process_id = trial.process_id
    assert process_id is not None
    os.kill(process_id, signal.SIGKILL)
    os.waitid(os.P_PID, process_id, os.WEXITED | os.WNOWAIT)
    assert grammars.compile(Grammar("regex", "b"))
    again = trial.process_id
    assert again is not None and again != process_id
    grammars.close()
    with pytest.raises(ProcessLookupError):
        os.kill(again, 0)
    grammars.close()


def test_closing_ends_a_trial_and_tells_the_callers_that_wait(small: Bench) -> None:
    grammars = small.open(time_limit_s=30.0, answer_limit_s=600.0)  # a starved machine takes long to end a process
    grammars.warm_up()
    bombs = [Grammar.json_schema({"type": "integer", "multipleOf": 1000081 + 2 * i}) for i in range(3)]
    turns = grammars.lanes[1].lock
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(grammars.compile, bomb) for bomb in bombs]
        while turns.num_waiting < 2:
            time.sleep(0.001)
        grammars.close()
        for future in waiting:
            with pytest.raises(EngineClosed):
                future.result(timeout=200)
    with pytest.raises(EngineClosed):
        grammars.compile(Grammar("regex", "too late"))
    never_used = small.open()
    never_used.close()
    with pytest.raises(EngineClosed):
        never_used.compile(Grammar("regex", "too late"))


def test_closing_kills_the_fork_that_tries_a_grammar_though_it_gets_no_processor(small: Bench) -> None:
    grammars = small.open(time_limit_s=30.0, answer_limit_s=600.0)
    grammars.warm_up()
    grammars.lanes[1].trial.start()
    process_id = grammars.lanes[1].trial.process_id
    forks = Path(f"/proc/{process_id}/task/{process_id}/children")
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(grammars.compile, Grammar.json_schema({"type": "integer", "multipleOf": 1000081}))
        while not (children := forks.read_text().split()):
            time.sleep(0.001)
        fork = int(children[0])
        os.kill(fork, signal.SIGSTOP)  # as one of the lowest priority on a machine with other work
        try:
            pool.submit(grammars.close).result(timeout=60)
        finally:
            with suppress(ProcessLookupError):
                os.kill(fork, signal.SIGKILL)
        with pytest.raises(EngineClosed):
            waiting.result(timeout=60)


@pytest.mark.parametrize(("num_mib", "is_killed"), [(8, False), (256, True)])
def test_a_trial_that_takes_much_memory_is_killed_where_the_system_limits_none(num_mib: int, is_killed: bool) -> None:
    reading, writing = os.pipe()
    sleeps_s = 60 if is_killed else 0.3
    program = (
        f"import os, time; x = bytearray(b'1') * ({num_mib} << 20); time.sleep({sleeps_s}); os.write({writing}, b'.')"
    )
    trial = subprocess.Popen([sys.executable, "-c", program], pass_fds=[writing])
    os.close(writing)
    grammar_trial_process._watch_memory(trial.pid, reading, 128 << 20)
    assert trial.wait(60) == (-signal.SIGKILL if is_killed else 0)
    assert os.read(reading, 2) == (b"" if is_killed else b".")
    os.close(reading)


def test_a_vocabulary_goes_over_the_pipe_unchanged(small: Bench) -> None:
    packed = json.loads(json.dumps(small.vocabulary.packed()))
    unpacked = TokenBytes.unpacked(packed | {"eos_token_ids": [2]})
    assert unpacked.tokens == small.vocabulary.tokens
    assert unpacked.special_token_ids == small.vocabulary.special_token_ids


def test_nothing_loads_the_library_before_a_grammar_is_wanted() -> None:
    """It took 8 MB and 30 ms of every start, for a function that frees memory."""
    code = "import sys, radixlm.runtime.engine.opening, radixlm.runtime.server; print('llguidance' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
