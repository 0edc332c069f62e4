"""Memory layout of weights for the kernels.

A block is 16 outputs; outputs are padded to blocks and inputs to groups with zeros.

- Integer codes: `[block, K/32, chunk, 64]`. A chunk's 64 bytes are 16 outputs times 4 neighbouring inputs. Formats of
  less than 8 bits pack the chunks of a group further (`codes.py`).
- Scales, and offsets (minima or integer zeros): `[block, K/group, 16]`.
- Nested scales: `[block, K/256]` records of 16 float16 and then `[256/group, 16]` int8.
- Floats: `[block, K, 16]`.
"""

from __future__ import annotations

ROW_BLOCK = 16  # outputs
GROUP = 32  # inputs; activations are quantized in such groups, whatever the weights' group is
CHUNKS = GROUP // 4  # in a group
CHUNK = ROW_BLOCK * 4  # codes in a chunk
ALIGNMENT = 64  # bytes; alignment of every stored array


def round_up(n: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `n`."""
    return -(-n // multiple) * multiple
