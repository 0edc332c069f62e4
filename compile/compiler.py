"""Compile a model source into an artifact: read, build, write, verify with plain NumPy, publish.

Nothing appears at the destination before the new artifact has agreed with the reference.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

import msgspec
from radixlm.runtime.artifact import CHAT_TEMPLATE, MODULE, TOKENIZER, WEIGHTS, Artifact, sha256_of, write_manifest
from radixlm.runtime.artifact.lora import MAX_LORA_RANK, MAX_LORAS, LoraDType, LoraInfo
from radixlm.runtime.artifact.manifest import (
    FORMAT_VERSION,
    FileInfo,
    KVLayout,
    Manifest,
    ModuleInfo,
    QuantizationInfo,
    TargetInfo,
    TokenizerInfo,
)
from radixlm.runtime.artifact.model_config import ModelConfig
from radixlm.runtime.artifact.model_names import no_chat_template
from radixlm.runtime.chat.chat_template import fault_of
from radixlm.runtime.errors import InvalidParameter, InvalidRequest
from radixlm.runtime.progress import Progress, Stage

from .codegen.kernel_cache import KernelCache
from .codegen.library import Library
from .codegen.targets import Target, find_target
from .families.registry import decoder_of
from .in_memory import InMemory
from .interrupts import interrupts_kept
from .kernels.sampling.top_k import num_maxima
from .kv_layout import KVChoice, kv_layout, resolved
from .kv_layout import context_length as chosen_context_length
from .lora_layout import lora_layout
from .module import DRAFT_FREQUENT, build_module, drafts, entry_points
from .ops.implemented import check_implemented
from .ops.ops import Ops
from .ops.program import Limits
from .preflight import check_ready, check_space
from .progress import expected_stages
from .publish import publish, unpublished, written_back
from .sources import Source, open_source
from .stored_weights import Quantize, StoredWeights, artifact_token_bytes, source_token_bytes, token_weights
from .tokenizer_file import tokenizer_file
from .verification import Verification, check_logits
from .weights.plan import WeightPlan
from .weights_file import RoundedTensor, WeightsWriter
from .written_weights import WrittenWeights

MAX_NUM_TOKENS = 512  # tokens of one forward
MAX_NUM_LOGITS = 64
DEFAULT_LORA_RANK = 16
NO_TEMPLATE = "the source has no chat template"


@dataclass(frozen=True)
class CompileReport:
    """The published artifact, its agreement with the reference, and the matrices that were rounded.

    `template_fault` is the reason why the artifact has no chat: the source has no chat template, or an unusable one.
    None if it has one.
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
    max_loras: int = 0,
    max_lora_rank: int = DEFAULT_LORA_RANK,
    lora_dtype: LoraDType = "f32",
    progress: Callable[[Progress], None] | None = None,
) -> CompileReport:
    """Compile `source` (as `open_source` takes it) into the artifact `output`, replacing an existing artifact.

    Args:
        quantize: `keep` stores every number as the source has it if a kernel can; others round to that kind.
        kv_dtype: storage of KV; `auto` is k12v8 if that is faster than f16, and f16 otherwise.
        target: a name of `codegen.targets.TARGETS`, or `native`.
        context_length: maximum tokens of a sequence; by default the context length of the model's training.
        name: the model's name in servers; by default that of the output.
        max_loras: number of LoRA adapters that the artifact has room for; 0 for none.
        max_lora_rank: largest rank of an adapter.
        lora_dtype: storage of adapters; f16 and bf16 halve the memory, and round numbers of a file in float32.

    Raises:
        SourceError: the source cannot be used.
        InvalidParameter: a parameter is out of range.
        CompileError: the disk is too full, or the build failed.
        VerificationFailed: the artifact disagrees with the reference.
    """
    options = CompileOptions(quantize, target, kv_dtype, context_length, name, max_loras, max_lora_rank, lora_dtype)
    with fresh_artifact(source, output, options, progress=progress) as fresh:
        return fresh.publish()


@dataclass(frozen=True)
class CompileOptions:
    """The arguments of `compile_model` that affect the artifact."""

    quantize: Quantize = "keep"
    target: str = "native"
    kv_dtype: KVChoice = "auto"
    context_length: int | None = None
    name: str | None = None
    max_loras: int = 0
    max_lora_rank: int = DEFAULT_LORA_RANK
    lora_dtype: LoraDType = "f32"

    def check(self) -> None:
        """Raise InvalidParameter if a field is out of range."""
        _check_choice("quantize", self.quantize, get_args(Quantize))
        _check_choice("kv_dtype", self.kv_dtype, get_args(KVChoice))
        _check_choice("lora_dtype", self.lora_dtype, get_args(LoraDType))
        if self.name is not None and not 1 <= len(self.name) <= 256:
            raise InvalidParameter(f"name has {len(self.name)} characters; it may have 1 to 256")
        for name, value, low, high in (
            ("max_loras", self.max_loras, 0, MAX_LORAS),
            ("max_lora_rank", self.max_lora_rank, 1, MAX_LORA_RANK),
        ):
            if not low <= value <= high:
                raise InvalidParameter(f"{name} is {value}; it must be {low} to {high}")


