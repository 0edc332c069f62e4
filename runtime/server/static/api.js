// Requests to the server that the page came from: the key, errors in OpenAI's shape, events of a stream.

const KEY = "radixlm.key"; // of this tab, gone with it

export class ApiError extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export class Api {
  // askForKey(message): a promise of a key, or of null if the user has none.
  constructor(askForKey) {
    this.askForKey = askForKey;
    this.asking = null;
    this.onKey = () => {}; // there is another key now
  }

  get key() {
    return sessionStorage.getItem(KEY) ?? "";
  }

  set key(value) {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
  }

  // The response of a request that succeeded. `isQuiet`: do not ask for a key, fail.
  async request(path, { isQuiet = false, ...options } = {}) {
    for (;;) {
      const sent = this.key;
      const headers = { ...options.headers };
      if (sent) headers.Authorization = "Bearer " + sent;
      if (options.body) headers["Content-Type"] = "application/json";
      const response = await fetch(path, { ...options, headers, cache: "no-store" });
      if (response.ok) return response;
      const error = await errorOf(response);
      if (response.status !== 401 || isQuiet) throw error;
      if (sent === this.key && !(await this.ask(sent ? "The server does not know that key." : ""))) throw error;
    }
  }

  // Ask for a key, once for all who need one; true if there is another now.
  async ask(message) {
    this.asking ??= this.askForKey(message).finally(() => (this.asking = null));
    const key = await this.asking;
    if (key === null) return false;
    this.key = key;
    this.onKey();
    return true;
  }

  async json(path, options) {
    return (await this.request(path, options)).json();
  }

  // The values of a server-sent stream up to [DONE]; an error in mid-stream is thrown.
  async *events(path, options) {
    const response = await this.request(path, options);
    for await (const data of eventData(response.body)) {
      if (data === "[DONE]") return;
      const value = JSON.parse(data);
      if (value.error) throw new ApiError(String(value.error.message), 200, value.error.code);
      yield value;
    }
    throw new ApiError("the stream broke off", 200, "broken_stream");
  }
}

async function errorOf(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // not JSON: a proxy's page, which nobody wants to read here
  }
  const message = error.message ?? `the server answered ${response.status} ${response.statusText}`;
  const wait = response.headers.get("Retry-After");
  return new ApiError(message + (wait ? ` (try again in ${wait} s)` : ""), response.status, error.code);
}

// The data of each event, however the bytes were cut on the way; comments are skipped.
async function* eventData(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const lines = event.split("\n").filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
