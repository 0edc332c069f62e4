// A conversation: what was said, the reply while it is made, and what each turn reused.

import { byId, make, partsBar, seconds, count, whyLine } from "./elements.js";

export class Chat {
  // onTraffic(isRunning): a reply begins, or has ended.
  constructor(api, settings, onTraffic) {
    this.api = api;
    this.settings = settings;
    this.onTraffic = onTraffic;
    this.turns = []; // {role, content}, as they are sent
    this.running = null; // the AbortController of the reply that is made
    this.log = byId("log");
    this.prompt = byId("prompt");
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.say();
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.say();
    });
    this.prompt.addEventListener("input", () => this.fit());
    byId("stop").addEventListener("click", () => this.stop());
    byId("again").addEventListener("click", () => this.again());
    byId("new").addEventListener("click", () => this.clear());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !byId("key-dialog").open) this.stop();
    });
  }

  say() {
    const text = this.prompt.value;
    if (this.running || !text.trim() || !this.settings.check()) return;
    this.prompt.value = "";
    this.fit();
    this.turns.push({ role: "user", content: text });
    this.show("user", text);
    this.reply();
  }

  // Another reply in place of the last one.
  again() {
    if (this.running || !this.settings.check()) return;
    if (this.turns.at(-1)?.role === "assistant") this.turns.pop();
    const last = this.log.lastElementChild;
    if (last.classList.contains("assistant")) last.remove();
    this.reply();
  }

  stop() {
    this.running?.abort();
  }

  clear() {
    this.stop();
    this.turns = [];
    this.log.replaceChildren(byId("empty") ?? make("p", "empty", "A new conversation. What the old one computed is still cached."));
    byId("again").hidden = true;
    this.prompt.focus();
  }

  async reply() {
    const turns = this.turns; // a new chat has others
    const running = (this.running = new AbortController());
    this.setRunning(true);
    const turn = this.show("assistant", "");
    const reply = new Reply(turn, () => this.follow());
    try {
      const body = JSON.stringify(this.settings.body(turns));
      const options = { method: "POST", body, signal: running.signal };
      for await (const chunk of this.api.events("/v1/chat/completions", options)) reply.take(chunk);
    } catch (error) {
      reply.fail(error);
    }
    reply.end();
    if (reply.text) turns.push({ role: "assistant", content: reply.text });
    if (this.running === running) {
      this.running = null;
      this.setRunning(false);
    }
  }

  show(role, text) {
    byId("empty")?.remove();
    this.log.querySelector(":scope > .empty")?.remove();
    const turn = make("article", `turn ${role}`, make("div", "who", role === "user" ? "You" : "Model"), make("div", "said", text));
    this.log.append(turn);
    this.log.scrollTop = this.log.scrollHeight;
    return turn;
  }

  // Stay at the end, unless the reader has gone up.
  follow() {
    if (this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 80) this.log.scrollTop = this.log.scrollHeight;
  }

  setRunning(isRunning) {
    byId("stop").hidden = !isRunning;
    byId("send").hidden = isRunning;
    byId("again").hidden = isRunning || !this.turns.length;
    this.log.setAttribute("aria-busy", String(isRunning));
    this.onTraffic(isRunning);
  }

  fit() {
    this.prompt.style.height = "auto";
    this.prompt.style.height = `${this.prompt.scrollHeight + 2}px`;
  }
}

// One reply: text is drawn at most once a frame, however fast tokens come.
class Reply {
  constructor(turn, onDrawn) {
    this.turn = turn;
    this.onDrawn = onDrawn;
    this.said = new MarkedText(turn.querySelector(".said")); // the thought until the answer begins
    turn.classList.add("live");
    this.text = "";
    this.guessed = []; // of each token behind the last text, whether it was guessed
    this.progress = null; // shown until the reply begins
    this.frame = 0;
    this.startedAt = performance.now();
    this.firstAt = this.lastAt = null;
    this.finishReason = null;
    this.usage = null;
    this.numDropped = 0; // messages of the history that did not fit
    this.isStopped = false;
  }

