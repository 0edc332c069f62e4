"""What Prometheus' own tool says of /metrics."""

from __future__ import annotations

import subprocess
import urllib.request

from ..serve_process import ServeProcess
from .conftest import KEY


def test_promtool_has_nothing_to_say(server: ServeProcess) -> None:
    server.json("/v1/completions", {"prompt": "One, two,", "max_tokens": 4})
    request = urllib.request.Request(server.url + "/metrics", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=60) as response:
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        metrics = response.read()
    assert b"radixlm" in metrics
    done = subprocess.run(["promtool", "check", "metrics"], input=metrics, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
