// Asks the server at BASE_URL with the `ollama` package from npm, and prints what came of it as JSON.

const { Ollama } = require("ollama");

const client = (key) => new Ollama({ host: process.env.BASE_URL, headers: { Authorization: `Bearer ${key}` } });
const ours = client(process.env.API_KEY);
const model = process.env.MODEL;
const messages = [{ role: "user", content: process.env.QUESTION }];
const options = { temperature: 0, num_predict: 16 };

async function caught(promise) {
  try {
    await promise;
    return null;
  } catch (error) {
    return { kind: error.name, status: error.status_code ?? null, has_message: error.message.length > 10 };
  }
}

const questions = {
  async chat() {
    const whole = await ours.chat({ model, messages, options });
    let streamed = "";
    let last = null;
    for await (const part of await ours.chat({ model, messages, options, stream: true })) {
      streamed += part.message.content;
      last = part;
    }
    return { text: whole.message.content, streamed, counts: [whole.eval_count, last.eval_count], reason: last.done_reason };
  },
  async generate() {
    const whole = await ours.generate({ model, prompt: messages[0].content, options });
    let streamed = "";
    for await (const part of await ours.generate({ model, prompt: messages[0].content, options, stream: true })) streamed += part.response;
    return { text: whole.response, streamed };
  },
  async format() {
    const schema = { type: "object", properties: { size: { type: "boolean" } }, required: ["size"], additionalProperties: false };
    const reply = await ours.chat({ model, messages, format: schema, options: { temperature: 0, num_predict: 60 } });
    return JSON.parse(reply.message.content);
  },
  async models() {
    const [listed, shown, loaded, version] = await Promise.all([ours.list(), ours.show({ model }), ours.ps(), ours.version()]);
    return { listed: listed.models[0].model, family: shown.details.family, loaded: loaded.models[0].name, version: version.version };
  },
  async errors() {
    return {
      model: await caught(ours.chat({ model: "gpt-oss", messages })),
      key: await caught(client("sk-wrong").list()),
      value: await caught(ours.chat({ model, messages, options: { temperature: -1 } })),
      pull: await caught(ours.pull({ model: "gpt-oss" })),
      embed: await caught(ours.embed({ model, input: "Hi" })),
    };
  },
  async embed() {
    return (await ours.embed({ model, input: messages[0].content })).embeddings;
  },
  async abort() {
    const stream = await ours.chat({ model, messages, stream: true, options: { num_predict: 1500, ignore_eos: true } });
    let parts = 0;
    let error = null;
    try {
      for await (const _ of stream) if (++parts === 3) stream.abort();
    } catch (raised) {
      error = raised.name;
    }
    return { parts, error };
  },
};

questions[process.argv[2]]().then((answer) => console.log(JSON.stringify(answer)));
