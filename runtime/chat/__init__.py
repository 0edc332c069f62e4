"""Convert a conversation to a prompt, and what a model generates to a reply: templates, tools, grammars."""
