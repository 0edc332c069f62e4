"""`radixlm explain-cache`: show how much of each turn's prompt is cached, and why the cached prefix ends."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..field_flags import CompileOptions, FieldCommand, compile_options, engine_keywords, take

if TYPE_CHECKING:
    from .playback import Played


@click.command("explain-cache", cls=FieldCommand, flags=("engine",))
@click.argument("model")
@click.option(
    "--turns",
    "file",
    type=click.Path(path_type=Path, allow_dash=True),
    required=True,
    metavar="FILE.json",
    help="A file with the turns; - is standard input.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    default=16,
    show_default=True,
    help="Maximum tokens of a generated reply.",
)
@click.option("--no-generate", is_flag=True, help="Run no model; replies that FILE lacks are empty.")
@click.option("--json", "as_json", is_flag=True, help="Print the turns as JSON.")
@compile_options
def command(model: str, file: Path, max_tokens: int, no_generate: bool, as_json: bool, **options: Any) -> None:
    """Show, turn by turn, how much of each prompt is cached, and why the cached prefix ends.

    FILE is a conversation (a list of messages), or a list of request bodies, with cache_match, cache_salt and so on.
    Replies in the file count as the model's own, with the usual token ids of their text, or with the message's
    token_ids. Missing replies are generated.

    \b
    radixlm explain-cache smollm2.radixlm --turns conversation.json
    radixlm explain-cache smollm2.radixlm --turns conversation.json --match exact --no-generate
    """
    import msgspec

    from .playback import Playback, read_turns

    turns = read_turns(sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes())
    explained = []
    artifact = take(CompileOptions, options).artifact_of(model)
    with Playback(artifact, engine_keywords(options), max_tokens=max_tokens, generates=not no_generate) as playback:
        for number, turn in enumerate(turns, 1):
            played = playback.play(turn)
            explained.append({"turn": number, "message": str(played.why_not_more), **msgspec.to_builtins(played)})
            if not as_json:
                _print_turn(number, played)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(explained)))


def _print_turn(number: int, played: Played) -> None:
    """Print how many tokens of a turn's prompt are cached, by kind of match, and why no more are."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in played.tokens_by_kind.items())
    cached = f"{played.num_cached_tokens} from the cache ({kinds})" if kinds else "none from the cache"
    click.echo(f"turn {number}: {played.num_prompt_tokens} prompt tokens, {cached}")
    click.secho(f"  {played.why_not_more}", dim=True)
