"""The tool runner of the `anthropic` package."""

from __future__ import annotations

from anthropic import Anthropic, beta_tool
from tools import MODEL, TASK, TOOLS, URL

with Anthropic(base_url=URL, api_key="none", max_retries=0) as client:
    runner = client.beta.messages.tool_runner(
        model=MODEL,
        max_tokens=2000,
        system="You repair small programs.",
        tools=[beta_tool(tool) for tool in TOOLS],
        messages=[{"role": "user", "content": TASK}],
    )
    print(runner.until_done().content[0].text)
