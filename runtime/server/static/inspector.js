// The cache inspector: requests the cache's state while the page is visible, and passes it to the views.

import { NO_ANSWER } from "./api.js";
import { byId, confirmed, count, make, setText, size } from "./elements.js";
import { RequestList } from "./request_list.js";
import { RunDialog } from "./run_dialog.js";
import { TreeView } from "./tree_view.js";

const PAGE_SIZE = 16;
const IDLE_MS = 1500;
const BUSY_MS = 350; // while this page's chat runs
const NOTE_MS = 8000; // how long the result of an action is shown
const LOSS = "This deletes your cached prefixes, in memory and on disk, and your stored responses (/v1/responses). The conversations in this browser stay.";

export class Inspector {
  constructor(api, settings) {
    this.api = api;
    this.settings = settings;
    this.isLive = true;
    this.isBusy = false;
    this.timer = 0;
    this.asking = null;
    this.isLocked = false;
    this.isGone = false; // the server does not answer
    this.noteTimer = 0;
    this.runs = [];
    this.query = ""; // query of the shown namespace and model
    const dialog = new RunDialog(api, () => this.query);
    this.tree = new TreeView((run) => dialog.open(run));
    this.requests = new RequestList(() => this.tree.show(this.runs, this.requests.requests, this.requests.chosen));
    byId("live").addEventListener("click", () => this.setLive(!this.isLive));
    confirmed(byId("forget"), () => this.forget(), (isAsking) => this.note(isAsking ? LOSS : ""));
    document.addEventListener("visibilitychange", () => this.refresh());
  }

  setLive(isLive) {
    this.isLive = isLive;
    this.showLive();
    this.refresh();
  }

  showLive() {
    byId("live").setAttribute("aria-pressed", String(this.isLive && !this.isGone));
    setText(byId("live"), this.isLive ? (this.isGone ? "Offline" : "Live") : "Paused");
  }

  setBusy(isBusy) {
    this.isBusy = isBusy;
    if (isBusy) this.note("");
    if (!isBusy) this.requests.chosenId = null; // show the request that has just ended
    this.refresh();
  }

  // Update now, and then repeatedly. Never sends a request before the last response.
  async refresh() {
    clearTimeout(this.timer);
    if (!this.isLive || document.hidden) return;
    if (this.asking) return;
    const startedAt = performance.now();
    this.asking = this.update();
    await this.asking;
    this.asking = null;
    if (this.isLocked) return; // until there is a key, or the page becomes visible again
    const tookMs = performance.now() - startedAt;
    const wait = Math.max(this.isBusy ? BUSY_MS : IDLE_MS, 5 * tookMs); // a large tree also loads the server
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.refresh(), wait);
  }

  async update() {
    try {
      const health = await this.api.json("health", { isQuiet: true }).catch(() => null);
      this.query = this.settings.cacheQuery(health?.models ? this.settings.model : "");
      const tree = await this.api.json("v1/cache" + this.query, { isQuiet: true });
      this.show(tree, health);
      this.isLocked = this.isGone = false;
      this.fail("");
    } catch (error) {
      this.isGone = error.code === NO_ANSWER;
      this.isLocked = error.status === 401;
      const isUnloaded = error.code === "model_not_loaded";
      this.fail(this.isLocked ? "An API key is required to see the cache." : isUnloaded ? "The model is not loaded; a message loads it." : error.message);
    }
    this.showLive();
  }

  async forget() {
    try {
      const done = await this.api.json("v1/cache" + this.query, { method: "DELETE" });
      this.note(`${count(done.num_freed_pages, "page")} freed` + (done.num_kept_pages ? `, ${done.num_kept_pages} in use` : ""));
      this.noteTimer = setTimeout(() => this.note(""), NOTE_MS);
    } catch (error) {
      this.fail(error.message);
    }
    this.refresh();
  }

  show(tree, health) {
    const inUse = tree.num_used_pages ? `, ${tree.num_used_pages} in use` : "";
    const most = tree.is_counted ? "" : "more than ";
    const sums = [`${most}${count(tree.num_runs, "run")}`, count(tree.num_tokens, "token"), count(tree.num_pages, "page") + inUse, ...(tree.num_states ? [count(tree.num_states, "state")] : [])];
    if (!tree.is_whole) sums.push(`${tree.runs.length} drawn`);
    setText(byId("sums"), sums.join(" · "));
    this.showPool(health);
    this.runs = tree.runs;
    this.requests.show(tree.requests);
    this.tree.show(tree.runs, tree.requests, this.requests.chosen);
  }

  showPool(health) {
    const models = health?.models; // if there are several
    const own = models ? (models[this.settings.model] ?? Object.values(models)[0]) : health;
    this.showStore(own?.tier);
    const { num_pages: all, num_free_pages: free, num_cached_pages: kept } = own ?? {};
    const isKnown = all > 0 && free >= 0 && kept >= 0;
    byId("pool").hidden = byId("pool-text").hidden = !isKnown;
    if (!isKnown) return;
    const used = all - free - kept;
    byId("pool").replaceChildren(
      ...[["used", used], ["kept", kept]].map(([kind, number]) => {
        const part = make("span", kind);
        part.style.width = `${(100 * number) / all}%`;
        return part;
      }),
    );
    const text = `KV cache: ${count(all, "page")}, ${used.toLocaleString("en")} in use, ${kept.toLocaleString("en")} cached, ${free.toLocaleString("en")} free`;
    byId("pool").setAttribute("aria-label", text);
    setText(byId("pool-text"), text);
  }

  showStore(tier) {
    byId("store-text").hidden = !tier;
    if (!tier) return;
    const { num_pages: pages, num_bytes: bytes, max_bytes: most, num_saved_pages: saved, num_evicted_pages: evicted } = tier;
    const said = [`${count(pages, "page")} (${count(pages * PAGE_SIZE, "token")}) on disk`, `${size(bytes)} of ${size(most)}`, `since the start ${saved.toLocaleString("en")} saved, ${evicted.toLocaleString("en")} evicted`];
    setText(byId("store-text"), tier.off_because ? `store: off, ${tier.off_because}` : `store: ${said.join(" · ")}`);
  }

  note(text) {
    clearTimeout(this.noteTimer);
    setText(byId("cache-note"), text);
  }

  fail(message) {
    byId("cache-error").hidden = !message;
    setText(byId("cache-error"), message);
  }
}
