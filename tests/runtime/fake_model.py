"""A model whose every logit depends on the exact KV rows that it sees, and the same model running alone.

KV of a token is a digest of the token, its position and all rows before it, read through slots, page table
and lengths as a real model does. Any wrong page, row, length or order gives another digest and so other
tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from radixlm.runtime.artifact.manifest import PAGE_SIZE, TOP_LOGITS
from radixlm.runtime.cache.cache_namespace import is_adapted
from radixlm.runtime.cache.page_pool import PagePool
from radixlm.runtime.cache.prefix_cache import PrefixCache
from radixlm.runtime.chat.token_constraint import TokenConstraint
from radixlm.runtime.engine.completion import RequestOutput
from radixlm.runtime.engine.engine_core import EngineCore
from radixlm.runtime.engine.engine_queue import WorkQueue
from radixlm.runtime.engine.reply import Reply, TextDecoder
from radixlm.runtime.engine.request import Request
from radixlm.runtime.engine.request_options import RequestLimits, RequestOptions, RequestSpec
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.engine.step.plan import SchedulerPolicy
from radixlm.runtime.engine.step.sampler import SampledToken, sample
from radixlm.runtime.engine.step.sampler_state import SamplerState
from radixlm.runtime.kv_log.log import KVLog
from radixlm.runtime.lora.adapters import Adapter
from radixlm.runtime.memory import Memories
from radixlm.runtime.model.batch import Batch, Float32Array, PageCopy, TopLogits, UInt8Array
from radixlm.runtime.prefix.disk_tier import DiskTier
from radixlm.runtime.prefix.expected_prompts import ExpectedPrompts
from radixlm.runtime.speculation.draft_levels import DraftSource
from radixlm.runtime.speculation.draft_model import DraftModel
from radixlm.runtime.states.state_pool import NO_STATE, StatePool
from radixlm.tokenizer_fix import SpelledPrompt

VOCAB_SIZE = 40
EOS = 39
CONTEXT_LENGTH = 96
FAKE_PAGE_BYTES = PAGE_SIZE * 8  # a manifest may say more: the rest is zeros
ODD_NUMBERS = np.arange(1, 2**15, 2, dtype=np.uint64)
POLICY = SchedulerPolicy(max_num_seqs=8, max_num_batched_tokens=24)


@dataclass(frozen=True)
class Prompt:
    """As `tokenizer_fix.PreparedPrompt`, without a tokenizer."""

    ids: tuple[int, ...]
    num_match: int
    swallow_leading_space: bool = False
    text: str | None = None
    num_known: int = 0
    space_id: int | None = None
    healed: bytes = b""


def prompt(ids: Sequence[int]) -> Prompt:
    return Prompt(tuple(ids), len(ids))


class LetterDecoder:
    """Each id is a letter."""

    def push(self, token_id: int) -> str:
        return chr(ord("A") + token_id)

    def finish(self) -> str:
        return ""

    def state(self) -> None:
        """It remembers nothing."""

    def restore(self, state: None) -> None:
        pass


def text_of(token_ids: Sequence[int]) -> str:
    return "".join(map(LetterDecoder().push, token_ids))


def digest(rows: np.ndarray, token: int, position: int) -> int:
    """The KV row of a token after `rows`; 52 bits, so that it can seed a generator."""
    weighted = int(np.dot(rows, ODD_NUMBERS[: len(rows)]))
    return (weighted * 6364136223846793005 + token * 1442695040888963407 + position * 22695477 + 1) % 2**52


@functools.lru_cache(maxsize=4096)  # what a request generates alone, it generates in a batch, too
def logits_of(row: int, vocab_size: int = VOCAB_SIZE) -> Float32Array:
    """The logits after a KV row; read-only, because callers share them."""
    logits = np.random.default_rng(row).normal(size=vocab_size).astype(np.float32) * 3
    logits.flags.writeable = False
    return logits


def top_of(logits: Float32Array) -> TopLogits:
    """The largest logits by sorting all, lower ids first among equals."""
    token_ids = np.argsort(-logits, axis=1, kind="stable")[:, :TOP_LOGITS].astype(np.int32)
    values = np.take_along_axis(logits, token_ids, axis=1)
    return TopLogits(values, token_ids, np.isfinite(logits).all(axis=1).astype(np.int32))


def state_after(state: int, token: int) -> int:
    """A recurrent state after one more token; 52 bits."""
    return (state * 2862933555777941757 + token * 3037000493 + 11) % 2**52


class FakeModel:
    """Keeps the pages; `before` is called with each batch and may raise, `after` may change the logits."""

    def __init__(self, num_pages: int, vocab_size: int = VOCAB_SIZE) -> None:
        self.vocab_size = vocab_size
        self.is_closed = False
        self.kv = np.full((num_pages, PAGE_SIZE), 2**51, np.uint64)  # rows never written would be noticed
        self.before: Callable[[Batch], None] = lambda batch: None
        self.after: Callable[[Batch, Float32Array], None] = lambda batch, logits: None
        self.max_missing = 0  # rows that a token's KV may be shorter than its position: of a pruned prefix
        self.num_tokens = 0
        self.logits = np.zeros((0, vocab_size), np.float32)

    def forward(self, batch: Batch) -> Float32Array:
        self.before(batch)
        arrays = batch.arrays
        assert batch.values.dtype == np.int32 and batch.values.flags.c_contiguous
        assert sum(array.size for array in arrays) == batch.values.size
        self.num_tokens += len(arrays.token_ids)
        flat, states = self.kv.reshape(-1), self.states_of(batch)
        for i, token in enumerate(arrays.token_ids):
            pages = arrays.page_table[arrays.row_of_token[i]]
            length, position = int(arrays.kv_lengths[i]), int(arrays.positions[i])
            own = pages[(length - 1) // PAGE_SIZE] * PAGE_SIZE + (length - 1) % PAGE_SIZE
            assert 0 <= position + 1 - length <= self.max_missing and own == arrays.slots[i]
            flat[own] = digest(self.kv[pages].reshape(-1)[: length - 1], int(token), position)
        rows = [logits_of((int(flat[arrays.slots[i]]) + states[i]) % 2**52, self.vocab_size) for i in arrays.logit_rows]
        self.logits = np.array(rows, np.float32).reshape(len(rows), self.vocab_size)
        self.after(batch, self.logits)
        return self.logits

    def states_of(self, batch: Batch) -> list[int]:
        """What the state adds to each token's row: nothing."""
        assert batch.state_in is None and batch.state_out is None
        return [0] * len(batch.arrays.token_ids)

    def top_logits(self, num_rows: int, vocab_size: int) -> TopLogits:
        return top_of(self.logits[:num_rows, :vocab_size])

    def copy_rows(self, copies: Sequence[PageCopy]) -> None:
        for copy in copies:
            self.kv[copy.dst_page, : copy.num_rows] = self.kv[copy.src_page, : copy.num_rows]

    def read_pages(self, page_ids: Sequence[int], out: UInt8Array) -> None:
        out[: len(page_ids)] = 0
        out[: len(page_ids), :FAKE_PAGE_BYTES] = self.kv[list(page_ids)].view(np.uint8)

    def write_pages(self, page_ids: Sequence[int], pages: UInt8Array) -> None:
        assert pages.shape[0] == len(page_ids) and pages.dtype == np.uint8 and not pages[:, FAKE_PAGE_BYTES:].any()
        self.kv[list(page_ids)] = np.ascontiguousarray(pages[:, :FAKE_PAGE_BYTES]).view(np.uint64)

    def close(self) -> None:
        self.is_closed = True


