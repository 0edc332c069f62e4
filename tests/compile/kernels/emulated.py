"""Call kernels for 64-bit Arm on this x86 machine: in a process of an emulated Python, which `make test-arm` installs.

Both sides are here. The emulated one, which this file is when it is run, opens libraries and calls kernels; arrays are
in a file that both map.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import json
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PYTHON = os.environ.get("RADIXLM_ARM_PYTHON")  # the emulated one, where there is one
ARCHITECTURE = "aarch64"
_SHARED_BYTES = 1 << 30  # of which only what is written takes memory
_PAGE = 4096


@dataclass(frozen=True)
class Array:
    """Memory, and where in it the array begins that a kernel gets."""

    memory: memoryview
    start: int


class EmulatedMachine:
    """A process that calls kernels; it ends with this one, or when a kernel crashes it."""

    def __init__(self) -> None:
        assert PYTHON is not None, "RADIXLM_ARM_PYTHON names no emulated Python; run make test-arm"
        file = tempfile.NamedTemporaryFile(dir="/dev/shm")  # noqa: SIM115 - open as long as the process
        file.truncate(_SHARED_BYTES)
        self._file, self._memory = file, mmap.mmap(file.fileno(), _SHARED_BYTES)
        self._process = subprocess.Popen(
            [PYTHON, __file__, file.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def call(self, library: str, symbol: str, arguments: Sequence[int | Array]) -> None:
        """Call a kernel; afterwards all memory is as the kernel left it. It begins as far into a page as here."""
        sent, end = [], 0
        for argument in arguments:
            if isinstance(argument, int):
                sent.append({"number": argument})
                continue
            begin = end + _address(argument.memory) % _PAGE
            end = begin + argument.memory.nbytes
            self._memory[begin:end] = bytes(argument.memory)
            sent.append({"offset": begin + argument.start})
            end = -(-end // _PAGE) * _PAGE
        assert end <= _SHARED_BYTES, f"the arguments have {end} bytes"
        self._ask({"library": library, "symbol": symbol, "arguments": sent})
        for argument, place in zip(arguments, sent, strict=True):
            if not isinstance(argument, int):
                begin = place["offset"] - argument.start
                argument.memory[:] = self._memory[begin : begin + argument.memory.nbytes]

    def _ask(self, question: dict[str, Any]) -> None:
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
        if not process.stdout.readline():
            machine.cache_clear()
            raise AssertionError(f"{question['symbol']} ended the emulated process with status {process.wait()}")


@functools.cache
def machine() -> EmulatedMachine:
    """The emulated machine of this process."""
    return EmulatedMachine()


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _serve(path: str) -> None:
    import tvm_ffi

    package = importlib.util.find_spec("tvm")
    assert package is not None and package.origin is not None
    ctypes.CDLL(str(Path(package.origin).with_name("lib") / "libtvm_runtime.so"), ctypes.RTLD_GLOBAL)
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), _SHARED_BYTES)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    modules: dict[str, Any] = {}
    for line in sys.stdin:
        question = json.loads(line)
        library = question["library"]
        if library not in modules:
            modules[library] = tvm_ffi.load_module(library)
            modules[library]["set_num_threads"](2)
        function = getattr(ctypes.CDLL(library), question["symbol"])
        function(
            *(
                ctypes.c_int64(argument["number"])
                if "number" in argument
                else ctypes.c_void_p(base + argument["offset"])
                for argument in question["arguments"]
            )
        )
        print("done", flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1])
