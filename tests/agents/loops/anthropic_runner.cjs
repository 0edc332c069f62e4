// The tool runner of the @anthropic-ai/sdk package.

const { Anthropic } = require("@anthropic-ai/sdk");
const tools = require("./tools.cjs");

const { RADIXLM_URL: baseURL, RADIXLM_MODEL: model, RADIXLM_TASK: task } = process.env;
const client = new Anthropic({ baseURL, apiKey: "none", maxRetries: 0 });

async function main() {
  const runner = client.beta.messages.toolRunner({
    model,
    max_tokens: 2000,
    system: "You repair small programs.",
    messages: [{ role: "user", content: task }],
    tools: Object.entries(tools).map(([name, [description, properties, run]]) => ({
      name,
      description,
      input_schema: { type: "object", properties, required: Object.keys(properties) },
      parse: (input) => input,
      run: async (input) => run(input),
    })),
  });
  const message = await runner.runUntilDone();
  console.log(message.content[0].text);
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
