"""What one decoded token must read of an artifact's weights."""

from __future__ import annotations

import json
import struct

from radixlm.runtime.artifact import Artifact


def decode_bytes_per_token(artifact: Artifact) -> int:
    """Bytes of all weights but an embedding of its own: of that, a token reads one row. KV is not counted."""
    total: int = artifact.manifest.module.weights_bytes
    if artifact.manifest.model.tie_word_embeddings:
        return total
    with artifact.weights_path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        tensors = json.loads(file.read(size))
    embedding = [t["data_offsets"] for name, t in tensors.items() if name.startswith("model.embed_tokens.")]
    return total - sum(int(end) - int(begin) for begin, end in embedding)
