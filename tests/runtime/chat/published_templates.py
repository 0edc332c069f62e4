"""Chat templates that were published, fetched with llama.cpp's sources, and what is found in each.

The repository may not carry them. The table is what was found, read and judged once: a change of it is a change for the
users of that model.
"""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from radixlm.runtime.artifact import cache_dir
from radixlm.runtime.chat.tools.known_formats import (
    ATEM,
    COHERE,
    DSML,
    GEMMA,
    GLM,
    GLM_TIGHT,
    GRANITE,
    HARMONY,
    HERMES,
    KIMI,
    KNOWN,
    LFM,
    LFM_CONTENT,
    LLAMA3,
    MINIMAX,
    MISTRAL,
    MISTRAL_IDS,
    MISTRAL_LIST,
    NEMOTRON,
    PLAIN,
    QWEN_CODER,
    SEED,
)
from radixlm.runtime.chat.tools.tool_format import ToolFormat

REPOSITORY = Path(__file__).resolve().parents[3]
FOLDER = "/vendor/llama.cpp/models/templates/"


class Found(NamedTuple):
    """What is found in a template.

    Args:
        tools: how it writes calls.
        thought: what begins a thought, what ends it, and what earlier ones are called, if they are kept.
        reads_the_middle: whether it reads what the system says in the middle.
        lost: what may end a prompt in a loop of calls, and does not stand in the next.
        drops: whether it drops the words before a call.
    """

    tools: ToolFormat
    thought: tuple[str, str, str | None] | None = None
    reads_the_middle: bool = True
    lost: str = ""
    drops: bool = False


