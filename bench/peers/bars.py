"""What a comparison with llama.cpp must show. Knows figures and ratios, not how they were measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..engine import figures
from ..engine.figures import Figure
from ..timing import Spread

OURS = "radixlm"
SAME, Q4_0, WHEEL = "llama.cpp, same file", "llama.cpp, Q4_0", "its wheel, Q4_0"
PEERS = (SAME, Q4_0, WHEEL)
Values = Mapping[str, Mapping[str, Sequence[float]]]  # contestant -> figure's name -> a value for each round


@dataclass(frozen=True)
class Verdict:
    """A bar, what it was held against, and whether it is met."""

    bar: str
    value: float
    wanted: float
    is_met: bool


# For SmolLM2: how many times better than which peers, in the median of rounds; than the best of them if more than one.
RATIO_BARS: tuple[tuple[Figure, tuple[str, ...], float], ...] = (
    (figures.DECODE, (SAME,), 2.4),
    (figures.DECODE, (Q4_0,), 2.3),
    (figures.PREFILL_512, (SAME,), 15.0),
    (figures.PREFILL_512, (Q4_0,), 4.5),
    (figures.STREAMS_8, PEERS, 3.7),
    (figures.STREAMS_50, PEERS, 3.7),
)
DECODE_BANDWIDTH_SHARE = 0.75


def ratios(values: Values, figure: Figure, peers: Sequence[str]) -> Spread:
    """How many times better ours is than the best of `peers`, round by round."""
    best = max if figure.higher_is_better else min
    rounds = zip(values[OURS][figure.name], *(values[peer][figure.name] for peer in peers), strict=True)
    return Spread.of(figure.gain(ours, best(theirs)) for ours, *theirs in rounds)


def verdicts(values: Values, decode_bandwidth_share: float) -> list[Verdict]:
    """Every bar, held against the medians."""
    found = []
    for figure, peers, wanted in RATIO_BARS:
        ratio = ratios(values, figure, peers).median
        against = peers[0] if len(peers) == 1 else "the best llama.cpp"
        found.append(Verdict(f"{figure.title}: times {against}", ratio, wanted, ratio >= wanted))
    share = decode_bandwidth_share
    bandwidth = f"{figures.DECODE.title}: share of read bandwidth"
    found.append(Verdict(bandwidth, share, DECODE_BANDWIDTH_SHARE, share >= DECODE_BANDWIDTH_SHARE))
    return found
