// Puts the page together: the key, the model's name, health, and the two views of narrow windows.

import { Api } from "./api.js";
import { Chat } from "./chat.js";
import { byId, setText } from "./elements.js";
import { Inspector } from "./inspector.js";
import { keyDialog } from "./key.js";
import { Settings } from "./settings.js";

const HEALTH_MS = 5000;

const api = new Api(keyDialog());
const settings = new Settings(() => inspector.refresh());
const inspector = new Inspector(api, settings);
new Chat(api, settings, (isRunning) => inspector.setBusy(isRunning));

for (const view of ["chat", "cache"]) {
  byId(`view-${view}`).addEventListener("click", () => {
    document.body.dataset.view = view;
    for (const other of ["chat", "cache"]) byId(`view-${other}`).setAttribute("aria-pressed", String(other === view));
  });
}
byId("key-open").addEventListener("click", () => api.ask(""));
api.onKey = start;

async function start() {
  try {
    const models = await api.json("/v1/models");
    setText(byId("model"), models.data[0].id);
    document.title = `${models.data[0].id} · radixlm`;
  } catch (error) {
    setText(byId("model"), error.status === 401 ? "locked: it needs an API key" : error.message);
  }
  inspector.refresh();
}

async function showHealth() {
  let [kind, text] = ["bad", "no connection"];
  try {
    const response = await fetch("/health", { cache: "no-store" });
    const health = await response.json();
    kind = response.ok && health.status !== "degraded" ? "good" : "bad";
    text = health.reason ? `${health.status}: ${health.reason}` : String(health.status);
  } catch {
    // said by the text
  }
  byId("health").className = `health ${kind}`;
  setText(byId("health"), text);
  setTimeout(showHealth, HEALTH_MS);
}

start();
showHealth();
byId("prompt").focus();
