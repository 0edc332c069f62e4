// What stands below a reply: how it failed or was stopped, and how much of its prompt was cached. Made from data that is
// stored with the reply, so that it is the same after a reload.

import { count, make, partsBar, seconds } from "./elements.js";
import { whyNotMore } from "./why.js";

// Return the elements. All figures may be missing: {usage, finishReason, firstTokenS, tokensPerS, numDropped, isStopped, failure}.
export function figuresBelow({ usage, finishReason, firstTokenS, tokensPerS, numDropped, isStopped, failure }) {
  const below = [];
  if (failure) below.push(make("p", "failure", failure));
  if (numDropped) below.push(make("div", "usage", `${count(numDropped, "earlier message")} dropped: the history exceeds the context`));
  if (usage) below.push(usageOf(usage, finishReason, firstTokenS, tokensPerS));
  else if (isStopped) below.push(make("div", "usage", "stopped; the computed prefix stays cached"));
  return below;
}

function usageOf(usage, finishReason, firstTokenS, tokensPerS) {
  const details = usage.prompt_tokens_details;
  const cached = details.cached_tokens;
  const computed = usage.prompt_tokens - cached;
  const kinds = Object.entries(details.cached_tokens_by_kind ?? {}).map(([kind, number]) => `${number} ${kind}`);
  const parts = [["hit", cached], ["computed", computed], ["generated", usage.completion_tokens]];
  const said = [
    ` prompt tokens cached${kinds.length ? ` (${kinds.join(", ")})` : ""}`,
    `${computed} computed`,
    count(usage.completion_tokens, "token") + " generated",
  ];
  if (firstTokenS !== undefined) said.push(`first token ${seconds(firstTokenS)}`);
  if (tokensPerS !== undefined) said.push(`${Math.round(tokensPerS)} tok/s`);
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
