"""An artifact on disk: a directory whose manifest describes every other file, verified before anything is used.

Knows files, sizes and digests; `runtime/model` runs them.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ..errors import ArtifactNotFound, CorruptArtifact, UnsupportedArtifact, UnsupportedCPU
from ..system import DESCRIPTORS, system_name
from .cpu import architecture_of, cpu_architecture, missing_features, system_of
from .manifest import FORMAT_VERSION, UNSEALED, Manifest

MANIFEST = "manifest.json"
MODULE = "model.so"
WEIGHTS = "weights.safetensors"
TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"

REQUIRED_FILES = (MODULE, WEIGHTS, TOKENIZER)
_ALLOWED_FILES = {*REQUIRED_FILES, CHAT_TEMPLATE}
_MAX_MANIFEST_BYTES = 16 << 20  # the tokenizer profile lists every added token
_MAX_HEADER_BYTES = 100 << 20  # as the safetensors library allows
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Artifact:
    """An artifact whose manifest, sizes and small files have been verified.

    The weights' digest is verified at the first open (remembered by inode, size and time) and by `verify`.
    """

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: str | Path, *, check_weights: bool = True) -> Artifact:
        """Read and verify the artifact at `path`.

        Args:
            check_weights: verify the weights' digest, unless a verification is remembered.

        Raises:
            ArtifactNotFound: there is no manifest.
            UnsupportedArtifact: another format version.
            CorruptArtifact: the manifest is not valid, or a file is missing or differs from its description.
        """
        artifact = cls(Path(path), read_manifest(Path(path)))
        artifact.check_sizes()
        for name in sorted(artifact.manifest.files.keys() - {WEIGHTS}):
            artifact._check_digest(name)
        if check_weights:
            artifact._check_weights_once()
        artifact.data_offset()
        return artifact

    @property
    def tokenizer_json(self) -> str:
        """The text of tokenizer.json."""
        return self._text(TOKENIZER)

    @property
    def tokenizer_bytes(self) -> bytes:
        """Content of tokenizer.json. As text in memory, Gemma's would be four times as large."""
        return self._bytes(TOKENIZER)

    @property
    def chat_template(self) -> str | None:
        """The Jinja template; None if the model has none."""
        if CHAT_TEMPLATE not in self.manifest.files:
            return None
        return self._text(CHAT_TEMPLATE)

    @property
    def module_path(self) -> Path:
        """The compiled library."""
        return self.path / MODULE

    @property
    def weights_path(self) -> Path:
        """The weights, in kernel layout."""
        return self.path / WEIGHTS

    @property
    def is_in_memory(self) -> bool:
        """Return whether the weights are a file in memory, so that mapping them uses no additional memory."""
        path = self.weights_path
        return path.is_symlink() and os.readlink(path).startswith(DESCRIPTORS)

    def data_offset(self) -> int:
        """Return the offset of the weights' data in their file; the rest of the file is `module.weights_bytes` long."""
        with self.weights_path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        size = self.manifest.files[WEIGHTS].size
        if length > _MAX_HEADER_BYTES or 8 + length + self.manifest.module.weights_bytes != size or length % 64 != 56:
            raise CorruptArtifact(
                f"{self.weights_path} has a header of {length} bytes and {size} in all, but the module needs "
                f"{self.manifest.module.weights_bytes} bytes of weights; compile it again"
            )
        return 8 + int(length)

    def check_cpu(self) -> None:
        """Raise unless this machine has everything that the module was compiled for.

        Raises:
            UnsupportedCPU: naming the features and the target to compile for.
        """
        target, here = self.manifest.target, cpu_architecture()
        name, any_cpu = {"aarch64": ("armv8", "64-bit Arm")}.get(here, ("x86-64", "x86-64"))
        if system_name() == "macos":
            name, any_cpu = "apple-m1", "Apple"
        if architecture_of(target.triple) != here:
            fault = f"is {here}, not {architecture_of(target.triple)}"
        elif system_of(target.triple) != system_name():
            fault = f"runs {system_name()}, not {system_of(target.triple)}"
        elif missing := missing_features(target.features):
            fault = f"lacks {', '.join(missing)}"
        else:
            return
        raise UnsupportedCPU(
            f"{self.path} was compiled for {target.name}, and this CPU {fault}; compile it here, or with --target "
            f"{name} for any {any_cpu} CPU"
        )

    def verify(self) -> None:
        """Read every file and compare its digest, the weights' included.

        Raises:
            CorruptArtifact: naming the first file that differs.
        """
        for name in sorted(self.manifest.files):
            self._check_digest(name)

    def _text(self, name: str) -> str:
        try:
            return self._bytes(name).decode()
        except UnicodeDecodeError as error:
            raise CorruptArtifact(f"{self.path / name} cannot be read ({error}); compile it again") from None

    def _bytes(self, name: str) -> bytes:
        try:
            return (self.path / name).read_bytes()
        except OSError as error:
            raise CorruptArtifact(f"{self.path / name} cannot be read ({error}); compile it again") from None

    def check_sizes(self) -> None:
        files = self.manifest.files
        unknown, missing = files.keys() - _ALLOWED_FILES, set(REQUIRED_FILES) - files.keys()
        if unknown or missing:
            raise CorruptArtifact(
                f"{self.path / MANIFEST} lists {sorted(files)!r:.200}; an artifact has "
                f"{', '.join(REQUIRED_FILES)} and may have {CHAT_TEMPLATE}; compile it again"
            )
        for name, info in files.items():
            path = self.path / name
            try:
                status = path.stat()
            except OSError as error:
                raise CorruptArtifact(f"{path} cannot be read ({error.strerror}); compile it again") from None
            if not stat.S_ISREG(status.st_mode):
                raise CorruptArtifact(f"{path} is no file; compile it again")
            if (size := status.st_size) != info.size:
                raise CorruptArtifact(f"{path} has {size} bytes, the manifest says {info.size}; compile it again")

    def _check_digest(self, name: str) -> None:
        found, expected = sha256_of(self.path / name), self.manifest.files[name].sha256
        if found != expected:
            raise CorruptArtifact(
                f"{self.path / name} has sha256 {found[:16]}..., the manifest says {expected[:16]}...; compile it again"
            )

    def remember_weights(self) -> None:
        """Let the next `open` skip the weights' digest; for the process that has just written and digested the file."""
        memory, checked = self._remembered_weights()
        try:
            memory.parent.mkdir(parents=True, exist_ok=True)
            memory.write_text(checked)
        except OSError:
            pass  # a read-only home directory: the next open reads the weights again

    def _check_weights_once(self) -> None:
        memory, checked = self._remembered_weights()
        try:
            if memory.read_bytes() == checked.encode():
                return
        except OSError:
            pass
        self._check_digest(WEIGHTS)
        self.remember_weights()

    def _remembered_weights(self) -> tuple[Path, str]:
        """Return the file that remembers a verification, and its content for the weights as they are now."""
        status = self.weights_path.stat()
        digest = self.manifest.files[WEIGHTS].sha256
        checked = f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}:{digest}"
        return cache_dir() / "verified" / hashlib.sha256(str(self.weights_path.resolve()).encode()).hexdigest(), checked


