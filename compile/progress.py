"""The stages of a compile, and the expected work of each."""

from __future__ import annotations

from radixlm.runtime.progress import Stage

_READ_S = 2.0
_PUBLISH_S = 0.1
_KERNEL_S = 0.27
_TYPICAL_NUM_KERNELS = 25
_RECEIVED_BYTES_PER_S = 50e6
_WRITTEN_BYTES_PER_S = 600e6
_COMPARED_BYTES_PER_S = 1200e6
_EVALUATED_BYTES_PER_S = 1800e6


def expected_stages(
    *,
    weights_bytes: int,
    num_kernels: int = _TYPICAL_NUM_KERNELS,
    received_bytes: int = 0,
    compares_weights: bool = True,
) -> tuple[Stage, ...]:
    """Return the stages of a compile with this much to download, build and write.

    Args:
        compares_weights: true if "verify" compares more than logits.
    """
    verify_s = weights_bytes / _EVALUATED_BYTES_PER_S + compares_weights * weights_bytes / _COMPARED_BYTES_PER_S
    stages = (
        Stage("download", "received bytes", received_bytes / _RECEIVED_BYTES_PER_S),
        Stage("read", "steps", _READ_S),
        Stage("build", "kernels", _KERNEL_S * num_kernels),
        Stage("weights", "bytes", weights_bytes / _WRITTEN_BYTES_PER_S),
        Stage("verify", "bytes", verify_s),
        Stage("publish", "steps", _PUBLISH_S),
    )
    return stages if received_bytes else stages[1:]
