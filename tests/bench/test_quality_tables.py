"""Perplexities and rounding errors become tables."""

from __future__ import annotations

from bench.quality_tables import perplexities, rounding_errors


def test_a_ratio_comes_with_twice_its_standard_error_and_is_left_out_where_there_is_none() -> None:
    against = {"llama.cpp": {"ratio": 0.998, "nats": -0.001694, "standard_error": 0.000749}}
    page = perplexities(
        [
            {"text": "bbh", "evaluator": "radixlm", "tokens": 19999, "perplexity": 37.57, "against": against},
            {"text": "bbh", "evaluator": "llama.cpp", "tokens": 19999, "perplexity": 37.64, "against": {}},
        ]
    )
    assert "| perplexity | times llama.cpp's |" in page
    assert "| bbh, 19,999 tokens | radixlm | 37.57 | 0.9983 ± 0.0015 |" in page
    assert "| bbh, 19,999 tokens | llama.cpp | 37.64 |  |" in page


def test_rounding_errors_name_the_kind_and_the_number_of_matrices() -> None:
    row = {"matrices": "k_proj", "count": 30, "weights": 0.909, "outputs": 0.964, "outputs_at_worst": 1.094}
    assert "| `k_proj`, 30 | 0.909 | 0.964 | 1.094 |" in rounding_errors([row])
