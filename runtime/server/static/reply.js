// A streamed reply: shows its text, updated at most once per frame, and how much of its prompt was cached.

import { count, make, partsBar, seconds } from "./elements.js";
import { whyNotMore } from "./why.js";

export class Reply {
  constructor(turn, onDrawn) {
    this.turn = turn;
    this.onDrawn = onDrawn;
    this.drafted = []; // for each token since the last text, whether it was drafted
    this.progress = null; // shown until the reply begins
    this.frame = 0;
    this.startedAt = performance.now();
    this.firstAt = this.lastAt = null;
    this.finishReason = null;
    this.usage = null;
    this.numDropped = 0; // dropped messages of the history
    this.isStopped = false;
    turn.element.classList.add("live");
  }

  take(chunk) {
    this.usage = chunk.usage ?? this.usage;
    if (chunk.prompt_progress) this.showProgress(chunk.prompt_progress);
    this.numDropped += chunk.truncation?.dropped_messages.length ?? 0;
    const choice = chunk.choices[0];
    this.finishReason = choice?.finish_reason ?? this.finishReason;
    const text = choice?.delta.content ?? "";
    const reasoning = choice?.delta.reasoning_content ?? "";
    this.drafted.push(...(choice?.guessed ?? []));
    if (!text && !reasoning) return;
    this.progress?.remove();
    this.lastAt = performance.now();
    this.firstAt ??= this.lastAt;
    if (reasoning) this.turn.addReasoning(reasoning);
    if (text) this.turn.add(text, this.drafted.length > 0 && this.drafted.every(Boolean));
    this.drafted = [];
    this.frame ||= requestAnimationFrame(() => this.draw(false));
  }

  // Show the prefill progress of a long prompt.
  showProgress({ total, cache, processed }) {
    this.progress ??= this.turn.element.appendChild(make("div", "usage progress"));
    const parts = [["hit", cache], ["computed", processed - cache], ["rest", total - processed]];
    this.progress.replaceChildren(partsBar(parts), make("div", "", `${processed} of ${total} prompt tokens`));
    this.onDrawn();
  }

  draw(isWhole) {
    this.frame = 0;
    this.turn.draw(isWhole);
    this.onDrawn();
  }

  fail(error) {
    this.isStopped = error.name === "AbortError";
    if (!this.isStopped) this.turn.element.append(make("p", "failure", error.message));
  }

  end() {
    const { element } = this.turn;
    cancelAnimationFrame(this.frame);
    this.progress?.remove();
    this.draw(true);
    element.classList.remove("live");
    if (this.numDropped) element.append(make("div", "usage", `${count(this.numDropped, "earlier message")} dropped: the history exceeds the context`));
    if (this.usage) element.append(usageOf(this.usage, this.speed(), this.finishReason));
    else if (this.isStopped) element.append(make("div", "usage", "stopped; the computed prefix stays cached"));
    this.onDrawn();
  }

  speed() {
    if (this.firstAt === null) return [];
    const said = [`first token ${seconds((this.firstAt - this.startedAt) / 1000)}`];
    const numMore = this.usage.completion_tokens - 1;
    const time = (this.lastAt - this.firstAt) / 1000;
    if (numMore > 3 && time > 0) said.push(`${Math.round(numMore / time)} tok/s`);
    return said;
  }
}

function usageOf(usage, speed, finishReason) {
  const details = usage.prompt_tokens_details;
  const cached = details.cached_tokens;
  const computed = usage.prompt_tokens - cached;
  const kinds = Object.entries(details.cached_tokens_by_kind ?? {}).map(([kind, number]) => `${number} ${kind}`);
  const parts = [["hit", cached], ["computed", computed], ["generated", usage.completion_tokens]];
  const said = [
    ` prompt tokens cached${kinds.length ? ` (${kinds.join(", ")})` : ""}`,
    `${computed} computed`,
    count(usage.completion_tokens, "token") + " generated",
    ...speed,
  ];
  const drafts = usage.completion_tokens_details;
  const numDrafts = (drafts?.accepted_prediction_tokens ?? 0) + (drafts?.rejected_prediction_tokens ?? 0);
  if (numDrafts) said.push(draftsOf(drafts.accepted_prediction_tokens, numDrafts));
  if (finishReason === "length") said.push("stopped at max tokens");
  const line = make("div", "", make("b", "cached", `${cached} of ${usage.prompt_tokens}`), ...said.flatMap((each, place) => (place ? [" · ", each] : [each])));
  return make("div", "usage", partsBar(parts), line, whyNotMore(details.why_not_more));
}

function draftsOf(numAccepted, number) {
  const said = make("span", "drafts", `${numAccepted} of ${count(number, "draft token")} accepted`);
  said.title = "Speculative decoding: the text is the same as without. Source underlines accepted draft tokens.";
  return said;
}