class FakeStates:
    """Slots of numbers, which leave and come back as `state_bytes` bytes, most of them zeros."""

    def __init__(self, num_slots: int, state_bytes: int) -> None:
        self.slots = np.full(num_slots, 2**51 + 1, np.uint64)  # one never written would be noticed
        self.slots[NO_STATE] = 0
        self.state_bytes = state_bytes

    def read_state(self, slot: int) -> UInt8Array:
        state = np.zeros(self.state_bytes, np.uint8)
        state[:8] = self.slots[slot : slot + 1].view(np.uint8)
        return state

    def write_state(self, slot: int, state: UInt8Array) -> None:
        assert slot != NO_STATE and state.nbytes == self.state_bytes and not state[8:].any()
        self.slots[slot] = state[:8].view(np.uint64)[0]


class RecurrentModel(FakeModel):
    """Logits depend on a state of all tokens, too, which is in slots."""

    def __init__(
        self, num_pages: int, vocab_size: int = VOCAB_SIZE, num_states: int = 16, state_bytes: int = 8
    ) -> None:
        super().__init__(num_pages, vocab_size)
        self.states = FakeStates(num_states, state_bytes)

    def states_of(self, batch: Batch) -> list[int]:
        assert batch.state_in is not None and batch.state_out is not None
        assert NO_STATE not in batch.state_out and len(set(batch.state_out)) == len(batch.state_out)
        assert not set(batch.state_out) & set(batch.state_in), "a state that is read is overwritten"
        now = [int(self.states.slots[slot]) for slot in batch.state_in]
        after: list[int] = []
        for token, row in zip(batch.arrays.token_ids, batch.arrays.row_of_token, strict=True):
            now[row] = state_after(now[row], int(token))
            after.append(now[row])
        self.states.slots[batch.state_out] = now
        return after


