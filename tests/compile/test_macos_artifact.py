"""An artifact for macOS, loaded as its dynamic linker would load it, on an emulated Arm processor without a system."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import unicorn
from radixlm.compile import compile_model
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.model.batch import Batch
from radixlm.runtime.model.model_runner import ModelRunner
from unicorn import arm64_const as registers

from .codegen.test_macho import Opened

LIBRARY, IMPORTS, MEMORY, STACK = 1 << 32, 2 << 32, 3 << 32, 4 << 32
MEMORY_BYTES, STACK_BYTES = 1 << 26, 1 << 20
RETURN = struct.pack("<I", 0xD65F03C0)
ARGUMENTS = [registers.UC_ARM64_REG_X0 + number for number in range(4)]
OF_MACOS = {  # what its C library has, and what libraries may ask for: no functions of numbers, which differ by system
    *("_sched_yield", "_getpid", "_pthread_create", "_pthread_join", "_clock_gettime_nsec_np", "_dladdr", "_dlopen"),
    *("_os_sync_wait_on_address", "_os_sync_wake_by_address_all", "_aligned_alloc", "_free"),
    *("_memcpy", "_memset", "_memset_pattern16", "_bzero"),
}
KIND_INT, KIND_TENSOR = 1, 7  # of tvm-ffi's arguments: an integer, a pointer to a DLTensor
DTYPES = {"i": 0, "u": 1, "f": 2}


class ArmProcessor:
    """A processor with a library in its memory, and what macOS would give it as functions of Python's."""

    def __init__(self, library: Opened) -> None:
        self._emulator = unicorn.Uc(unicorn.UC_ARCH_ARM64, unicorn.UC_MODE_ARM)
        self._emulator.ctl_set_cpu_model(registers.UC_CPU_ARM64_MAX)
        self._emulator.reg_write(registers.UC_ARM64_REG_CPACR_EL1, 3 << 20)  # floating point is on
        self._library = library
        self._functions: dict[int, Callable[[], None]] = {}
        self._top = MEMORY
        self.num_threads, self.opened = 0, ""
        memory = library.memory()
        for word in library.rebased():
            struct.pack_into("<Q", memory, word, struct.unpack_from("<Q", memory, word)[0] + LIBRARY)
        for begin, size in ((LIBRARY, len(memory)), (IMPORTS, 1 << 14), (MEMORY, MEMORY_BYTES), (STACK, STACK_BYTES)):
            self._emulator.mem_map(begin, size)
        self._emulator.mem_write(LIBRARY, bytes(memory))
        for word, name in library.bound().items():
            self._set_function(word, getattr(self, name.lstrip("_"), None))
        self._emulator.hook_add(
            unicorn.UC_HOOK_CODE, lambda _, at, *__: self._functions[at](), None, IMPORTS + 16, IMPORTS + (1 << 14)
        )
        self._emulator.mem_write(IMPORTS, RETURN)

    def put(self, content: bytes) -> int:
        """Write to memory that nobody else has. Returns the address."""
        self._top += -self._top % 4096
        address, self._top = self._top, self._top + len(content)
        self._emulator.mem_write(address, content)
        return address

    def call(self, name: str, arguments: list[Any]) -> None:
        """Call an entry point; its tensors, the arrays among `arguments`, are changed in place."""
        values, addresses = b"", list[int]()
        for argument in arguments:
            if isinstance(argument, np.ndarray):
                addresses.append(self.put(argument.tobytes()))
                values += struct.pack("<iIQ", KIND_TENSOR, 0, self._tensor(argument, addresses[-1]))
            else:
                values += struct.pack("<iIq", KIND_INT, 0, argument)
        for register, value in zip(ARGUMENTS, (0, self.put(values), len(arguments), self.put(bytes(16))), strict=True):
            self._emulator.reg_write(register, value)
        self._emulator.reg_write(registers.UC_ARM64_REG_SP, STACK + STACK_BYTES - 256)
        self._emulator.reg_write(registers.UC_ARM64_REG_LR, IMPORTS)
        self._emulator.emu_start(LIBRARY + (self._library.find(f"__tvm_ffi_{name}") or 0), IMPORTS)
        assert self._emulator.reg_read(ARGUMENTS[0]) == 0, "the entry point reports an error"
        for array in (argument for argument in arguments if isinstance(argument, np.ndarray)):
            content = bytes(self._emulator.mem_read(addresses.pop(0), array.nbytes))
            array[:] = np.frombuffer(content, array.dtype).reshape(array.shape)

    def _tensor(self, array: np.ndarray, address: int) -> int:
        """A DLTensor of the CPU's."""
        assert array.flags.c_contiguous
        shape = self.put(struct.pack(f"<{array.ndim}q", *array.shape))
        strides = self.put(struct.pack(f"<{array.ndim}q", *(size // array.itemsize for size in array.strides)))
        kind = (DTYPES[array.dtype.kind], 8 * array.itemsize, 1)
        return self.put(struct.pack("<QiiiBBHQQQ", address, 1, 0, array.ndim, *kind, shape, strides, 0))

    def _set_function(self, word: int, function: Callable[[], None] | None) -> None:
        """Have a word of the library's point to code that calls a function, which is an error if there is none."""
        address = IMPORTS + 16 * (1 + len(self._functions))
        self._emulator.mem_write(address, RETURN)
        self._emulator.mem_write(LIBRARY + word, struct.pack("<Q", address))
        self._functions[address] = function or self._refuse

    def _arguments(self, count: int) -> list[int]:
        return [self._emulator.reg_read(register) for register in ARGUMENTS[:count]]

    def _refuse(self) -> None:
        raise AssertionError("the library calls what this test does not have")

    # What libraries call, by its name in C.

    def aligned_alloc(self) -> None:
        _, size = self._arguments(2)
        self._emulator.reg_write(ARGUMENTS[0], self.put(bytes(size)))

    def free(self) -> None:
        """Memory is not used again."""

    def pthread_create(self) -> None:
        """A thread that never gets a processor: the caller does its work."""
        self.num_threads += 1
        self._emulator.reg_write(ARGUMENTS[0], 0)

    def dladdr(self) -> None:
        _, found = self._arguments(2)
        self._emulator.mem_write(found, struct.pack("<Q", self.put(b"there.radixlm/model.so\0")))

    def dlopen(self) -> None:
        path, _ = self._arguments(2)
        self.opened = bytes(self._emulator.mem_read(path, 22)).decode()

    def getpid(self) -> None:
        self._emulator.reg_write(ARGUMENTS[0], 1)

    def clock_gettime_nsec_np(self) -> None:
        self._emulator.reg_write(ARGUMENTS[0], time.monotonic_ns())

    def memcpy(self) -> None:
        to, source, size = self._arguments(3)
        self._emulator.mem_write(to, bytes(self._emulator.mem_read(source, size)))

    def bzero(self) -> None:
        address, size = self._arguments(2)
        self._emulator.mem_write(address, bytes(size))

    def memset_pattern16(self) -> None:
        to, pattern, size = self._arguments(3)
        content = bytes(self._emulator.mem_read(pattern, 16)) * (size // 16 + 1)
        self._emulator.mem_write(to, content[:size])


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_forward_on_an_arm_processor_has_the_bits_of_one_here(
    num_threads: int, tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"name": "tiny", "kv_dtype": "k12v8", "quantize": "q4"}
    here = compile_model(tiny_source, tmp_path / "here.radixlm", **options).path
    there = compile_model(tiny_source, tmp_path / "there.radixlm", target="apple-m1", **options).path
    runner = ModelRunner(Artifact.open(here), num_pages=4, num_threads=1)
    library = Opened(Artifact.open(there).module_path.read_bytes())
    assert {name for name in library.bound().values() if not name.startswith("_TVMFFI")} <= OF_MACOS
    processor = ArmProcessor(library)
    processor.call("set_num_threads", [num_threads])
    forward, emulated = runner._functions["forward"], list[np.ndarray]()

    def forward_both(*arguments: Any) -> None:
        """Call the entry point here, and with copies of its arguments there; the last tensor takes the logits."""
        copies = [np.array(np.from_dlpack(one)) if hasattr(one, "__dlpack__") else one for one in arguments]
        processor.call("forward", copies)
        emulated.append(copies[-1])
        forward(*arguments)

    monkeypatch.setitem(runner._functions, "forward", forward_both)
    for start, stop in ((0, 20), (20, 21)):
        positions, pages = np.arange(start, stop, dtype=np.int32), np.arange(2, dtype=np.int32)[None]
        last = np.array([stop - start - 1], np.int32)
        ids = positions * 7 % 90
        batch = Batch(ids, positions, positions, positions * 0, pages, positions + np.int32(1), last)
        logits = runner.forward(batch)
        assert np.isfinite(logits).all() and logits.std() > 0.1
        np.testing.assert_array_equal(emulated[-1][:, : logits.shape[1]].view(np.uint32), logits.view(np.uint32))
    runner.close()
    assert processor.num_threads == num_threads - 1
    assert processor.opened == ("there.radixlm/model.so" if num_threads > 1 else "")  # so that it stays while they run
