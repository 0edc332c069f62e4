"""Options of `radixlm serve` that are refused before anything is loaded."""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from radixlm.cli.serve import command


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--api-key-file", "nowhere"], "cannot read API keys from nowhere"),
        (["--cors-origin", "example.com"], "the origin 'example.com'"),
        (["--api-key", " "], "an API key is empty"),
    ],
)
def test_serve_says_what_is_wrong_before_it_loads_anything(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(command, ["nowhere.radixlm", "--port", "0", *arguments])
    assert result.exit_code != 0
    assert says in str(result.exception)
    assert "loading" not in result.output
