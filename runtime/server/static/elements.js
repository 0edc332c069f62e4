// Elements out of data. Text only ever becomes text: nothing here parses markup.

export const byId = (id) => document.getElementById(id);

// make("p", "soft", "text", child): null children are left out.
export function make(tag, className = "", ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// A stacked bar of [class, tokens]; widths are shares of `total`.
export function partsBar(parts, total = 0) {
  const all = total || parts.reduce((sum, [, count]) => sum + count, 0);
  const bar = make("div", "parts");
  for (const [kind, count] of parts) {
    if (count > 0 && all > 0) {
      const part = make("span", kind);
      part.style.width = `${(100 * count) / all}%`;
      bar.append(part);
    }
  }
  return bar;
}

// Text on one line in which nothing hides: breaks are arrows, spaces at its ends dots, control and direction characters are U+FFFD.
export function visible(text) {
  return text
    .replace(/\r?\n/g, "↵")
    .replace(/\t/g, "⇥")
    .replace(/^ +| +$/g, (spaces) => "·".repeat(spaces.length))
    .replace(/[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g, "\ufffd");
}

// Why a cached prefix ends where it does, in texts; the server's own line, with ids, is the tooltip.
export function whyLine(why) {
  // what a client has changed, from the first letter on that differs
  const wanted = quoted(why.change ? why.change.now : why.wanted_text);
  const cached = quoted(why.change ? why.change.was : why.cached_text);
  const behind = why.change?.before ? `, behind ${quoted(why.change.before)}` : "";
  const kinds = {
    differs: cached ? `the cache goes on with ${cached}, the prompt with ${wanted}${behind}` : `the cache goes on otherwise than with ${wanted}`,
    retokenized: `the model generated ${wanted} in other tokens; matching by text reuses it`,
    not_generated: `a client wrote ${wanted} in other tokens; that is reused by its own encoding only`,
    evicted: `what went on with ${wanted} was dropped to make room`,
    unseen: `nothing cached goes on with ${wanted}`,
    no_state: visible(why.message),
  };
  const place = why.kind === "off" || why.kind === "no_state" ? "" : `not more, for at token ${why.position} `;
  const line = make("div", "why", make("span", "", place), kinds[why.kind] ?? visible(why.message));
  line.title = visible(why.message);
  return line;
}

function quoted(text) {
  return text ? `“${visible(text)}”` : "";
}

export function seconds(value) {
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 100) return `${value < 10 ? value.toFixed(1) : Math.round(value)} s`;
  if (value < 5400) return `${Math.round(value / 60)} min`;
  if (value < 172800) return `${Math.round(value / 3600)} h`;
  return `${Math.round(value / 86400)} d`;
}

// An age that does not flicker: whole seconds.
export function age(value) {
  return value < 1 ? "now" : value < 100 ? `${Math.floor(value)} s` : seconds(value);
}

export function count(number, one, many = one + "s") {
  return `${number.toLocaleString("en")} ${number === 1 ? one : many}`;
}
