"""llama.cpp's logits for every position of a prompt, through the C functions of the `xllamacpp` wheel.

The wheel's Python has a server only, which gives probabilities of one position a request and as JSON; its library
exports llama.cpp's C API all the same. Knows that API as of llama.h: a batch's fields, and that parameters begin
with the three sizes; everything else keeps llama.cpp's defaults (f16 KV, flash attention where it can, repacking).
"""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


class _Parameters(ctypes.Structure):
    """`llama_model_params` or `llama_context_params`: passed by value and read from the start, so longer is fine."""

    _fields_ = (("words", ctypes.c_uint32 * 256),)


class _Batch(ctypes.Structure):
    """`llama_batch`; null `pos`, `n_seq_id` and `seq_id` mean sequence 0 from its end on."""

    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.c_void_p),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.c_void_p),
        ("n_seq_id", ctypes.c_void_p),
        ("seq_id", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
    )


class LlamaCpp:
    """A GGUF file in llama.cpp, with a context of `num_tokens` tokens that are computed as one batch.

    Raises RuntimeError where llama.cpp refuses the file or the size.
    """

    def __init__(self, path: Path, *, num_tokens: int, num_threads: int) -> None:
        self._library = library = _load_library()
        library.llama_backend_init()
        self._model = library.llama_model_load_from_file(str(path).encode(), library.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        parameters = library.llama_context_default_params()
        parameters.words[:3] = (num_tokens,) * 3  # n_ctx, n_batch, n_ubatch
        self._context = library.llama_init_from_model(self._model, parameters)
        if not self._context or library.llama_n_ubatch(self._context) != num_tokens:
            raise RuntimeError(f"llama.cpp makes no context of {num_tokens} tokens: has llama_context_params changed?")
        library.llama_set_n_threads(self._context, num_threads, num_threads)
        self._vocab_size = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model))

    def logits(self, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """Logits `[n, vocab]` of `token_ids` `[n]` as a whole prompt; valid until the next call."""
        library, num_tokens = self._library, len(token_ids)
        library.llama_memory_clear(library.llama_get_memory(self._context), True)
        tokens = np.ascontiguousarray(token_ids, np.int32)
        wanted = np.ones(num_tokens, np.int8)
        batch = _Batch(num_tokens, tokens.ctypes.data, logits=wanted.ctypes.data)
        status = library.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status} for {num_tokens} tokens")
        return np.ctypeslib.as_array(library.llama_get_logits(self._context), (num_tokens, self._vocab_size))


def _load_library() -> ctypes.CDLL:
    extension = importlib.util.find_spec("xllamacpp.xllamacpp")
    if extension is None or extension.origin is None:
        raise RuntimeError("xllamacpp is not installed here")
    library = ctypes.CDLL(extension.origin)
    pointer, int32, boolean = ctypes.c_void_p, ctypes.c_int32, ctypes.c_bool
    for name, result, arguments in (
        ("llama_backend_init", None, ()),
        ("llama_model_default_params", _Parameters, ()),
        ("llama_context_default_params", _Parameters, ()),
        ("llama_model_load_from_file", pointer, (ctypes.c_char_p, _Parameters)),
        ("llama_init_from_model", pointer, (pointer, _Parameters)),
        ("llama_n_ubatch", ctypes.c_uint32, (pointer,)),
        ("llama_set_n_threads", None, (pointer, int32, int32)),
        ("llama_model_get_vocab", pointer, (pointer,)),
        ("llama_vocab_n_tokens", int32, (pointer,)),
        ("llama_get_memory", pointer, (pointer,)),
        ("llama_memory_clear", None, (pointer, boolean)),
        ("llama_decode", int32, (pointer, _Batch)),
        ("llama_get_logits", ctypes.POINTER(ctypes.c_float), (pointer,)),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
