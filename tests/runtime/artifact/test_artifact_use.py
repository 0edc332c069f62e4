"""What has an artifact open keeps it from being removed, and says when it was used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from radixlm.runtime.artifact.artifact_use import ArtifactUse, is_open, last_used, remove_artifact
from radixlm.runtime.errors import ArtifactBusy, ArtifactNotFound

NAMES = st.sampled_from(("one", "two", "three"))


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.radixlm"
    path.mkdir()
    (path / "manifest.json").write_text("{}")
    os.utime(path, (1000, 1000))
    return path


class Artifacts(RuleBasedStateMachine):
    """Beside a count of openings for each artifact that there is."""

    def __init__(self) -> None:
        super().__init__()
        import tempfile

        self._folder = tempfile.TemporaryDirectory()
        self._uses: dict[str, list[ArtifactUse]] = {}

    def teardown(self) -> None:
        for uses in self._uses.values():
            for use in uses:
                use.end()
        self._folder.cleanup()

    def _path(self, name: str) -> Path:
        return Path(self._folder.name, name)

    @rule(name=NAMES)
    def publish(self, name: str) -> None:
        if name not in self._uses:
            self._path(name).mkdir()
            (self._path(name) / "manifest.json").write_text(name)
            self._uses[name] = []

    @rule(name=NAMES)
    def open(self, name: str) -> None:
        if name in self._uses:
            self._uses[name].append(ArtifactUse.begin(self._path(name)))

    @rule(name=NAMES)
    def close(self, name: str) -> None:
        if self._uses.get(name):
            use = self._uses[name].pop()
            use.end()
            use.end()

    @rule(name=NAMES)
    def remove(self, name: str) -> None:
        if name not in self._uses:
            with pytest.raises(ArtifactNotFound):
                remove_artifact(self._path(name))
        elif self._uses[name]:
            assert is_open(self._path(name))
            with pytest.raises(ArtifactBusy, match="open in another process"):
                remove_artifact(self._path(name))
            assert (self._path(name) / "manifest.json").read_text() == name
        else:
            assert not is_open(self._path(name))
            remove_artifact(self._path(name))
            del self._uses[name]
        assert {path.name for path in Path(self._folder.name).iterdir()} == set(self._uses)


TestArtifacts = Artifacts.TestCase
TestArtifacts.settings = settings(max_examples=30, deadline=None)


def test_opening_is_a_use_and_looking_is_none(artifact: Path) -> None:
    assert not is_open(artifact) and last_used(artifact) == 1000
    ArtifactUse.begin(artifact).end()
    assert last_used(artifact) > 1000


def test_a_process_that_was_killed_holds_nothing(artifact: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from radixlm.runtime.artifact.artifact_use import ArtifactUse;"
        "use = ArtifactUse.begin(Path(sys.argv[1])); print('open', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(artifact)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdin is not None
    assert process.stdout.readline() == "open\n"
    with pytest.raises(ArtifactBusy):
        remove_artifact(artifact)
    process.kill()
    process.wait(60)
    process.stdout.close()
    process.stdin.close()
    remove_artifact(artifact)
    assert not artifact.exists()


def test_an_artifact_that_is_being_removed_is_not_opened(artifact: Path) -> None:
    import fcntl

    fd = os.open(artifact, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        with pytest.raises(ArtifactBusy, match="is being removed"):
            ArtifactUse.begin(artifact)
    finally:
        os.close(fd)


def test_without_locks_nothing_is_open_and_nothing_fails(tmp_path: Path) -> None:
    use = ArtifactUse.begin(tmp_path / "nowhere")  # as on a file system without locks
    assert not is_open(tmp_path / "nowhere")
    use.end()
    use.end()
