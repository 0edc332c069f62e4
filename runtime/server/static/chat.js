// The chat view: the conversation, the running reply, and how much of each prompt was cached.

import { ConversationList, newConversation } from "./conversations.js";
import { byId, make } from "./elements.js";
import { Reply } from "./reply.js";
import { ReplyTurn, userTurn } from "./turn.js";

export class Chat {
  // onTraffic(isRunning): called when a reply begins or ends.
  constructor(api, settings, onTraffic) {
    this.api = api;
    this.settings = settings;
    this.onTraffic = onTraffic;
    this.conversation = newConversation();
    this.running = null; // the AbortController of the running reply
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
    this.prompt.addEventListener("input", () => this.fit());
    byId("stop").addEventListener("click", () => this.stop());
    byId("again").addEventListener("click", () => this.again());
    byId("new").addEventListener("click", () => this.clear());
    this.list = new ConversationList((conversation) => this.open(conversation));
    const last = this.list.last();
    if (last) this.open(last);
    else this.list.setCurrent(this.conversation);
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !byId("key-dialog").open) this.stop();
    });
  }

  // The messages in the form of the API: {role, content}.
  get turns() {
    return this.conversation.turns;
  }

  say() {
    const text = this.prompt.value;
    if (this.running || !text.trim() || !this.settings.check()) return;
    this.prompt.value = "";
    this.fit();
    this.turns.push({ role: "user", content: text });
    this.list.save(this.conversation);
    this.show(userTurn(text));
    this.reply();
  }

  // Replace the last reply by another one.
  again() {
    if (this.running || !this.settings.check()) return;
    if (this.turns.at(-1)?.role === "assistant") this.turns.pop();
    const last = this.log.lastElementChild;
    if (last.classList.contains("assistant")) last.remove();
    this.reply();
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
    this.conversation = conversation ?? newConversation();
    this.list.setCurrent(this.conversation);
    this.log.replaceChildren(...this.turns.map(({ role, content }) => (role === "user" ? userTurn(content) : new ReplyTurn(content).element)));
    if (!this.turns.length) this.log.append(make("p", "empty", "A new conversation. The prefixes of earlier ones are still cached."));
    this.log.scrollTop = this.log.scrollHeight;
    byId("again").hidden = !this.turns.length;
  }

  async reply() {
    const conversation = this.conversation; // the user may open another in the meantime
    const running = (this.running = new AbortController());
    this.setRunning(true);
    const turn = new ReplyTurn();
    this.show(turn.element);
    const reply = new Reply(turn, () => this.follow());
    try {
      const body = JSON.stringify(this.settings.body(conversation.turns));
      const options = { method: "POST", body, signal: running.signal };
      for await (const chunk of this.api.events("v1/chat/completions", options)) reply.take(chunk);
    } catch (error) {
      reply.fail(error);
    }
    reply.end();
    if (turn.text) {
      conversation.turns.push({ role: "assistant", content: turn.text });
      this.list.save(conversation);
    }
    if (this.running === running) {
      this.running = null;
      this.setRunning(false);
    }
  }

  show(turn) {
    byId("empty")?.remove();
    this.log.querySelector(":scope > .empty")?.remove();
    this.log.append(turn);
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

  fit() {
    this.prompt.style.height = "auto";
    this.prompt.style.height = `${this.prompt.scrollHeight + 2}px`;
  }
}
