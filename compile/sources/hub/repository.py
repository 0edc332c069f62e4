"""A repository of the hub: its files, their sizes and digests, and the files that are in the cache.

Knows the hub library, its cache and its errors; not which files make a model. Large files are fetched here, because the
library restarts an interrupted download, and compares only sizes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from glob import escape
from pathlib import Path

import huggingface_hub
from huggingface_hub import errors
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.hf_api import RepoFile
from radixlm.runtime.artifact.model_names import HUB, HubName
from radixlm.runtime.errors import CorruptSource, SourceNotFound

from .transfer import MAX_BYTES, Transfer, reporting_bar, wrong_digest

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass
class Repository:
    """A repository at one revision. Offline, its files are those in the cache.

    Attributes:
        sizes: bytes of its files, by name.
        digests: sha256 of the files for which the hub has one; empty offline.
    """

    reference: str
    name: HubName
    cache: Path
    sizes: Mapping[str, int]
    digests: Mapping[str, str] = field(default_factory=dict)
    commit: str | None = None  # None if offline

    @classmethod
    def open(cls, reference: str, cache_dir: Path | None, *, is_offline: bool = False) -> Repository:
        """List the files of a repository.

        Raises:
            SourceNotFound: the hub is unreachable or has no such model, and nothing of it is in the cache.
        """
        name, cache = HubName.parse(reference), cache_dir / "hub" if cache_dir else Path(HF_HUB_CACHE)
        if is_offline:
            return cls(reference, name, cache, _sizes_here(name, cache, None, reference))
        try:
            api = huggingface_hub.HfApi(endpoint=_endpoint())
            commit = api.repo_info(name.repository, revision=name.revision).sha
            tree = api.list_repo_tree(name.repository, recursive=True, revision=commit)
            files = [file for file in tree if isinstance(file, RepoFile)]
        except Exception as error:  # the library does not catch the errors of its HTTP client, which can be any
            return cls(reference, name, cache, _sizes_here(name, cache, error, reference))
        digests = {file.path: file.lfs.sha256 for file in files if file.lfs is not None}
        return cls(reference, name, cache, {file.path: file.size for file in files}, digests, commit)

    def fetch(self, names: Sequence[str], progress: Callable[[int, int], None] | None = None) -> Path:
        """Return the directory of the repository, in which these files are complete and verified.

        Raises:
            SourceNotFound: a file is unavailable.
            CorruptSource: a file has another sha256 than the hub says.
        """
        missing = [name for name in names if name not in self.sizes]
        if missing:
            where = "of what is here, and the hub cannot be asked" if self.commit is None else "of the repository"
            raise SourceNotFound(f"{self.reference}: {missing[0]} is no part {where}; fetch it again")
        report = None if progress is None else _Report(progress, sum(self.sizes[name] for name in names))
        checked = {name for name in names if self._transfer(name, report)}
        directory = self._snapshot(names, report)
        for name in names:
            if name not in checked:
                self._check_digest(directory / name)
        return directory

    def _transfer(self, name: str, report: _Report | None) -> bool:
        """Fetch a large file into the cache, and verify it. Returns whether it did.

        The library is left to fetch files without a sha256, those above `MAX_BYTES`, and all of them offline.
        """
        digest, size = self.digests.get(name), self.sizes[name]
        if self.commit is None or digest is None or size > MAX_BYTES:
            return False
        url = huggingface_hub.hf_hub_url(self.name.repository, name, revision=self.commit, endpoint=_endpoint())
        folder = repo_folder_name(repo_id=self.name.repository, repo_type="model")
        blob, lock = self.cache / folder / "blobs" / digest, self.cache / ".locks" / folder / f"{digest}.lock"
        try:
            Transfer(url, blob, lock, size, digest).run(None if report is None else report.next_callback(size))
        except CorruptSource as error:
            raise CorruptSource(f"{self.reference}: {name} {error}") from error
        except Exception as error:
            raise explain_error(self.reference, error) from error
        return True

    def _snapshot(self, names: Sequence[str], report: _Report | None) -> Path:
        """Let the library fetch the files that `_transfer` did not; return the folder that links all files by name."""
        try:
            path = huggingface_hub.snapshot_download(
                self.name.repository,
                revision=self.name.revision,
                allow_patterns=[escape(name) for name in names],
                cache_dir=self.cache,
                endpoint=_endpoint(),
                local_files_only=self.commit is None,
                tqdm_class=None if report is None else reporting_bar(report.next_callback(0)),
            )
        except Exception as error:
            raise explain_error(self.reference, error) from error
        return Path(path)

    def _check_digest(self, path: Path) -> None:
        """Raise CorruptSource, and remove the file, if its digest is wrong.

        Only files that the library stores under their sha256 are checked: the large ones.
        """
        blob = path.resolve()
        if _SHA256.fullmatch(blob.name) and (found := wrong_digest(blob, blob.name)) is not None:
            path.unlink()
            blob.unlink()
            raise CorruptSource(
                f"{self.reference}: {path.name} has sha256 {found[:16]}..., the hub says {blob.name[:16]}...; "
                "it was removed: fetch it again"
            )


def repositories() -> Iterator[tuple[str, Path]]:
    """Yield the models `hf:ORGANIZATION/NAME` in the hub library's cache, each with its folder, sorted."""
    for folder in sorted(Path(HF_HUB_CACHE).glob("models--*--*")):
        _, organization, name = folder.name.split("--", 2)
        yield f"{HUB}{organization}/{name}", folder