  take(chunk) {
    this.usage = chunk.usage ?? this.usage;
    if (chunk.prompt_progress) this.showProgress(chunk.prompt_progress);
    this.numDropped += chunk.truncation?.dropped_messages.length ?? 0;
    const choice = chunk.choices[0];
    this.finishReason = choice?.finish_reason ?? this.finishReason;
    const text = choice?.delta.content ?? "";
    const thought = choice?.delta.reasoning_content ?? "";
    this.guessed.push(...(choice?.guessed ?? []));
    if (!text && !thought) return;
    this.progress?.remove();
    this.lastAt = performance.now();
    this.firstAt ??= this.lastAt;
    if (text && !this.text) this.said.clear();
    const isGuessed = this.guessed.length > 0 && this.guessed.every(Boolean);
    if (text || !this.text) this.said.add(text || thought, isGuessed);
    this.guessed = [];
    this.text += text;
    this.frame ||= requestAnimationFrame(() => this.draw());
  }

  // How much of a prompt that takes several steps is there.
  showProgress({ total, cache, processed }) {
    this.progress ??= this.turn.appendChild(make("div", "usage progress"));
    const parts = [["hit", cache], ["computed", processed - cache], ["rest", total - processed]];
    this.progress.replaceChildren(partsBar(parts), make("div", "", `${processed} of ${total} prompt tokens`));
    this.onDrawn();
  }

  draw() {
    this.frame = 0;
    this.said.draw();
    this.onDrawn();
  }

  fail(error) {
    this.isStopped = error.name === "AbortError";
    if (!this.isStopped) this.turn.append(make("p", "failure", error.message));
  }

  end() {
    cancelAnimationFrame(this.frame);
    this.progress?.remove();
    this.draw();
    this.turn.classList.remove("live");
    if (this.numDropped) this.turn.append(make("div", "usage", `${count(this.numDropped, "earlier message")} left out: the history outgrew the context`));
    if (this.usage) this.turn.append(usageOf(this.usage, this.speed(), this.finishReason));
    else if (this.isStopped) this.turn.append(make("div", "usage", "stopped; what was computed stays cached"));
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

// Text that grows at its end; what was guessed has elements of its own.
class MarkedText {
  constructor(element) {
    this.element = element;
    this.clear();
  }

  clear() {
    this.element.replaceChildren();
    this.pending = []; // [text, isGuessed], not drawn yet
    this.last = null; // the text node at the end,
    this.isGuessed = false; // and what it is
  }

  add(text, isGuessed) {
    this.pending.push([text, isGuessed]);
  }

  draw() {
    for (const [text, isGuessed] of this.pending) {
      if (this.last && isGuessed === this.isGuessed) {
        this.last.appendData(text);
      } else {
        this.last = document.createTextNode(text);
        this.isGuessed = isGuessed;
        this.element.append(isGuessed ? make("span", "guessed", this.last) : this.last);
      }
    }
    this.pending = [];
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
  const guesses = usage.completion_tokens_details;
  const numGuesses = (guesses?.accepted_prediction_tokens ?? 0) + (guesses?.rejected_prediction_tokens ?? 0);
  if (numGuesses) said.push(legendOf(guesses.accepted_prediction_tokens, numGuesses));
  if (finishReason === "length") said.push("cut at the limit of tokens");
  const line = make("div", "", make("b", "cached", `${cached} of ${usage.prompt_tokens}`), ...said.flatMap((each, place) => (place ? [" · ", each] : [each])));
  const why = details.why_not_more ? whyLine(details.why_not_more) : null;
  return make("div", "usage", partsBar(parts), line, why);
}

// How many guesses were right, marked as their text is.
function legendOf(numRight, number) {
  const legend = make("span", "guessed", `${numRight} of ${count(number, "guess", "guesses")} right`);
  legend.title = "What is underlined was guessed, and the model said the same: the text is that without guesses.";
  return legend;
}
