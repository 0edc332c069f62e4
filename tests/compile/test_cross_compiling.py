"""Artifacts for machines of another kind: compiled and checked here, and refused where they do not run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from radixlm.compile import compile_model
from radixlm.compile.codegen.elf_object import AARCH64, X86_64
from radixlm.compile.codegen.targets import TARGETS, Target
from radixlm.runtime.artifact import WEIGHTS, Artifact
from radixlm.runtime.artifact.cpu import architecture_of, cpu_architecture
from radixlm.runtime.errors import UnsupportedCPU, VerificationFailed
from radixlm.runtime.model.model_runner import ModelRunner

from .codegen.test_macho import Opened

ELSEWHERE = [target for target in TARGETS.values() if architecture_of(target.triple) != cpu_architecture()]
MACHINES = {"x86_64": X86_64, "aarch64": AARCH64}
OPTIONS: dict[str, Any] = {"name": "tiny", "quantize": "q4", "kv_dtype": "k12v8"}
ONE_OF_EACH_KIND = [*ELSEWHERE[:2], *[target for target in ELSEWHERE if target.is_for_macos][-1:]]


@pytest.mark.parametrize("target", [pytest.param(target, id=target.name) for target in ONE_OF_EACH_KIND])
def test_what_cannot_run_here_is_compiled_and_checked_by_a_module_that_can(
    target: Target, tiny_source: Path, tmp_path: Path
) -> None:
    here = compile_model(tiny_source, tmp_path / "here.radixlm", **OPTIONS)
    there = compile_model(tiny_source, tmp_path / "there.radixlm", target=target.name, **OPTIONS)
    assert there.verification == here.verification
    artifact = Artifact.open(there.path)
    assert artifact.weights_path.read_bytes() == (here.path / WEIGHTS).read_bytes()
    module = artifact.module_path.read_bytes()
    if target.is_for_macos:
        assert Opened(module).find("__tvm_ffi_forward") is not None
    else:
        assert module[18] == MACHINES[architecture_of(target.triple)]  # e_machine
    assert artifact.manifest.target == there.manifest.target
    assert (artifact.manifest.target.name, artifact.manifest.target.triple) == (target.name, target.triple)
    fault = rf"compiled for {target.name}, and this CPU is {cpu_architecture()}, not "
    with pytest.raises(UnsupportedCPU, match=fault):
        ModelRunner(artifact, num_pages=1)


def test_a_wrong_program_for_another_machine_is_not_published(
    tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixlm.compile.verification._TOLERANCE_ROUNDED", 0.0)
    with pytest.raises(VerificationFailed):
        compile_model(tiny_source, tmp_path / "there.radixlm", target=ELSEWHERE[0].name, **OPTIONS)
    assert not (tmp_path / "there.radixlm").exists()
