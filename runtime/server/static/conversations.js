// Conversations stored in this browser, each under its own key in localStorage. The oldest are dropped if there is no room.

import { button, byId, confirmed, count, make, setText } from "./elements.js";

const PREFIX = "radixlm.conversation.";
const OPEN = "radixlm.open"; // of this tab, for a reload
const MAX_KEPT = 100;
const MAX_CHARS = 2_000_000; // over all; browsers allow about 5 million
const MAX_TITLE = 80;

// Return {id, title, updatedAt, turns, settings}. A turn is {role, content, figures}; replies alone have figures, see
// figures.js. The settings are those of the last reply, see settings.js; undefined if the conversation is older than they are.
// The conversation is stored with its first message.
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
    if (!conversation.turns.length) return this.withdraw(conversation);
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

  // Store nothing of a conversation that has lost its only message. Its next message gives it another title.
  withdraw(conversation) {
    conversation.title = "";
    localStorage.removeItem(PREFIX + conversation.id);
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
      if (id !== this.current.id) this.onOpen(read(PREFIX + id));
    });
    open.title = title;
    const isCurrent = id === this.current.id;
    const row = make("li", isCurrent ? "conversation current" : "conversation", open);
    if (isCurrent) open.ariaCurrent = "true";
    const rename = button("quiet", "Rename", () => this.rename(id, open));
    const remove = button("quiet", "Delete", () => {});
    confirmed(remove, () => this.remove(id));
    const when = make("time", "small", new Date(updatedAt).toLocaleString([], { dateStyle: "short", timeStyle: "short" }));
    row.append(when, rename, button("quiet", "Export", () => this.exportOne(id)), remove);
    return row;
  }

  exportOne(id) {
    const conversation = read(PREFIX + id);
    if (conversation) download(fileName(conversation.title), [conversation]); // else deleted in another tab
  }

  // Put a field in the place of the title. All other elements stay where they are, so that a click on one finds it.
  rename(id, open) {
    const field = make("input", "");
    field.value = open.title;
    field.maxLength = MAX_TITLE;
    field.ariaLabel = "Title";
    let isCancelled = false;
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.preventDefault();
      event.stopPropagation(); // Escape would stop a reply, too
      isCancelled = event.key === "Escape";
      field.blur();
    });
    field.addEventListener("blur", () => {
      const title = field.value.trim();
      if (title && !isCancelled) this.setTitle(id, (open.title = open.textContent = title));
      field.replaceWith(open);
    }, { once: true });
    open.replaceWith(field);
    field.focus();
    field.select();
  }

  setTitle(id, title) {
    const conversation = id === this.current.id ? this.current : read(PREFIX + id);
    if (!conversation) return; // deleted in another tab
    conversation.title = title;
    stored(PREFIX + id, written(conversation));
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
    const { id, title, updatedAt, turns, settings } = JSON.parse(text);
    return { id, title, updatedAt, settings, turns: turns.map(({ role, content, figures }) => ({ role, content, figures })), numChars: text.length };
  } catch {
    return null; // missing, or not written by this page
  }
}

function written({ id, title, updatedAt, turns, settings }) {
  return JSON.stringify({ id, title, updatedAt, turns, settings });
}

function stored(key, text) {
  try {
    localStorage.setItem(key, text);
    return true;
  } catch {
    return false; // no room
  }
}

// Return turns in the form of the API.
export function messagesOf(turns) {
  return turns.map(({ role, content }) => ({ role, content }));
}

// Return a title without what file systems refuse or read as a path.
function fileName(title) {
  return title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "").slice(0, 60) || "conversation";
}

function download(name, conversations) {
  const told = conversations.map(({ title, updatedAt, turns, settings }) => ({ title, updated_at: new Date(updatedAt).toISOString(), settings, messages: messagesOf(turns) }));
  const link = make("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify({ conversations: told }, null, 2)], { type: "application/json" }));
  link.download = `${name}.json`;
  link.click();
  URL.revokeObjectURL(link.href);
}

function randomId() {
  return [...crypto.getRandomValues(new Uint8Array(8))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}
