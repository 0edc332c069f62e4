"""Compile the grammars that clients request, and cache them for later requests with the same one.

The library is llguidance. xgrammar was considered first: its wheel (0.2.8) requires torch, triton and transformers,
and its package imports torch even if masks are NumPy's, so that an install of radixlm would grow by gigabytes.
llguidance requires nothing, compiles lazily in about a millisecond, and limits its work. The limits do not cover all of
it: a chain of 5,000 `$ref`s overflows its stack and kills the process, and `"multipleOf": 1000003` takes seven seconds.

So `grammar_trial.py` tries each new grammar first, for a short time. The few that need longer are tried once more, in
another process and queue, so that a quick grammar never waits for a slow one. (One process and queue with half a second
for each grammar were worse: after 70 hostile schemas a good one waited 32 s; bench/LOG.md has more.)

Knows nothing of requests and HTTP. `compile` blocks: call it neither on an event loop nor on the engine's thread.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import cast

import llguidance
from cachetools import Cache, LRUCache

from ..errors import EngineClosed, GrammarsOverloaded, InvalidGrammar
from ..system import trim_heap
from .fair_lock import FairLock
from .grammar import Grammar
from .grammar_constraint import GrammarConstraint, MatcherWork
from .grammar_trial import GrammarTrial, OutOfTime
from .grammar_trial_process import TokenBytes, limits_of

MAX_GRAMMARS = 128  # cached, shorter ones than MAX_CHARACTERS / 128 each
MAX_CHARACTERS = 1 << 20  # of all cached grammars: compiled, each character takes up to 150 bytes
MAX_MASKS = 8192  # of all cached grammars: their states take up to 30 KB a mask
MAX_REFUSED = 128  # remembered with the reason
MAX_WAITING = 64  # callers waiting in one lane
ANSWER_LIMIT_S = 1.0  # half of it can be spent waiting for trials of other grammars
QUICK_LIMIT_S = 0.05  # of CPU time; most grammars take 1 to 10 ms, the largest that OpenAI accepts up to 60
TIME_LIMIT_S = 0.25
LIMITS = {"step_lexer_fuel": 100_000, "max_lexer_states": 50_000}  # 7 ms a mask, 100 MB
_RETRY_AFTER_S = 1
_STARTS_PER_MATCHER = 64  # copies share the states that they visited; a new matcher now and then drops these


class CompiledGrammar:
    """A grammar that any number of replies can follow at a time; `Grammars.compile` makes it.

    Attributes:
        grammar: the grammar that it was compiled from.
        holds_reasoning: as in `Grammar`.
        work: the work that replies caused in its matcher.

    Args:
        on_failed: called when a reply becomes too much work.
    """

    def __init__(
        self,
        grammar: Grammar,
        open_matcher: Callable[[], llguidance.LLMatcher],
        vocab_size: int,
        *,
        on_failed: Callable[[], None] = lambda: None,
    ) -> None:
        self.work = MatcherWork(on_failed=on_failed)
        self.grammar, self.holds_reasoning = grammar, grammar.holds_reasoning
        self._open_matcher = open_matcher
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._matcher = open_matcher()
        self._num_starts = 0

    def start(self) -> GrammarConstraint:
        """Return a constraint that applies the grammar to a new reply."""
        with self._lock:
            self._num_starts += 1
            if self._num_starts % _STARTS_PER_MATCHER == 0 or self.work.num_masks > MAX_MASKS // 4:
                self._matcher = self._open_matcher()
                self.work = MatcherWork(on_failed=self.work.on_failed)
            return GrammarConstraint(self._matcher.deep_copy(), self._vocab_size, self.work)


@dataclass(frozen=True)
class Lane:
    """A process that tries grammars, and the lock by which its callers take turns."""

    trial: GrammarTrial
    lock: FairLock


@dataclass
class _Attempt:
    """The trial of one grammar in one lane after the other."""

    grammar: Grammar
    began_at: float  # seconds of `time.monotonic()`
    met_busy_machine: bool = False  # when it last ran out of time


class Grammars:
    """The grammars of one model; the most recently used stay compiled. For any thread.

    Args:
        open_vocabulary: returns the model's vocabulary; called for the first grammar.
        eos_token_ids: tokens that end a reply, at least one.
        time_limit_s: seconds of CPU time; a grammar that takes longer is refused.
        answer_limit_s: seconds of real time. A caller gets GrammarsOverloaded if the trial has not ended by then, or
            has not begun after half of it.

    Attributes:
        answer_limit_s: as above; can be changed, for instance if tests keep the machine busy.
    """

    def __init__(
        self,
        open_vocabulary: Callable[[], TokenBytes],
        eos_token_ids: tuple[int, ...],
        *,
        max_grammars: int = MAX_GRAMMARS,
        time_limit_s: float = TIME_LIMIT_S,
        answer_limit_s: float = ANSWER_LIMIT_S,
    ) -> None:
        self._open_vocabulary = open_vocabulary
        self._eos_token_ids = eos_token_ids
        self._time_limit_s = time_limit_s
        self._limits = limits_of(LIMITS)
        self.answer_limit_s = answer_limit_s
        least = MAX_CHARACTERS // max_grammars
        self._compiled: LRUCache[Grammar, CompiledGrammar] = LRUCache(
            least * max_grammars, getsizeof=lambda compiled: max(len(compiled.grammar.text), least)
        )
        self._refused: LRUCache[Grammar, InvalidGrammar] = LRUCache(MAX_REFUSED)  # apart: they evict no good ones
        self._lock = threading.Lock()  # guards the grammars
        self._opening = threading.Lock()  # guards the first use of the tokenizer
        self._is_open = self._is_closed = False

    def warm_up(self) -> None:
        """Prepare what the first grammar would wait for; later calls do nothing. The process of the slow lane starts
        with the first grammar that needs it.

        Raises:
            EngineError: a process that tries grammars does not start.
        """
        if "lanes" in vars(self) and not self._is_open:
            self.lanes[0].trial.start()  # ends a start with the lowest priority
        with self._opening:
            if self._is_open:
                return
            self.lanes[0].trial.start()
            matcher = self._matcher(llguidance.LLMatcher.grammar_from_regex("(.|\\n)*"))
            GrammarConstraint(matcher, self._tokenizer.vocab_size).mask()
            self._is_open = True

    def pieces_of_warm_up(self) -> Iterator[None]:
        """Do the work of `warm_up`, a piece for each `next`, starting the process with the lowest priority.

        The last piece blocks every thread of this process, for half a second with 150,000 tokens.

        Raises:
            EngineError: as `warm_up`, or a request came meanwhile and made its own start.
        """
        with self._opening:
            self._require_open()
            self.lanes[0].trial.start(is_awaited=False)
        yield
        self.warm_up()

    def compile(self, grammar: Grammar, *, client: str = "") -> CompiledGrammar:
        """Return a grammar that replies can follow, at once if it is cached; clients take turns to have others tried.

        Raises:
            InvalidGrammar: it is wrong, or too much work.
            GrammarsOverloaded: too many are being tried.
            EngineError: a process that tries grammars could not be used.
        """
        found = self._find(grammar)
        if found is not None:
            return found
        self._require_open()
        self.warm_up()
        attempt = _Attempt(grammar, time.monotonic())
        for lane in self.lanes:
            with lane.lock.turn(client, deadline=attempt.began_at + self.answer_limit_s / 2):
                found = self._try(attempt, lane)
            if found is not None:
                return found
        raise self._failure(attempt)

    async def compile_on_loop(self, grammar: Grammar, *, client: str = "") -> CompiledGrammar:
        """Like `compile`, for an event loop. A cancelled task leaves the queue at once."""
        found = self._find(grammar)
        if found is not None:
            return found
        self._require_open()
        if not self._is_open:
            await asyncio.to_thread(self.warm_up)
        attempt = _Attempt(grammar, time.monotonic())
        for lane in self.lanes:
            work, deadline = partial(self._try, attempt, lane), attempt.began_at + self.answer_limit_s / 2
            found = await lane.lock.run_in_thread(client, work, deadline=deadline)
            if found is not None:
                return found
        raise self._failure(attempt)

    def close(self) -> None:
        """End the processes that try grammars. New grammars raise EngineClosed from now on."""
        self._is_closed = True
        self._close_lanes()  # without waiting for one that is being started
        with self._opening:
            self._close_lanes()

    def _close_lanes(self) -> None:
        for lane in self.lanes if "lanes" in vars(self) else ():
            lane.trial.close()

    def __len__(self) -> int:
        return len(self._compiled)

    def _require_open(self) -> None:
        if self._is_closed:
            raise EngineClosed("the engine was closed; open it again")

    def _try(self, attempt: _Attempt, lane: Lane) -> CompiledGrammar | None:
        """Try a grammar in a lane while the caller has its turn; return None if there was too little time."""
        found = self._find(attempt.grammar)  # an earlier request may have had the same grammar
        if found is not None:
            return found
        left_s = attempt.began_at + self.answer_limit_s - time.monotonic()
        try:
            return self._add_compiled(attempt.grammar, lane.trial.compiled(attempt.grammar, real_limit_s=left_s))
        except OutOfTime as error:
            attempt.met_busy_machine = error.is_busy
            return None
        except InvalidGrammar as error:
            self._refuse(attempt.grammar, error)
            raise

    def _failure(self, attempt: _Attempt) -> GrammarsOverloaded | InvalidGrammar:
        """Return the error for a grammar that no lane had enough time to try.

        GrammarsOverloaded if the machine was busy; else InvalidGrammar, which is remembered.
        """
        if attempt.met_busy_machine:
            return _refusal(self.lanes[-1].lock.num_waiting)
        reason = f"the {attempt.grammar.noun} cannot be used: it takes more than {self._time_limit_s:g} s to compile"
        self._refuse(attempt.grammar, InvalidGrammar(reason))
        return InvalidGrammar(reason)

    def _find(self, grammar: Grammar) -> CompiledGrammar | None:
        """Return a cached grammar, or None. Raises InvalidGrammar for one that is known to be wrong."""
        with self._lock:
            refused = self._refused.get(grammar)
            if refused is not None:
                raise InvalidGrammar(str(refused), line=refused.line)  # new each time: its traceback grows
            found = self._compiled.get(grammar)
            while self._num_masks() > MAX_MASKS and len(self._compiled) > 1:
                self._compiled.popitem()  # the least recently used
            return found

    def _num_masks(self) -> int:
        """Return the masks that the cached grammars have computed, without counting as a use of them."""
        return sum(Cache.__getitem__(self._compiled, grammar).work.num_masks for grammar in self._compiled)

    def _add_compiled(self, grammar: Grammar, tried: str) -> CompiledGrammar:
        """Cache a grammar that was tried, and return it; it is dropped if a reply fails by it.

        `tried` is the grammar in the library's form.
        """
        compiled = CompiledGrammar(
            grammar,
            lambda: self._matcher(tried),
            self._tokenizer.vocab_size,
            on_failed=lambda: self._drop(grammar),
        )
        with self._lock:
            self._compiled[grammar] = compiled
        return compiled

    def _drop(self, grammar: Grammar) -> None:
        """Remove a grammar from the cache."""
        with self._lock:
            self._compiled.pop(grammar, None)

    def _refuse(self, grammar: Grammar, error: InvalidGrammar) -> None:
        """Remember the error of a grammar, to be raised again for the same one."""
        with self._lock:
            self._refused[grammar] = InvalidGrammar(str(error), line=error.line)

    def _matcher(self, tried: str) -> llguidance.LLMatcher:
        return llguidance.LLMatcher(self._tokenizer, tried, log_level=0, limits=self._limits)

    @cached_property
    def _vocabulary(self) -> TokenBytes:
        return self._open_vocabulary()

    @cached_property
    def _tokenizer(self) -> llguidance.LLTokenizer:
        """The library's tokenizer. Making it drops our copy of the tokens' bytes; the lanes have theirs already."""
        wrapper = cast(llguidance.TokenizerWrapper, self._vocabulary)
        tokenizer = llguidance.LLTokenizer(wrapper, eos_token=list(self._eos_token_ids))
        assert self.lanes, "they have packed it"
        self._vocabulary.drop_bytes()
        trim_heap()
        return tokenizer

    @cached_property
    def lanes(self) -> tuple[Lane, Lane]:
        """The quick lane and the slow lane. Each is a process that tries new grammars, and the lock for turns.

        A grammar is tried in the quick one first, and in the slow one if its time there was too short.

        The slow one has the lowest priority. With the priority of the kernels' threads, a flood of slow
        grammars made a reply of two tokens take 1.2 s instead of 0.05; with the lowest one it takes 0.2.
        """
        quick_limit_s = min(QUICK_LIMIT_S, self._time_limit_s)
        return self._make_lane(quick_limit_s, niceness=0), self._make_lane(self._time_limit_s, niceness=19)

    def _make_lane(self, time_limit_s: float, *, niceness: int) -> Lane:
        """Return a lane: a process that tries grammars, and the lock by which clients take turns."""
        trial = GrammarTrial(
            self._vocabulary,
            eos_token_ids=list(self._eos_token_ids),
            limits=LIMITS,
            time_limit_s=time_limit_s,
            niceness=niceness,
        )
        return Lane(trial, FairLock(max_waiting=lambda: MAX_WAITING, refusal=_refusal))


def _refusal(num_waiting: int) -> GrammarsOverloaded:
    return GrammarsOverloaded(num_waiting, retry_after_s=_RETRY_AFTER_S)
