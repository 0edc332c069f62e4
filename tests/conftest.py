"""Where tests find real inputs that the repository may not carry."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from radixlm.compile.sources import default_model

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real tokenizers, conversations and tiny models; tests that need it skip without it."""
    path = Path(os.environ.get("RADIXLM_DATA", REPOSITORY.parent / "shared" / "data"))
    if not path.is_dir():
        pytest.skip(f"real inputs are not at {path}; set RADIXLM_DATA")
    return path


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The default model's file out of the cache; a machine's first test run downloads it (98 MB)."""
    return default_model.download()
