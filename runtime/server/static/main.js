// Set up the page: the API key, the model's name, health, and the two views of narrow windows.

import { Api } from "./api.js";
import { Chat } from "./chat.js";
import { byId, make, setText } from "./elements.js";
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
byId("key-open").addEventListener("click", () => api.ask("", false));
api.onKey = start;

async function start() {
  try {
    showModels((await api.json("v1/models")).data);
  } catch (error) {
    setText(byId("model"), error.status === 401 ? "locked: an API key is required" : error.message);
  }
  inspector.refresh();
}

// Show the model's name, or a choice of several.
function showModels(models) {
  if (!models.some((model) => model.id === settings.model && canChat(model))) settings.model = "";
  const chosen = models.find(({ id }) => id === settings.model) ?? models.find(canChat) ?? models[0];
  if (chosen !== models[0]) settings.model = chosen.id; // the server's first cannot chat, or another was chosen
  if (models.length > 1) {
    const select = make("select", "", ...models.map((model) => new Option(labelOf(model), model.id, false, model.id === chosen.id)));
    disableSilent(select, models);
    select.ariaLabel = "Model";
    select.addEventListener("change", () => {
      settings.model = select.value;
      showModels(models);
      inspector.refresh();
    });
    select.addEventListener("focus", () => showStates(select)); // other clients load and unload models, too
    byId("model").replaceChildren(select);
  } else {
    setText(byId("model"), chosen.id);
  }
  const context = chosen.max_input_tokens ? `, a context of ${chosen.max_input_tokens.toLocaleString("en")} tokens` : "";
  byId("model").title = chosen.id + context;
  settings.showDefaults(chosen.id, chosen.default_sampling ?? {});
  document.title = `${chosen.id} · radixlm`;
}

// A model that is not loaded may tell only later that it has no chat template.
function canChat(model) {
  return model.has_chat_template !== false;
}

function disableSilent(select, models) {
  for (const option of select.options) {
    option.disabled = models.some((model) => model.id === option.value && !canChat(model));
    option.title = option.disabled ? "This model has no chat template: it continues texts only (/v1/completions)" : "";
  }
}

// Return the label of a model. One that is not loaded can be chosen: the first message loads it.
function labelOf({ id, state, percent }) {
  const done = percent === undefined ? "" : `, ${percent} %`;
  return state === undefined || state === "loaded" ? id : `${id} (${state}${done})`;
}

async function showStates(select) {
  const models = (await api.json("v1/models", { isQuiet: true }).catch(() => null))?.data ?? [];
  for (const option of select.options) option.text = labelOf(models.find(({ id }) => id === option.value) ?? { id: option.value });
  disableSilent(select, models);
}

let wasGone = false; // the last question for health was not answered

async function showHealth() {
  let [kind, text, isAnswered] = ["bad", "no connection", false];
  try {
    const response = await fetch("health", { cache: "no-store" });
    const health = await response.json();
    kind = response.ok && health.status !== "degraded" ? "good" : "bad";
    isAnswered = true;
    text = health.reason ? `${health.status}: ${health.reason}` : String(health.status);
  } catch {
    // the text says so
  }
  byId("health").className = `health ${kind}`;
  setText(byId("health"), text);
  if (isAnswered && wasGone) start();
  wasGone = !isAnswered;
  setTimeout(showHealth, HEALTH_MS);
}

start();
showHealth();
byId("prompt").focus();
