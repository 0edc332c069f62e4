"""From a conversation to a prompt and back: templates, tools, and grammars that a reply follows."""
