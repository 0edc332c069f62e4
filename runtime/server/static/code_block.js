// A block of code with its language, a copy button, and colours when it is complete. Prism only splits it into tokens.

import { copyButton, make } from "./elements.js";

const MAX_COLOURED = 100_000; // characters; longer code stays plain
const ALIASES = { "c++": "cpp", h: "c", hpp: "cpp", console: "bash", zsh: "bash", golang: "go", jsx: "javascript", tsx: "typescript", jsonc: "json", patch: "diff", rs: "rust", yml: "yaml" };
let prism = null; // a promise of the module, loaded for the first code

export class CodeBlock {
  // `info`: text after the opening fence.
  constructor(info = "") {
    this.language = info.trim().split(/[\s{,]/)[0].toLowerCase();
    this.text = document.createTextNode("");
    this.code = make("code", "", this.text);
    const pre = make("pre", "", this.code);
    pre.tabIndex = 0; // it scrolls
    this.element = make("div", "code", make("div", "code-head", make("span", "", this.language || "text"), copyButton("Copy", () => this.code.textContent)), pre);
  }

  add(text) {
    if (text) this.text.appendData(text);
  }

  // Colour the code, which is complete.
  async end() {
    const text = this.text.data;
    if (!this.language || text.length > MAX_COLOURED) return;
    prism ??= import("./vendor/prism.js");
    const { languages, tokenize } = (await prism).default;
    const name = ALIASES[this.language] ?? this.language;
    const grammar = Object.hasOwn(languages, name) && typeof languages[name] === "object" ? languages[name] : null;
    if (grammar) this.code.replaceChildren(...spans(tokenize(text, grammar)));
  }
}

function spans(tokens) {
  return [tokens].flat().map((token) => (typeof token === "string" ? token : make("span", `tk-${token.type}`, ...spans(token.content))));
}
