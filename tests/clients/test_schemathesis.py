"""schemathesis sends what /openapi.json says and what it forbids, and holds each answer to it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ..serve_process import ServeProcess
from .conftest import KEY

# Not `positive_data_acceptance`: what one field may be with another no schema says, and that is 400, too.
CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_headers_conformance"),
    *("response_schema_conformance", "negative_data_rejection", "missing_required_header", "unsupported_method"),
    "ignored_auth",
)
REFUSED = ("/api/embed", "/api/embeddings", "/api/delete")  # whatever is sent, by design
BUDGET_S = 90


def test_every_answer_is_as_it_is_described(tmp_path: Path) -> None:
    # a short context: where no limit is sent, replies go on to its end
    options = ("--kv-cache-gb", "0.01", "--context-length", "200", "--max-num-seqs", "4", "--api-key", KEY, "--strict")
    with ServeProcess(*options, log=tmp_path / "log", api_key=KEY) as server:
        schema = tmp_path / "openapi.json"
        schema.write_bytes(server.bytes("/openapi.json"))
        command = [
            *(Path(sys.executable).parent / "schemathesis", "run", schema, "--url", server.url, "--no-color"),
            *("--header", f"Authorization: Bearer {KEY}", "--checks", ",".join(CHECKS)),
            *(word for path in REFUSED for word in ("--exclude-path", path)),
            *("--exclude-path-regex", "/v1/embeddings|/v./rerank|/v1/score"),  # the model has none of these
            *("--phases", "examples,coverage,fuzzing", "--max-examples", "8", "--max-time", str(BUDGET_S)),
            *("--seed", "1", "--generation-database", "none", "--workers", "4", "--request-timeout", "150"),
            "--continue-on-failure",
        ]
        environment = os.environ | {"NO_PROXY": "127.0.0.1"}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout[-20_000:] + done.stderr
        assert "Tested: 46" in done.stdout or "Tested: 47" in done.stdout, done.stdout
        server.wait_until_idle()
        assert "Traceback" not in server.log
