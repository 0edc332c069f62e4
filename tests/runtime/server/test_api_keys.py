"""Keys out of files: one a line, none missing, and none that lets everybody in."""

from __future__ import annotations

from pathlib import Path

import pytest
from radixlm.runtime.errors import InvalidParameter
from radixlm.runtime.server.api_keys import read_keys


def test_keys_are_lines_and_the_rest_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# of the web site\nsk-one\r\n\n  sk-two-ключ  \n# old\n")
    assert read_keys(path) == ("sk-one", "sk-two-ключ")


@pytest.mark.parametrize("content", [b"", b"\n \n", b"# sk-one\n", b"\xff\xfe", b"x" * 1025])
def test_a_file_without_a_key_that_can_be_used_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content)
    with pytest.raises(InvalidParameter):
        read_keys(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="cannot read API keys"):
        read_keys(tmp_path / "nowhere")
