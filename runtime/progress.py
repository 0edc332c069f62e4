"""Progress of a long operation: its stages, their expected durations, and the completed part.

Knows no kernels, files or displays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Unit = Literal["bytes", "received bytes", "kernels", "tokens", "steps"]


@dataclass(frozen=True)
class Stage:
    """A stage of a compile, the unit of its progress, and the seconds it takes on two cores of a Xeon server.

    Another machine takes longer or shorter. The seconds give the stage's share of the compile, not when it ends.
    """

    name: str
    unit: Unit
    seconds: float


@dataclass(frozen=True)
class Progress:
    """The state of a compile: `done` of `total` units of a stage: download, read, build, weights, verify, publish.

    `stages` are all stages in order. They are empty while nothing is known of the source, and `total` is 0 while the
    size of a download is unknown.
    """

    stage: str
    done: int
    total: int
    stages: tuple[Stage, ...] = ()

    @property
    def unit(self) -> Unit:
        """Unit of `done` and `total`; "steps" if the stage is not one of `stages`."""
        return next((stage.unit for stage in self.stages if stage.name == self.stage), "steps")

    @property
    def stage_fraction(self) -> float:
        """Completed part of the stage, 0 to 1."""
        return min(1.0, self.done / self.total) if self.total > 0 else 0.0

    @property
    def fraction(self) -> float:
        """Completed part of the whole compile, 0 to 1; 0 as long as `stages` are empty.

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
