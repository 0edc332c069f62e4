// Make elements from data. Text always stays text: markup is never parsed.

const CONFIRM_MS = 4000;

export const byId = (id) => document.getElementById(id);

// make("p", "soft", "text", child): null children are skipped.
export function make(tag, className = "", ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function button(kind, label, onClick) {
  const made = make("button", kind, label);
  made.type = "button";
  made.addEventListener("click", onClick);
  return made;
}

// Make a button act only on a second click within seconds. onAsk(isAsking): called when it asks, and when it stops to.
export function confirmed(element, act, onAsk = () => {}) {
  const label = element.textContent;
  let timer = 0; // runs while it asks
  const setAsking = (isAsking) => {
    clearTimeout(timer);
    timer = isAsking ? setTimeout(() => setAsking(false), CONFIRM_MS) : 0;
    element.textContent = isAsking ? "Really?" : label;
    onAsk(isAsking);
  };
  element.addEventListener("click", () => {
    const isSure = timer !== 0;
    setAsking(!isSure);
    if (isSure) act();
  });
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Return a stacked bar of [class, tokens]. Widths are shares of `total`.
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

// Return text on one line with invisible characters shown: breaks as arrows, spaces at its ends as dots, control and direction characters as U+FFFD.
export function visible(text) {
  return text
    .replace(/\r?\n/g, "↵")
    .replace(/\t/g, "⇥")
    .replace(/^ +| +$/g, (spaces) => "·".repeat(spaces.length))
    .replace(/[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g, "\ufffd");
}

// Return a button that copies the result of `text()`, and confirms it.
export function copyButton(label, text) {
  const made = button("quiet copy", label, async () => {
    made.textContent = (await copied(text())) ? "Copied" : "Not allowed";
    setTimeout(() => (made.textContent = label), 1500);
  });
  return made;
}

// Copy a text. Browsers offer the clipboard only on localhost and over TLS; elsewhere a selection is copied.
async function copied(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text).then(() => true, () => false);
  const area = make("textarea", "hidden");
  area.value = text;
  document.body.append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  return isCopied;
}

export function seconds(value) {
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 100) return `${value < 10 ? value.toFixed(1) : Math.round(value)} s`;
  if (value < 5400) return `${Math.round(value / 60)} min`;
  if (value < 172800) return `${Math.round(value / 3600)} h`;
  return `${Math.round(value / 86400)} d`;
}

// Return an age in whole seconds, so that it does not flicker.
export function age(value) {
  return value < 1 ? "now" : value < 100 ? `${Math.floor(value)} s` : seconds(value);
}

export function size(bytes) {
  return bytes < 1e6 ? `${Math.round(bytes / 1e3)} KB` : bytes < 1e9 ? `${Math.round(bytes / 1e6)} MB` : `${(bytes / 1e9).toFixed(1)} GB`;
}

export function count(number, one, many = one + "s") {
  return `${number.toLocaleString("en")} ${number === 1 ? one : many}`;
}
