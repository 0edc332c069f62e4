"""Find the artifact of a model by its name; `radixlm pull` makes one in a separate process if there is none.

Knows that command, because the runtime has no compiler.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

from ..errors import CompileError
from .compiled_models import artifact_named

_PULL = (sys.executable, "-P", "-c", "from radixlm.cli.main import main; main()", "pull")
_ERROR = "Error: "
_LOGGER = logging.getLogger(__name__)


def find_artifact(model: str | Path) -> Path:
    """Return the artifact of `model`: itself, or the one that it is compiled into once, in the cache folder.

    Args:
        model: an artifact, a .gguf file, a model directory, a name that begins with `hf:`, the alias smollm2, or the
            name of a compiled model. A `Path` is always a file or a directory.

    Raises:
        ArtifactNotFound: there is nothing at that path.
        CompileError: it cannot be downloaded or compiled; the message is the command's.
    """
    name = str(model.absolute()) if isinstance(model, Path) else model
    if (artifact := artifact_named(name)) is not None:
        return artifact
    process = subprocess.Popen(
        [*_PULL, "--", name], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    last = ""
    try:
        for line in process.stderr or ():
            last = line.rstrip()
            if not last.startswith(_ERROR):
                _tell(last)
        said = process.communicate()[0]
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if process.returncode:
        raise CompileError(last.removeprefix(_ERROR) or f"{model} cannot be compiled: exit code {process.returncode}")
    return Path(said.splitlines()[-1])


def _tell(line: str) -> None:
    """Log a line of the progress where there is a log of such lines, as in a server; else print it for who waits."""
    if _LOGGER.isEnabledFor(logging.INFO):
        _LOGGER.info("%s", line)
    else:
        print(line, file=sys.stderr)
