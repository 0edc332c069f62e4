"""The calibration of a model, in a file beside the artifact's others.

Knows the file: a calibration of another artifact or version, or a changed one, is refused. Does not measure.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final, Literal

import msgspec

from ....artifact.manifest import UNSEALED, Manifest
from ....errors import InvalidParameter
from ....system import replaced

NAME: Final = "calibration.json"
_MAX_BYTES: Final = 1 << 20
_VERSION: Final = 1


class BudgetLoss(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The loss with the probe's head at one share of the rows; means over all questions."""

    budget: float  # share of the rows
    kl: float  # nats per token of the true continuation, KL(all rows || this share)
    num_found: int  # facts that are the model's most likely continuation
    dropped: float  # the largest estimate of dropped attention


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The measured limits on leaving out rows of this model's prefixes.

    Attributes:
        artifact: digest of the artifact's manifest.
        probe_head: the KV head whose keys predict where a query looks.
        max_dropped_attention: a query with a higher estimate is served with all rows.
        least_budget: the least measured share of rows that kept the facts; 1.0: none did. Requests get no less.
        num_facts: facts that were asked for, and that the model finds with all rows.
        head_kl: by head that was tried: nats per token at a quarter of the rows.
        losses: with the probe's head, by budget.
    """

    version: Literal[1]
    artifact: str
    probe_head: int
    max_dropped_attention: float
    least_budget: float
    num_facts: int
    head_kl: dict[str, float]
    losses: list[BudgetLoss]
    digest: str = UNSEALED  # SHA-256 of the file, with zeros here

    @classmethod
    def of(
        cls, manifest: Manifest, *, probe_head: int, max_dropped_attention: float, least_budget: float = 0.0
    ) -> Calibration:
        """Make one without measurements, for tests and experiments."""
        return cls(_VERSION, manifest.digest, probe_head, max_dropped_attention, least_budget, 0, {}, [])

    @classmethod
    def read(cls, directory: Path, manifest: Manifest) -> Calibration:
        """Read the calibration of the artifact in `directory`.

        Raises:
            InvalidParameter: there is none, or it is invalid, or of another artifact or version.
        """
        path = directory / NAME
        hint = f"run: radixlm calibrate {directory}"
        try:
            with path.open("rb") as file:
                data = file.read(_MAX_BYTES + 1)
        except FileNotFoundError:
            message = f"a kv_budget needs to know which rows of {manifest.name} matter, and {path} is not there; {hint}"
            raise InvalidParameter(message, param="kv_budget") from None
        except OSError as error:
            raise InvalidParameter(f"{path} cannot be read ({error.strerror}); {hint}", param="kv_budget") from None
        if (wrong := _what_is_wrong(data)) is not None:
            raise InvalidParameter(f"{path} {wrong}; {hint}", param="kv_budget")
        try:
            found = msgspec.json.decode(data, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidParameter(f"{path} is not valid: {error}; {hint}", param="kv_budget") from None
        num_heads, bound = manifest.kv.num_kv_heads, found.max_dropped_attention
        if found.artifact != manifest.digest:
            wrong = f"is of the artifact {found.artifact[:16]}, this one is {manifest.digest[:16]}"
        elif not 0 <= found.probe_head < num_heads:
            wrong = f"names KV head {found.probe_head}, the model has {num_heads}"
        elif not 0 < bound <= 1:
            wrong = f"allows {bound} of the attention to be dropped; it must be above 0 and at most 1"
        elif not 0 <= found.least_budget <= 1:
            wrong = f"asks for at least {found.least_budget} of the rows; it must be 0 to 1"
        if wrong is not None:
            raise InvalidParameter(f"{path} {wrong}; {hint}", param="kv_budget")
        return found

    def write(self, directory: Path) -> Path:
        """Write the calibration to the artifact's directory, replacing an earlier one; return the path.

        Raises:
            OSError: the directory cannot be written.
        """
        data = msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(self, digest=UNSEALED)), indent=2)
        sealed = data.replace(UNSEALED.encode(), hashlib.sha256(data).hexdigest().encode())
        path = directory / NAME
        with replaced(path) as file:
            file.write(sealed)
        return path


class _Seal(msgspec.Struct):
    """The fields that are checked before the rest."""

    version: int
    digest: str


def _what_is_wrong(data: bytes) -> str | None:
    """Return why the bytes are no unchanged calibration of this version; None if they are one."""
    if len(data) > _MAX_BYTES:
        return f"has more than {_MAX_BYTES} bytes"
    try:
        seal = msgspec.json.decode(data, type=_Seal)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return "is no calibration"
    if seal.version != _VERSION:
        return f"has version {seal.version}, this radixlm reads {_VERSION}"
    found = hashlib.sha256(data.replace(seal.digest.encode(), UNSEALED.encode())).hexdigest()
    if not seal.digest or found != seal.digest:
        return f"was changed: its sha256 is {found[:16]}, it says {seal.digest[:16]}"
    return None
