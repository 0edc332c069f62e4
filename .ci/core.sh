#!/bin/sh
# Tests the core without its extras: in a copy of the tree without runtime/extras and their tests, every module of the
# core is imported, and the tests of the extras' hooks pass. A minute. Usage: .ci/core.sh [PYTHON]
set -eu
cd "$(dirname "$0")/.."
python=$(cd "$(dirname "${1:-.venv/bin/python}")" && pwd)/$(basename "${1:-.venv/bin/python}")
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
for path in .ci .types README.md cli compile docs examples package pyproject.toml requirements.lock runtime tests tokenizer_fix; do
    cp -RP "$path" "$copy"
done
rm -rf "$copy/runtime/extras" "$copy/tests/runtime/extras" "$copy/tests/ray" "$copy/tests/bench"
mkdir "$copy/site"
# An editable install would find what the copy lacks.
cat >"$copy/site/sitecustomize.py" <<'END'
import sys

sys.meta_path = [finder for finder in sys.meta_path if not getattr(finder, "__module__", "").startswith("__editable__")]
sys.path = [path for path in sys.path if not path.startswith("__editable__")]
END
cd "$copy"
export PYTHONPATH="$copy/site:$copy/.types" OPENBLAS_NUM_THREADS=1
"$python" - <<'END'
import importlib
import pathlib

for path in sorted([*pathlib.Path("runtime").rglob("*.py"), *pathlib.Path("cli").rglob("*.py")]):
    importlib.import_module(".".join(["radixlm", *path.with_suffix("").parts]).removesuffix(".__init__"))
try:
    importlib.import_module("radixlm.runtime.extras")
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("radixlm.runtime.extras is found, although it was removed")
END
exec "$python" -m pytest -p no:cacheprovider -n0 --timeout 300 \
    tests/test_layout.py tests/runtime/test_optional.py \
    tests/runtime/prefix/test_disk_tier.py tests/runtime/prefix/test_page_saver.py tests/runtime/prefix/test_tier_hooks.py \
    tests/runtime/store/test_page_store.py tests/runtime/store/test_states.py tests/runtime/store/test_bundle.py \
    tests/runtime/engine/test_engine.py tests/runtime/engine/test_engine_core.py tests/runtime/engine/test_engine_options.py \
    tests/runtime/engine/test_scheduler.py tests/runtime/engine/test_request_options.py \
    tests/runtime/server/test_app.py tests/runtime/server/test_chat.py tests/runtime/server/test_metrics.py
