"""The engines that are compared, one class each: what is started for a scenario, with its best known settings.

Every number of streams has a server of its own where an engine divides its context between them. Servers stay until
the next round, when each engine is started anew.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from radixlm.compile.sources.gguf_file import GGUFFile
from radixlm.compile.sources.gguf_tokenizer import TokenType

from ..processes import RADIXLM
from ..prompts import Prompts
from ..served import ServedProcess
from .client import CompletionsClient, EngineClient, LlamaCppClient
from .scenarios import FIGURES, SCENARIOS, Scenario, Values
from .starting import start

OURS = "radixlm"
_BEST = {figure.name: max if figure.higher_is_better else min for figure in FIGURES}
Command = tuple[str, ...]
_ANY_VOCABULARY = 300  # tokens that every model has


class Contestant(ABC):
    """An engine with a model. A scenario's figures are those of the better of its commands, if it has several."""

    client: Callable[[int], EngineClient] = LlamaCppClient  # of the server at a port
    is_slow_to_start = False  # then it is started once, not in every round
    is_held = False  # whether it was built for a target's instructions and uses no others

    def __init__(self, name: str) -> None:
        self.name = name
        self._servers: dict[Command, tuple[ServedProcess, EngineClient]] = {}

    @abstractmethod
    def commands(self, scenario: Scenario) -> Sequence[Command]:
        """Servers, less their `--port PORT`."""

    @property
    def why_missing(self) -> str | None:
        """What it lacks; None: it can be measured."""
        missing = [path for path in self.needs if not path.exists()]
        return f"there is no {missing[0]}" if missing else None

    @property
    def needs(self) -> Sequence[Path]:
        """Files and folders."""
        return ()

    def start(self, prompts: Prompts) -> Values:
        """Close its servers, and measure how the one for a single stream starts, which stays."""
        if self.is_slow_to_start and self._servers:
            return {}
        self.close()
        command = self.commands(SCENARIOS[0])[0]
        server, client, values = start(command, self.client, prompts)
        self._servers[command] = server, client
        return values

    def measure(self, scenario: Scenario, prompts: Prompts) -> Values:
        """The figures of a scenario; each command gets prompts of its own."""
        found: Values = {}
        for command in self.commands(scenario):
            runs = [scenario.measure(self._client(command), prompts) for _ in range(scenario.repeats)]
            for name in runs[0]:
                value = statistics.median(run[name] for run in runs)
                found[name] = _BEST[name](value, found.get(name, value))
        return found

    def close(self) -> None:
        """End its processes."""
        while self._servers:
            self._servers.popitem()[1][0].close()

    def _client(self, command: Command) -> EngineClient:
        if command not in self._servers:
            server = ServedProcess(command)
            client = self.client(server.port)
            self._servers[command] = server, client
            client.ask(Prompts(len(self._servers), _ANY_VOCABULARY).ids(64), 8)  # `start` measures what comes first
        return self._servers[command][1]


class RadixLM(Contestant):
    """`radixlm serve` without guesses: greedy replies to random prompts repeat themselves more than those of users."""

    client = CompletionsClient

    def __init__(self, artifact: Path) -> None:
        super().__init__(OURS)
        self._command = (RADIXLM, "serve", str(artifact), "--speculate", "off")

    def commands(self, scenario: Scenario) -> Sequence[Command]:
        """See `Contestant`."""
        return [self._command]


class LlamaCpp(Contestant):
    """A `llama-server` of llama.cpp: flash attention is faster everywhere but in single decode."""

    is_held = True

    def __init__(self, name: str, server: Command, gguf: Path, num_threads: int, needs: Sequence[Path] = ()) -> None:
        super().__init__(name)
        self._server, self._gguf, self._num_threads, self._needs = server, gguf, num_threads, needs

    @property
    def needs(self) -> Sequence[Path]:
        """See `Contestant`."""
        return (*self._needs, self._gguf)

    def commands(self, scenario: Scenario) -> Sequence[Command]:
        """See `Contestant`."""
        size = str(scenario.num_streams * scenario.context)
        command = (
            *(*self._server, "--model", str(self._gguf), "--threads", str(self._num_threads)),
            *("--parallel", str(scenario.num_streams), "--ctx-size", size, "--cache-ram", "0"),
        )
        is_single = scenario.num_streams == 1 and scenario.decodes
        return [(*command, *settings) for settings in self.settings(is_single_decode=is_single)]

    def settings(self, *, is_single_decode: bool) -> Sequence[Command]:
        """Options that differ between scenarios."""
        on, off = ("--flash-attn", "on"), ("--flash-attn", "off")
        return [on, off] if is_single_decode else [on]


class Wheel(LlamaCpp):
    """llama.cpp as pip gives it, in the wheel `xllamacpp`, which is built for AVX2."""

    def __init__(self, name: str, gguf: Path, num_threads: int) -> None:
        super().__init__(name, (sys.executable, "-m", "bench.peers.wheel_server"), gguf, num_threads)

    @property
    def why_missing(self) -> str | None:
        """See `Contestant`."""
        return None if importlib.util.find_spec("xllamacpp") else "xllamacpp is not installed"


