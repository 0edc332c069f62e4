"""Group the options of a command in its `--help`, and derive their environment variables.

Knows flags by name, not what they do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import click

FLAGS_ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(("-c", "--ctx-size", "--num-ctx"), "--context-length"),
    **dict.fromkeys(("-n", "--n-predict", "--predict", "--num-predict"), "--max-tokens"),
    **dict.fromkeys(("-t",), "--threads"),
    **dict.fromkeys(("--temp",), "--temperature"),
    **dict.fromkeys(("--repeat-penalty",), "--repetition-penalty"),
    **dict.fromkeys(("-s",), "--seed"),
    **dict.fromkeys(("-np", "--parallel"), "--max-num-seqs"),
    **dict.fromkeys(("-md", "--model-draft"), "--draft"),
    **dict.fromkeys(("-m",), "give MODEL without a flag"),
    **dict.fromkeys(("-hf", "--hf-repo"), "give hf:ORG/NAME:Q4_K_M as MODEL"),
    **dict.fromkeys(("-p", "--prompt"), "give PROMPT after MODEL"),
    **dict.fromkeys(("-ngl", "--gpu-layers", "--n-gpu-layers"), "remove it: models run on the CPU"),
}
"""What to use instead of the flags of llama.cpp and Ollama."""

SECTIONS: Mapping[str, Sequence[str]] = {
    "Model": (
        *("--quantize", "--kv-dtype", "--context-length", "--threads", "--chat-template-kwargs", "--system"),
        *("--speculate", "--draft", "--lora", "--prompt-file"),
    ),
    "Serving": (
        *("--models", "--allow-pull", "--unload-after", "--host", "--port", "--uds", "--root-path", "--model-id"),
        *("--max-num-seqs", "--max-queue"),
        *("--max-num-batched-tokens", "--prefill-ms", "--admission", "--truncation", "--strict", "--idle-work"),
        "--shutdown-timeout",
    ),
    "Cache": (
        *(
            "--memory-gb",
            "--kv-cache-gb",
            "--state-cache-gb",
            "--match",
            "--strip-suffix",
            "--cache-ttl",
            "--store",
            "--store-gb",
        ),
        *("--ignore-prompt-cache-key", "--kv-budget", "--chunk-cache-mb"),
        *("--keep-responses", "--response-ttl", "--response-gb"),
    ),
    "Sampling": (
        *("--max-tokens", "--temperature", "--top-k", "--top-p", "--min-p", "--top-n-sigma", "--repetition-penalty"),
        *("--seed", "--stop", "--stop-regex", "--ban", "--xtc-probability", "--xtc-threshold", "--dry-multiplier"),
        *("--dry-base", "--dry-allowed-length", "--dry-penalty-last-n"),
    ),
    "Security": (
        *("--api-key", "--api-key-file", "--metrics-key", "--allowed-host", "--cors-origin"),
        *("--ssl-certfile", "--ssl-keyfile", "--hide-cached-text"),
    ),
    "Logging": ("--log-format", "--log-prompts", "--log-kv", "--log-kv-mb", "--record", "--record-mb"),
}
"""Flags by heading, both in the order of the help."""

VARIABLE_PREFIX = "RADIXLM_"
_OTHER = dict.fromkeys(SECTIONS["Sampling"], "generate")  # a command with a flag; for other flags it is serve


_MODEL = (
    "A .gguf file, the directory of a Hugging Face or MLC model, hf:ORG/NAME:Q4_K_M, smollm2, or an artifact "
    "(NAME.radixlm). Models that are not artifacts are compiled once, and cached."
)


class SectionedCommand(click.Command):
    """A command whose help groups options under headings. Options of no section come last, under `Options`.

    The help also explains MODEL. `-h` works even if the command is parsed without its group.
    """

    def get_help_option_names(self, ctx: click.Context) -> list[str]:
        """Return the group's names of `--help`, also if the command is parsed without its group."""
        return ["-h", "--help"]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. The error for an unknown flag names ours for it, or similar ones.

        Raises:
            NoSuchOption: a flag is unknown.
        """
        given = [arg.partition("=")[0] for arg in args]
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            known = (flag for flag in given if flag in FLAGS_ELSEWHERE and flag.startswith(error.option_name))
            name = next(known, error.option_name)
            own = {flag for param in self.get_params(ctx) for flag in param.opts}
            instead = FLAGS_ELSEWHERE.get(name, "")
            if instead.startswith("--"):
                other = f" of another command, such as radixlm {_OTHER.get(instead, 'serve')}"
                instead = f"use {instead}{'' if instead in own else other}"
            hint = f"No such option {name!r:.60}; {instead}" if instead else None
            near = () if instead else error.possibilities
            raise click.NoSuchOption(name, hint, near, ctx) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under their headings, after an explanation of MODEL."""
        if any(param.name == "model" for param in self.get_params(ctx)):
            with formatter.section("Arguments"):
                formatter.write_dl([("MODEL", _MODEL)])
        rows = {flag_of(param): row for param in self.get_params(ctx) if (row := _row(param, ctx))}
        for heading, flags in SECTIONS.items():
            found = [rows.pop(flag) for flag in flags if flag in rows]
            if found:
                with formatter.section(heading):
                    formatter.write_dl(found)
        if rows:
            with formatter.section("Options"):
                formatter.write_dl(list(rows.values()))


def _row(param: click.Parameter, ctx: click.Context) -> tuple[str, str] | None:
    return param.get_help_record(ctx) if isinstance(param, click.Option) else None  # the docstring explains arguments


def flag_of(param: click.Parameter) -> str:
    """Return the flag that an option is known by, or the name of an argument.

    >>> flag_of(click.Option(["--store-gb", "store_bytes"])), flag_of(click.Option(["-o", "--output"]))
    ('--store-gb', '--output')
    """
    return next((name for name in param.opts if name.startswith("--")), param.opts[0])


def variable_of(flag: str) -> str:
    """Return the environment variable of a flag.

    >>> variable_of("--kv-cache-gb")
    'RADIXLM_KV_CACHE_GB'
    """
    return VARIABLE_PREFIX + flag.removeprefix("--").replace("-", "_").upper()
