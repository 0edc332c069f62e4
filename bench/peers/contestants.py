"""An engine that is compared, and ours: the server for a scenario, and its client. Knows no other engine.

Where an engine divides its context between streams, every number of streams has a separate server. Servers stay until
the next round, when each engine is restarted.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

from ..first_start import forget
from ..processes import RADIXLM, core_taken
from ..prompts import Prompts
from ..served import ServedProcess
from .client import CompletionsClient, EngineClient, LlamaCppClient
from .scenarios import FIGURES, FIRST_START, SCENARIOS, SIZE_FIGURES, START, Scenario, Values
from .starting import start, weight, when_warm

OURS = "radixlm"
_BEST = {figure.name: max if figure.higher_is_better else min for figure in (*FIGURES, *SIZE_FIGURES)}
Command = tuple[str, ...]
_ANY_VOCABULARY = 300  # tokens that every model has
_POLL_S = 0.5


class Contestant(ABC):
    """An engine with a model. A scenario's figures are those of the better of its commands, if it has several."""

    client: Callable[[int], EngineClient] = LlamaCppClient  # of the server at a port
    is_slow_to_start = False  # then it is started once, not in every round
    is_held = False  # whether it was built for a target's instructions and uses no others
    one_server = False  # see `Plan`
    ready_path = "/health"

    def __init__(self, name: str) -> None:
        self.name = name
        self._servers: dict[Command, tuple[ServedProcess, EngineClient]] = {}

    @abstractmethod
    def commands(self, scenario: Scenario) -> Sequence[Command]:
        """Return the commands of servers, without their `--port PORT`."""

    @property
    def why_missing(self) -> str | None:
        """Return what it lacks, or None if it can be measured."""
        missing = [path for path in self.needs if not path.exists()]
        return f"there is no {missing[0]}" if missing else None

    @property
    def needs(self) -> Sequence[Path]:
        """The files and folders that it needs."""
        return ()

    def start(self, prompts: Prompts) -> Values:
        """Close its servers, and measure the start of the one for a single stream, which stays."""
        if self.is_slow_to_start and self._servers:
            return {}
        self.close()
        command = self.commands(SCENARIOS[0])[0]
        server, client, values = start(command, self.client, prompts, self.ready_path)
        self._servers[command] = server, client
        return values if self.one_server else values | when_warm(server, client, prompts)

    def first_start(self, model: Path, prompts: Prompts) -> Values:
        """Measure the first start, without files of an earlier one, and with the model's file not in the page cache."""
        forget(model)
        return {FIRST_START.name: self.start(prompts)[START.name]}

    def measure(self, scenario: Scenario, prompts: Prompts) -> Values:
        """Return the figures of a scenario; each command gets separate prompts."""
        found: Values = {}
        for command in self.commands(scenario):
            client = self._start_client(command)
            with core_taken() if scenario.takes_core else nullcontext():
                runs = [scenario.measure(client, prompts) for _ in range(scenario.repeats)]
            for name in runs[0]:
                value = statistics.median(run[name] for run in runs)
                found[name] = _BEST[name](value, found.get(name, value))
        return found | weight(self._servers[command][0]) if scenario.weighs else found

    def close(self) -> None:
        """End its processes."""
        while self._servers:
            self._servers.popitem()[1][0].close()

    def _start_client(self, command: Command) -> EngineClient:
        """Return a client of the server with this command, which is started and warmed up unless it runs."""
        if command not in self._servers:
            if self.one_server:
                self.close()
            server = ServedProcess(command, ready_path=self.ready_path)
            client = self.client(server.port)
            self._servers[command] = server, client
            client.ask(Prompts(len(self._servers), _ANY_VOCABULARY).ids(64), 8)  # `start` measures the first request
        return self._servers[command][1]


class RadixLM(Contestant):
    """`radixlm serve` without drafts: greedy replies to random prompts repeat themselves more than those of users."""

    client = CompletionsClient

    def __init__(self, model: Path, *prefix: str) -> None:
        super().__init__(OURS)
        self._command = (*prefix, RADIXLM, "serve", str(model), "--speculate", "off")

    def commands(self, scenario: Scenario) -> Sequence[Command]:
        """Return the command of `radixlm serve`, the same for all scenarios."""
        return [self._command]


class FreshRadixLM(RadixLM):
    """`radixlm serve` of a model's file: the first start compiles it into an empty cache folder, which others use.

    Attributes:
        artifact: the artifact that the first start has made.
    """

    def __init__(self, gguf: Path, cache: Path) -> None:
        super().__init__(gguf, "env", f"XDG_CACHE_HOME={cache}")
        self._artifacts = cache / "radixlm" / "artifacts"

    @property
    def artifact(self) -> Path:
        """The artifact that the first start has made."""
        [path] = self._artifacts.glob("*.radixlm")
        return path

    def first_start(self, model: Path, prompts: Prompts) -> Values:
        """Measure the first start; end when the artifact is written, which the server does while it serves."""
        found = super().first_start(model, prompts)
        while not list(self._artifacts.glob("*.radixlm")) or list(self._artifacts.glob("*.lock")):
            time.sleep(_POLL_S)
        self.close()
        return found


class TargetRadixLM(RadixLM):
    """`radixlm serve` of an artifact that is compiled for a target's instructions.

    Attributes:
        artifact: the artifact that the first start has made.
    """

    def __init__(self, gguf: Path, folder: Path, target: str) -> None:
        self.artifact = folder / f"{gguf.stem}.radixlm"
        self._target = target
        super().__init__(self.artifact)

    def first_start(self, model: Path, prompts: Prompts) -> Values:
        """Compile the model; how long that takes is a figure of the native target alone."""
        subprocess.run([RADIXLM, "compile", model, "-o", self.artifact, "--target", self._target], check=True)
        return {}


def close_all(contestants: Sequence[Contestant]) -> None:
    """Close all contestants."""
    for contestant in contestants:
        with suppress(OSError):
            contestant.close()
