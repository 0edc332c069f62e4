"""A model source becomes an artifact: plan, build, write, run it against plain NumPy, publish.

Nothing appears at the destination before the fresh artifact has agreed with the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

from radixlm.runtime.artifact import (
    CHAT_TEMPLATE,
    MODULE,
    TOKENIZER,
    WEIGHTS,
    Artifact,
    sha256_of,
    write_manifest,
)
from radixlm.runtime.artifact.manifest import (
    FORMAT_VERSION,
    FileInfo,
    Manifest,
    ModuleInfo,
    QuantizationInfo,
    TargetInfo,
    TokenizerInfo,
)
from radixlm.runtime.chat.chat_template import fault_of
from radixlm.runtime.errors import InvalidParameter
from radixlm.tokenizer_fix import profile_tokenizer

from .codegen.kernel_cache import KernelCache
from .codegen.targets import TRIPLE, Target, find_target
from .compact_tokenizer import compact_tokenizer
from .context_length import context_length as chosen_context_length
from .context_length import resolved
from .families.registry import decoder_of
from .in_memory import InMemory
from .interrupts import interrupts_kept
from .kernels.top_k import num_maxima
from .kv_layout import KVChoice, kv_layout
from .module import build_module, entry_points
from .ops.implemented import check_implemented
from .ops.ops import Ops
from .ops.rows import Limits
from .preflight import check_ready, check_space
from .progress import Progress, Stage, expected_stages
from .publish import publish, unpublished, written_back
from .sources import open_source
from .stored_weights import Quantize, StoredWeights
from .token_bytes import artifact_token_bytes, source_token_bytes
from .verification import Verification, verify_artifact
from .weights.plan import WeightPlan
from .weights_file import RoundedTensor, WeightsWriter

MAX_NUM_TOKENS = 512  # of one forward
MAX_NUM_LOGITS = 64
NO_TEMPLATE = "the source has no chat template"


@dataclass(frozen=True)
class CompileReport:
    """What was published, how well it agrees with the reference, and which matrices were rounded.

    `template_fault` says why it takes no conversations, if it takes none: the source has no chat template, or one that
    cannot be used.
    """

    path: Path
    manifest: Manifest
    verification: Verification
    template_fault: str | None
    rounded: tuple[RoundedTensor, ...]


def compile_model(
    source: str | Path,
    output: str | Path,
    *,
    quantize: Quantize = "keep",
    target: str = "native",
    kv_dtype: KVChoice = "auto",
    context_length: int | None = None,
    name: str | None = None,
    progress: Callable[[Progress], None] | None = None,
    in_memory: InMemory | None = None,
) -> CompileReport:
    """Compile `source` (as `open_source` takes it) into the artifact `output`, replacing one that is there.

    Args:
        quantize: `keep` stores every number as the source has it where a kernel can; the rest round to that kind.
        kv_dtype: how keys and values are kept; `auto` is k12v8 where that is faster than f16, and f16 elsewhere.
        target: a name of `codegen.targets.TARGETS`, or `native`.
        context_length: most tokens of a sequence; by default as many as the model was trained for.
        name: what servers call the model; by default the output's.
        in_memory: takes the artifact instead of `output`, unless its weights are too large for it.

    Raises:
        SourceError: the source cannot be used.
        InvalidParameter: a parameter is out of range.
        CompileError: there is no C compiler, the disk is too full, or the build failed.
        VerificationFailed: the artifact disagrees with the reference.
    """
    _check_choice("quantize", quantize, get_args(Quantize))
    _check_choice("kv_dtype", kv_dtype, get_args(KVChoice))
    if name is not None and not 1 <= len(name) <= 256:
        raise InvalidParameter(f"name has {len(name)} characters; it may have 1 to 256")
    output, chosen_target = Path(output), find_target(target)
    check_ready(source, output, quantize, needs_space=in_memory is None)

    with ExitStack() as stack:
        check_interrupted = stack.enter_context(interrupts_kept())
        stages: tuple[Stage, ...] = ()  # until the source was read

        def report(stage: str, done: int, total: int) -> None:
            check_interrupted()
            if progress is not None:
                progress(Progress(stage, done, total, stages))

        received_bytes = 0

        def downloaded(done: int, total: int) -> None:  # in threads of its own, where no signal arrives
            nonlocal received_bytes
            received_bytes = total
            if progress is not None:
                progress(Progress("download", done, total, expected_stages(weights_bytes=total, received_bytes=total)))

        if Path(source).exists():
            report("read", 0, 1)
        opened = stack.enter_context(open_source(source, progress=downloaded))
        report("read", 0, 1)
        length = chosen_context_length(opened.config, context_length)
        config = resolved(opened.config, length)
        check_implemented(str(source), config)
        template_fault = NO_TEMPLATE if opened.chat_template is None else fault_of(opened.chat_template)
        layout = kv_layout(config, kv_dtype, chosen_target)
        weights = StoredWeights(opened, quantize)
        plan = WeightPlan(weights.kinds, weights.sorted_inputs)
        limits = Limits(min(MAX_NUM_TOKENS, length), MAX_NUM_LOGITS, length)
        ops = Ops(config, layout, limits, chosen_target, plan)
        decoder_of(config).forward(ops)
        if in_memory is not None and plan.num_bytes <= in_memory.limit_bytes:
            output = directory = in_memory.prepare()
        else:
            check_space(output.parent, plan.num_bytes)
            directory = stack.enter_context(unpublished(output))
        expected = partial(expected_stages, weights_bytes=plan.num_bytes, received_bytes=received_bytes)
        stages = expected(num_kernels=len(ops.program.kernels))
        report("read", 1, 1)

        def compiled(done: int, missing: int) -> None:
            nonlocal stages
            stages = expected(num_kernels=missing)
            report("build", done, missing + 1)

        library = build_module(
            ops.program,
            plan,
            config,
            layout,
            limits.num_tokens,
            chosen_target,
            KernelCache.of_user(),
            compiled,
        )
        library.export(directory / MODULE)
        report("build", 1, 1)

        writer = WeightsWriter(weights, plan, config.ropes)
        file = stack.enter_context((directory / WEIGHTS).open("wb", buffering=0)).fileno()
        wait_for_disk = stack.enter_context(written_back(file))
        digest = writer.write(file, lambda done, total: report("weights", done, total))
        writer.check_rounding()
        (directory / TOKENIZER).write_text(compact_tokenizer(opened.tokenizer_json), encoding="utf-8")
        if opened.chat_template is not None:
            (directory / CHAT_TEMPLATE).write_text(opened.chat_template, encoding="utf-8")
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            name=_name(output) if name is None else name,
            model=config,
            context_length=length,
            quantization=QuantizationInfo(
                mode=quantize,
                kinds=writer.kind_infos(),
                token_bytes=artifact_token_bytes(weights),
                source_token_bytes=source_token_bytes(opened),
            ),
            kv=layout,
            target=_target_info(chosen_target),
            module=ModuleInfo(
                entry_points=entry_points(config),
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
            files=_file_infos(directory, {WEIGHTS: digest}),
        )
        write_manifest(directory, manifest)

        def verified(stage: str, done: int, total: int) -> None:
            report(stage, plan.num_bytes * done // total, plan.num_bytes)  # as bytes of the artifact, like "weights"

        verified("verify", 0, 1)
        artifact = Artifact.open(directory, check_weights=False)  # their digest was made while they were written
        verification = verify_artifact(artifact, plan, weights, ops.rounded_inputs, verified)
        report("publish", 0, 1)
        if directory != output:
            wait_for_disk()
            publish(directory, output)
        Artifact(output, artifact.manifest).remember_weights()
        report("publish", 1, 1)
    return CompileReport(output, artifact.manifest, verification, template_fault, writer.rounded())


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidParameter(f"{name} is {value!r}; use one of {', '.join(allowed)}")


def _name(output: Path) -> str:
    return output.resolve().name.removesuffix(".radixlm")


def _target_info(target: Target) -> TargetInfo:
    return TargetInfo(name=target.name, triple=TRIPLE, mcpu=target.mcpu, features=target.features)


def _file_infos(directory: Path, known: Mapping[str, str]) -> dict[str, FileInfo]:
    """Size and digest of each file; `known` are digests by name."""
    return {
        path.name: FileInfo(size=path.stat().st_size, sha256=known.get(path.name) or sha256_of(path))
        for path in sorted(directory.iterdir())
    }
