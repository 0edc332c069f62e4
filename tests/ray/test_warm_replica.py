"""A replica is warm before it gets requests, as any server."""

from __future__ import annotations

from radixlm.runtime.engine.engine import Engine
from radixlm.runtime.extras.ray.ray_app import _EngineReplica

from ..runtime.fake_model import FakeModel
from .engines import VOCAB_SIZE, fake_engine


def test_a_replica_has_computed_a_first_step_when_it_is_made() -> None:
    """Serve sends requests then, and the first waited for the weights to be mapped."""
    shapes: list[tuple[int, ...]] = []
    engines: list[Engine] = []

    def open_runner(_: object, num_pages: int, __: object) -> FakeModel:
        model = FakeModel(num_pages, VOCAB_SIZE)
        model.before = lambda batch: shapes.append(batch.shape)
        return model

    def open_engine() -> Engine:
        engines.append(fake_engine(open_runner))
        return engines[0]

    replica = _EngineReplica(open_engine, ())
    with engines[0]:
        assert shapes, "it computed no step"
        replica.check_health()
