"""Turn a conversation into a prompt and its reply back: templates, tools, and grammars that a reply follows."""