@dataclass(frozen=True)
class FreshArtifact:
    """A complete artifact before its publication. Its logits agree with the reference.

    Attributes:
        artifact: in a directory that is removed at the end of the context of `fresh_artifact`, or in memory.
        report: report of the compile, as if it were published.
        is_in_memory: true if its weights were not compared yet.
    """

    artifact: Artifact
    report: CompileReport
    is_in_memory: bool
    _weights: WrittenWeights
    _progress: _Reporter
    _wait_for_disk: Callable[[], None]

    def check_weights(self) -> int:
        """Compare all weights with the source, as `WrittenWeights.check` does.

        Returns the number of rows that were also compared with the source's numbers as its format's formula gives them.

        Raises:
            VerificationFailed: they differ.
        """
        return self._weights.check(lambda compared, total: None)

    def publish(self) -> CompileReport:
        """Wait until the artifact is on disk, and move it to its destination; return the report."""
        self._progress("publish", 0, 1)
        self._wait_for_disk()
        publish(self.artifact.path, self.report.path)
        Artifact(self.report.path, self.artifact.manifest).remember_weights()
        self._progress("publish", 1, 1)
        return self.report


@contextmanager
def fresh_artifact(
    source: str | Path,
    output: str | Path,
    options: CompileOptions,
    *,
    progress: Callable[[Progress], None] | None = None,
    opened: Callable[[], None] | None = None,
    in_memory: InMemory | None = None,
    for_chat: bool = False,
) -> Iterator[FreshArtifact]:
    """Compile `source`, and yield the artifact before it is published at `output`. Raises as `compile_model` does.

    Args:
        opened: called once when the source has been downloaded and recognized.
        in_memory: destination of the artifact, unless its weights are too large for it.
        for_chat: raise InvalidRequest, before the compile, if the source has no chat template.
    """
    options.check()
    output, target = Path(output), find_target(options.target)
    check_ready(source, output, options.quantize, needs_space=in_memory is None)
    with ExitStack() as stack:
        stack.enter_context(_garbage_collection_disabled())
        reporter = _Reporter(progress, stack.enter_context(interrupts_kept()))
        model = stack.enter_context(open_source(source, progress=reporter.report_download))
        if for_chat and model.chat_template is None:
            raise InvalidRequest(no_chat_template(str(source)))
        if opened is not None:
            opened()
        reporter("read", 0, 1)
        tokenizer = stack.enter_context(ThreadPoolExecutor(1)).submit(tokenizer_file, model.tokenizer_json)
        planned = _plan_artifact(str(source), model, options, target)
        is_in_memory = in_memory is not None and planned.plan.num_bytes <= in_memory.limit_bytes
        if in_memory is not None and is_in_memory:
            directory = in_memory.prepare()
        else:
            check_space(output.parent, planned.plan.num_bytes)
            directory = stack.enter_context(unpublished(output))
        reporter.weights_bytes = planned.plan.num_bytes
        reporter.compares_weights = not is_in_memory
        reporter.expect_kernels(num_kernels=len(planned.ops.program.kernels))
        reporter("read", 1, 1)
        planned.build(reporter.report_kernels).export(directory / MODULE)
        reporter("build", 1, 1)

        file = stack.enter_context((directory / WEIGHTS).open("w+b", buffering=0)).fileno()
        wait_for_disk = stack.enter_context(written_back(file))
        writer = WeightsWriter(planned.weights, planned.plan, planned.config.ropes)
        digest = writer.write(file, lambda done, total: reporter("weights", done, total))
        writer.check_rounding()
        (directory / TOKENIZER).write_text(tokenizer.result().text, encoding="utf-8")
        if model.chat_template is not None:
            (directory / CHAT_TEMPLATE).write_text(model.chat_template, encoding="utf-8")
        infos = _describe_files(directory, {WEIGHTS: digest})
        name = _default_name(output) if options.name is None else options.name
        write_manifest(directory, planned.manifest(name, writer, tokenizer.result().profile, infos))
        artifact = Artifact.open(directory, check_weights=False)  # the digest was computed during writing
        written = WrittenWeights(file, artifact.data_offset(), planned.plan, planned.weights)
        num_rows, half = 0, reporter.share_of_stage("verify", 0, 0.5)
        if not is_in_memory:  # first, because it names the wrong tensor
            num_rows = written.check(lambda compared, total: half(compared / total))
        if in_memory is not None and is_in_memory:
            artifact.remember_weights()  # it is opened in place
            in_memory.written()
        done = reporter.share_of_stage("verify", 0 if is_in_memory else 0.5, 1)
        checked, ops = artifact, planned.ops
        if not target.runs_here:
            checked, ops = stack.enter_context(_build_for_this_machine(planned, artifact))
        verification = check_logits(checked, planned.plan, planned.weights, ops.program, ops.rounded_inputs, done)
        verification = replace(verification, num_rows=num_rows)
        fault = NO_TEMPLATE if model.chat_template is None else fault_of(model.chat_template)
        report = CompileReport(output, artifact.manifest, verification, fault, writer.rounded())
        yield FreshArtifact(artifact, report, is_in_memory, written, reporter, wait_for_disk)


