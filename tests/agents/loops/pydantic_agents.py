"""An agent of the `pydantic-ai` package, over the API that the first argument names."""

from __future__ import annotations

import sys

from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from tools import MODEL, TASK, TOOLS, URL


def model() -> AnthropicModel | OpenAIChatModel | OpenAIResponsesModel:
    if sys.argv[1] == "messages":
        client = AsyncAnthropic(base_url=URL, api_key="none", max_retries=0)
        return AnthropicModel(MODEL, provider=AnthropicProvider(anthropic_client=client))
    provider = OpenAIProvider(openai_client=AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0))
    kind = OpenAIChatModel if sys.argv[1] == "chat" else OpenAIResponsesModel
    return kind(MODEL, provider=provider)


agent = Agent(model(), system_prompt="You repair small programs.", tools=TOOLS)
print(agent.run_sync(TASK).output)
