"""OpenAI's APIs, Chat Completions, Completions and Responses: their endpoints, requests and replies."""
