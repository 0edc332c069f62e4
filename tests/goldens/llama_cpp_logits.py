"""llama.cpp's logits of all positions of a prompt, in one pass over it.

Its server gives probabilities of one position an answer, as JSON: a second each with a vocabulary of 262,144. The
library inside xllamacpp exports llama.cpp's C functions, so these are called. Knows their structures as far as it needs
them, and checks that the defaults stand where they should. Needs xllamacpp, which no test does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from ctypes import POINTER, Structure, c_byte, c_char_p, c_float, c_int8, c_int32, c_uint32, c_void_p
from typing import Self

import numpy as np
import xllamacpp.xllamacpp

CHUNK = 512  # tokens a pass, as its server has it
_SILENT = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)(lambda level, text, data: None)


class _ModelParams(Structure):
    _fields_ = [("all", c_byte * 1024)]  # longer than it is: passed on the stack as it came


class _ContextParams(Structure):
    _fields_ = [
        ("n_ctx", c_uint32),
        ("n_batch", c_uint32),
        ("n_ubatch", c_uint32),
        ("n_seq_max", c_uint32),
        ("rest", c_byte * 1008),
    ]


class _Batch(Structure):
    _fields_ = [
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    ]


class LlamaCppLogits:
    """A GGUF file in llama.cpp with its defaults, but for the length of the context."""

    def __init__(self, path: str, context_length: int) -> None:
        self._lib = lib = ctypes.CDLL(xllamacpp.xllamacpp.__file__)
        lib.llama_model_default_params.restype = _ModelParams
        lib.llama_context_default_params.restype = _ContextParams
        lib.llama_batch_init.restype = _Batch
        lib.llama_get_logits_ith.restype = POINTER(c_float)
        for name in (
            "llama_model_load_from_file",
            "llama_model_get_vocab",
            "llama_init_from_model",
            "llama_get_memory",
        ):
            getattr(lib, name).restype = c_void_p
        params = lib.llama_context_default_params()
        assert (params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max) == (512, 2048, 512, 1)
        params.n_ctx = context_length
        lib.llama_log_set(_SILENT, None)
        lib.llama_backend_init()
        self._model = c_void_p(lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params()))
        self._vocab = c_void_p(lib.llama_model_get_vocab(self._model))
        self.vocab_size = int(lib.llama_vocab_n_tokens(self._vocab))
        self._context = c_void_p(lib.llama_init_from_model(self._model, params))
        assert self._model and self._context, f"llama.cpp cannot read {path}"
        self._memory = c_void_p(lib.llama_get_memory(self._context))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._lib.llama_free(self._context)
        self._lib.llama_model_free(self._model)

    def encode(self, text: str) -> list[int]:
        """Its ids of a text, with the token that begins one if the model has it."""
        raw = text.encode()
        ids = (c_int32 * (len(raw) + 2))()
        count = self._lib.llama_tokenize(self._vocab, c_char_p(raw), len(raw), ids, len(ids), True, False)
        return ids[:count]

    def logits(self, ids: list[int], first: int) -> Iterator[np.ndarray]:
        """Logits of the positions from `first` on, one after the other: float32 `[vocab]`, valid until the next."""
        self._lib.llama_memory_clear(self._memory, True)
        for start in range(0, len(ids), CHUNK):
            batch = self._batch(ids, start, first)
            failed = self._lib.llama_decode(self._context, batch)
            assert not failed, f"llama_decode: {failed}"
            for row in range(max(first - start, 0), batch.n_tokens):
                found = self._lib.llama_get_logits_ith(self._context, row)
                yield np.ctypeslib.as_array(found, (self.vocab_size,))
            self._lib.llama_batch_free(batch)

    def _batch(self, ids: list[int], start: int, first: int) -> _Batch:
        part = ids[start : start + CHUNK]
        batch = self._lib.llama_batch_init(len(part), 0, 1)
        assert batch.pos and batch.logits and not batch.embd
        batch.n_tokens = len(part)
        for row, token in enumerate(part):
            batch.token[row], batch.pos[row], batch.logits[row] = token, start + row, start + row >= first
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = 0
        return batch
