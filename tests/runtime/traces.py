"""How many random traces tests run: a few by default, so that every change is tried in seconds.

Thousands, before a release or after a change of the cache (it takes minutes)::

    RADIXLM_TRACES=3000 pytest tests/runtime/engine -k "traces or counting_oracle or warm_is_cold"
"""

from __future__ import annotations

import os


def num_traces(few: int) -> int:
    """`few`, or what RADIXLM_TRACES says."""
    return int(os.environ.get("RADIXLM_TRACES", few))
