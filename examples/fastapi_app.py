"""Serve an engine from your own FastAPI app: RADIXLM_ARTIFACT=smollm2.radixlm fastapi run examples/fastapi_app.py

For clients of OpenAI and Anthropic, use `radixlm serve`.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from radixlm import Engine, InvalidRequest


class Question(BaseModel):
    """The request body of both endpoints."""

    text: str
    max_tokens: int = Field(default=64, ge=1, le=512)


class Person(BaseModel):
    """The JSON schema of a reply."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Open the engine in the serving process, and close it at shutdown."""
    async with Engine(os.environ["RADIXLM_ARTIFACT"]) as engine:
        app.state.engine = engine
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/ask")
async def ask(question: Question, request: Request) -> dict[str, str]:
    """Return the whole answer."""
    messages = [{"role": "user", "content": question.text}]
    try:
        reply = await request.app.state.engine.achat(messages, max_tokens=question.max_tokens)
    except InvalidRequest as error:
        raise HTTPException(400, str(error)) from error
    return {"text": reply.text}


@app.post("/stream")
async def stream(question: Question, request: Request) -> StreamingResponse:
    """Stream the answer; a client that disconnects ends its request."""

    async def texts() -> AsyncIterator[str]:
        messages = [{"role": "user", "content": question.text}]
        async with request.app.state.engine.stream_chat(messages, max_tokens=question.max_tokens) as deltas:
            async for delta in deltas:
                yield delta.text

    return StreamingResponse(texts(), media_type="text/plain")


@app.get("/person")
async def person(request: Request) -> Person:
    """Return an invented person."""
    messages = [{"role": "user", "content": "Invent a person, as JSON."}]
    reply = await request.app.state.engine.achat(messages, response_format=Person, max_tokens=512)
    return Person.model_validate_json(reply.text)
