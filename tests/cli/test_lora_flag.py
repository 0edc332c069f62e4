"""`--lora NAME=PATH`: adapters by name, and the room that a model gets which is compiled for them."""

from __future__ import annotations

from pathlib import Path

import pytest
from radixlm.cli.field_flags import _named_paths, _room_for
from radixlm.runtime.errors import InvalidAdapter

from ..goldens.tiny_adapters import TinyAdapter


def test_names_and_paths() -> None:
    assert _named_paths("--lora", ["a=x", "b=y=z"]) == {"a": "x", "b": "y=z"}
    assert _named_paths("--lora", []) is None
    for wrong in ("a", "=x", "a="):
        with pytest.raises(ValueError, match=f"--lora is '{wrong}'; give NAME=PATH"):
            _named_paths("--lora", [wrong])
    with pytest.raises(ValueError, match="--lora is given twice with one name, of a, a; rename one"):
        _named_paths("--lora", ["a=x", "a=y"])


def test_a_model_is_compiled_with_room_for_its_adapters(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    small = str(TinyAdapter("llama").write_peft(tmp_path / "small"))
    wide = str(TinyAdapter("llama", rank=40).write_peft(tmp_path / "wide"))
    assert _room_for(str(model), {}) == {}
    assert _room_for(str(model), {"a": small}) == {"max-loras": "8", "max-lora-rank": "16"}
    nine = dict.fromkeys("abcdefgh", small) | {"i": wide}
    assert _room_for(str(model), nine) == {"max-loras": "9", "max-lora-rank": "40"}
    with pytest.raises(InvalidAdapter, match="cannot be read"):
        _room_for(str(model), {"a": str(tmp_path / "none")})
