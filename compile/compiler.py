"""A model source becomes an artifact: plan, build, write, run it against plain NumPy, publish.

Nothing appears at the destination before the fresh artifact has agreed with the reference.
"""

from __future__ import annotations

import glob
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from radixlm.runtime.artifact import (
    CHAT_TEMPLATE,
    MANIFEST,
    MODULE,
    TOKENIZER,
    WEIGHTS,
    Artifact,
    sha256_of,
    write_manifest,
)
from radixlm.runtime.artifact.manifest import (
    FORMAT_VERSION,
    PAGE_SIZE,
    FileInfo,
    KVDType,
    KVLayout,
    Manifest,
    ModelConfig,
    ModuleInfo,
    QuantizationInfo,
    TargetInfo,
    TokenizerInfo,
)
from radixlm.runtime.chat.chat_template import fault_of
from radixlm.runtime.errors import CompileError, InvalidParameter
from radixlm.tokenizer_fix import profile_tokenizer

from .interrupts import interrupts_kept
from .kernels.top_k import num_maxima
from .models import MODELS
from .module import ENTRY_POINTS, build_module
from .ops import Ops
from .quantization import GROUP, Mode, WeightKind
from .rows import Limits
from .sources import Source, open_source
from .targets import TRIPLE, Target, find_target
from .tvm_build import check_linker, export_library
from .verification import Verification, verify_artifact
from .weight_plan import WeightPlan
from .weights_file import WeightsWriter, stored_weight

Quantize = Literal["keep", "q4", "q8", "f16", "f32"]
MAX_NUM_TOKENS = 512  # of one forward
MAX_NUM_LOGITS = 64
_OTHER_FILES_BYTES = 16 << 20  # about: library, tokenizer, manifest
_ABANDONED_S = 24 * 3600.0  # a compile that takes longer than a day was killed

