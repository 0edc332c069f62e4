"""Load an artifact's machine code, a shared library, with `tvm_ffi`, without TVM's compiler or runtime.

The only file that imports `tvm_ffi`. Knows files and entry points, not what they compute.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from ..artifact import Artifact
from ..artifact.cpu import default_num_threads
from ..errors import CorruptArtifact


def load_functions(artifact: Artifact, num_threads: int | None = None) -> dict[str, Any]:
    """Load the module's entry points, by name.

    Raises:
        CorruptArtifact: it cannot be loaded, or lacks one.
    """
    num_threads = choose_num_threads(num_threads)
    try:
        path = artifact.module_path.resolve()
        library = _tvm_ffi().load_module(str(path))
        functions = {name: library[name] for name in artifact.manifest.module.entry_points}
        for name in functions.keys() & {"top_logits", "weight_sums", "copy_pages"}:
            functions[name].release_gil = False  # these take less time than getting the lock back
        functions["set_num_threads"](num_threads)
        return functions
    except (RuntimeError, AttributeError, KeyError, OSError) as error:
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        raise CorruptArtifact(f"{artifact.module_path} cannot be loaded ({reason}); compile it again") from None


def choose_num_threads(num_threads: int | None = None) -> int:
    """Return the number of threads to compute with: `num_threads`, else `TVM_NUM_THREADS`, else one for each CPU."""
    return num_threads or int(os.environ.get("TVM_NUM_THREADS", default_num_threads()))


def tensor_maker() -> Callable[[Any], Any]:
    """Return the function that converts an array for entry points; both share the memory."""
    make: Callable[[Any], Any] = _tvm_ffi().from_dlpack
    return make


@functools.cache
def _tvm_ffi() -> Any:
    """Return `tvm_ffi`, which loads libraries and calls them; neither TVM's compiler nor its runtime.

    It imports torch if that is installed, which would cost over a second, so torch is hidden during the import.
    """
    os.environ.setdefault("TVM_FFI_DISABLE_TORCH_C_DLPACK", "1")
    hide = "torch" not in sys.modules
    if hide:
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        import tvm_ffi
    finally:
        if hide:
            del sys.modules["torch"]
    return tvm_ffi
