"""The servers that a coding session is sent to, with the settings that preserve most of its cache.

Knows commands and what survives a restart; not the requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from radixlm.runtime.artifact.cpu import default_num_threads

from ..peers.contestants import OURS
from ..processes import RADIXLM
from ..served import Client, Json

NUM_SLOTS = 3  # the main conversation and two subagents
_REUSED_CHUNK = 256  # tokens: the smallest part that llama.cpp moves in a cache


@dataclass(frozen=True)
class AgentsServer:
    """A server's command, without its `--port PORT`.

    Attributes:
        fields: additional fields of a request, so that replies have the full length.
        before_end, after_start: calls at its port by which more survives an orderly restart.
    """

    name: str
    command: Sequence[str]
    fields: Json = field(default_factory=dict)
    ready_path: str = "/health"
    before_end: Callable[[int], None] = lambda port: None
    after_start: Callable[[int], None] = lambda port: None


def servers_of(
    gguf: Path, artifact: Path, places: Mapping[str, Path], context: int, num_reply: int, scratch: Path
) -> list[AgentsServer]:
    """Return all servers, on one model; their disk data is in `scratch`."""
    threads = str(default_num_threads())
    model = ("--model", str(gguf), "--threads", threads)
    slots = (*("--parallel", str(NUM_SLOTS), "--jinja"), "--slot-save-path", f"{scratch / 'slots'}/")
    (scratch / "slots").mkdir(exist_ok=True)
    whole = MappingProxyType({"ignore_eos": True})
    return [
        AgentsServer(
            OURS,
            (RADIXLM, "serve", str(artifact), "--speculate", "off", "--store", str(scratch / "store")),
            {"min_tokens": num_reply},
        ),
        AgentsServer(
            "llama.cpp",
            (
                *(str(places["llama.cpp"] / "llama-server"), *model, *slots, "--flash-attn", "on", "--kv-unified"),
                *("--ctx-size", str(2 * context), "--cache-reuse", str(_REUSED_CHUNK)),
            ),
            dict(whole),
            before_end=_save_slots,
            after_start=_restore_slots,
        ),
        AgentsServer(
            "ik_llama.cpp",
            (
                *(str(places["ik_llama.cpp"] / "llama-server"), *model, *slots, "-fa", "on", "-rtr", "--log-disable"),
                *("--ctx-size", str(NUM_SLOTS * context)),
            ),
            dict(whole),
            before_end=_save_slots,
            after_start=_restore_slots,
        ),
        AgentsServer(
            "dasLLAMA",
            (
                *(str(places["dasllama"] / "bin" / "dasllama-server"), *model, "--gpu", "off"),
                *("--ctx", str(context), "--streams", str(NUM_SLOTS)),
            ),
            ready_path="/v1/models",
        ),
    ]


def _save_slots(port: int) -> None:
    _each_slot(port, "save")


def _restore_slots(port: int) -> None:
    _each_slot(port, "restore")


def _each_slot(port: int, action: str) -> None:
    """Save each slot of llama.cpp to a file, or restore it from one; empty slots and missing files are left out.

    `action` is `save` or `restore`.
    """
    with closing(Client(port)) as client:
        for slot in range(NUM_SLOTS):
            with suppress(RuntimeError):
                client.json("POST", f"/slots/{slot}?action={action}", {"filename": f"slot-{slot}"})
