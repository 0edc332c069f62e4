"""The process of a model, whose artifact is fake: `python -m tests.cli.several.fake_worker`."""

from __future__ import annotations

import pytest
from radixlm.cli.several.worker import main

from ...runtime.eager_loads import load_always
from ..serving_process import use_fake_artifacts

if __name__ == "__main__":
    use_fake_artifacts()
    load_always(pytest.MonkeyPatch())
    main()
