"""How weights lie in memory for the kernels.

A block is 16 outputs. Integer codes: `[block, K/32, chunk, 64]`, where a chunk's 64 bytes are 16 outputs times 4
neighbouring inputs; formats of less than 8 bits pack the chunks of a group further (`codes.py`). Scales, and offsets,
which are minima or integer zeros: `[block, K/group, 16]`; nested ones: `[block, K/256]` records of 16 float16 and then
`[256/group, 16]` int8. Floats: `[block, K, 16]`. Outputs are padded to blocks and inputs to groups with zeros.
"""

from __future__ import annotations

ROW_BLOCK = 16  # outputs
GROUP = 32  # inputs; activations are quantized in such groups, whatever the weights' group
CHUNKS = GROUP // 4  # of a group
CHUNK = ROW_BLOCK * 4  # codes
ALIGNMENT = 64  # bytes; of every stored array


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `n`."""
    return -(-n // multiple) * multiple