def alone(
    prompt_ids: Sequence[int],
    params: SamplingParams,
    *,
    context_length: int = CONTEXT_LENGTH,
    vocab_size: int = VOCAB_SIZE,
    after: Callable[[Float32Array], None] = lambda logits: None,
    constraint: TokenConstraint | None = None,
    is_recurrent: bool = False,
) -> tuple[int, ...]:
    """What the model generates with no engine, cache or company; `after` may change its logits."""
    state = SamplerState(params, prompt_ids, vocab_size, constraint)
    tokens, rows = list(prompt_ids), np.zeros(0, np.uint64)
    stop_ids = {*params.stop_token_ids, *([] if params.ignore_eos else [EOS])}
    generated: list[int] = []
    recurrent = 0
    while True:
        for position in range(len(rows), len(tokens)):
            rows = np.append(rows, np.uint64(digest(rows, tokens[position], position)))
            recurrent = state_after(recurrent, tokens[position]) if is_recurrent else 0
        logits = logits_of((int(rows[-1]) + recurrent) % 2**52, vocab_size)[None].copy()
        after(logits)
        sampled = sample(logits, top_of(logits), [state])[0]
        assert sampled is not None
        state.record(sampled.token_id)
        tokens.append(sampled.token_id)
        generated.append(sampled.token_id)
        if sampled.token_id in stop_ids or len(tokens) == context_length:
            return tuple(generated)
        if len(generated) == params.max_tokens or (constraint is not None and constraint.is_finished):
            return tuple(generated)


def generate_one(request: Request, now: float) -> None:
    """Have a request's model say token 1."""
    request.reply.accept(SampledToken(1), now, is_full=request.num_left == 1)
    request.admitted.append((1,))


