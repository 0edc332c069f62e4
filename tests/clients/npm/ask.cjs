// Asks the server at BASE_URL with the `openai` package from npm, and prints what came of it as JSON.

const OpenAI = require("openai");

const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: process.env.API_KEY, maxRetries: 0 });
const asked = {
  model: process.env.MODEL,
  messages: [{ role: "user", content: process.env.QUESTION }],
  max_tokens: 16,
  temperature: 0,
};
const weather = {
  type: "function",
  function: {
    name: "get_weather",
    parameters: { type: "object", properties: { city: { enum: ["Paris", "Rome"] } }, required: ["city"], additionalProperties: false },
  },
};

async function caught(promise) {
  try {
    await promise;
    return null;
  } catch (error) {
    return { kind: error.constructor.name, status: error.status ?? null, code: error.code ?? null };
  }
}

const questions = {
  async chat() {
    const whole = await client.chat.completions.create(asked);
    let streamed = "";
    let usage = null;
    for await (const chunk of await client.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } })) {
      streamed += chunk.choices[0]?.delta.content ?? "";
      usage = chunk.usage ?? usage;
    }
    return { text: whole.choices[0].message.content, streamed, usage };
  },
  async responses() {
    const response = await client.responses.create({ model: asked.model, input: asked.messages[0].content, max_output_tokens: 16, temperature: 0 });
    return { text: response.output_text, status: response.status };
  },
  async tools() {
    const stream = client.chat.completions.stream({ ...asked, max_tokens: 60, tools: [weather], tool_choice: "required" });
    const [call] = (await stream.finalChatCompletion()).choices[0].message.tool_calls;
    return { name: call.function.name, arguments: JSON.parse(call.function.arguments) };
  },
  async errors() {
    return {
      model: await caught(client.chat.completions.create({ ...asked, model: "gpt-4" })),
      key: await caught(new OpenAI({ baseURL: process.env.BASE_URL, apiKey: "sk-wrong", maxRetries: 0 }).models.list()),
      value: await caught(client.chat.completions.create({ ...asked, temperature: -1 })),
      timeout: await caught(client.chat.completions.create({ ...asked, max_tokens: 1500, ignore_eos: true }, { timeout: 300 })),
    };
  },
  async abort() {
    const stream = await client.chat.completions.create({ ...asked, max_tokens: 1500, ignore_eos: true, stream: true });
    let chunks = 0;
    for await (const _ of stream) if (++chunks === 3) break;
    return { chunks };
  },
};

questions[process.argv[2]]().then((answer) => console.log(JSON.stringify(answer)));
