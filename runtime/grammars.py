"""Compile what clients want replies to keep to, and remember it for the next one who wants the same.

The library is llguidance. xgrammar was looked at first: its wheel (0.2.8) requires torch, triton and transformers,
and its package imports torch even where masks are NumPy's, so that an install of radixlm would grow by gigabytes.
llguidance requires nothing, compiles lazily in about a millisecond, and counts its work. Not everything, though: a
chain of 5,000 `$ref`s overflows its stack and kills the process, `"multipleOf": 1000003` takes it seven seconds.
Hence each new grammar is tried by `grammar_trial.py` first.

Knows nothing of requests and HTTP; `compile` waits, so call it neither on an event loop nor on the engine's thread.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property
from typing import cast

import llguidance

from .errors import EngineClosed, GrammarsOverloaded, InvalidGrammar
from .grammar import Grammar
from .grammar_constraint import GrammarConstraint
from .grammar_trial import GrammarTrial
from .grammar_trial_process import Vocabulary, limits_of

MAX_GRAMMARS = 128  # of which a large one's states take some tens of megabytes
MAX_WAITING = 64  # threads that wait for a trial
TIME_LIMIT_S = 0.5
LIMITS = {"step_lexer_fuel": 100_000, "max_lexer_states": 50_000}  # 7 ms a mask, 100 MB
_STARTS_PER_MATCHER = 64  # copies share the states that were met; anew now and then, they do not pile up


class CompiledGrammar:
    """A grammar that replies can follow, any number of them at a time; `Grammars.compile` makes it."""

    def __init__(self, open_matcher: Callable[[], llguidance.LLMatcher], vocab_size: int) -> None:
        self._open_matcher = open_matcher
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._matcher = open_matcher()
        self._num_starts = 0

    def start(self) -> GrammarConstraint:
        """A constraint at the beginning of a reply."""
        with self._lock:
            self._num_starts += 1
            if self._num_starts % _STARTS_PER_MATCHER == 0:
                self._matcher = self._open_matcher()
            return GrammarConstraint(self._matcher.deep_copy(), self._vocab_size)


class Grammars:
    """The grammars of one model, the latest used of them compiled; any thread may use it.

    Args:
        open_vocabulary: the model's, asked for when the first grammar comes.
        eos_token_ids: tokens that end a reply, at least one.
    """

    def __init__(
        self,
        open_vocabulary: Callable[[], Vocabulary],
        eos_token_ids: tuple[int, ...],
        *,
        max_grammars: int = MAX_GRAMMARS,
        time_limit_s: float = TIME_LIMIT_S,
    ) -> None:
        self._open_vocabulary = open_vocabulary
        self._eos_token_ids = eos_token_ids
        self._max_grammars = max_grammars
        self._time_limit_s = time_limit_s
        self._limits = limits_of(LIMITS)
        self._compiled: OrderedDict[Grammar, CompiledGrammar | InvalidGrammar] = OrderedDict()
        self._lock = threading.Lock()  # guards the grammars,
        self._opening = threading.Lock()  # and this the first use of the tokenizer
        self._waiting = threading.BoundedSemaphore(MAX_WAITING)
        self._is_open = self._is_closed = False

    def warm_up(self) -> None:
        """Make ready what the first grammar would wait for.

        Raises:
            EngineError: the process that tries grammars does not start.
        """
        with self._opening:
            self._is_open = True
            self._trial.start()
            matcher = self._matcher(llguidance.LLMatcher.grammar_from_regex("(.|\\n)*"))
            GrammarConstraint(matcher, self._tokenizer.vocab_size).mask()

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """A grammar ready to be followed.

        Raises:
            InvalidGrammar: it is wrong, or too much work.
            GrammarsOverloaded: too many are being compiled.
            EngineError: the process that tries grammars could not be used.
        """
        found = self._find(grammar)
        if found is None:
            if not self._waiting.acquire(blocking=False):
                raise GrammarsOverloaded(MAX_WAITING, retry_after_s=1)
            try:
                found = self._compile(grammar)
            finally:
                self._waiting.release()
            self._keep(grammar, found)
        if isinstance(found, InvalidGrammar):
            raise InvalidGrammar(str(found))  # one of its own for each, as a traceback grows
        return found

    def close(self) -> None:
        """End the process that tries grammars; new ones raise EngineClosed from now on."""
        self._is_closed = True
        if self._is_open:
            with self._opening:
                self._trial.close()

    def __len__(self) -> int:
        return len(self._compiled)

    def _find(self, grammar: Grammar) -> CompiledGrammar | InvalidGrammar | None:
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
            return self._compiled.get(grammar)

    def _keep(self, grammar: Grammar, found: CompiledGrammar | InvalidGrammar) -> None:
        with self._lock:
            self._compiled[grammar] = found
            while len(self._compiled) > self._max_grammars:
                self._compiled.popitem(last=False)

    def _compile(self, grammar: Grammar) -> CompiledGrammar | InvalidGrammar:
        if self._is_closed:
            raise EngineClosed("the engine was closed; open it again")
        if not self._is_open:
            self.warm_up()
        try:
            tried = self._trial.compiled(grammar)
        except InvalidGrammar as error:
            return InvalidGrammar(str(error))
        return CompiledGrammar(lambda: self._matcher(tried), self._tokenizer.vocab_size)

    def _matcher(self, tried: str) -> llguidance.LLMatcher:
        return llguidance.LLMatcher(self._tokenizer, tried, log_level=0, limits=self._limits)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return self._open_vocabulary()

    @cached_property
    def _tokenizer(self) -> llguidance.LLTokenizer:
        wrapper = cast(llguidance.TokenizerWrapper, self._vocabulary)
        return llguidance.LLTokenizer(wrapper, eos_token=list(self._eos_token_ids))

    @cached_property
    def _trial(self) -> GrammarTrial:
        return GrammarTrial(
            self._vocabulary,
            eos_token_ids=list(self._eos_token_ids),
            limits=LIMITS,
            time_limit_s=self._time_limit_s,
        )