DSML_4 = next(format for format in KNOWN if format.trigger == "<｜DSML｜tool_calls>")
FUNCTIONARY = next(format for format in KNOWN if format.begin == "<function=" and format.trigger == "<function=")
TABLE: dict[str, Found | None] = {
    "Apertus-8B-Instruct": Found(PLAIN, reads_the_middle=False),
    "Apriel-1.6-15b-Thinker-fixed": Found(
        PLAIN,
        ("<|begin_assistant|>\nHere are my reasoning steps:\n", "\n[BEGIN FINAL RESPONSE]\n", "reasoning_content"),
        lost="Here are my reasoning steps:\n",
    ),
    "Bielik-11B-v3.0-Instruct": Found(
        HERMES,
        ("<think>\n", "\n</think>\n", "reasoning_content"),
        reads_the_middle=False,
        lost="end|>\n<|im_start|>assistant\n",
    ),
    "ByteDance-Seed-OSS": Found(SEED, ("<seed:think>", "</seed:think>\n", "reasoning_content")),
    "Cohere2MoE": Found(
        COHERE,
        ("<|START_THINKING|>", "<|END_THINKING|><|START_TEXT|>", "reasoning_content"),
        lost="THINKING|>",
        drops=True,
    ),
    "CohereForAI-c4ai-command-r-plus-tool_use": None,
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": Found(
        COHERE, ("<|START_THINKING|>", "<|END_THINKING|>", "reasoning_content"), drops=True
    ),
    "GLM-4.6": Found(GLM, ("\n<think>", "</think>\n", "reasoning_content")),
    "GLM-4.7-Flash": Found(GLM_TIGHT, ("<think>", "</think>", "reasoning_content"), lost="think>"),
    "GigaChat3-10B-A1.8B": Found(PLAIN),
    "GigaChat3.1-10B-A1.8B": Found(PLAIN),
    "HuggingFaceTB-SmolLM3-3B": Found(PLAIN, ("<think>", "</think>", None), reads_the_middle=False),
    "Kimi-K2-Instruct": Found(PLAIN),
    "Kimi-K2-Thinking": Found(PLAIN, ("<think>", "</think>", None)),
    "Kimi-K3": Found(PLAIN, ("<|sep|>", "<|close|>think<|sep|><|open|>response<|sep|>", "reasoning_content")),
    "LFM2-8B-A1B": Found(LFM_CONTENT),
    "LFM2.5-8B-A1B": Found(LFM, ("<think>", "</think>", "thinking")),
    "LFM2.5-Instruct": Found(LFM_CONTENT),
    "MiMo-VL": Found(HERMES),
    "MiniMax-M1": Found(PLAIN, reads_the_middle=False),
    "MiniMax-M2": Found(
        MINIMAX, ("<think>\n", "\n</think>\n\n", "reasoning_content"), reads_the_middle=False, lost="<think>\n"
    ),
    "MiniMax-M3": Found(PLAIN, ("<mm:think>", "</mm:think>", "reasoning_content"), reads_the_middle=False),
    "Mistral-Small-3.2-24B-Instruct-2506": Found(MISTRAL_IDS, reads_the_middle=False, drops=True),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": Found(
        QWEN_CODER, ("<think>\n", "\n</think>\n", "reasoning_content"), lost="\n"
    ),
    "NVIDIA-Nemotron-Nano-v2": Found(NEMOTRON, ("<think>", "</think>", None), reads_the_middle=False, lost="think>\n"),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": Found(
        HERMES, reads_the_middle=False, lost="<|im_end|><|im_start|>assistant\n", drops=True
    ),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": Found(
        HERMES, reads_the_middle=False, lost="<|im_end|><|im_start|>assistant\n", drops=True
    ),
    "Qwen-QwQ-32B": Found(HERMES, ("<think>", "</think>", None), lost="hink>\n</think>"),
    "Qwen-Qwen2.5-7B-Instruct": Found(HERMES),
    "Qwen-Qwen3-0.6B": Found(HERMES, ("<think>\n", "\n</think>\n\n", "reasoning_content")),
    "Qwen3-Coder": Found(QWEN_CODER),
    "Qwen3.5-4B": Found(QWEN_CODER, ("<think>\n", "\n</think>\n\n", "reasoning_content"), reads_the_middle=False),
    "Reka-Edge": Found(
        replace(HERMES, separator=""), ("<think>\n", "\n</think>\n\n", "reasoning_content"), reads_the_middle=False
    ),
    "Spark2.5": Found(GLM_TIGHT, ("<think>", "</think>", "reasoning_content"), lost="think>"),
    "StepFun3.5-Flash": Found(replace(QWEN_CODER, separator=""), ("<think>\n", "\n</think>\n", "reasoning_content")),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": Found(
        PLAIN, ("<think>", "</think>", None), reads_the_middle=False, lost="<think>\n"
    ),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": Found(
        PLAIN, ("<think>", "</think>", None), reads_the_middle=False, lost="<think>\n</think>"
    ),
    "deepseek-ai-DeepSeek-V3.1": Found(PLAIN, ("<think>", "</think>", None), reads_the_middle=False),
    "deepseek-ai-DeepSeek-V3.2": Found(
        DSML, ("<think>", "</think>", "reasoning_content"), reads_the_middle=False, lost="think></think>"
    ),
    "deepseek-ai-DeepSeek-V4-Flash-0731": Found(
        DSML_4, ("<think>", "</think>", "reasoning_content"), reads_the_middle=False
    ),
    "deepseek-ai-DeepSeek-V4": Found(DSML_4, ("<think>", "</think>", "reasoning_content"), reads_the_middle=False),
    "fireworks-ai-llama-3-firefunction-v2": None,
    "google-gemma-2-2b-it": Found(PLAIN, reads_the_middle=False),
    "google-gemma-4-31B-it-interleaved": Found(
        GEMMA, ("<|channel>thought\n", "<channel|>", "reasoning_content"), lost="channel>thought\n<channel|>"
    ),
    "google-gemma-4-31B-it": Found(
        GEMMA, ("<|channel>thought\n", "\n<channel|>", "reasoning_content"), lost="channel>thought\n<channel|>"
    ),
    "ibm-granite-granite-3.3-2B-Instruct": Found(GRANITE, ("<think>", "</think>", None)),
    "ibm-granite-granite-4.0": Found(HERMES),
    "ibm-granite-granite-4.1": Found(HERMES),
    "inclusionai-ling-3.0-flash": Found(PLAIN, ("<think>", "</think>", "reasoning_content")),
    "llama-cpp-deepseek-r1": Found(PLAIN, ("<think>", "</think>", None), reads_the_middle=False, lost="<think>\n"),
    "llama-cpp-rwkv-world": Found(PLAIN, ("<think>", "</think>", None), reads_the_middle=False),
    "meetkai-functionary-medium-v3.1": Found(FUNCTIONARY),
    "meetkai-functionary-medium-v3.2": Found(PLAIN),
    "meta-llama-Llama-3.1-8B-Instruct": Found(LLAMA3, drops=True),
    "meta-llama-Llama-3.2-3B-Instruct": Found(LLAMA3, drops=True),
    "meta-llama-Llama-3.3-70B-Instruct": Found(LLAMA3, drops=True),
    "microsoft-Phi-3.5-mini-instruct": Found(PLAIN),
    "mistralai-Ministral-3-14B-Reasoning-2512": Found(
        MISTRAL, ("[THINK]", "[/THINK]", "content"), reads_the_middle=False
    ),
    "mistralai-Mistral-Nemo-Instruct-2407": Found(MISTRAL_LIST, reads_the_middle=False, drops=True),
    "moonshotai-Kimi-K2": Found(KIMI),
    "muse-glimmer": Found(
        ATEM, (" to=self<|message|>", "<|eom|><|start|>assistant to=user<|message|>", "reasoning_content"), drops=True
    ),
    "openai-gpt-oss-120b": Found(
        HARMONY,
        ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>", "thinking"),
        reads_the_middle=False,
    ),
    "openbmb-MiniCPM5-1B": Found(PLAIN, ("<think>\n", "\n</think>\n\n", "reasoning_content")),
    "poolside-Laguna-S-2.1": Found(GLM_TIGHT, ("<think>", "</think>", "reasoning_content")),
    "poolside-Laguna-XS-2.1": Found(GLM, ("<think>\n", "\n</think>\n", "reasoning_content")),
    "poolside-Laguna-XS.2": Found(GLM, ("<think>\n", "\n</think>\n", "reasoning_content")),
    "tencent-Hy3": Found(
        PLAIN, ("<think:opensource>", "</think:opensource>", "reasoning_content"), reads_the_middle=False
    ),
    "unsloth-Apriel-1.5": Found(PLAIN),
    "unsloth-mistral-Devstral-Small-2507": Found(MISTRAL),
    "upstage-Solar-Open-100B": Found(
        PLAIN, ("<|think|>", "<|end|><|begin|>assistant<|content|>", "reasoning"), reads_the_middle=False
    ),
}
"""By the names of the files; None: it wants variables that no client sends, and takes no conversation."""