@dataclass
class Bench:
    """An engine core on a fake model, what it has put out so far, and a clock that stands still."""

    num_pages: int = 16
    context_length: int = CONTEXT_LENGTH
    policy: SchedulerPolicy = POLICY
    vocab_size: int = VOCAB_SIZE
    make_model: Callable[[int, int], FakeModel] = FakeModel
    now: float = 0.0
    outputs: dict[str, list[RequestOutput]] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    kv_log: KVLog | None = None
    open_tier: Callable[[PrefixCache, FakeModel, WorkQueue], DiskTier] | None = None
    draft_model: DraftModel | None = None
    open_head: Callable[[FakeModel, PagePool], DraftSource] | None = None
    num_states: int = 0  # above 0: of a recurrent model
    clock: Callable[[], float] | None = None  # of the core; None: `now`
    aside: Callable[[Callable[[], None]], object] | None = (
        None  # what makes the ids of expected prompts; None: none are
    )

    def __post_init__(self) -> None:
        self.model = self.make_model(self.num_pages, self.vocab_size)
        states = StatePool(self.num_states) if self.num_states else None
        if states is not None:
            self.model = RecurrentModel(self.num_pages, self.vocab_size, self.num_states)
        self.memories = Memories()
        self.cache = self.memories.add(PrefixCache(PagePool(self.num_pages), states=states, kv_log=self.kv_log))
        limits = RequestLimits(self.vocab_size, self.context_length)
        clock = self.clock or (lambda: self.now)
        queue = WorkQueue(clock=clock)
        tier = None if self.open_tier is None else self.open_tier(self.cache, self.model, queue)
        self.tier = None if tier is None else self.memories.add(tier)
        if self.draft_model is not None:
            self.memories.add(self.draft_model)
        self.expected: ExpectedPrompts | None = None
        if self.aside is not None:
            self.expected = ExpectedPrompts(
                self.model,
                self.cache,
                context_length=self.context_length,
                max_num_tokens=self.policy.max_num_batched_tokens,
                clock=clock,
                aside=self.aside,
                post=queue.post,
            )
            self.memories.add(self.expected)
        self.core = EngineCore(
            self.model,
            self.cache,
            self.memories,
            limits,
            policy=self.policy,
            clock=clock,
            tier=self.tier,
            queue=queue,
            expected=self.expected,
            draft_model=self.draft_model,
            mtp_head=None if self.open_head is None else self.open_head(self.model, self.cache.pool),
        )

    def request(
        self,
        name: str,
        ids: Sequence[int],
        params: SamplingParams,
        namespace: bytes | None = b"",
        constraint: TokenConstraint | None = None,
        decoder: TextDecoder | None = None,
        spelled: Callable[[], SpelledPrompt] | None = None,
    ) -> Request:
        lora = Adapter("fake", "fake", 0) if namespace is not None and is_adapted(namespace) else None
        options = RequestOptions(cache_match="off") if namespace is None else RequestOptions(namespace, lora=lora)
        reply = Reply(
            params,
            ids,
            decoder=decoder or LetterDecoder(),
            vocab_size=self.vocab_size,
            eos_token_ids=(EOS,),
            constraint=constraint,
        )
        return Request(RequestSpec(name, prompt(ids), params, options, self.now, spelled), reply)

    def add(
        self,
        name: str,
        ids: Sequence[int],
        params: SamplingParams,
        namespace: bytes | None = b"",
        constraint: TokenConstraint | None = None,
        decoder: TextDecoder | None = None,
        spelled: Callable[[], SpelledPrompt] | None = None,
    ) -> Request:
        request = self.request(name, ids, params, namespace, constraint, decoder, spelled)
        self.core.add(request)
        self.requests[name] = request
        return request

    def step(self) -> None:
        for output in self.core.step():
            self.outputs.setdefault(output.request_id, []).append(output)
        self.core.check()

    def abort(self, name: str) -> None:
        output = self.core.abort(name)
        if output is not None:
            self.outputs.setdefault(name, []).append(output)
        self.core.check()

    def run(self, max_steps: int = 5000) -> None:
        for _ in range(max_steps):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError(f"still busy after {max_steps} steps")

    def tokens(self, name: str) -> tuple[int, ...]:
        """The ids of a finished request, which its deltas must agree with."""
        outputs = self.outputs[name]
        completion = outputs[-1].completion
        assert completion is not None, outputs[-1].error
        deltas = [output.delta for output in outputs if output.delta]
        assert "".join(delta.text for delta in deltas) == completion.text
        assert tuple(t for delta in deltas for t in delta.token_ids) == completion.token_ids
        assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
        assert deltas[-1].finish_reason == completion.finish_reason
        return completion.token_ids

    def error(self, name: str) -> Exception:
        error = self.outputs[name][-1].error
        assert error is not None
        return error
