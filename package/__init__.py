"""Serve compiled language models from Python, with a prefix cache.

Open an engine, and use it from any number of threads or tasks:

    from radixlm import Engine

    with Engine("smollm2.radixlm") as engine:
        print(engine.generate("The capital of France is", max_tokens=8).text)
        print(engine.chat([{"role": "user", "content": "Name a tree."}], temperature=0).text)

- `Engine` has `generate` and `chat`, `stream` and `stream_chat`, `agenerate` and `achat`, and `generate_many`.
- `SamplingParams`, `RequestOptions` and `EngineOptions` document each option with its range and its default.
- `response_format=` takes a JSON schema, a pydantic model or a type; `Grammar` also takes regular expressions,
  choices and context-free grammars.
- Every error raised on purpose is a `RadixLMError`; `radixlm.runtime.errors` has all of them.

`radixlm.compile.compile_model` compiles a model into an artifact. `python -m radixlm` runs the command line. Names are
imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixlm import runtime
from radixlm.runtime.version import VERSION as __version__

if TYPE_CHECKING:
    from radixlm.runtime import *  # noqa: F403

__all__ = ["__version__"]
__all__ += runtime.__all__


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(runtime, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
