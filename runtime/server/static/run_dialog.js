// The dialog with the text and the token ids of one run of the tree.

import { byId, copyButton, setText } from "./elements.js";

export class RunDialog {
  // query(): returns the query of /v1/cache for the shown namespace and model.
  constructor(api, query) {
    this.api = api;
    this.query = query;
    this.run = null;
    this.dialog = byId("run-dialog");
    byId("run-copy").replaceWith(copyButton("Copy text", () => byId("run-text").textContent), copyButton("Copy ids", () => byId("run-ids").textContent));
    byId("run-close").addEventListener("click", () => this.dialog.close());
  }

  async open(run) {
    this.run = run;
    setText(byId("run-title"), `Tokens ${run.start} to ${run.start + run.num_tokens}`);
    this.show("", "");
    this.dialog.showModal();
    try {
      const query = new URLSearchParams(this.query());
      query.set("run", run.id);
      const whole = await this.api.json(`v1/cache?${query}`);
      if (run === this.run) this.show(whole.text, whole.token_ids.join(", "));
    } catch (error) {
      if (run === this.run) this.show("", "", error.message);
    }
  }

  show(text, ids, error = "") {
    setText(byId("run-text"), text);
    setText(byId("run-ids"), ids);
    setText(byId("run-error"), error);
    byId("run-error").hidden = !error;
  }
}
