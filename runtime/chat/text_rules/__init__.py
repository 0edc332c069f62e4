"""What the text of a reply ends before, what it never has, and what it begins with. Knows text, not tokens' numbers."""
