"""The engines that ours is compared with, one class each: the server for a scenario, with its best known settings.

Knows files, folders and command lines; not what is requested.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from radixlm.compile.sources.gguf_file import GGUFFile
from radixlm.compile.sources.gguf_tokenizer import TokenType

from ..prompts import Prompts
from .client import CompletionsClient, LlamaCppClient, TextClient
from .comparison import is_of_machine
from .contestants import Command, Contestant
from .scenarios import Scenario, Values
from .shapes import SHAPES

_WORD = re.compile("[\u0120\u2581][a-z]{3,}")  # a space as vocabularies have it, and letters


class LlamaCpp(Contestant):
    """A `llama-server` of llama.cpp: flash attention is faster everywhere but in single decode."""

    is_held = True

    def __init__(self, name: str, server: Command, gguf: Path, num_threads: int, needs: Sequence[Path] = ()) -> None:
        super().__init__(name)
        self._server, self._gguf, self._num_threads, self._needs = server, gguf, num_threads, needs

    @property
    def needs(self) -> Sequence[Path]:
        """The files of the program, and the GGUF file."""
        return (*self._needs, self._gguf)

    def commands(self, scenario: Scenario) -> Sequence[Command]:
        """Return the commands of llama-server: several for a single decode, with and without flash attention."""
        size = str(scenario.num_streams * scenario.context)
        command = (
            *(*self._server, "--model", str(self._gguf), "--threads", str(self._num_threads)),
            *("--parallel", str(scenario.num_streams), "--ctx-size", size, "--cache-ram", "0"),
        )
        is_single = scenario.num_streams == 1 and scenario.decodes and not self.one_server
        return [(*command, *settings) for settings in self.settings(is_single_decode=is_single)]

    def settings(self, *, is_single_decode: bool) -> Sequence[Command]:
        """Return options that differ between scenarios."""
        on, off = ("--flash-attn", "on"), ("--flash-attn", "off")
        return [on, off] if is_single_decode else [on]


class Wheel(LlamaCpp):
    """llama.cpp as pip installs it, in the wheel `xllamacpp`, which is built for AVX2."""

    def __init__(self, name: str, gguf: Path, num_threads: int) -> None:
        super().__init__(name, (sys.executable, "-m", "bench.peers.wheel_server"), gguf, num_threads)

    @property
    def why_missing(self) -> str | None:
        """Return that xllamacpp is not installed; None if it is."""
        return None if importlib.util.find_spec("xllamacpp") else "xllamacpp is not installed"


class IkLlamaCpp(LlamaCpp):
    """ik_llama.cpp. Weights that it repacks at load decode faster, and prefill slower."""

    def start(self, prompts: Prompts) -> Values:
        """Measure the start, with a client that bans the file's control tokens."""
        self.client = partial(LlamaCppClient, banned=control_ids(self._gguf))
        return super().start(prompts)

    def settings(self, *, is_single_decode: bool) -> Sequence[Command]:
        """Return options with the weights repacked when loaded, and for a single decode also without that."""
        on = ("-fa", "on", "--log-disable")  # else it writes a llama.log in this folder
        repacked = (*on, "-rtr")
        return [repacked] if self.one_server else [on, repacked] if is_single_decode else [on]


class DasLLAMA(Contestant):
    """dasLLAMA's server from its wheel, with its defaults."""

    ready_path = "/v1/models"

    def __init__(self, name: str, venv: Path, gguf: Path, num_threads: int) -> None:
        super().__init__(name)
        self._server, self._gguf, self._num_threads = venv / "bin" / "dasllama-server", gguf, num_threads

    @property
    def needs(self) -> Sequence[Path]:
        """The program and the GGUF file."""
        return self._server, self._gguf

    def start(self, prompts: Prompts) -> Values:
        """Measure the start, with a client that sends text of the file's words."""
        self.client = partial(TextClient, words=words_of(self._gguf))
        return super().start(prompts)

    def first_start(self, model: Path, prompts: Prompts) -> Values:
        """Measure the first start, which converts the file and writes the result next to it, for the later ones."""
        for made in model.parent.glob(f"{model.name}.*.dlim"):
            made.unlink()
        return super().first_start(model, prompts)

    def commands(self, scenario: Scenario) -> Sequence[Command]:
        """Return the command of the server, without a GPU."""
        model = ("--model", str(self._gguf), "--gpu", "off", "--threads", str(self._num_threads))
        return [(str(self._server), *model, "--ctx", str(scenario.context), "--streams", str(scenario.num_streams))]


