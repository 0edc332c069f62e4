// The chat view: the conversation, the running reply, and how much of each prompt was cached.

import { ConversationList, newConversation } from "./conversations.js";
import { byId, make } from "./elements.js";
import { Reply } from "./reply.js";
import { ReplyTurn, storedReply, userTurn } from "./turn.js";

const DRAFT = "radixlm.draft"; // of this tab, for a reload

export class Chat {
  // onTraffic(isRunning): called when a reply begins or ends.
  constructor(api, settings, onTraffic) {
    this.api = api;
    this.settings = settings;
    this.onTraffic = onTraffic;
    this.conversation = newConversation();
    this.running = null; // the AbortController of the running reply
    this.elements = new WeakMap(); // turn -> its element
    this.edited = null; // the sent message that is in the box, and what was there before: {turn, draft}
    this.log = byId("log");
    this.prompt = byId("prompt");
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.say();
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.say();
    });
    this.prompt.addEventListener("input", () => this.write(this.prompt.value));
    byId("edit-cancel").addEventListener("click", () => this.endEdit());
    byId("stop").addEventListener("click", () => this.stop());
    byId("again").addEventListener("click", () => this.again());
    byId("new").addEventListener("click", () => this.clear());
    this.list = new ConversationList((conversation) => this.open(conversation));
    const last = this.list.last();
    if (last) this.open(last);
    else this.list.setCurrent(this.conversation);
    this.write(sessionStorage.getItem(DRAFT) ?? "");
    document.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
      this.stop();
      this.endEdit();
    });
  }

  // Stored turns, see conversations.js. The array is replaced, never changed.
  get turns() {
    return this.conversation.turns;
  }

  // Send the text of the box: as the next message, or in the place of the message that is edited.
  say() {
    const text = this.prompt.value;
    if (this.running || !text.trim() || !this.settings.check()) return;
    const edited = this.edited?.turn;
    const kept = edited ? this.turns.slice(0, this.turns.indexOf(edited)) : this.turns;
    if (edited) this.endEdit();
    else this.write("");
    this.send([...kept, { role: "user", content: text }], () => {
      if (edited) this.edit(edited, text);
      else this.write([text, this.prompt.value].filter(Boolean).join("\n\n"));
    });
  }

  // Replace the last reply by another one.
  again() {
    if (this.running || !this.settings.check()) return;
    this.endEdit();
    this.send(this.turns.at(-1)?.role === "assistant" ? this.turns.slice(0, -1) : this.turns, () => {});
  }

  // Put a sent message into the box, with its text or another.
  edit(turn, text = turn.content) {
    this.endEdit();
    this.edited = { turn, draft: this.prompt.value };
    this.write(text);
    this.showEdited();
    this.prompt.focus();
  }

  // Leave the sent message as it is: the box has its draft again.
  endEdit() {
    if (!this.edited) return;
    this.write(this.edited.draft);
    this.edited = null;
    this.showEdited();
  }

  showEdited() {
    const from = this.edited ? this.turns.indexOf(this.edited.turn) : Infinity;
    this.turns.forEach((turn, index) => this.elementOf(turn).classList.toggle("replaced", index >= from));
    byId("editing").hidden = !this.edited;
  }

  // Take out a message and all that followed it.
  remove(turn) {
    this.endEdit();
    this.conversation.turns = this.turns.slice(0, this.turns.indexOf(turn));
    this.list.save(this.conversation);
    this.draw();
    this.setRunning(false);
  }

  stop() {
    this.running?.abort();
  }

  clear() {
    this.open(null);
    this.prompt.focus();
  }

  // Show a stored conversation, or a new one.
  open(conversation) {
    this.stop();
    this.endEdit();
    this.conversation = conversation ?? newConversation();
    this.list.setCurrent(this.conversation);
    this.draw();
    if (this.turns.at(-1)?.role === "user") this.show(make("p", "turn usage", "No reply: it was stopped, or it failed. Regenerate asks for another."));
    byId("again").hidden = !this.turns.length;
  }

  // Replace the turns, and have them answered. If the server refuses them, they are as they were, and onRefused is called.
  async send(turns, onRefused) {
    const conversation = this.conversation; // the user may open another in the meantime
    const before = conversation.turns;
    const running = (this.running = new AbortController());
    conversation.turns = turns;
    conversation.settings = this.settings.record();
    this.list.save(conversation);
    this.draw();
    this.setRunning(true);
    const shown = new ReplyTurn();
    this.show(shown.element);
    const reply = new Reply(shown, () => this.follow());
    let isRefused = false;
    try {
      const body = JSON.stringify(this.settings.body(turns));
      const options = { method: "POST", body, signal: running.signal };
      for await (const chunk of this.api.events("v1/chat/completions", options)) reply.take(chunk);
    } catch (error) {
      isRefused = error.status >= 400 && error.status < 500;
      reply.fail(error, before.length ? this.settings.hintFor(error) : "");
    }
    reply.end();
    if (shown.text) {
      const turn = { role: "assistant", content: shown.text, figures: reply.figures };
      this.elements.set(turn, shown.element);
      conversation.turns = [...turns, turn];
      this.list.save(conversation);
    }
    if (isRefused) {
      conversation.turns = before;
      this.list.save(conversation);
      if (conversation === this.conversation) {
        this.draw();
        onRefused();
        this.show(shown.element);
      }
    }
    if (this.running === running) {
      this.running = null;
      this.setRunning(false);
    }
  }

  // Show all turns, and nothing else. A turn that has been shown keeps its element.
  draw() {
    this.log.replaceChildren(...this.turns.map((turn) => this.elementOf(turn)));
    if (!this.turns.length) this.log.append(make("p", "empty", "A new conversation. The prefixes of earlier ones are still cached."));
    this.log.scrollTop = this.log.scrollHeight;
  }

  elementOf(turn) {
    let element = this.elements.get(turn);
    if (!element) {
      element = turn.role === "user" ? userTurn(turn.content, () => this.edit(turn), () => this.remove(turn)) : storedReply(turn);
      this.elements.set(turn, element);
    }
    return element;
  }

  // Show something below the turns.
  show(element) {
    this.log.querySelector(":scope > .empty")?.remove();
    this.log.append(element);
    this.log.scrollTop = this.log.scrollHeight;
  }

  // Scroll to the end, unless the user has scrolled up.
  follow() {
    if (this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 80) this.log.scrollTop = this.log.scrollHeight;
  }

  setRunning(isRunning) {
    byId("stop").hidden = !isRunning;
    byId("send").hidden = isRunning;
    byId("again").hidden = isRunning || !this.turns.length;
    this.log.setAttribute("aria-busy", String(isRunning));
    this.onTraffic(isRunning);
  }

  // Set the text of the box, which outlives a reload.
  write(text) {
    if (this.prompt.value !== text) this.prompt.value = text; // setting the same would move the cursor
    try {
      sessionStorage.setItem(DRAFT, text);
    } catch {
      // no room
    }
    this.prompt.style.height = "auto";
    this.prompt.style.height = `${this.prompt.scrollHeight + 2}px`;
  }
}
