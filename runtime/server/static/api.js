// Requests to the server of this page, with the API key, errors in OpenAI's format and events of streams.

export const NO_ANSWER = "no_answer"; // the code of an error without a response

const KEY = "radixlm.key"; // of this tab only

export class ApiError extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export class Api {
  // askForKey(message, isRequired): returns a promise of a key, or of null if the user cancels.
  constructor(askForKey) {
    this.askForKey = askForKey;
    this.asking = null;
    this.onKey = () => {}; // called when the key has changed
  }

  get key() {
    return sessionStorage.getItem(KEY) ?? "";
  }

  set key(value) {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
  }

  // Return the response of a successful request. `isQuiet`: fail instead of asking for a key.
  async request(path, { isQuiet = false, ...options } = {}) {
    for (;;) {
      const sent = this.key;
      const headers = { ...options.headers };
      if (sent) headers.Authorization = "Bearer " + sent;
      if (options.body) headers["Content-Type"] = "application/json";
      const response = await fetch(path, { ...options, headers, cache: "no-store" }).catch(failed);
      if (response.ok) return response;
      const error = await errorOf(response);
      if (response.status !== 401 || isQuiet) throw error;
      if (sent === this.key && !(await this.ask(sent ? "The server does not accept this key." : "", true))) throw error;
    }
  }

  // Ask the user for a key, once for all requests that wait. Returns whether there is a new one.
  async ask(message, isRequired) {
    this.asking ??= this.askForKey(message, isRequired).finally(() => (this.asking = null));
    const key = await this.asking;
    if (key === null) return false;
    this.key = key;
    this.onKey();
    return true;
  }

  async json(path, options) {
    return (await this.request(path, options)).json().catch(failed);
  }

  // Yield the values of a server-sent stream up to [DONE]. An error within the stream is thrown.
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

// Throw what a browser's own error means: it has a TypeError for every lost connection, each browser with other words.
function failed(error) {
  if (!(error instanceof TypeError)) throw error;
  throw new ApiError(`The server at ${location.host} does not answer; is it still running?`, 0, NO_ANSWER);
}

async function errorOf(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // not JSON, but a proxy's page
  }
  const message = error.message ?? `the server responded with ${response.status} ${response.statusText}`;
  const wait = response.headers.get("Retry-After");
  return new ApiError(message + (wait ? ` (try again in ${wait} s)` : ""), response.status, error.code);
}

// Yield the data of each event, however the bytes were split. Comments are skipped.
async function* eventData(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read().catch(failed);
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