@contextmanager
def _build_for_this_machine(planned: _ArtifactPlan, artifact: Artifact) -> Iterator[tuple[Artifact, Ops]]:
    """Yield an artifact with the same weights and program for this machine, if the target does not run here.

    Only the module differs; it is compiled from the same kernels.
    """
    here = planned.for_target(find_target("native"))
    with TemporaryDirectory(prefix="radixlm-check-") as folder:
        here.build(lambda done, missing: None).export(Path(folder) / MODULE)
        (Path(folder) / WEIGHTS).symlink_to(artifact.weights_path.resolve())
        manifest = artifact.manifest
        module = msgspec.structs.replace(manifest.module, workspace_bytes=here.ops.program.workspace_bytes)
        manifest = msgspec.structs.replace(manifest, target=here.target_info, module=module)
        yield Artifact(Path(folder), manifest), here.ops


@contextmanager
def _garbage_collection_disabled() -> Iterator[None]:
    """Disable garbage collection: the many long-lived expressions of TIR would trigger it often."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Reporter:
    """A callback that reports progress with the expected stages, and lets a signal end the compile."""

    def __init__(self, progress: Callable[[Progress], None] | None, check_interrupted: Callable[[], None]) -> None:
        self._progress, self._check_interrupted = progress, check_interrupted
        self._stages: tuple[Stage, ...] = ()  # () until the source is read
        self._received_bytes = 0
        self.weights_bytes = 0
        self.compares_weights = True

    def __call__(self, stage: str, done: int, total: int) -> None:
        self._check_interrupted()
        if self._progress is not None:
            self._progress(Progress(stage, done, total, self._stages))

    def expect_kernels(self, *, num_kernels: int) -> None:
        """Recompute the expected stages for this number of kernels to compile."""
        self._stages = expected_stages(
            weights_bytes=self.weights_bytes,
            received_bytes=self._received_bytes,
            num_kernels=num_kernels,
            compares_weights=self.compares_weights,
        )

    def report_download(self, done: int, total: int) -> None:
        """Report downloaded bytes of a source. Called in other threads, to which no signals are delivered."""
        self._received_bytes = total
        if self._progress is not None:
            stages = expected_stages(weights_bytes=total, received_bytes=total)
            self._progress(Progress("download", done, total, stages))

    def report_kernels(self, done: int, missing: int) -> None:
        """Report `done` compiled kernels of the `missing` ones, which the cache lacked."""
        self.expect_kernels(num_kernels=missing)
        self("build", done, missing + 1)

    def share_of_stage(self, stage: str, begin: float, end: float) -> Callable[[float], None]:
        """Return a callback that reports a finished share of a part of a stage.

        The part is from `begin` to `end`, shares of the stage, which is counted in the artifact's bytes.
        """
        total = self.weights_bytes
        return lambda share: self(stage, int(total * (begin + (end - begin) * share)), total)


@dataclass(frozen=True)
class _ArtifactPlan:
    """The plan of an artifact: its configuration, the layout of its weights, and its program of kernels."""

    source: Source
    options: CompileOptions
    target: Target
    config: ModelConfig
    layout: KVLayout
    weights: StoredWeights
    plan: WeightPlan
    limits: Limits
    lora: LoraInfo | None
    ops: Ops

    @property
    def target_info(self) -> TargetInfo:
        """The target, as the manifest describes it."""
        target = self.target
        return TargetInfo(name=target.name, triple=target.triple, mcpu=target.mcpu, features=target.features)

    def for_target(self, target: Target) -> _ArtifactPlan:
        """Return the same plan for another target, with the same weights and KV."""
        ops = _build_ops(self.config, self.layout, self.limits, target, self.plan, self.lora)
        return replace(self, target=target, ops=ops)

    def build(self, report: Callable[[int, int], None]) -> Library:
        """Compile the kernels that the cache lacks; `report` gets the compiled number and the total."""
        return build_module(
            self.ops.program,
            self.plan,
            self.config,
            self.layout,
            self.limits.num_tokens,
            self.target,
            KernelCache.of_user(),
            report,
            self.lora,
        )

    def manifest(
        self, name: str, writer: WeightsWriter, profile: dict[str, object], files: dict[str, FileInfo]
    ) -> Manifest:
        """Return the manifest; the weights must be written."""
        source = self.source
        return Manifest(
            format_version=FORMAT_VERSION,
            name=name,
            model=self.config,
            context_length=self.limits.context_length,
            quantization=QuantizationInfo(
                mode=self.options.quantize,
                kinds=writer.kind_infos(),
                token_bytes=artifact_token_bytes(self.weights),
                source_token_bytes=source_token_bytes(source),
                token_weights=token_weights(self.weights),
            ),
            kv=self.layout,
            target=self.target_info,
            module=ModuleInfo(
                entry_points=entry_points(self.config),
                max_num_tokens=self.limits.num_tokens,
                max_num_logits=self.limits.num_logits,
                workspace_bytes=self.ops.program.workspace_bytes,
                top_logits_scratch=num_maxima(self.config.num_outputs),
                weights_bytes=self.plan.num_bytes,
                num_frequent=drafts(self.config).get(DRAFT_FREQUENT) or msgspec.UNSET,
            ),
            tokenizer=TokenizerInfo(
                bos_token_id=source.bos_token_id,
                eos_token_ids=source.eos_token_ids,
                add_bos_token=source.add_bos_token,
                profile=profile,
            ),
            sampling=source.sampling,
            source=source.info,
            files=files,
            embedding=source.embedding,
            reranking=source.reranking,
            pairs=source.pairs,
            lora=msgspec.UNSET if self.lora is None else self.lora,
        )


def _plan_artifact(name: str, source: Source, options: CompileOptions, target: Target) -> _ArtifactPlan:
    """Plan the weights, and run the model's definition to get its program. Errors call the source `name`."""
    length = chosen_context_length(source.config, options.context_length)
    config = resolved(source.config, length)
    check_implemented(name, config)
    layout = kv_layout(config, options.kv_dtype, target)
    weights = StoredWeights(source, options.quantize)
    plan = WeightPlan(weights.kinds, weights.sorted_inputs)
    num_tokens = length if config.is_bidirectional else min(MAX_NUM_TOKENS, length)
    # a vector may be made of all hidden states of a text
    limits = Limits(num_tokens, num_tokens if config.output == "hidden" else MAX_NUM_LOGITS, length)
    lora: LoraInfo | None = None
    if options.max_loras:
        lora = lora_layout(config, options.max_loras, options.max_lora_rank, options.lora_dtype)
    ops = _build_ops(config, layout, limits, target, plan, lora)
    return _ArtifactPlan(source, options, target, config, layout, weights, plan, limits, lora, ops)


