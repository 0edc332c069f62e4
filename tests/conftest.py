"""Where tests find real inputs that the repository may not carry."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real tokenizers, conversations and tiny models; tests that need it skip where it is not."""
    path = Path(os.environ.get("RADIXLM_DATA", REPOSITORY.parent / "shared" / "data"))
    if not path.is_dir():
        pytest.skip(f"real inputs are not at {path}; set RADIXLM_DATA")
    return path