@dataclass
class _Report:
    """The progress of files that are fetched one after the other, reported as one sum of bytes."""

    progress: Callable[[int, int], None]
    total: int
    begun: int = 0

    def next_callback(self, size: int) -> Callable[[int, int], None]:
        """Return the progress callback of the next `size` bytes: a file, or several files fetched together.

        It takes the received bytes of these files, and a total, which is ignored; it reports the sum over all files.
        """
        before = self.begun
        self.begun += size
        return lambda done, _: self.progress(min(before + done, self.total), self.total)


def explain_error(reference: str, error: Exception) -> SourceNotFound:
    """Return a SourceNotFound that explains an error of the hub's library in one line, with a hint."""
    repository, where = HubName.parse(reference).repository, _endpoint() or "the hub"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError):
        hint = f"it is gated: accept its terms at {where}/{repository}, and set HF_TOKEN"
    elif isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403):
        hint = "check the name; if it is private or gated, set HF_TOKEN to a token that may read it"
    elif isinstance(error, errors.RevisionNotFoundError):
        hint = "check the name of the revision after @"
    else:
        hint = "check the name, the network and, for a gated model, HF_TOKEN; what is here already goes on later"
    return SourceNotFound(f"{reference} cannot be had from {where} ({_first_line(error)}); {hint}")


def _sizes_here(name: HubName, cache: Path, why: Exception | None, reference: str) -> Mapping[str, int]:
    """Return the sizes in bytes of the cached snapshot's files, by name.

    Raises:
        SourceNotFound: there is none; the error says `why` the hub was not reached.
    """
    try:
        snapshot = huggingface_hub.snapshot_download(
            name.repository, revision=name.revision, allow_patterns=[], cache_dir=cache, local_files_only=True
        )
    except Exception as error:
        raise explain_error(reference, why or error) from (why or error)
    files = (path for path in Path(snapshot).rglob("*") if path.is_file())
    return {path.relative_to(snapshot).as_posix(): path.stat().st_size for path in files}


def _endpoint() -> str | None:
    """Return the hub's address if the environment sets one."""
    return os.environ.get("HF_ENDPOINT") or None  # read at each call; the library reads it only when it is imported


def _first_line(error: Exception) -> str:
    """Return the first line of an error's message that is not empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:200]