def _build_ops(
    config: ModelConfig, layout: KVLayout, limits: Limits, target: Target, plan: WeightPlan, lora: LoraInfo | None
) -> Ops:
    """Return the model's forward as kernel calls for a target, with the MTP head's drafting, if it has one."""
    ops, decoder = Ops(config, layout, limits, target, plan, lora), decoder_of(config)
    decoder.forward(ops)
    for entry_point, most_logits in drafts(config).items():
        drafting = Ops(config, layout, limits, target, plan, most_logits=most_logits)
        decoder.draft(drafting)
        ops.program.add_draft(entry_point, drafting.program)
        ops.rounded_inputs |= drafting.rounded_inputs
    return ops


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise InvalidParameter if a value is not one of those allowed."""
    if value not in allowed:
        raise InvalidParameter(f"{name} is {value!r}; use one of {', '.join(allowed)}")


def _default_name(output: Path) -> str:
    """Return the model's default name: that of the output without its suffix."""
    return output.resolve().name.removesuffix(".radixlm")


def _describe_files(directory: Path, known: Mapping[str, str]) -> dict[str, FileInfo]:
    """Return size and digest of each file; `known` are digests by name."""
    return {
        path.name: FileInfo(size=path.stat().st_size, sha256=known.get(path.name) or sha256_of(path))
        for path in sorted(directory.iterdir())
    }
