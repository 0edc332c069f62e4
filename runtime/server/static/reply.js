// A streamed reply: shows its text, updated at most once per frame, and how much of its prompt was cached.

import { make, partsBar } from "./elements.js";
import { figuresBelow } from "./figures.js";

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
    this.failure = undefined;
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

  // `hint`: what can be done about the error, or "".
  fail(error, hint) {
    this.isStopped = error.name === "AbortError";
    if (!this.isStopped) this.failure = hint ? `${error.message.replace(/\.?$/, ".")} ${hint}` : error.message;
  }

  end() {
    const { element } = this.turn;
    cancelAnimationFrame(this.frame);
    this.progress?.remove();
    this.draw(true);
    element.classList.remove("live");
    element.append(...figuresBelow(this.figures));
    this.onDrawn();
  }

  // What is shown below the reply, as data.
  get figures() {
    const { usage, finishReason, numDropped, isStopped, failure } = this;
    const figures = { usage, finishReason, numDropped, isStopped, failure };
    if (this.firstAt === null || !usage) return figures;
    figures.firstTokenS = (this.firstAt - this.startedAt) / 1000;
    const numMore = usage.completion_tokens - 1;
    const time = (this.lastAt - this.firstAt) / 1000;
    if (numMore > 3 && time > 0) figures.tokensPerS = numMore / time;
    return figures;
  }
}
