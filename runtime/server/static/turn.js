// The elements of one turn: the user's text as typed, or a reply as Markdown or source.

import { copyButton, make } from "./elements.js";
import { MarkdownText } from "./markdown.js";

export function userTurn(text) {
  return make("article", "turn user", make("div", "who", "You"), make("div", "said", text));
}

// A reply, which may still grow. `text` is its text so far, without reasoning.
export class ReplyTurn {
  constructor(text = "") {
    this.text = "";
    this.pieces = []; // [text, whether all of its tokens were drafted], for the source
    this.rendered = make("div", "rendered");
    this.source = make("div", "source");
    this.source.hidden = true;
    this.markdown = new MarkdownText(this.rendered);
    this.reasoning = null; // an element, if the reply has reasoning
    this.toggle = make("button", "quiet", "Source");
    this.toggle.type = "button";
    this.toggle.title = "The reply as the model wrote it; accepted draft tokens are underlined";
    this.toggle.addEventListener("click", () => this.showSource(this.source.hidden));
    this.who = make("div", "who", "Model", make("span", "tools", copyButton("Copy", () => this.text), this.toggle));
    this.said = make("div", "said", this.rendered, this.source);
    this.element = make("article", "turn assistant", this.who, this.said);
    if (text) {
      this.add(text, false);
      this.draw(true);
    }
  }

  add(text, isDrafted) {
    if (this.reasoning) this.reasoning.open = false;
    this.text += text;
    this.markdown.add(text);
    const last = this.pieces.at(-1);
    if (last?.[1] === isDrafted) last[0] += text;
    else this.pieces.push([text, isDrafted]);
  }

  addReasoning(text) {
    if (!this.reasoning) {
      this.reasoning = make("details", "reasoning", make("summary", "", "Reasoning"), make("div", "thought", ""));
      this.reasoning.open = true;
      this.said.before(this.reasoning);
    }
    this.reasoning.lastElementChild.append(text);
  }

  draw(isWhole) {
    this.markdown.draw(isWhole);
    if (isWhole && !this.source.hidden) this.showSource(true);
  }

  showSource(isShown) {
    this.source.hidden = !isShown;
    this.rendered.hidden = isShown;
    this.toggle.setAttribute("aria-pressed", String(isShown));
    const parts = isShown ? this.pieces.map(([text, isDrafted]) => (isDrafted ? make("span", "drafted", text) : text)) : [];
    this.source.replaceChildren(...parts);
  }
}
