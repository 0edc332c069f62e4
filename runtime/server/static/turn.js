// The elements of one turn: the user's text as typed, or a reply as Markdown or source.

import { button, confirmed, copyButton, make } from "./elements.js";
import { figuresBelow } from "./figures.js";
import { MarkdownText } from "./markdown.js";

export function userTurn(text, onEdit, onDelete) {
  const edit = button("quiet edit", "Edit", onEdit);
  edit.title = "Change this message; what followed it is replaced";
  const remove = button("quiet delete", "Delete", () => {});
  remove.title = "Delete this message and its reply";
  confirmed(remove, onDelete);
  return make("article", "turn user", make("div", "who", "You", make("span", "tools", edit, remove)), make("div", "said", text));
}

// Return a reply that has ended, with its figures if they are known.
export function storedReply({ content, figures }) {
  const turn = new ReplyTurn();
  turn.add(content, false);
  turn.draw(true);
  turn.element.append(...figuresBelow(figures ?? {}));
  return turn.element;
}

// A reply, which may still grow. `text` is its text so far, without reasoning.
export class ReplyTurn {
  constructor() {
    this.text = "";
    this.pieces = []; // [text, whether all of its tokens were drafted], for the source
    this.rendered = make("div", "rendered");
    this.source = make("div", "source");
    this.source.hidden = true;
    this.markdown = new MarkdownText(this.rendered);
    this.reasoning = null; // an element, if the reply has reasoning
    this.toggle = button("quiet", "Source", () => this.showSource(this.source.hidden));
    this.toggle.title = "The reply as the model wrote it; accepted draft tokens are underlined";
    this.who = make("div", "who", "Model", make("span", "tools", copyButton("Copy", () => this.text), this.toggle));
    this.said = make("div", "said", this.rendered, this.source);
    this.element = make("article", "turn assistant", this.who, this.said);
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