class IkLlamaCpp(LlamaCpp):
    """ik_llama.cpp. Weights that it repacks at load decode faster, and prompts slower."""

    def start(self, prompts: Prompts) -> Values:
        """See `Contestant`."""
        self.client = partial(LlamaCppClient, banned=control_ids(self._gguf))
        return super().start(prompts)

    def settings(self, *, is_single_decode: bool) -> Sequence[Command]:
        """See `LlamaCpp`."""
        on = ("-fa", "on", "--log-disable")  # else it leaves a llama.log in this folder
        repacked = (*on, "-rtr")
        return [on, repacked] if is_single_decode else [on]


class OpenVINO(Contestant):
    """OpenVINO GenAI behind our front, which imports nothing of ours."""

    client = CompletionsClient

    def __init__(self, name: str, venv: Path, model: Path, num_threads: int) -> None:
        super().__init__(name)
        self._python, self._model, self._num_threads = venv / "bin" / "python", model, num_threads

    @property
    def needs(self) -> Sequence[Path]:
        """See `Contestant`."""
        return self._python, self._model

    def commands(self, scenario: Scenario) -> Sequence[Command]:
        """See `Contestant`."""
        front = (str(self._python), "-m", "bench.peers.openvino_server")
        return [(*front, "--model", str(self._model), "--threads", str(self._num_threads))]


class VLLM(Contestant):
    """vLLM for processors, in bfloat16."""

    client = CompletionsClient
    is_slow_to_start = True

    def __init__(self, name: str, venv: Path, model: Path, num_threads: int) -> None:
        super().__init__(name)
        self._vllm, self._model, self._num_threads = venv / "bin" / "vllm", model, num_threads

    @property
    def needs(self) -> Sequence[Path]:
        """See `Contestant`."""
        return self._vllm, self._model

    def commands(self, scenario: Scenario) -> Sequence[Command]:
        """See `Contestant`."""
        environment = ("VLLM_CPU_KVCACHE_SPACE=1", f"VLLM_CPU_OMP_THREADS_BIND=0-{self._num_threads - 1}")
        options = ("--dtype", "bfloat16", "--max-num-seqs", "64", "--max-model-len", "8192")
        return [("env", *environment, str(self._vllm), "serve", str(self._model), *options)]


def control_ids(gguf: Path) -> list[int]:
    """The tokens of a file that are no text, ends of replies among them."""
    file = GGUFFile(gguf)
    kinds = file.metadata["tokenizer.ggml.token_type"]
    file.close()
    return [token_id for token_id, kind in enumerate(kinds) if kind == TokenType.CONTROL]


def peers_of(gguf: Path, q4_0: Path, places: dict[str, Path], cache: Path, num_threads: int) -> list[Contestant]:
    """All that a file can be compared with; `places` are the folders of `PLACES`."""
    made, native, ik = cache / "peers" / gguf.stem, places["llama.cpp"], places["ik_llama.cpp"] / "llama-server"
    openvino, server = places["openvino"], native / "llama-server"
    peers: list[Contestant] = [
        LlamaCpp("llama.cpp, same file", (str(server),), gguf, num_threads, [server]),
        LlamaCpp("llama.cpp, Q4_0", (str(server),), q4_0, num_threads, [server]),
        Wheel("its wheel, Q4_0", q4_0, num_threads),
        IkLlamaCpp("ik_llama.cpp, same file", (str(ik),), gguf, num_threads, [ik]),
        OpenVINO("OpenVINO, int8", openvino, made / "int8", num_threads),
        OpenVINO("OpenVINO, int4", openvino, made / "int4", num_threads),
        VLLM("vLLM, bf16", places["vllm"], made / "hf", num_threads),
    ]
    if any(kind in gguf.name for kind in ("Q4_0", "Q4_1", "Q8_0")):  # it fails to read the others
        peers.insert(-1, OpenVINO("OpenVINO, same file", openvino, gguf, num_threads))
    return peers


PLACES = {
    "llama.cpp": Path(".cache/llama.cpp"),
    "ik_llama.cpp": Path(".cache/ik_llama.cpp"),
    "openvino": Path(".venv-openvino"),
    "vllm": Path(".venv-vllm"),
}
"""Where `make peers` leaves them; `--peer NAME=DIR` names other places."""


def places_for(target: str) -> dict[str, Path]:
    """Where the peers are that were built for a target, `native` or one of `radixlm compile`."""
    if target == "native":
        return dict(PLACES)
    built = {name: PLACES[name].with_name(f"{PLACES[name].name}-{target}") for name in ("llama.cpp", "ik_llama.cpp")}
    return PLACES | built


def closed(contestants: Sequence[Contestant]) -> None:
    """End all processes."""
    for contestant in contestants:
        with suppress(OSError):
            contestant.close()
