// The settings of replies, stored in the tab. Fields have the API's names; empty ones are not sent.

import { messagesOf } from "./conversations.js";
import { byId } from "./elements.js";

const STORE = "radixlm.settings";
const MODEL = "radixlm.model";
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];

export class Settings {
  constructor(onChange) {
    this.form = byId("composer");
    this.defaultModel = ""; // until the server has named it
    this.defaults = {};
    this.fields = [...byId("settings").querySelectorAll("[name]")];
    const stored = JSON.parse(sessionStorage.getItem(STORE) ?? "{}");
    for (const field of this.fields) field.value = stored[field.name] ?? "";
    byId("settings").addEventListener("input", () => this.changed(onChange));
    byId("settings-reset").addEventListener("click", () => {
      for (const field of this.fields) field.value = "";
      this.changed(onChange);
    });
    this.changed(() => {});
  }

  changed(onChange) {
    const set = Object.fromEntries(this.fields.filter((f) => f.value !== "").map((f) => [f.name, f.value]));
    sessionStorage.setItem(STORE, JSON.stringify(set));
    const said = Object.entries(set).map(([name, value]) => (name === "system" ? "system prompt" : `${name.replaceAll("_", " ")} ${value}`));
    byId("settings-set").textContent = said.length ? `· ${said.join(" · ")}` : "";
    onChange();
  }

  value(name) {
    return this.fields.find((field) => field.name === name).value;
  }

  // Return whether the settings are valid. If not, the browser shows which is not.
  check() {
    if (this.form.checkValidity()) return true;
    byId("settings").open = true;
    this.form.reportValidity();
    return false;
  }

  // Return what a reader needs to repeat a reply: the model, the system prompt, and the sampling, the server's defaults included.
  record() {
    const sampling = Object.fromEntries(NUMBERS.map((name) => [name, this.value(name) || this.defaults[name]]).filter(([, value]) => value !== undefined));
    for (const name in sampling) sampling[name] = Number(sampling[name]);
    return { model: this.model || this.defaultModel, system: this.value("system"), ...sampling };
  }

  // The chosen model; "" for the server's first.
  get model() {
    return sessionStorage.getItem(MODEL) ?? "";
  }

  set model(name) {
    sessionStorage.setItem(MODEL, name);
  }

  // Show the defaults of a model in empty fields.
  showDefaults(model, defaults) {
    this.defaultModel = model;
    this.defaults = defaults;
    for (const field of this.fields) if (field.name in defaults) field.placeholder = String(Math.round(defaults[field.name] * 1e4) / 1e4);
  }

  // Return the body of /v1/chat/completions for these turns.
  body(turns) {
    const body = { stream: true, stream_options: { include_usage: true }, return_progress: true, return_guesses: true };
    for (const name of NUMBERS) if (this.value(name) !== "") body[name] = Number(this.value(name));
    for (const name of ["cache_match", "cache_salt", "truncation"]) if (this.value(name) !== "") body[name] = this.value(name);
    if (this.model) body.model = this.model;
    const system = this.value("system");
    const messages = messagesOf(turns);
    body.messages = system ? [{ role: "system", content: system }, ...messages] : messages;
    return body;
  }

  // Return which setting lets a history go on that the server has refused; "" if none does.
  hintFor(error) {
    const field = this.fields.find(({ name }) => name === "truncation");
    if (error.code !== "context_length_exceeded" || field.value === "middle") return "";
    const [label, option] = [field.labels[0].firstChild.textContent, field.querySelector("[value=middle]").text];
    return `The setting “${label}: ${option}” sends it without its oldest turns.`;
  }

  // Return the query of /v1/cache for the chat's namespace. `model` is "" if there is only one.
  cacheQuery(model) {
    const query = new URLSearchParams();
    if (this.value("cache_salt")) query.set("cache_salt", this.value("cache_salt"));
    if (model) query.set("model", model);
    return query.size ? `?${query}` : "";
  }
}