def published_templates() -> dict[str, str]:
    """The templates by their names, out of the cache, downloaded at first (77 MB); the test skips where the registry is
    not reached.
    """
    script = (REPOSITORY / ".ci" / "llama_cpp.sh").read_text(encoding="utf-8")
    found = re.search(r"^requirement=(.+)==(.+)$", script, re.MULTILINE)
    assert found is not None, "it pins the sources"
    directory = cache_dir() / f"chat-templates-{found[2]}"
    directory.parent.mkdir(parents=True, exist_ok=True)
    with (directory.parent / f".{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the tests run in several processes
        if not directory.is_dir():
            with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".download-") as scratch:
                os.replace(_extracted(_download(found[1], found[2], Path(scratch)), Path(scratch)), directory)
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(directory.glob("*.jinja"))}


def _download(name: str, version: str, scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--no-binary", name]
    command += ["--disable-pip-version-check", f"{name}=={version}", "-d", str(scratch)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        lines = result.stderr.strip().splitlines() or ["it said nothing"]
        pytest.skip(f"pip could not download {name}: {lines[-1].strip()}")
    return next(scratch.glob("*.tar.gz"))


def _extracted(sources: Path, scratch: Path) -> Path:
    directory = scratch / "templates"
    directory.mkdir()
    with tarfile.open(sources) as archive:
        for member in archive:
            if FOLDER in member.name and member.name.endswith(".jinja"):
                file = archive.extractfile(member)
                assert file is not None
                (directory / Path(member.name).name).write_bytes(file.read())
    return directory
