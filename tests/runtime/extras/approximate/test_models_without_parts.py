"""A model that needs all keys and values of a prefix refuses a budget, of an engine and of a request, and says why."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from radixlm.runtime.artifact.model_config import LatentAttention, Mixer, ModelConfig, Rope
from radixlm.runtime.engine.engine_options import EngineOptions
from radixlm.runtime.engine.opening import open_parts
from radixlm.runtime.engine.request_options import RequestOptions
from radixlm.runtime.errors import InvalidParameter
from radixlm.runtime.extras.approximate.extra import EXTRA

from ...fake_artifact import ATTENTION, FakeArtifact, fake_artifact

WINDOW = replace(ATTENTION, window=64)
SHARED = replace(ATTENTION, shared_kv=0)
WIDER = replace(ATTENTION, head_dim=8)
LATENT = LatentAttention(
    num_heads=4, latent_dim=32, plain_dim=16, value_dim=16, scale=0.2, rope=Rope(theta=1e4, rotary_dim=8)
)
TINY_SPM = Path(__file__).resolve().parents[3] / "data" / "tokenizers" / "tiny_spm.json"


def model_of(artifact: FakeArtifact, mixer: Mixer = ATTENTION) -> ModelConfig:
    """Two layers, of which the second has that mixer."""
    model = artifact.manifest.model
    layer = model.layers[0]
    return replace(model, layers=(layer, replace(layer, mixer=mixer)))


@pytest.fixture
def artifact() -> FakeArtifact:
    return fake_artifact(TINY_SPM.read_text("utf-8"), None, vocab_size=512, bos_token_id=1, eos_token_id=2)


@pytest.mark.parametrize(
    ("mixer", "why"),
    [
        (WINDOW, "a window of the tokens"),
        (SHARED, "values of others"),
        (WIDER, "different shapes"),
        (LATENT, "one latent row of each token"),
    ],
)
def test_a_budget_is_refused_with_the_reason(artifact: FakeArtifact, tmp_path: Path, mixer: Mixer, why: str) -> None:
    model = model_of(artifact, mixer)
    opened = FakeArtifact(replace(artifact.manifest, model=model), artifact.tokenizer_json, None)
    for budget in (0.5, 1.0):  # with 1 each request may ask for less
        options = EngineOptions(store=tmp_path / "store", store_bytes=1 << 20, kv_budget=budget)
        with pytest.raises(InvalidParameter, match=why) as told:
            open_parts(opened, options)  # type: ignore[arg-type]
        assert told.value.param == "kv_budget"
    assert not (tmp_path / "store").exists()
    with pytest.raises(InvalidParameter, match=why):
        EngineOptions().decide(RequestOptions(kv_budget=0.5), model)
    assert EngineOptions().decide(RequestOptions(kv_budget=1.0), model).kv_budget == 1.0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"store": "s", "draft": "a"}, "leave it out, or kv_budget"),
        ({"store": "s", "speculate": "lookup"}, "leave it out, or kv_budget"),
        ({}, "store is not"),
        ({"store": "s", "kv_budget": float("nan")}, "above 0 and at most 1"),
    ],
)
def test_options_that_do_not_go_with_a_budget_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidParameter, match=says):
        EngineOptions(**{"kv_budget": 0.5, **options})  # type: ignore[arg-type]


def test_layers_that_are_alike_allow_it(artifact: FakeArtifact) -> None:
    EXTRA.check_model(0.5, model_of(artifact))
    with pytest.raises(InvalidParameter, match="--kv-budget"):  # this engine loads all, another would not
        EngineOptions().decide(RequestOptions(kv_budget=0.5), model_of(artifact))
