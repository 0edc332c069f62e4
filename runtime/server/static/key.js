// The dialog that asks for an API key.

import { byId } from "./elements.js";

export function keyDialog() {
  const dialog = byId("key-dialog");
  const value = byId("key-value");
  let answer = null;

  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault(); // the key goes into a header, never into an address
    answer = value.value.trim();
    dialog.close();
  });
  byId("key-cancel").addEventListener("click", () => dialog.close());
  byId("key-drop").addEventListener("click", () => {
    answer = "";
    dialog.close();
  });

  // Return a promise of the entered key, "" to remove the key, or null if the user cancels.
  return function ask(message, isRequired) {
    answer = null;
    value.value = "";
    byId("key-required").hidden = !isRequired;
    byId("key-error").textContent = message;
    byId("key-error").hidden = !message;
    dialog.showModal();
    return new Promise((resolve) => dialog.addEventListener("close", () => resolve(answer), { once: true }));
  };
}
