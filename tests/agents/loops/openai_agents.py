"""An agent of the `openai-agents` package, over /v1/responses."""

from __future__ import annotations

from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from tools import MODEL, TASK, TOOLS, URL

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
agent = Agent(
    name="tidy",
    instructions="You repair small programs.",
    model=OpenAIResponsesModel(model=MODEL, openai_client=client),
    tools=[function_tool(tool) for tool in TOOLS],
)
print(Runner.run_sync(agent, TASK, max_turns=20).final_output)