def cache_dir() -> Path:
    """Return the folder for files that can be made again: `$XDG_CACHE_HOME/radixlm`, or `~/.cache/radixlm`."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(cache) / "radixlm"


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of the artifact at `path`, without reading other files.

    Raises:
        ArtifactNotFound, UnsupportedArtifact, CorruptArtifact: see `Artifact.open`.
    """
    file = path / MANIFEST
    if not path.is_dir() or not file.is_file():
        if not path.exists():
            raise ArtifactNotFound(
                f"{path} does not exist; check the name, or make it: radixlm compile SOURCE -o NAME.radixlm"
            )
        raise ArtifactNotFound(f"{path} is not an artifact (no {MANIFEST} in it); give a .radixlm directory")
    if file.stat().st_size > _MAX_MANIFEST_BYTES:
        raise CorruptArtifact(f"{file} has {file.stat().st_size} bytes, at most {_MAX_MANIFEST_BYTES} are allowed")
    data = file.read_bytes()
    try:
        version = json.loads(data)["format_version"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise CorruptArtifact(f"{file} is not a manifest; compile it again") from None
    if version != FORMAT_VERSION:
        raise UnsupportedArtifact(
            f"{path} has format version {version!r:.40}, this radixlm reads {FORMAT_VERSION}; compile it again"
        )
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptArtifact(f"{file} is not valid: {error}; compile it again") from None
    found = hashlib.sha256(data.replace(manifest.digest.encode(), UNSEALED.encode())).hexdigest()
    if found != manifest.digest:
        raise CorruptArtifact(
            f"{file} has sha256 {found[:16]}..., it says {manifest.digest[:16]}... of itself; compile it again"
        )
    return manifest


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write manifest.json, including the digest of all its other bytes.

    The module's limits come from the manifest: one wrong digit would make it write beyond its workspace.
    """
    unsealed = msgspec.structs.replace(manifest, digest=UNSEALED)
    data = msgspec.json.format(msgspec.json.encode(unsealed), indent=2)
    digest = hashlib.sha256(data).hexdigest()
    (directory / MANIFEST).write_bytes(data.replace(UNSEALED.encode(), digest.encode()))


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal, reading it in pieces."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while piece := file.read(_READ_BYTES):
                digest.update(piece)
    except OSError as error:
        raise CorruptArtifact(f"{path} cannot be read ({error.strerror}); compile it again") from None
    return digest.hexdigest()
