"""Which kinds of keys and values a model can have is said when it is compiled."""

from __future__ import annotations

from pathlib import Path

import pytest
from radixlm.compile import compile_model
from radixlm.runtime.errors import InvalidParameter

from tests.goldens.families import FAMILIES


def test_latent_vectors_have_no_codes_of_their_own(tmp_path: Path) -> None:
    source = FAMILIES["deepseek_v2"].write(tmp_path / "source")
    with pytest.raises(InvalidParameter, match=r"keeps latent vectors, which are keys and values at once; use f16"):
        compile_model(source, tmp_path / "tiny.radixlm", kv_dtype="k12v8")
    assert not (tmp_path / "tiny.radixlm").exists()
