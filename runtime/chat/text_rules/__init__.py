"""The text rules of a reply: strings that end it, and strings that it must not contain. Knows text, not token ids."""
