"""The section on a whole coding session, and its picture. Knows the contents of the JSON file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median

from .tables import Json, table

_TITLES = {"whole": "undisturbed", "killed": "server killed in the middle", "unloaded": "server unloaded in the middle"}
_COLORS = ("#c0392b", "#2c6fbb", "#2e8b57", "#8e5ea2", "#777777")
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 760, 400, 60, 150, 40, 50


def session(results: Json) -> Iterator[str]:
    """Yield the coding session's times: a row for each server and way, whole, killed or unloaded."""
    have, whole = results["layers"]
    ways = results["ways"]
    some = next(iter(next(iter(ways.values())).values()))
    num_requests, num_tokens = len(some), max(answer["num_prompt"] for answer in some)
    yield "## A coding session, as its user lives it"
    yield (
        f"One conversation and two subagents, {num_requests} requests of chat completions one after the other, with "
        "long instructions, 16 tools, files that are read and a reminder that moves, as coding agents send them "
        f"(`bench/agents/session.py`), up to {num_tokens:,} tokens long; {results['shape']} with {have} of {whole} "
        f"layers and random weights; replies of {results['num_reply_tokens']} tokens. llama.cpp has `--cache-reuse`, "
        "three slots of one cache and its prompt cache, and saves and restores its slots where the server is unloaded "
        "in order; radixlm has `--store`. A request that finds the server gone waits for its start. Other requests: "
        "all but the first of each agent."
        + (f" Scaled to {whole} layers: first tokens by layers, replies by bytes of weights." if have < whole else "")
    )
    for name, why in sorted(results["missing"].items()):
        yield f"Not measured: {name} ({why})."
    rows = [
        {
            "way": f"{_TITLES[way]}: {name}",
            "taken": f"{results['taken_by_others'][way][name]:.0%}",
            **_figures(answers, results),
        }
        for way, servers in ways.items()
        for name, answers in servers.items()
    ]
    columns = {
        "": "{way}",
        "total, s": "{total:auto}",
        "first prompt, s": "{first:auto}",
        "first token of others, median s": "{median:auto}",
        "at worst, s": "{worst:auto}",
        "tokens from a cache": "{cached}",
        "CPU time of others": "{taken}",
    }
    yield table(columns | ({f"total with {whole} layers, scaled, s": "{scaled:auto}"} if have < whole else {}), rows)


def _figures(answers: Sequence[Json], results: Json) -> Json:
    """Return one server's figures: seconds in all and to first tokens, cached tokens, and seconds for all layers."""
    have, whole = results["layers"]
    seen: set[int] = set()
    others = []
    for answer in answers:
        if answer["agent"] in seen:
            others.append(answer["to_first_s"])
        seen.add(answer["agent"])
    prompts, cached = (sum(answer[key] for answer in answers) for key in ("num_prompt", "num_cached"))
    replies = sum(answer["seconds"] - answer["to_first_s"] for answer in answers)
    return {
        "total": sum(answer["seconds"] for answer in answers),
        "first": answers[0]["to_first_s"],
        "median": median(others),
        "worst": max(others),
        "cached": f"{cached / prompts:.0%}" if cached else "not told",
        "scaled": sum(answer["to_first_s"] for answer in answers) * whole / have + replies * results["decode_scale"],
    }


def picture(results: Json) -> str:
    """Return the seconds to the first token of each request of the main conversation, as an SVG with a log scale."""
    way = next(way for way in ("killed", "unloaded", "whole") if way in results["ways"])
    lines = {
        name: [answer["to_first_s"] for answer in answers if answer["agent"] == 0]
        for name, answers in results["ways"][way].items()
    }
    have, whole = results["layers"]
    every = [value for values in lines.values() for value in values]
    low, high = math.floor(math.log10(min(every))), math.ceil(math.log10(max(every)))
    num = max(map(len, lines.values()))
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def x(number: float) -> float:
        return _LEFT + (right - _LEFT) * number / max(1, num - 1)

    def y(seconds: float) -> float:
        return bottom - (bottom - _TOP) * (math.log10(seconds) - low) / max(1, high - low)

    title = f"Seconds to the first token, by request: {results['shape']}, {have} of {whole} layers; {_TITLES[way]}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="13">{title}</text>',
    ]
    for power in range(low, high + 1):
        at = y(10**power)
        parts.append(f'<line x1="{_LEFT}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{10.0**power:g} s</text>')
    for number in range(0, num, max(1, num // 8)):
        parts.append(f'<text x="{x(number):.1f}" y="{bottom + 18}" text-anchor="middle">{number + 1}</text>')
    below = f'x="{(_LEFT + right) / 2:.0f}" y="{_HEIGHT - 10}" text-anchor="middle"'
    parts.append(f"<text {below}>request of the main conversation</text>")
    if way != "whole":
        parts.append(f'<path d="M{x(num // 2):.1f} {_TOP}V{bottom}" stroke="#999" stroke-dasharray="4 4"/>')
    labels = sorted(lines, key=lambda name: lines[name][-1])
    spots: dict[str, float] = {}
    for name in labels:  # from the bottom up, each a line above the one before
        spots[name] = min(y(lines[name][-1]), *(spot - 15 for spot in spots.values()), bottom + 15)
    for color, (name, values) in zip(_COLORS, lines.items(), strict=False):
        points = " ".join(f"{x(number):.1f},{y(value):.1f}" for number, value in enumerate(values))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts.append(f'<text x="{right + 8}" y="{spots[name] + 4:.1f}" fill="{color}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
