"""What guidellm needs of torch to hand out requests: a loader of data, in the same process.

torch itself is not installed: on PyPI it brings 4 GB for GPUs. Only guidellm's process sees this package; what the real
one would compute, nothing here asks for.
"""

from . import utils as utils


class Generator:
    """Takes a seed; the data here are not shuffled."""

    def manual_seed(self, seed: int) -> None:
        pass
