"""Follow a prompt's tokens down from a root, as far as the tree has them.

Reads nodes and changes none. Knows keys and pages, not sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..artifact.manifest import PAGE_SIZE
from ..states.state_pool import NO_STATE, FoundState
from .radix_node import PAGE_BYTES, TOKEN_BYTES, Node, num_common_tokens
from .why_not_more import MAX_IDS_COMPARED


@dataclass(frozen=True)
class FoundRun:
    """The longest cached run that begins like the requested tokens.

    The full `pages` hold the first tokens. The other `num_rows` tokens are the first rows of `partial_page`, a full
    page or a tail.

    Attributes:
        ahead_ids: the next tokens in the tree, if any.
        is_next_generated: the model generated the first of `ahead_ids`.
        was_evicted: the tree once had the requested token there, and evicted it.
        num_with_kv: tokens with KV. More than `num_tokens` if the run was cut at a state or at dropped window rows.
        state_slot: recurrent models: the slot of the state after `num_tokens` tokens.
    """

    num_tokens: int
    pages: list[int]
    partial_page: int | None
    num_rows: int
    generated: bytes
    ahead_ids: tuple[int, ...]
    is_next_generated: bool
    was_evicted: bool
    num_with_kv: int
    state_slot: int = NO_STATE

    @classmethod
    def below(cls, root: Node | None, key: bytes) -> FoundRun:
        """Return the longest run below `root` that begins like the tokens of `key`; an empty one without a root."""
        pages: list[int] = []
        generated: list[bytes] = []
        partial_page, num_rows = None, 0
        node, done = root, 0
        ahead: tuple[Node, int] | None = None
        was_evicted = False
        while node is not None and done < len(key):
            child, common = node.nearest(key, done)
            if child is None or common == 0:
                was_evicted = node.was_evicted(key[done : done + PAGE_BYTES], 0)
                ahead = None if child is None else (child, 0)
                break
            if common == PAGE_SIZE:
                common = num_common_tokens(child.run, key, 0, done)
            num_full = common // PAGE_SIZE
            was_evicted = num_full == 0 and node.was_evicted(key[done : done + PAGE_BYTES], common)
            pages += child.pages[:num_full]
            generated.append(bytes(child.generated[:common]))
            if num_full < len(child.pages):
                num_rows = common % PAGE_SIZE
                partial_page = child.pages[num_full] if num_rows else None
                if common * TOKEN_BYTES < len(child.run):
                    ahead = (child, common)
                break
            node, done = child, done + num_full * PAGE_BYTES
        return cls(
            num_tokens=len(pages) * PAGE_SIZE + num_rows,
            num_with_kv=len(pages) * PAGE_SIZE + num_rows,
            pages=pages,
            partial_page=partial_page,
            num_rows=num_rows,
            generated=b"".join(generated),
            ahead_ids=() if ahead is None else ahead[0].tokens(ahead[1], MAX_IDS_COMPARED),
            is_next_generated=ahead is not None and bool(ahead[0].generated[ahead[1]]),
            was_evicted=was_evicted,
        )

    def up_to(self, state: FoundState) -> FoundRun:
        """Return the part of the run that ends at a state; nothing if that is the state of zeros."""
        num_pages, num_rows = divmod(state.num_tokens, PAGE_SIZE)
        after = self.pages[num_pages] if num_pages < len(self.pages) else self.partial_page
        return replace(
            self,
            num_tokens=state.num_tokens,
            pages=self.pages[:num_pages],
            partial_page=after if num_rows else None,
            num_rows=num_rows,
            generated=self.generated[: state.num_tokens],
            state_slot=state.slot,
        )
