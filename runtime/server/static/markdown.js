// Render Markdown as elements, also while it is streamed. Marked splits text into tokens; elements are made here, so that no markup is parsed.

import { CodeBlock } from "./code_block.js";
import { make } from "./elements.js";
import { Lexer } from "./vendor/marked.js";

const FENCE = /^\n*(`{3,}|~{3,})([^\n`]*)\n/;
const LEAST_GROWTH = 1 / 256; // an open block is redrawn when it has grown by this share, so that all work is linear

// A text that grows at its end. Complete blocks stay; only the last block is redrawn.
export class MarkdownText {
  constructor(element) {
    this.element = element;
    this.clear();
  }

  clear() {
    this.tail = ""; // source of the open block,
    this.open = []; // and its elements
    this.fence = null; // {mark, block} of an open code block
    this.numDrawn = 0; // characters of the tail
    this.links = {}; // definitions so far
    this.element.replaceChildren();
  }

  add(text) {
    this.tail += text.replace(/\r\n?/g, "\n");
  }

  // `isWhole`: the text is complete.
  draw(isWhole) {
    while (this.drawCode(isWhole));
    if (this.fence || (!isWhole && this.tail.length - this.numDrawn < this.tail.length * LEAST_GROWTH)) return;
    const tokens = this.tokensOf(isWhole ? this.tail : steady(this.tail));
    const last = tokens.findLastIndex((token) => token.type !== "space");
    const isDone = (index) => isWhole || index < last;
    this.open.forEach((node) => node.remove());
    this.open = [];
    let numDone = 0;
    tokens.forEach((token, index) => {
      const element = block(token, isDone(index));
      if (element) this.element.append(element);
      if (isDone(index)) numDone += token.raw.length;
      else if (element) this.open.push(element);
    });
    this.tail = this.tail.slice(numDone);
    this.numDrawn = this.tail.length;
    if (!isWhole && FENCE.test(this.tail)) this.draw(false);
  }

  // Move fenced code at the start of the tail into its block. Returns true if it was closed, and text follows.
  drawCode(isWhole) {
    const opened = this.fence ? null : FENCE.exec(this.tail);
    if (opened) {
      this.open.forEach((node) => node.remove());
      this.open = [];
      this.fence = { mark: opened[1], block: new CodeBlock(opened[2]) };
      this.element.append(this.fence.block.element);
      this.tail = this.tail.slice(opened[0].length);
    }
    if (!this.fence) return false;
    const { mark, block } = this.fence;
    const closed = new RegExp(`(^|\\n) {0,3}${mark[0]}{${mark.length},}[ \\t]*(?:\\n|${isWhole ? "$" : "(?!)"})`).exec(this.tail);
    // the last line may become the closing fence
    const end = closed ? closed.index : isWhole ? this.tail.length : Math.max(0, this.tail.lastIndexOf("\n"));
    block.add(this.tail.slice(0, end));
    this.tail = this.tail.slice(closed ? end + closed[0].length : end);
    this.numDrawn = 0;
    if (!closed && !isWhole) return false;
    block.end();
    this.fence = null;
    return this.tail !== "";
  }

  tokensOf(text) {
    const lexer = new Lexer({ gfm: true });
    Object.assign(lexer.tokens.links, this.links);
    const tokens = lexer.lex(text);
    this.links = { ...lexer.tokens.links };
    return tokens;
  }
}

// Complete an unfinished text: close open marks, and remove marks without text.
function steady(text) {
  // a last line of marks alone may become a rule, a heading, a bullet or a fence
  text = text.replace(/(^|\n)[ \t]*(?:[-=*_+#>~`|:][-=*_+#>~`|: \t]*|\d{1,9}[.)]?[ \t]*)$/, "$1").replace(/[*_~`]+$/, "");
  text = text.replace(/(^|\n\n)\|[^\n]*(?:\n[ \t|:-]*)?$/, "$1"); // the head of a table without rows
  const bare = text.slice(text.lastIndexOf("\n\n") + 1).replace(/(`+)[^`]+\1(?!`)/g, "");
  const code = /`+(?=[^`]*$)/.exec(bare);
  if (code) return text + code[0];
  text = text.replace(/!?\[([^[\]\n]*)\]\([^()\s]*$/, "$1"); // a link with an incomplete address
  for (const mark of ["**", "~~"]) if (bare.split(mark).length % 2 === 0) return text.trimEnd() + mark;
  return /(^|[\s(])\*[^\s*][^*]*$/.test(bare.replaceAll("**", "")) ? text.trimEnd() + "*" : text;
}

function block(token, isDone) {
  switch (token.type) {
    case "space":
    case "def":
      return null;
    case "heading":
      return make(`h${Math.min(6, token.depth + 2)}`, "", ...inline(token.tokens)); // h1 and h2 belong to the page
    case "code": {
      const code = new CodeBlock(token.lang);
      code.add(token.text);
      if (isDone) code.end();
      return code.element;
    }
    case "blockquote":
      return make("blockquote", "", ...blocks(token.tokens, isDone));
    case "list": {
      const list = make(token.ordered ? "ol" : "ul", "", ...token.items.map((item) => make("li", "", ...blocks(item.tokens, isDone))));
      if (token.ordered) list.start = token.start;
      return list;
    }
    case "table":
      return table(token);
    case "hr":
      return make("hr");
    case "text": // in a tight list
      return make("span", "", ...inline(token.tokens ?? [token]));
    case "paragraph":
      return make("p", "", ...inline(token.tokens));
    default: // markup is shown as text
      return make("p", "", token.raw);
  }
}

function blocks(tokens, isDone) {
  return tokens.map((token) => (token.type === "checkbox" ? box(token) : block(token, isDone)));
}

function table({ header, rows, align }) {
  const row = (tag, cells) =>
    make("tr", "", ...cells.map((cell, column) => {
      const made = make(tag, "", ...inline(cell.tokens));
      if (align[column]) made.style.textAlign = align[column];
      return made;
    }));
  const body = rows.map((cells) => row("td", cells));
  return make("div", "table", make("table", "", make("thead", "", row("th", header)), make("tbody", "", ...body)));
}

function inline(tokens) {
  return tokens.map((token) => {
    switch (token.type) {
      case "strong":
      case "em":
      case "del":
        return make(token.type, "", ...inline(token.tokens));
      case "codespan":
        return make("code", "", token.text);
      case "br":
        return "\n"; // line breaks stay
      case "link":
        return link(token.href, inline(token.tokens));
      case "image": // never loaded
        return link(token.href, [token.text || token.href]);
      case "checkbox":
        return box(token);
      case "text":
        return token.tokens ? make("span", "", ...inline(token.tokens)) : unescaped(token.text);
      case "escape":
        return token.text;
      default:
        return token.raw;
    }
  });
}

function box({ checked }) {
  return checked ? "☑ " : "☐ ";
}

// A link to the web; any other address is text.
function link(href, children) {
  const url = URL.canParse(href) ? new URL(href) : null;
  if (!url || !["http:", "https:"].includes(url.protocol)) return make("span", "", ...children);
  const element = make("a", "", ...children);
  element.href = url.href;
  element.target = "_blank";
  element.rel = "noopener noreferrer";
  element.title = url.href;
  return element;
}

const NAMED = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };

function unescaped(text) {
  return text.replace(/&(?:#(\d{1,7})|#x([\da-f]{1,6})|(amp|lt|gt|quot|apos|nbsp));/gi, (all, decimal, hex, name) => {
    if (name) return NAMED[name.toLowerCase()];
    const code = decimal ? Number(decimal) : parseInt(hex, 16);
    return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : all;
  });
}