class OpenVINO(Contestant):
    """OpenVINO GenAI with our HTTP server, which imports nothing of ours."""

    client = CompletionsClient

    def __init__(self, name: str, venv: Path, model: Path, num_threads: int) -> None:
        super().__init__(name)
        self._python, self._model, self._num_threads = venv / "bin" / "python", model, num_threads

    @property
    def needs(self) -> Sequence[Path]:
        """The Python that has OpenVINO GenAI, and the model."""
        return self._python, self._model

    def commands(self, scenario: Scenario) -> Sequence[Command]:
        """Return the command of our server for OpenVINO GenAI, with memory for the KV of the scenario."""
        front = (str(self._python), "-m", "bench.peers.openvino_server")
        kv_gb = str(1 + scenario.num_streams * scenario.context // 8192 if self.one_server else 1)
        return [(*front, "--model", str(self._model), "--threads", str(self._num_threads), "--kv-gb", kv_gb)]


class VLLM(Contestant):
    """vLLM for processors, in bfloat16."""

    client = CompletionsClient
    is_slow_to_start = True

    def __init__(self, name: str, venv: Path, model: Path, num_threads: int) -> None:
        super().__init__(name)
        self._vllm, self._model, self._num_threads = venv / "bin" / "vllm", model, num_threads

    @property
    def needs(self) -> Sequence[Path]:
        """The `vllm` program and the model."""
        return self._vllm, self._model

    def commands(self, scenario: Scenario) -> Sequence[Command]:
        """Return the command of `vllm serve`, on all cores."""
        environment = ("VLLM_CPU_KVCACHE_SPACE=1", f"VLLM_CPU_OMP_THREADS_BIND=0-{self._num_threads - 1}")
        options = ("--dtype", "bfloat16", "--max-num-seqs", "64", "--max-model-len", "8192")
        return [("env", *environment, str(self._vllm), "serve", str(self._model), *options)]


def control_ids(gguf: Path) -> list[int]:
    """Return the tokens of a file that are no text, including ends of replies."""
    file = GGUFFile(gguf)
    kinds = file.metadata["tokenizer.ggml.token_type"]
    file.close()
    return [token_id for token_id, kind in enumerate(kinds) if kind == TokenType.CONTROL]


def words_of(gguf: Path) -> list[str]:
    """Return those tokens of a file that are a space and a word: a text of n of them has n tokens."""
    file = GGUFFile(gguf)
    words = [" " + token[1:] for token in file.metadata["tokenizer.ggml.tokens"] if _WORD.fullmatch(token)]
    file.close()
    return words


def peers_of(gguf: Path, q4_0: Path, places: dict[str, Path], cache: Path, num_threads: int) -> list[Contestant]:
    """Return all that a file can be compared with; `places` are the folders of `PLACES`."""
    made, native, ik = cache / "peers" / gguf.stem, places["llama.cpp"], places["ik_llama.cpp"] / "llama-server"
    openvino, server = places["openvino"], native / "llama-server"
    peers: list[Contestant] = [
        LlamaCpp("llama.cpp, same file", (str(server),), gguf, num_threads, [server]),
        LlamaCpp("llama.cpp, Q4_0", (str(server),), q4_0, num_threads, [server]),
        Wheel("its wheel, Q4_0", q4_0, num_threads),
        IkLlamaCpp("ik_llama.cpp, same file", (str(ik),), gguf, num_threads, [ik]),
        DasLLAMA("dasLLAMA, same file", places["dasllama"], gguf, num_threads),
        OpenVINO("OpenVINO, int8", openvino, made / "int8", num_threads),
        OpenVINO("OpenVINO, int4", openvino, made / "int4", num_threads),
        VLLM("vLLM, bf16", places["vllm"], made / "hf", num_threads),
    ]
    if any(kind in gguf.name for kind in (*("Q4_0", "Q4_1", "Q8_0"), *SHAPES)):  # it fails to read Q5_0
        peers.insert(-1, OpenVINO("OpenVINO, same file", openvino, gguf, num_threads))
    return peers


PLACES = {
    "llama.cpp": Path(".cache/llama.cpp"),
    "ik_llama.cpp": Path(".cache/ik_llama.cpp"),
    "dasllama": Path(".venv-dasllama"),
    "openvino": Path(".venv-openvino"),
    "vllm": Path(".venv-vllm"),
}
"""The folders in which `make peers` puts them; `--peer NAME=DIR` names other places."""


def places_for(target: str) -> dict[str, Path]:
    """Return the folder of each peer that was built for a target: `native`, or a target of `radixlm compile`."""
    if is_of_machine(target):
        return dict(PLACES)
    built = {name: PLACES[name].with_name(f"{PLACES[name].name}-{target}") for name in ("llama.cpp", "ik_llama.cpp")}
    return PLACES | built
