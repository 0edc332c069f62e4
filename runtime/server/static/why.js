// Explain why a cached prefix ends: one sentence, and the two texts from the last common token on.

import { make, visible } from "./elements.js";

const PAGE_SIZE = 16;
const MAX_IDS = 8; // shown by the server for each side

// Return the element; null if everything was reused, or nothing could be.
export function whyNotMore(why) {
  if (!why || (why.kind === "unseen" && why.position === 0)) return null;
  const line = make("div", "why", make("span", "why-said", sentence(why)), diff(why), pages(why));
  line.title = visible(why.message); // the server's message, with ids
  return line;
}

function sentence(why) {
  const upTo = why.position ? `Cached up to token ${why.position}` : "Nothing reused";
  return {
    differs: `${upTo}; then the prompt differs.`,
    retokenized: `${upTo}; the model generated the next text in other tokens. Matching by text reuses them.`,
    not_generated: `${upTo}; a client wrote the next text in other tokens. Those are reused only for the same ids.`,
    evicted: `${upTo}; what followed was evicted to make room.`,
    unseen: `${upTo}, which is where the cache ends.`,
  }[why.kind] ?? visible(why.message);
}

// Return three lines: common text, cached text (-) and the prompt's text (+), all in whole tokens.
function diff(why) {
  if (!["differs", "retokenized", "not_generated", "evicted"].includes(why.kind)) return null;
  const isSameText = why.kind === "retokenized" || why.kind === "not_generated";
  const side = (text, ids) => text && shown(text) + (ids.length < MAX_IDS ? "" : "…") + (isSameText ? `  [${ids.join(" ")}]` : "");
  const rows = [
    ["same", " ", why.before_text && shown(why.before_text)],
    ["cached", "-", side(why.cached_text, why.cached_ids)],
    ["prompt", "+", side(why.wanted_text, why.wanted_ids)],
  ];
  return make("div", "diff", ...rows.filter(([, , text]) => text).map(([name, sign, text]) => make("div", name, make("span", "sign", `${sign} ${name}`), make("span", "", text))));
}

// Explain why the tree has two branches although the tokens are the same.
function pages({ kind, position }) {
  const numCopied = position % PAGE_SIZE;
  if (kind !== "differs" || !numCopied) return null;
  const which = numCopied === position ? `these ${position} tokens were` : `the last ${numCopied} of these tokens were`;
  return make("div", "pages-note", `A page holds ${PAGE_SIZE} tokens: ${which} copied to a page of the prompt’s own.`);
}

// Show spaces at the ends as dots, because they often differ.
function shown(text) {
  return visible(text);
}
