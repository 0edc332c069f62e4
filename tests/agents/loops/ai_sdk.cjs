// The loop of the ai package, over the provider that the first argument names.

const { generateText, jsonSchema, stepCountIs, tool } = require("ai");
const tools = require("./tools.cjs");

const { RADIXLM_URL: url, RADIXLM_MODEL: model, RADIXLM_TASK: prompt } = process.env;

function provider(name) {
  if (name === "anthropic") return require("@ai-sdk/anthropic").createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" });
  return require("@ai-sdk/open-responses").createOpenResponses({ name: "radixlm", url: `${url}/v1/responses`, apiKey: "none" });
}

async function main() {
  const { text } = await generateText({
    model: provider(process.argv[2])(model),
    instructions: "You repair small programs.",
    prompt,
    maxRetries: 0,
    stopWhen: stepCountIs(20),
    tools: Object.fromEntries(
      Object.entries(tools).map(([name, [description, properties, run]]) => {
        const inputSchema = jsonSchema({ type: "object", properties, required: Object.keys(properties), additionalProperties: false });
        return [name, tool({ description, inputSchema, execute: async (input) => run(input) })];
      }),
    ),
  });
  console.log(text);
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