# One wrong bit in these costs most, and they are read once a token: as q4 they stay in 8 bits, as llama.cpp does.
_KEPT_IN_8_BITS = ("model.embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True)
class Progress:
    """`done` of `total` units of a stage: read, build, weights, verify, publish."""

    stage: str
    done: int
    total: int


@dataclass(frozen=True)
class CompileReport:
    """What was published, how well it agrees with the reference, and why it takes no conversations, if a chat template
    is there that cannot be used."""

    path: Path
    manifest: Manifest
    verification: Verification
    template_fault: str | None


def compile_model(
    source: str | Path,
    output: str | Path,
    *,
    quantize: Quantize = "keep",
    target: str = "native",
    kv_dtype: KVDType = "f16",
    context_length: int | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> CompileReport:
    """Compile `source` (as `open_source` takes it) into the artifact `output`, replacing one that is there.

    Args:
        quantize: `keep` stores every number as the source has it where a kernel can; the rest round to that kind.
        target: a name of `targets.py`, or `native`.
        context_length: most tokens of a sequence; by default the model's own, or its sliding window if that is shorter.

    Raises:
        SourceError: the source cannot be used.
        InvalidParameter: a parameter is out of range.
        CompileError: there is no C compiler, the disk is too full, or the build failed.
        VerificationFailed: the artifact disagrees with the reference.
    """
    _check_choice("quantize", quantize, get_args(Quantize))
    _check_choice("kv_dtype", kv_dtype, get_args(KVDType))
    output, chosen_target = Path(output), find_target(target)
    _check_output(output)
    check_linker()

    with ExitStack() as stack:
        check_interrupted = stack.enter_context(interrupts_kept())

        def report(stage: str, done: int, total: int) -> None:
            check_interrupted()
            if progress is not None:
                progress(Progress(stage, done, total))

        report("read", 0, 1)
        opened = stack.enter_context(open_source(source))
        directory = stack.enter_context(_unpublished(output))
        config = opened.config
        template_fault = None if opened.chat_template is None else fault_of(opened.chat_template)
        length = _context_length(config, context_length)
        layout = _kv_layout(config, kv_dtype)
        modes = _modes(opened, quantize)
        plan = WeightPlan(_kinds(opened, modes))
        limits = Limits(min(MAX_NUM_TOKENS, length), MAX_NUM_LOGITS, length)
        ops = Ops(config, layout, limits, chosen_target, plan)
        MODELS[config.architecture](config).forward(ops)
        _check_space(output.parent, plan.num_bytes)
        report("read", 1, 1)

        report("build", 0, 2)
        library = build_module(ops.program, plan, config, layout, limits.num_tokens, chosen_target)
        report("build", 1, 2)
        _export(library, directory / MODULE)
        report("build", 2, 2)

        writer = WeightsWriter(opened, plan, modes)
        writer.write(directory / WEIGHTS, lambda done, total: report("weights", done, total))
        (directory / TOKENIZER).write_text(opened.tokenizer_json, encoding="utf-8")
        if opened.chat_template is not None:
            (directory / CHAT_TEMPLATE).write_text(opened.chat_template, encoding="utf-8")
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            name=_name(output),
            model=config,
            context_length=length,
            quantization=QuantizationInfo(mode=quantize, kinds=writer.kind_infos()),
            kv=layout,
            target=_target_info(chosen_target),
            module=ModuleInfo(
                entry_points=ENTRY_POINTS,
                max_num_tokens=limits.num_tokens,
                max_num_logits=limits.num_logits,
                workspace_bytes=ops.program.workspace_bytes,
                top_logits_scratch=num_maxima(config.vocab_size),
                weights_bytes=plan.num_bytes,
            ),
            tokenizer=TokenizerInfo(
                bos_token_id=opened.bos_token_id,
                eos_token_ids=opened.eos_token_ids,
                add_bos_token=opened.add_bos_token,
                profile=profile_tokenizer(opened.tokenizer_json).to_dict(),
            ),
            sampling=opened.sampling,
            source=opened.info,
            files=_file_infos(directory),
        )
        write_manifest(directory, manifest)

        report("verify", 0, 1)
        artifact = Artifact.open(directory)
        verification = verify_artifact(
            artifact,
            lambda name: stored_weight(opened, name, modes[name]).dequantize(),
            ops.rounded_inputs,
            report,
        )
        report("publish", 0, 1)
        _publish(directory, output)
        report("publish", 1, 1)
    return CompileReport(output, artifact.manifest, verification, template_fault)


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidParameter(f"{name} is {value!r}; use one of {', '.join(allowed)}")


def _check_output(output: Path) -> None:
    if output.exists() and not (output / MANIFEST).is_file():
        raise InvalidParameter(f"{output} exists and is no artifact; choose another -o, or remove it")
    if not output.parent.is_dir():
        raise InvalidParameter(f"{output.parent} is no directory; make it first, or choose another -o")


def _check_space(directory: Path, weights_bytes: int) -> None:
    needed, free = weights_bytes + _OTHER_FILES_BYTES, shutil.disk_usage(directory).free
    if free < needed:
        raise CompileError(
            f"{directory} has {free / 1e6:,.0f} MB free, the artifact needs {needed / 1e6:,.0f} MB; "
            "make room, or choose another -o"
        )


def _name(output: Path) -> str:
    return output.resolve().name.removesuffix(".radixlm")


def _context_length(config: ModelConfig, wanted: int | None) -> int:
    trained, window = config.max_position_embeddings, config.sliding_window
    if wanted is None:
        return min(trained, window or trained)
    if not PAGE_SIZE <= wanted <= trained:
        raise InvalidParameter(
            f"context length {wanted} is not in {PAGE_SIZE}..{trained}, which is what the model was trained for"
        )
    if window is not None and wanted > window:
        raise InvalidParameter(
            f"context length {wanted} is beyond the model's sliding window of {window}, which is not supported; "
            f"use --context-length {window} or less"
        )
    return wanted


def _kv_layout(config: ModelConfig, dtype: KVDType) -> KVLayout:
    return KVLayout(
        dtype=dtype,
        page_size=PAGE_SIZE,
        num_layers=config.num_hidden_layers,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
    )


def _modes(source: Source, quantize: Quantize) -> dict[str, Mode | None]:
    """How each matrix is to be rounded; None keeps it, and vectors are float32 anyway."""
    modes: dict[str, Mode | None] = {}
    for name, tensor in source.tensors().items():
        mode: Mode | None = None if quantize == "keep" or len(tensor.shape) != 2 else quantize
        if mode == "q4" and name in _KEPT_IN_8_BITS:
            mode = "q8"
        if mode in ("q4", "q8") and tensor.shape[1] % GROUP:
            mode = "f16"  # rows that are no multiple of a group
        modes[name] = mode
    return modes


def _kinds(source: Source, modes: Mapping[str, Mode | None]) -> dict[str, WeightKind]:
    matrices = (name for name, tensor in source.tensors().items() if len(tensor.shape) == 2)
    return {name: stored_weight(source, name, modes[name], slice(0, 1)).kind for name in matrices}


def _target_info(target: Target) -> TargetInfo:
    return TargetInfo(name=target.name, triple=TRIPLE, mcpu=target.mcpu, features=target.features)


def _export(library: object, path: Path) -> None:
    try:
        export_library(library, path)
    except (RuntimeError, OSError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
        raise CompileError(f"the module cannot be linked ({reason}); is gcc installed?") from None


def _file_infos(directory: Path) -> dict[str, FileInfo]:
    return {
        path.name: FileInfo(size=path.stat().st_size, sha256=sha256_of(path)) for path in sorted(directory.iterdir())
    }


@contextmanager
def _unpublished(output: Path) -> Iterator[Path]:
    """A directory beside `output`, on the same file system; gone afterwards unless it was renamed."""
    directory = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".tmp", dir=output.parent))
    directory.chmod(0o755)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _publish(directory: Path, output: Path) -> None:
    """Put `directory` at `output`; an artifact that was there is moved aside first and then removed."""
    if output.exists():
        with _unpublished(output) as aside:
            os.rename(output, aside / "replaced")
            os.rename(directory, output)
    else:
        os.rename(directory, output)
    _sweep(output)


def _sweep(output: Path) -> None:
    """Remove what compiles of the same output left beside it when they were killed, long ago."""
    for directory in output.parent.glob(f".{glob.escape(output.name)}.????????.tmp"):
        try:
            abandoned = directory.stat().st_mtime < time.time() - _ABANDONED_S
        except OSError:
            continue  # another compile has just removed it
        if abandoned:
            shutil.rmtree(directory, ignore_errors=True)
