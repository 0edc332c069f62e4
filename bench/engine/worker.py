"""Run radixlm for measurements: one engine with its defaults, in a separate process.

    python -m bench.engine.worker ARTIFACT

Times are those of a user of `Engine`: from the call until the token is delivered.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from radixlm.cli.bench.engine_timer import EngineTimer, greedy
from radixlm.runtime import Engine

from ..worker import serve


class RadixLM(EngineTimer):
    """The measurements; every prompt is a list of token ids."""

    def resume(self, prefix: Sequence[int], suffix: Sequence[int]) -> float:
        """Return the seconds to the first token of `prefix + suffix`, after `prefix` was the last prompt."""
        self.engine.generate(prefix, greedy(1))
        return self.first_token_s([*prefix, *suffix], num_cached=len(prefix))


def main() -> None:
    """Run an engine, and answer commands on standard input with measured times, until it ends."""
    with Engine(sys.argv[1]) as engine:
        radixlm = RadixLM(engine)
        serve({name: getattr(radixlm, name) for name in ("prefill", "decode", "streams", "resume")})


if __name__ == "__main__":
    main()
