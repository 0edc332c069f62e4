"""`bench/RESULTS.md` from `bench/results/*.json`: tables and plots, each with machine, commit and command.

    python -m bench.report

What was not measured is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from . import (
    cache_tables,
    chunk_tables,
    ladder_tables,
    load_tables,
    partial_first_tables,
    partial_tables,
    plots,
    quality_tables,
    replay_tables,
    restart_tables,
    store_plots,
    store_tables,
    suffix_tables,
    tables,
)
from .machine import ROOT
from .results import RESULTS, read_results
from .tables import Json

_HEAD = """# Results

Made by `python -m bench.report` from the files in `bench/results`; what a command measures, its first lines say.
Experiments, also those that did not help, are in [LOG.md](LOG.md).
"""


def main() -> None:
    """Write the page and its plots."""
    page = ROOT / "bench" / "RESULTS.md"
    page.write_text(render(RESULTS), encoding="utf-8")
    print(page)


def render(directory: Path) -> str:
    """The page of the results in `directory`; plots are written there."""
    parts = [_HEAD]
    for name, sections in _SECTIONS.items():
        results = read_results(name, directory)
        if results is not None:
            parts += sections(results, directory)
            if "runs" not in results:  # each of which has its own
                parts.append(tables.origin(results))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _peers(results: Json, directory: Path) -> Iterator[str]:
    yield "## Beside llama.cpp"
    yield (
        "All get the same random prompts, one engine after the other in every round; a ratio is of two runs of one "
        "round, and more than 1 says that radixlm is better. llama.cpp is its server, built for this machine "
        "(`.ci/llama_cpp.sh`), on the same file and on one that its own tool made of that in Q4_0, with flash "
        "attention, but for batch-1 decode, where the better of with and without counts. The wheel is `xllamacpp`, "
        "which pip gives, on the Q4_0. Streams and first tokens are timed by the same client over HTTP; its "
        "connections are kept open. Prefill and decode leave HTTP out: llama.cpp's by its own clock, ours by the "
        "caller's of the engine."
    )
    for run in results["runs"].values():
        yield f"### {run['model']}"
        builds = (f"{build}: {info}" for build, info in run["llama_cpp_system_info"].items())
        yield f"{run['threads']} threads for each. llama.cpp was built for, {'; '.join(builds)}."
        yield tables.peers(run)
        plot = f"peers_{run['model'].removesuffix('.gguf')}.svg"
        plots.peers(run, directory / plot)
        yield f"![how many times as fast as llama.cpp](results/{plot})"
        yield (
            f"Decode reads {run['decode_bytes_per_token'] / 1e6:.1f} MB of weights a token, "
            f"{run['decode_bandwidth_share']:.0%} of the bandwidth that was measured in the same round, right before "
            "and after."
        )
        if run["verdicts"]:
            yield tables.verdicts(run)
        yield tables.origin(run)


def _ladder(results: Json, _: Path) -> Iterator[str]:
    yield "## More and more streams against a small pool"
    yield (
        "`radixlm serve` with its defaults and a small KV pool; each stream sends its next chat when its last reply "
        "has ended, over a connection that it keeps open. Prompts are distinct words and share no more than the "
        "template's beginning; replies have a fixed length. The last row is the run of llmperf after which mlc-llm "
        "#2766 reports a crash. Pages free: after the last reply, when the cache was emptied, too."
    )
    for run in results["runs"].values():
        yield ladder_tables.rungs(run)
        yield tables.origin(run)


def _engine(results: Json, _: Path) -> Iterator[str]:
    yield "## The engine"
    yield tables.limits(results)
    yield tables.engine(results)


def _kernels(results: Json, _: Path) -> Iterator[str]:
    yield "## Kernels"
    yield (
        f"Target {results['target']}. The share is the least time at the limits over the time taken; rows that come "
        "from caches may pass the bandwidth of memory."
    )
    yield tables.limits(results)
    yield tables.kernels(results)


def _growth(results: Json, directory: Path) -> Iterator[str]:
    yield "## How cost grows"
    plots.growth(results, directory / "growth.svg")
    yield "![time against context, prompt and streams](results/growth.svg)"
    yield tables.curve(results, "decode_s_by_context", "decode after so many tokens")
    yield tables.curve(results, "prefill_s_by_prompt", "prompt of so many tokens")
    yield tables.curve(results, "step_s_by_batch", "step of so many streams")


def _model_sizes(results: Json, directory: Path) -> Iterator[str]:
    yield "## Model sizes"
    yield "Random bfloat16 weights, compiled to q4; memory is anonymous memory, without mapped files."
    plots.model_sizes(results, directory / "model_sizes.svg")
    yield "![compile and decode against parameters](results/model_sizes.svg)"
    yield tables.model_sizes(results)


def _perplexity(results: Json, _: Path) -> Iterator[str]:
    yield "## Perplexity"
    yield (
        f"{results['model']}, its numbers kept. All get the same tokens in the same windows of {results['window']}, "
        "which overlap by half, without BOS, and count each token once; llama.cpp with its defaults, transformers in "
        "float32. A ratio is given with twice its standard error, from the differences token by token."
    )
    yield quality_tables.perplexities(results["rows"])


def _quality_q4(results: Json, _: Path) -> Iterator[str]:
    yield f"## q4 beside Q4_0: {results['model']}"
    yield (
        "Squared errors of our q4 over those of llama.cpp's Q4_0 of the same weights: of the weights, and of what the "
        "matrices give for inputs from the texts, both as geometric means over the layers."
    )
    yield quality_tables.rounding_errors(results["errors"])
    yield quality_tables.perplexities(results["rows"])


def _replay(results: Json, _: Path) -> Iterator[str]:
    yield "## Conversations replayed"
    yield (
        "Prompt tokens passed to the model in every turn but the first, over the ideal: all after the last token whose "
        "KV can exist. OASST conversations; the model is told what to say, in replies that begin with a word (bare) or "
        "a space, are split into any ids of the vocabulary, stand in white space (padded), or ended for want of room "
        "(cut). `others` feeds the rendered text and matches its ids. The bar is 1.01 for `text`: "
        f"{'met' if results['is_met'] else '**missed**'}."
    )
    yield replay_tables.ratios(results)
    yield (
        "The same conversations with clients who change what was said, or go on with another's: how many requests did "
        "not reuse everything up to the last token before the first changed byte. Each reuse was true: the ids that "
        "were used spell the prompt. `memo` puts prompts together from the ids of replies that are known by their text."
    )
    yield replay_tables.changed(results)


def _replay_live(results: Json, _: Path) -> Iterator[str]:
    yield "## A real model's own replies"
    yield (
        f"{results['num_conversations']} conversations of {results['num_turns']} turns at temperature 1, counted at "
        "the model's door. Of a reply that came whole to the client nothing that had KV may be prefilled again: "
        f"{'met' if results['is_met'] else '**missed**'}. The tokens of a stop string had KV, too, but their text is "
        "kept from the client, who cannot send it back."
    )
    yield replay_tables.live(results)


def _suffix(results: Json, _: Path) -> Iterator[str]:
    yield "## What Llama-2's appended token costs"
    turns = results["rows"][0]["turns"]
    yield (
        f"One talk of {len(turns)} turns over raw completions that end in a space, with Llama-2's tokenizer and the "
        f"shapes of Llama-2-7B, of which {results['num_layers']} layers compute. Matched by ids with 29871 fed, as "
        "engines do that key their cache by ids (mlc-llm #2897); by ids without it; and by text, as is the default. "
        "Replies begin with '▁The', or with 'The', before which the token of the space is said where the prompt lost "
        "it. Seconds are medians of the rounds, from a prompt to its first token, of all turns and of the last; pages "
        "are those that the cache holds after the talk, and MB those of all layers."
    )
    yield suffix_tables.costs(results)


def _text_quality(results: Json, _: Path) -> Iterator[str]:
    yield "## A reply's own ids, or its text encoded anew"
    yield (
        "Mean log-likelihood of the true text that follows, behind the usual ids and how much more it is behind the "
        "reused ones; KL(usual || reused) in nats a token; all with twice the standard error over talks. `sampled`: "
        f"those of {results['num_sampled']} replies that the model sampled whose ids are not the encoding of their "
        "text; `split`: ids drawn at random, which no model says."
    )
    yield replay_tables.text_quality(results)


def _scored(results: Json, _: Path) -> Iterator[str]:
    yield "## What scores of KV rows cost"
    yield (
        f"`forward_scored`, which adds up how much attention each KV row gets, beside `forward`; medians of "
        f"{results['runs']} calls in turn. Before: `forward` of an artifact whose compiler knew no scores."
    )
    yield partial_tables.scored(results)


def _match_cost(results: Json, _: Path) -> Iterator[str]:
    yield "## What the prefix cache costs"
    yield (
        "Microseconds to match a prompt that is cached, plus those to insert a new one, which is all that the cache "
        "does for a request: match, open, a step's reserve and commit, close. Without tokenization; medians. The text "
        "walk is of the same text in other ids: the prompt has two for each cached one."
    )
    yield cache_tables.match_costs(results)
    yield cache_tables.index_sizes(results)


def _mooncake(results: Json, _: Path) -> Iterator[str]:
    yield "## Mooncake's conversation trace"
    yield (
        f"{results['requests']:,} requests with {results['hash_ids']:,} hash ids, {results['distinct']:,} distinct, "
        "each a page; the share of them that is found. The engine's order is LRU, leaves first; others are simulated."
    )
    yield cache_tables.hit_rates(results)


def _load(results: Json, _: Path) -> Iterator[str]:
    yield "## Impatient clients"
    yield (
        "A real server with a KV pool far too small for its clients, who ask for random prompts with random sampling, "
        "go on with conversations, leave in the middle, and send what must be refused. Survivors, drawn at random, are "
        "computed again from the ids that were used, alone on a fresh engine: ids, text, logprobs and finish reason "
        "must be the same to the last bit. Memory is what no file holds, from 30 % of the time on. `qwen2` has the "
        "shapes and the tokenizer of Qwen2-0.5B, 4 of its 24 layers and random weights (`python -m bench.load_model`)."
    )
    yield load_tables.loads(results)
    yield load_tables.refusals(results)
    yield load_tables.origins(results)


_PARTIAL = {
    "text": "a text, and later parts of it as queries",
    "nq": "passages of NQ-open, and questions about each",
    "tools": "schemas of functions, and requests for each",
    "bbh": "few-shot examples of BBH's tasks, and one more of each",
}


def _partial(results: Json, directory: Path) -> Iterator[str]:
    workload = results["workload"]
    yield f"## A part of a prefix's KV: {_PARTIAL[workload]}"
    yield (
        f"{results['num_prefixes']} prefixes of {results['shortest_prefix']:,} to {results['longest_prefix']:,} "
        f"tokens, {results['rows'][0]['num_queries']} queries; KL(full || partial) over what truly follows, with "
        "twice the standard error over queries. History is the attention of the prefix's other queries; the hybrid "
        "takes half by that and that of the prefix itself, or without the latter (`no pass`). With all rows every "
        "query gave the full prefix's logits to the last bit."
    )
    store_plots.quality(results, directory / f"partial_{workload}.svg")
    yield f"![KL against the share of rows](results/partial_{workload}.svg)"
    yield partial_tables.qualities(results)


def _partial_needle(results: Json, directory: Path) -> Iterator[str]:
    yield "## A part of a prefix's KV: a fact that nobody asked for before"
    yield (
        f"{results['num_prefixes']} prefixes of {results['shortest_prefix']:,} to {results['longest_prefix']:,} tokens "
        "with a fact at some depth; found is where every token of the answer is the most likely one."
    )
    store_plots.quality(results, directory / "partial_needle.svg")
    yield "![KL and facts found against the share of rows](results/partial_needle.svg)"
    yield partial_tables.needles(results)


def _store_restart(results: Json, directory: Path) -> Iterator[str]:
    yield "## The first token after a restart"
    yield (
        f"Seconds from a prompt of {results['num_tokens']:,} tokens to its first token, medians of "
        f"{len(results['rounds'])} rounds: computed without a store; loaded from a disk in full; and as the planner "
        "decides, which measures disk and model. A fresh engine and an empty page cache each time; disks other than "
        "the real one are throttled by a token bucket. All replies are the same, to the last bit of their logprobs."
    )
    store_plots.first_tokens(results, directory / "store_restart.svg")
    yield "![first token against the speed of the disk](results/store_restart.svg)"
    yield restart_tables.first_tokens(results)


def _store_partial(results: Json, _: Path) -> Iterator[str]:
    yield f"## The first token with a part of a stored prefix: {_PARTIAL[results['workload']]}"
    yield (
        f"Seconds to the first token over {len(results['num_tokens'])} prefixes that are on disk only, medians over "
        f"questions that nobody asked before; {min(results['num_history'])} to {max(results['num_history'])} others of "
        "each were asked first, and where they looked is the order in which it is stored. Always: whatever the engine "
        "thinks of it. As in the text: the same tokens, from runs that are in no order. Disks other than the real one "
        "are throttled by a token bucket; the page cache is emptied before each request. Replies that are not of a "
        "part are those of an engine without a store, to the last bit of their logprobs."
    )
    for num_joined in sorted({joined for joined, _ in results["num_tokens"]}):
        lengths = [length for joined, length in results["num_tokens"] if joined == num_joined]
        yield f"Prefixes of {min(lengths):,} to {max(lengths):,} tokens, with probe keys in memory:"
        yield partial_first_tables.first_tokens(results, num_joined)
        yield "The first question of each, which finds none there:"
        yield partial_first_tables.first_tokens(results, num_joined, is_first=True)
    yield (
        "A quarter, as the engine decides, beside a full load and the better of that and of computing; parts: how many "
        "of the requests had one, the others are answered exactly. It is wanted to be "
        f"{partial_first_tables.MIN_GAIN} times as fast as a full load that waits for the disk for "
        f"{partial_first_tables.BOTTLENECK:.0%} of its time and more."
    )
    yield partial_first_tables.verdicts(results)
    yield partial_first_tables.bytes_read(results)
    yield (
        f"Probe keys and orders take {partial_first_tables.known_mib(results):.4f} MiB of memory a token, its keys and "
        f"values {results['page_bytes'] / 16 / 2**20:.4f}."
    )


def _store_amplification(results: Json, directory: Path) -> Iterator[str]:
    yield "## Bytes read for each byte attended to"
    yield (
        f"KV of {results['num_prefixes']} prefixes of {results['shortest_prefix']:,} to "
        f"{results['longest_prefix']:,} tokens in chunks of tokens of one layer and KV head: in the order of the text, "
        "ranked by the attention that the prefix itself and other queries paid, and as it ships (quarter): ranked are "
        "those that half of a quarter takes, and the others lie behind as in the text. Bytes are whole units of 4 KiB, "
        "with headers, orders and checksums. Stored order: the first tokens of each layer and head, as many as fill "
        "pages of 16; whole chunks: fewer, where that leaves any."
    )
    store_plots.amplification(results, directory / "store_amplification.svg")
    yield "![bytes read over bytes attended to, by size of chunks](results/store_amplification.svg)"
    yield store_tables.by_stored_order(results["rows"])
    yield (
        "Hybrid: half by stored order, half in chunks that a look through the keys of one KV head finds. All that is "
        "read, those keys among it; with them kept in memory; with the order and the checksums kept there, too."
    )
    yield store_tables.by_probe(results["rows"])
    yield "In chunks of 16 tokens, by text, with all that is read:"
    yield store_tables.by_workload(results["workloads"])
    space = next(row["space"] for row in results["rows"])
    yield f"An ordered run takes {space:.2f} times the bytes of its pages: probe keys are there twice."


def _chunk_cache(results: Json, _: Path) -> Iterator[str]:
    yield "## Which chunks of ordered runs stay in memory"
    yield (
        f"The share of bytes that a cache of 5 to 50 % of {results['ordered_bytes'] / 1e6:,.0f} MB of ordered runs has "
        f"when they are wanted: {results['num_prefixes']} prefixes of {results['shortest_prefix']:,} to "
        f"{results['longest_prefix']:,} tokens, {results['num_requests']} requests, Zipf, of which three quarters "
        f"count; each wants {results['wanted_bytes'] / 1e6:.1f} MB of chunks, for a load of {results['budget']:.0%}. "
        f"Changing: every {results['change_after']} requests others are popular. What is worth least makes room: uses, "
        "times the share of attention or over the rank where it says so. The optimum knows the future."
    )
    yield chunk_tables.hit_ratios(results["rows"])
    yield (
        "Read from disk for a request, and its first token, estimated: the disk's time and "
        f"{results['passes_s'] * 1e3:.0f} ms for the look and the prompt."
    )
    yield chunk_tables.first_tokens(results["rows"], ["LRU", "LFU", "fading"])


def _request_cost(results: Json, _: Path) -> Iterator[str]:
    yield "## What a request costs beyond the engine"
    yield (
        f"One token of a prompt that is cached, medians of {results['requests']} requests each way (8 at once: of each "
        "client), in turns: `Engine.generate` in one process, `radixlm serve` in another, asked by `http.client` on a "
        "connection that is kept open, or on a new one each time, and by the `openai` package if it was there."
    )
    yield tables.request_cost(results)


_SECTIONS: dict[str, Callable[[Json, Path], Iterator[str]]] = {
    "peers": _peers,
    "perplexity": _perplexity,
    "quality_q4_none": _quality_q4,
    "quality_q4_0": _quality_q4,
    "quality_q4_1": _quality_q4,
    "engine": _engine,
    "request_cost": _request_cost,
    "growth": _growth,
    "model_sizes": _model_sizes,
    "match_cost": _match_cost,
    "mooncake": _mooncake,
    "partial_needle": _partial_needle,
    **{f"partial_{workload}": _partial for workload in _PARTIAL},
    "scored": _scored,
    "store_restart": _store_restart,
    "store_partial": _store_partial,
    "store_amplification": _store_amplification,
    "chunk_cache": _chunk_cache,
    "ladder": _ladder,
    "load": _load,
    "kernels": _kernels,
    "replay": _replay,
    "replay_live": _replay_live,
    "suffix": _suffix,
    "text_quality": _text_quality,
}


if __name__ == "__main__":
    main()
