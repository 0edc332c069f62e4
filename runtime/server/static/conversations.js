// Conversations stored in this browser, each under its own key in localStorage. The oldest are dropped if there is no room.

import { byId, count, make, setText } from "./elements.js";

const PREFIX = "radixlm.conversation.";
const OPEN = "radixlm.open"; // of this tab, for a reload
const MAX_KEPT = 100;
const MAX_CHARS = 2_000_000; // over all; browsers allow about 5 million
const MAX_TITLE = 80;

// Return {id, title, updatedAt, turns}. It is stored with its first message.
export function newConversation() {
  return { id: randomId(), title: "", updatedAt: 0, turns: [] };
}

export class ConversationList {
  // onOpen(conversation): called to show a conversation, or a new one for null.
  constructor(onOpen) {
    this.onOpen = onOpen;
    this.current = null;
    this.deleted = new Set(); // ids, so that a reply that ends later does not restore one
    this.box = byId("conversations");
    byId("export-all").addEventListener("click", () => download("radixlm-conversations", kept()));
    confirmed(byId("delete-all"), () => kept().forEach(({ id }) => this.remove(id)));
    window.addEventListener("storage", () => this.show()); // another tab
  }

  // Return the conversation that this tab showed before a reload, or null.
  last() {
    return read(PREFIX + sessionStorage.getItem(OPEN));
  }

  setCurrent(conversation) {
    this.current = conversation;
    sessionStorage.setItem(OPEN, conversation.id);
    this.show();
  }

  save(conversation) {
    if (this.deleted.has(conversation.id)) return;
    conversation.updatedAt = Date.now();
    conversation.title ||= conversation.turns[0].content.trim().replace(/\s+/g, " ").slice(0, MAX_TITLE);
    const text = written(conversation);
    const others = kept().filter(({ id }) => id !== conversation.id);
    let numChars = text.length + others.reduce((sum, { numChars }) => sum + numChars, 0);
    while (others.length && (others.length >= MAX_KEPT || numChars > MAX_CHARS)) {
      const oldest = others.pop();
      numChars -= oldest.numChars;
      localStorage.removeItem(PREFIX + oldest.id);
    }
    while (!stored(PREFIX + conversation.id, text) && others.length) localStorage.removeItem(PREFIX + others.pop().id);
    this.show();
  }

  remove(id) {
    this.deleted.add(id);
    localStorage.removeItem(PREFIX + id);
    if (id === this.current.id) this.onOpen(null);
    this.show();
  }

  show() {
    const all = kept();
    setText(byId("conversations-count"), count(all.length, "conversation"));
    byId("conversations-panel").hidden = all.length === 0;
    this.box.replaceChildren(...all.map((conversation) => this.row(conversation)));
  }

  row(conversation) {
    const { id, title, updatedAt } = conversation;
    const open = button("open", title, () => {
      byId("conversations-panel").open = false;
      this.onOpen(read(PREFIX + id));
    });
    open.title = title;
    const isCurrent = id === this.current.id;
    const row = make("li", isCurrent ? "conversation current" : "conversation", open);
    if (isCurrent) open.ariaCurrent = "true";
    const rename = button("quiet", "Rename", () => row.replaceChildren(this.titleField(id, title)));
    const remove = button("quiet", "Delete", () => {});
    confirmed(remove, () => this.remove(id));
    const when = make("time", "small", new Date(updatedAt).toLocaleString([], { dateStyle: "short", timeStyle: "short" }));
    row.append(when, rename, button("quiet", "Export", () => download("radixlm-conversation", [read(PREFIX + id)])), remove);
    return row;
  }

  titleField(id, title) {
    const field = make("input", "");
    field.value = title;
    field.maxLength = MAX_TITLE;
    field.ariaLabel = "Title";
    field.addEventListener("change", () => {
      const conversation = id === this.current.id ? this.current : read(PREFIX + id);
      if (!conversation || !field.value.trim()) return;
      conversation.title = field.value.trim();
      stored(PREFIX + id, written(conversation));
    });
    field.addEventListener("keydown", (event) => event.key === "Enter" && (event.preventDefault(), field.blur()));
    field.addEventListener("blur", () => this.show());
    setTimeout(() => field.select());
    return field;
  }
}

// Return all stored conversations, last used first.
function kept() {
  const keys = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
  return keys.map(read).filter(Boolean).sort((one, other) => other.updatedAt - one.updatedAt);
}

function read(key) {
  const text = localStorage.getItem(key);
  try {
    const { id, title, updatedAt, turns } = JSON.parse(text);
    return { id, title, updatedAt, turns: turns.map(({ role, content }) => ({ role, content })), numChars: text.length };
  } catch {
    return null; // missing, or not written by this page
  }
}

function written({ id, title, updatedAt, turns }) {
  return JSON.stringify({ id, title, updatedAt, turns });
}

function stored(key, text) {
  try {
    localStorage.setItem(key, text);
    return true;
  } catch {
    return false; // no room
  }
}

function download(name, conversations) {
  const told = conversations.map(({ title, updatedAt, turns }) => ({ title, updated_at: new Date(updatedAt).toISOString(), messages: turns }));
  const link = make("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify({ conversations: told }, null, 2)], { type: "application/json" }));
  link.download = `${name}.json`;
  link.click();
  URL.revokeObjectURL(link.href);
}

function button(kind, label, onClick) {
  const made = make("button", kind, label);
  made.type = "button";
  made.addEventListener("click", onClick);
  return made;
}

// Make a button act only on a second click.
function confirmed(element, act) {
  const label = element.textContent;
  element.addEventListener("click", () => {
    if (element.dataset.asked) return act();
    element.dataset.asked = "yes";
    element.textContent = "Really?";
    setTimeout(() => {
      delete element.dataset.asked;
      element.textContent = label;
    }, 3000);
  });
}

function randomId() {
  return [...crypto.getRandomValues(new Uint8Array(8))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}
