"""The figures that `radixlm bench` measures, in rounds until the time is up, and the minimum work of each.

Knows prompts and replies by their lengths, and the manifest, not the format of a table.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from radixlm.runtime.artifact.manifest import Manifest
from radixlm.runtime.model.machine_limits import LimitsMeter

from .engine_timer import EngineTimer, random_ids

_WARM_UP_PROMPT, _WARM_UP_REPLY = 64, 8  # tokens
_MAX_ROUNDS = 5


@dataclass(frozen=True)
class Figure:
    """A measurement: `num_requests` at once, with prompts and replies of given lengths in tokens.

    A reply of one token measures prefill. A longer reply to a single prompt measures decode after the last measured
    prompt of this length, which is then cached.
    """

    name: str
    num_prompt: int
    num_reply: int = 1
    num_requests: int = 1

    @property
    def is_prefill(self) -> bool:
        """Return whether the figure counts prompt tokens, rather than the reply's tokens after the first."""
        return self.num_reply == 1

    def expected_s(self, prefill_per_s: float, decode_per_s: float) -> float:
        """Estimate the seconds from the rates of a single request. Concurrent replies take half of their total time."""
        together = (1 + self.num_requests) / 2
        return self.num_prompt * self.num_requests / prefill_per_s + self.num_reply / decode_per_s * together


FIGURES = (
    Figure("prefill 512", 512),
    Figure("prefill 2,048", 2048),
    Figure("decode", 16, 33),
    Figure("decode after 2,048", 2048, 33),
    Figure("8 requests decode", 32, 33, 8),
)


@dataclass
class Measured:
    """The values of a figure, one for each round.

    Attributes:
        tokens_per_s: rate of all requests together.
        gb_per_s: rate at which weights and KV are read; empty if it depends on the size of the steps.
        memory_share: share of the memory bandwidth measured in the same round.
        gop_per_s: rate of products with weights, two operations each; empty if the artifact does not have their number.
        integer_share: share of the integer rate of all threads.
    """

    name: str
    tokens_per_s: list[float] = field(default_factory=list)
    gb_per_s: list[float] = field(default_factory=list)
    memory_share: list[float] = field(default_factory=list)
    gop_per_s: list[float] = field(default_factory=list)
    integer_share: list[float] = field(default_factory=list)

    def add(self, figure: Figure, speed: float, manifest: Manifest, read_gb_per_s: float, gop_per_s: float) -> None:
        """Add the value of a round, given the machine's limits in that round."""
        self.tokens_per_s.append(speed)
        if figure.num_requests == 1 and not figure.is_prefill:
            self.gb_per_s.append(speed * decode_bytes(manifest, figure.num_prompt + figure.num_reply // 2) / 1e9)
            self.memory_share.append(self.gb_per_s[-1] / read_gb_per_s)
        if manifest.quantization.token_weights is not None:
            products: float = manifest.quantization.token_weights
            if figure.is_prefill:  # logits are computed for the last token only
                head = manifest.model.vocab_size * manifest.model.hidden_size
                products -= head * (figure.num_prompt - 1) / figure.num_prompt
            self.gop_per_s.append(speed * 2 * products / 1e9)
            self.integer_share.append(self.gop_per_s[-1] / gop_per_s)

    @property
    def median(self) -> dict[str, float]:
        """The median of each list that is not empty."""
        lists = {name: values for name, values in vars(self).items() if isinstance(values, list)}
        return {name: median(values) for name, values in lists.items() if values}


def decode_bytes(manifest: Manifest, context: int) -> int:
    """Return the bytes of weights, KV and states read to decode one token after `context` tokens."""
    kv = manifest.kv
    num_bytes = (manifest.quantization.token_bytes or manifest.module.weights_bytes) + manifest.model.state_bytes
    for layer, attention in enumerate(manifest.model.kv_attentions):
        seen = min(context, attention.window or context, attention.chunk or context)
        num_bytes += seen * kv.of_layer(layer).page_items * kv.itemsize // kv.page_size
    return num_bytes


class Rounds:
    """Measures all figures in turns, so that changes of the machine's speed affect all of them.

    Args:
        meter: measures the memory bandwidth before and after each figure; the better one counts.
        integer_gop_per_s: integer rate of all threads.
        context_length: figures that need more tokens are skipped.
        seconds: time after which no round starts. A figure that alone would take longer is skipped.
        tell: called with a line about each skipped figure and each round.
    """

    def __init__(
        self,
        timer: EngineTimer,
        manifest: Manifest,
        meter: LimitsMeter,
        *,
        integer_gop_per_s: float,
        context_length: int,
        seconds: float,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._timer, self._manifest, self._meter = timer, manifest, meter
        self._integer_gop_per_s = integer_gop_per_s
        self._context_length, self._seconds, self._tell = context_length, seconds, tell
        self._random = random.Random(0)
        self._prompts: dict[int, list[int]] = {}  # the last computed prompt of each length

    def measure(self) -> list[Measured]:
        """Measure each figure in one to five rounds, in about `seconds`. Returns a result for each figure."""
        started = self._clock()
        cost = self._choose_figures()
        found = {figure: Measured(figure.name) for figure in cost}
        for number in range(_MAX_ROUNDS):
            for figure, measured in found.items():
                begun = self._clock()
                if number and begun + cost[figure] > started + self._seconds:
                    continue
                before, speed = self._meter.read_gb_per_s(), self._speed(figure)
                bandwidth = max(before, self._meter.read_gb_per_s())
                measured.add(figure, speed, self._manifest, bandwidth, self._integer_gop_per_s)
                cost[figure] = self._clock() - begun
            self._tell(f"round {number + 1}: {self._clock() - started:.0f} s")
            if self._clock() + min(cost.values(), default=0) > started + self._seconds:
                break
        return list(found.values())

    def _choose_figures(self) -> dict[Figure, float]:
        """Return the figures that fit into context and time, with the expected seconds of each."""
        prompt = self._ids(_WARM_UP_PROMPT)
        prefill_per_s = _WARM_UP_PROMPT / self._timer.prefill(prompt)
        decode_per_s = self._timer.decode(prompt, _WARM_UP_REPLY)
        chosen = {}
        for figure in FIGURES:
            expected_s = figure.expected_s(prefill_per_s, decode_per_s)
            if figure.num_prompt + figure.num_reply > self._context_length:
                self._tell(f"{figure.name} is skipped: the context is {self._context_length:,} tokens")
            elif expected_s > self._seconds:
                self._tell(f"{figure.name} is skipped: it would take {expected_s:.0f} s; raise --seconds")
            else:
                chosen[figure] = expected_s
        return chosen

    def _speed(self, figure: Figure) -> float:
        """Measure a figure once, in tokens per second."""
        if figure.is_prefill:
            self._prompts[figure.num_prompt] = prompt = self._ids(figure.num_prompt)
            return figure.num_prompt / self._timer.prefill(prompt)
        if figure.num_requests > 1:
            prompts = [self._ids(figure.num_prompt) for _ in range(figure.num_requests)]
            return self._timer.streams(prompts, figure.num_reply)
        prompt = self._prompts.get(figure.num_prompt) or self._ids(figure.num_prompt)
        return self._timer.decode(prompt, figure.num_reply)

    def _ids(self, count: int) -> list[int]:
        return random_ids(self._random, count, self._manifest.model.vocab_size)
