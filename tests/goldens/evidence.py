"""Write down what the families were compared with, for `radixlm models`, docs/models.md and README, and the targets
for docs/platforms.md.

    python -m tests.goldens.evidence

Run it where a family, a golden, a kernel or a target was added. It reads the goldens' own tables and the registries of
families and targets; it takes seconds, and needs neither torch nor transformers.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from radixlm.compile.codegen.targets import TARGETS, IntegerDot
from radixlm.compile.evidence import FORMATS, VERIFIED, FamilyEvidence, families
from radixlm.compile.families import registry
from radixlm.compile.kv_layout import resolved
from radixlm.compile.ops.implemented import check_implemented
from radixlm.compile.sources.huggingface import huggingface_settings
from radixlm.runtime.artifact.cpu import architecture_of
from radixlm.runtime.errors import UnsupportedArchitecture

from ..compile.families.harness import COMPILED, OFTEN, OLDEST
from .encoders import ENCODERS, about_saved
from .families import FAMILIES
from .tiny_models import TINY_MODELS, TinyModel
from .tiny_outputs import TinyOutputs

ROOT = Path(__file__).resolve().parents[2]
# Real models: what is compared with transformers, and the test that does so.
REAL = {
    "llama": ("SmolLM2-135M-Instruct in Q4_1", "tests/runtime/engine/test_quality_smollm2.py"),
    "qwen2": ("Qwen2.5-Coder-0.5B-Instruct in Q4_K_M", "tests/runtime/engine/test_quality_real.py"),
    "gemma3": ("Gemma 3 270M in Q4_K_M", "tests/runtime/engine/test_quality_real.py"),
}
TABLE = re.compile(r"(?<=<!-- families -->\n).*?(?=<!-- end of families -->)", re.DOTALL)
EVIDENCE_TABLE = re.compile(r"(?<=<!-- evidence -->\n).*?(?=<!-- end of evidence -->)", re.DOTALL)
TARGET_TABLE = re.compile(r"(?<=<!-- targets -->\n).*?(?=<!-- end of targets -->)", re.DOTALL)
PRODUCTS: dict[IntegerDot, str] = {
    "vnni512": "`vpdpbusd` of 512 bits",
    "vnni256": "`vpdpbusd` of 256 bits",
    "madd512": "`vpmaddubsw`, `vpmaddwd` of 512 bits",
    "madd256": "`vpmaddubsw`, `vpmaddwd` of 256 bits",
    "portable": "32-bit products",
    "usdot": "`usdot`",
    "sdot": "`sdot`",
    "smull": "`smull`, `smlal`",
}
ARCHITECTURES = {"x86_64": "x86-64", "aarch64": "64-bit Arm"}
FORMAT_TABLE = re.compile(r"(?<=<!-- formats -->\n).*?(?=<!-- end of formats -->)", re.DOTALL)
NUMBER = re.compile(r"(?<=\[)\d+(?= families\])")


def verified() -> str:
    """What belongs into `verified.json`."""
    found: dict[str, dict[str, Any]] = defaultdict(lambda: {"goldens": []})
    for name, tiny in sorted({**TINY_MODELS, **FAMILIES}.items()):
        try:
            settings = huggingface_settings(name, tiny.config)
        except UnsupportedArchitecture:
            continue  # a golden of a family that has no file yet
        golden = {
            "name": name,
            "llama_cpp": TinyOutputs.load(name).llama_cpp,
            "needs": _needs(name, tiny, settings),
            "bits": _bits(name),
        }
        found[settings.architecture]["goldens"].append(golden)
    for name in sorted(ENCODERS):
        compared = about_saved(name).get("llama_cpp")
        golden = {"name": name, "llama_cpp": compared, "needs": None, "bits": "test"}  # tests/compile/test_encoders.py
        found[name]["goldens"].append(golden)
    for key, (model, _) in REAL.items():
        found[key]["real"] = model
    return json.dumps(found, indent=2, sort_keys=True) + "\n"


def _needs(name: str, tiny: TinyModel, settings: Any) -> str | None:
    """What no kernel computes of a checkpoint; None where it compiles."""
    config = registry.FAMILIES[settings.architecture].config(settings)
    try:
        check_implemented(name, resolved(config, tiny.context_length))
    except UnsupportedArchitecture as error:
        return str(error).partition(" needs ")[2].partition(", which no kernel")[0]
    return None


def _bits(name: str) -> str | None:
    """The target whose test compares the bits of each token."""
    if name in (*OLDEST, *OFTEN):
        return "test"
    return "test-long" if name in COMPILED else None


def table(found: list[FamilyEvidence]) -> str:
    """The families as a table for docs/models.md: what a user needs to find a model."""
    lines = ["| family | in GGUF files | classes of safetensors checkpoints |", "|---|---|---|"]
    for each in found:
        of_others = f"as {', '.join(each.gguf_of_others)}" if each.gguf_of_others else "-"
        gguf = ", ".join(f"`{name}`" for name in each.gguf) or of_others
        lines.append(f"| {each.title} | {gguf} | {', '.join(each.classes)} |")
    return "\n".join(lines) + "\n"


def evidence_table(found: list[FamilyEvidence]) -> str:
    """What each family was compared with, as a table for docs/models.md."""
    lines = [
        "| family | goldens of transformers | llama.cpp within | compiles | bits compared by |",
        "|---|---|---|---|---|",
    ]
    for each in found:
        needs = [f"{golden.name} needs {golden.needs}" for golden in each.goldens if golden.needs is not None]
        cells = (
            f"{each.title}{'' if each.real is None else f'; real: {each.real}'}",
            ", ".join(golden.name for golden in each.goldens) or "none",
            _llama_cpp(each),
            "; ".join(needs) or ("yes" if each.goldens else "not tried"),
            f"`make {each.bits}`" if each.bits else "-",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def target_table() -> str:
    """What each target needs, beside what the next smaller one does."""
    lines = ["| `--target` | the processor has | 8-bit integers are multiplied by |", "|---|---|---|"]
    for target in TARGETS.values():
        alike = [other for other in TARGETS.values() if other.triple == target.triple]
        smaller = [other for other in alike if {*other.features} < {*target.features}]
        most = max(smaller, key=lambda other: len(other.features), default=None)
        more = (
            [] if most is None else [f"all of `{most.name}`", *(f for f in target.features if f not in most.features)]
        )
        least = "Apple's M1, with macOS 14.4" if target.is_for_macos else ARCHITECTURES[architecture_of(target.triple)]
        needs = ", ".join(more) or f"nothing more than {least}"
        cells = f"`{target.name}`", needs, PRODUCTS[target.integer_dot]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _llama_cpp(family: FamilyEvidence) -> str:
    """How near llama.cpp is, and which goldens that is not of."""
    if family.llama_cpp is None:
        return "-"
    without = " and ".join(family.without_llama_cpp)
    return f"{family.llama_cpp:.0e}{f'; not {without}' if without else ''}"


def format_table() -> str:
    """The formats as a table for docs/models.md."""
    lines = ["| format | what is read | in the artifact, with `keep` | compared with |", "|---|---|---|---|"]
    lines += [f"| {each.title} | {each.reads} | {each.kept} | {each.verified} |" for each in FORMATS]
    return "\n".join(lines) + "\n"


def number(found: list[FamilyEvidence]) -> str:
    """How many of them compile, which README says."""
    return str(sum(each.is_compiled for each in found))


def pages() -> dict[Path, str]:
    """The files that say it, as they should be; `verified.json` must be as it should be already."""
    found, models, readme = families(), ROOT / "docs" / "models.md", ROOT / "README.md"
    platforms = ROOT / "docs" / "platforms.md"
    page = TABLE.sub(lambda _: table(found), models.read_text(encoding="utf-8"), count=1)
    page = EVIDENCE_TABLE.sub(lambda _: evidence_table(found), page, count=1)
    return {
        platforms: TARGET_TABLE.sub(lambda _: target_table(), platforms.read_text(encoding="utf-8"), count=1),
        models: FORMAT_TABLE.sub(lambda _: format_table(), page, count=1),
        readme: NUMBER.sub(lambda _: number(found), readme.read_text(encoding="utf-8"), count=1),
    }


if __name__ == "__main__":
    VERIFIED.write_text(verified(), encoding="utf-8")
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
