"""A workplace for each test, and the folder that npm has filled."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from .workplace import ROOT, Workplace


@pytest.fixture
def workplace(request: pytest.FixtureRequest) -> Iterator[Workplace]:
    """Below .cache: Codex makes no helpers in a temporary folder."""
    workplace = Workplace(ROOT / ".cache" / "agents" / re.sub(r"\W+", "-", request.node.name))
    yield workplace
    workplace.way_out.close()


@pytest.fixture(scope="session")
def npm() -> Path:
    """The packages that package-lock.json pins; of opencode, which is a program for each platform, Linux's."""
    return Path(os.environ["RADIXLM_NPM_AGENTS"]) / "node_modules"
