"""Where tests find real inputs that the repository may not carry."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from radixlm.compile.sources import default_model
from radixlm.runtime.artifact import cache_dir

from .goldens.tiny_models import TINY_MODELS
from .real_models import GEMMA_3_270M, QWEN_2_5_CODER, real_model
from .slowest_files import slowest_files
from .target_report import target_lines

if TYPE_CHECKING:
    from radixlm.compile.kv_layout import KVChoice
    from radixlm.compile.stored_weights import Quantize

CompileOnce = Callable[..., Path]
# Suites of their own, in environments of their own: see the Makefile.
collect_ignore = ["agents", "browser", "clients", "instruments", "newcomer", "ray", "wheel"]
collect_ignore += [] if os.environ.get("RADIXLM_ARM_PYTHON") else ["arm"]
NUM_ENGINE_THREADS = "1"
REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """After the list of skips, name the slowest files, and the targets that were executed, and those that were not."""
    yield
    reports = [report for found in terminalreporter.stats.values() for report in found if hasattr(report, "duration")]
    if lines := slowest_files((report.nodeid, report.duration) for report in reports):
        terminalreporter.section("slowest files")
        for line in lines:
            terminalreporter.line(line)
    executed = [report.nodeid for key in ("passed", "failed") for report in terminalreporter.getreports(key)]
    skipped = [report.nodeid for report in terminalreporter.getreports("skipped")]
    if not any("x86-64" in test for test in [*executed, *skipped]):
        return  # and nothing slow is imported
    from radixlm.compile.codegen.targets import TARGETS
    from radixlm.runtime.artifact.cpu import cpu_features

    targets = {name: target.features for name, target in TARGETS.items()}
    if lines := target_lines(executed, skipped, targets, cpu_features()):
        terminalreporter.section("compilation targets")
        for line in lines:
            terminalreporter.line(line)


@pytest.fixture(scope="session", autouse=True)
def share_kernels() -> None:
    """Tests that choose a cache folder, and the commands that they start, take kernels from the user's all the same."""
    os.environ.setdefault("RADIXLM_KERNEL_CACHE", str(cache_dir() / "kernels"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Have engines compute on one thread unless a test says how many: two spend half of their time in waits for each
    other, on models this small."""
    os.environ["TVM_NUM_THREADS"] = NUM_ENGINE_THREADS  # an engine that is told a number leaves it there


@pytest.fixture(scope="session", autouse=True)
def heed_interrupts() -> None:
    """Heed Ctrl-C and the end of the terminal, as all that the tests start does: background jobs of a shell ignore the
    former, and jobs of nohup the latter.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session", autouse=True)
def roomy_disk() -> None:
    """Let the small stores of tests find free space on any disk: a store keeps up to 1 GiB of its disk free."""
    from radixlm.runtime.store.files import OSFiles

    measured = OSFiles.disk_bytes

    def at_least(files: OSFiles, directory: Path) -> tuple[int, int]:
        num_bytes, num_free = measured(files, directory)
        return max(num_bytes, 1 << 34), max(num_free, 1 << 33)

    OSFiles.disk_bytes = at_least  # type: ignore[method-assign]


@pytest.fixture(scope="session", autouse=True)
def unpaid_guesses() -> None:
    """With RADIXLM_UNPAID_GUESSES every step checks guesses, most of them wrong, so that each test of what is generated
    is one of guesses, too. Tests that count steps and rows fail then.
    """
    if not os.environ.get("RADIXLM_UNPAID_GUESSES"):
        return
    from radixlm.runtime.engine.step import drafts

    from .runtime.guess_oracle import Unpaid

    drafts.Drafter = Unpaid  # type: ignore[misc]


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real tokenizers, conversations and tiny models; tests that need it skip without it."""
    path = Path(os.environ.get("RADIXLM_DATA", REPOSITORY.parent / "shared" / "data"))
    if not path.is_dir():
        pytest.skip(f"real inputs are not at {path}; set RADIXLM_DATA")
    return path


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The default model's file out of the cache; a machine's first test run downloads it (98 MB)."""
    return default_model.download()


@pytest.fixture(scope="session")
def smollm2_artifact(smollm2_gguf: Path) -> Path:
    """The default model compiled for this machine; compiled anew only when the compiler's sources change."""
    return _compile_once(smollm2_gguf)


@pytest.fixture(scope="session")
def smollm2_codes_artifact(smollm2_gguf: Path) -> Path:
    """The same with attention in integers, whatever the machine."""
    return _compile_once(smollm2_gguf, "k12v8")


@pytest.fixture(scope="session")
def smollm2_f16_artifact(smollm2_gguf: Path) -> Path:
    """The same with keys and values in float16."""
    return _compile_once(smollm2_gguf, "f16")


@pytest.fixture(scope="session")
def gemma3_artifact() -> Path:
    """Gemma 3 270M in Q4_K_M, compiled once as well; a machine's first test run downloads it (253 MB)."""
    return _compile_once(real_model(GEMMA_3_270M))


@pytest.fixture(scope="session")
def qwen2_artifact() -> Path:
    """Qwen2.5-Coder-0.5B-Instruct in Q4_K_M (491 MB), the same way."""
    return _compile_once(real_model(QWEN_2_5_CODER))


@pytest.fixture(scope="session")
def tiny_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of three small layers, as a Hugging Face directory. Read it, or copy it and break the copy."""
    return TINY_MODELS["llama3"].write(tmp_path_factory.mktemp("sources") / "tiny")


@pytest.fixture(scope="session")
def compile_once() -> CompileOnce:
    """`compile_once(source, kv_choice, quantize=..., context_length=..., target=..., max_loras=...)`: its artifact.

    Whoever asks first compiles it. It is shared with all tests, workers and later runs, so copy it to change it.
    """
    return _compile_once


@pytest.fixture(scope="session")
def tiny_artifact(tiny_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, compiled to 4 bits for this machine, with a calibration by which all attention may be dropped."""
    from radixlm.runtime.artifact import Artifact
    from radixlm.runtime.optional import APPROXIMATE, find

    path = tmp_path_factory.mktemp("artifacts") / "tiny.radixlm"
    shutil.copytree(_compile_once(tiny_source, quantize="q4"), path)
    if find(APPROXIMATE) is None:  # it was removed
        return path
    from radixlm.runtime.extras.approximate.calibration.calibration import Calibration

    manifest = Artifact.open(path).manifest  # random weights attend to everything
    Calibration.of(manifest, probe_head=manifest.kv.num_kv_heads - 1, max_dropped_attention=1.0).write(path)
    return path


@pytest.fixture(scope="session")
def family_artifact(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A tiny family compiled once as well, by its name, its precision, how keys and values are stored, and target."""
    from .goldens.families import FAMILIES, MTP_FAMILIES

    @functools.cache
    def compiled(name: str, quantize: Quantize, kv_dtype: KVChoice, target: str = "native") -> Path:
        tiny = FAMILIES.get(name) or MTP_FAMILIES[name]
        source = tiny.write(tmp_path_factory.mktemp("sources") / name)
        context_length = tiny.context_length
        return _compile_once(source, kv_dtype, quantize=quantize, context_length=context_length, target=target)

    return compiled


def _compile_once(
    source: Path,
    choice: KVChoice = "auto",
    *,
    quantize: Quantize = "keep",
    context_length: int | None = None,
    target: str = "native",
    max_loras: int = 0,
) -> Path:
    from radixlm.compile import compile_model
    from radixlm.compile.codegen.targets import find_target
    from radixlm.compile.kv_layout import kv_layout
    from radixlm.compile.sources import open_source

    machine = find_target(target)
    with open_source(source) as opened:
        kv_dtype = kv_layout(opened.config, choice, machine).dtype
    cache_dir = REPOSITORY / ".cache" / "tests"
    digest = digest_of_compiler()
    if source.is_dir():  # whose name says nothing of what is in it
        digest = _digest_of(sorted(path for path in source.rglob("*") if path.is_file()), digest)
    options = f"{quantize}-{kv_dtype}-{context_length or 'default'}-{machine.name}"
    if max_loras:
        options += f"-{max_loras}-loras"
    artifact = cache_dir / f"{source.stem}-{options}-{digest}.radixlm"
    locks = cache_dir / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    with (locks / f"{source.stem}-{options}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the tests run in several processes
        if not artifact.is_dir():
            _drop_stale(cache_dir)
            compile_model(
                source,
                artifact,
                quantize=quantize,
                kv_dtype=kv_dtype,
                context_length=context_length,
                target=machine.name,
                name=source.stem,
                max_loras=max_loras,
            )
        os.utime(artifact)  # it is in use: no run beside this one drops it
    return artifact


def _drop_stale(cache_dir: Path) -> None:
    """Drop artifacts of other sources, but for those that a run beside this one may be using."""
    for artifact in cache_dir.glob("*.radixlm"):
        if artifact.stat().st_mtime < time.time() - 3600:
            shutil.rmtree(artifact, ignore_errors=True)


@functools.cache  # what is changed while tests run is not what they run
def digest_of_compiler() -> str:
    """A digest of all that decides what an artifact contains, but for the model and the machine."""
    folders = ("compile", "tokenizer_fix", "runtime/artifact")
    files = sorted(path for name in folders for path in (REPOSITORY / name).rglob("*.py"))
    return _digest_of([*files, REPOSITORY / "requirements.lock"])


def _digest_of(files: Iterable[Path], before: str = "") -> str:
    """A digest of files and of what their folder calls them, and of one of others."""
    digest = hashlib.sha256(before.encode())
    for path in files:
        digest.update(f"{path.name}\0".encode())
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
