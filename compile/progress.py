"""How far a compile is: its stages, the work that each is expected to be, and the part of all that is done.

Knows no kernels, files or displays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Unit = Literal["bytes", "received bytes", "kernels", "tokens", "steps"]

_READ_S = 2.0
_PUBLISH_S = 0.1
_KERNEL_S = 0.27
_TYPICAL_NUM_KERNELS = 25
_RECEIVED_BYTES_PER_S = 50e6
_WRITTEN_BYTES_PER_S = 600e6
_COMPARED_BYTES_PER_S = 1200e6
_EVALUATED_BYTES_PER_S = 1800e6


@dataclass(frozen=True)
class Stage:
    """A stage of a compile, what its progress counts, and the seconds it takes on two cores of a Xeon server.

    Another machine takes longer or shorter. The seconds say how much of the compile a stage is, not when it ends.
    """

    name: str
    unit: Unit
    seconds: float


@dataclass(frozen=True)
class Progress:
    """`done` of `total` units of a stage: download, read, build, weights, verify, publish.

    `stages` are all stages in order. They are empty while nothing is known of the source, and `total` is 0 while the
    size of a download is unknown.
    """

    stage: str
    done: int
    total: int
    stages: tuple[Stage, ...] = ()

    @property
    def unit(self) -> Unit:
        """What `done` and `total` count; "steps" if the stage is not one of `stages`."""
        return next((stage.unit for stage in self.stages if stage.name == self.stage), "steps")

    @property
    def stage_fraction(self) -> float:
        """The part of the stage that is done, 0 to 1."""
        return min(1.0, self.done / self.total) if self.total > 0 else 0.0

    @property
    def fraction(self) -> float:
        """The part of the whole compile that is done, 0 to 1; 0 as long as `stages` are empty.

        >>> Progress("verify", 1, 2, (Stage("weights", "bytes", 6.0), Stage("verify", "bytes", 4.0))).fraction
        0.8
        """
        whole = sum(stage.seconds for stage in self.stages)
        before = 0.0
        for stage in self.stages:
            if stage.name == self.stage:
                return (before + stage.seconds * self.stage_fraction) / whole
            before += stage.seconds
        return 0.0


def expected_stages(
    *,
    weights_bytes: int,
    num_kernels: int = _TYPICAL_NUM_KERNELS,
    received_bytes: int = 0,
    compares_weights: bool = True,
) -> tuple[Stage, ...]:
    """Return the stages of a compile that downloads, builds and writes so much.

    Args:
        compares_weights: whether "verify" is more than logits.
    """
    verify_s = weights_bytes / _EVALUATED_BYTES_PER_S + compares_weights * weights_bytes / _COMPARED_BYTES_PER_S
    stages = (
        Stage("download", "received bytes", received_bytes / _RECEIVED_BYTES_PER_S),
        Stage("read", "steps", _READ_S),
        Stage("build", "kernels", _KERNEL_S * num_kernels),
        Stage("weights", "bytes", weights_bytes / _WRITTEN_BYTES_PER_S),
        Stage("verify", "bytes", verify_s),
        Stage("publish", "steps", _PUBLISH_S),
    )
    return stages if received_bytes else stages[1:]
