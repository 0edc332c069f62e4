// The list of running and recent requests, with their cached tokens. One is selected.

import { age, byId, make, partsBar, seconds } from "./elements.js";
import { whyNotMore } from "./why.js";

export class RequestList {
  // onChoice(): called when another request is selected.
  constructor(onChoice) {
    this.box = byId("requests");
    this.requests = [];
    this.chosenId = null; // null: the newest
    this.onChoice = onChoice;
    this.box.addEventListener("click", (event) => {
      const row = event.target.closest(".request");
      if (row) this.choose(row.dataset.id);
    });
    this.box.addEventListener("keydown", (event) => this.move(event));
  }

  get chosen() {
    return this.requests.find((request) => request.id === this.chosenId) ?? this.requests[0] ?? null;
  }

  choose(id) {
    this.chosenId = id === this.requests[0]?.id ? null : id;
    this.show(this.requests);
    this.onChoice();
  }

  move(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step || !this.requests.length) return;
    event.preventDefault();
    const at = this.requests.indexOf(this.chosen) + step;
    const next = this.requests[Math.max(0, Math.min(at, this.requests.length - 1))];
    this.choose(next.id);
    this.box.querySelector('[aria-selected="true"]').focus();
  }

  show(requests) {
    const hadFocus = this.box.contains(document.activeElement);
    this.requests = requests;
    const largest = Math.max(1, ...requests.map((r) => r.num_prompt_tokens + r.num_generated_tokens));
    this.box.replaceChildren(...requests.map((request) => requestRow(request, request === this.chosen, largest)));
    if (hadFocus) this.box.querySelector('[aria-selected="true"]')?.focus({ preventScroll: true });
  }
}

function requestRow(request, isChosen, largest) {
  const { num_prompt_tokens: prompt, num_cached_tokens: cached, num_generated_tokens: generated } = request;
  const kinds = Object.entries(request.cached_tokens_by_kind).map(([kind, number]) => `${number} ${kind}`);
  const row = make(
    "div",
    `request ${request.state}`,
    make(
      "div",
      "line",
      make("span", "id", `#${request.id.slice(0, 6)}`),
      make("span", "state", stateOf(request)),
      make("span", "tokens", make("b", "", `${cached} of ${prompt}`), ` cached · ${prompt - cached} computed · ${generated} generated`),
    ),
    partsBar([["lane hit", cached], ["lane computed", prompt - cached], ["lane generated", generated]], largest),
    whyNotMore(request.why_not_more) ?? make("div", "why", noReason(request)),
  );
  row.title = kinds.length ? `found: ${kinds.join(", ")}` : "";
  row.dataset.id = request.id;
  row.role = "option";
  row.tabIndex = isChosen ? 0 : -1;
  row.ariaSelected = String(isChosen);
  return row;
}

function noReason({ state, why_not_more: why }) {
  if (state === "waiting") return "Waiting in the queue.";
  return why ? "No cached prefix begins like this prompt." : "Everything that can be reused was reused.";
}

function stateOf(request) {
  if (request.state !== "ended") return `${request.state} ${age(request.running_s)}`;
  const how = { stop: "ended", length: "reached max tokens", cancelled: "cancelled" }[request.finish_reason] ?? "ended";
  const when = request.ended_s < 1 ? "just now" : `${age(request.ended_s)} ago`;
  return `${how} ${when}, took ${seconds(request.running_s)}`;
}
