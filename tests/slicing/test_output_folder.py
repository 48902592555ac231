"""The output folder appears whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from moelora.slicing import output_folder
from moelora.slicing.errors import OutputError
from moelora.slicing.output_folder import whole_folder

MARKER = "moelora.json"


def make(target: Path, *, force: bool = False, text: str = "new") -> None:
    with whole_folder(target, marker=MARKER, force=force) as folder:
        (folder / MARKER).write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b" / "out"
    with whole_folder(target, marker=MARKER) as folder:
        (folder / MARKER).write_text("new")
        assert not target.exists()  # not before the end
        assert folder.parent == target.parent  # a sibling: the rename stays on one disk
    assert names(target.parent) == ["out"]
    assert (target / MARKER).read_text() == "new"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_leaves_nothing(error: type[BaseException], tmp_path: Path) -> None:
    with pytest.raises(error), whole_folder(tmp_path / "a" / "b" / "out", marker=MARKER) as folder:
        (folder / "half").write_text("x")
        raise error
    assert names(tmp_path) == []  # nor the parents that were made for it


def test_parents_that_were_there_stay(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(ValueError), whole_folder(tmp_path / "a" / "out", marker=MARKER):
        raise ValueError
    assert names(tmp_path) == ["a"]


def test_existing_target_needs_force(tmp_path: Path) -> None:
    make(tmp_path / "out", text="old")
    with pytest.raises(OutputError, match="exists already") as caught:
        make(tmp_path / "out")
    assert caught.value.exit_code == 6 and "--force" in caught.value.hint
    assert (tmp_path / "out" / MARKER).read_text() == "old"
    make(tmp_path / "out", force=True)
    assert (tmp_path / "out" / MARKER).read_text() == "new"
    assert names(tmp_path) == ["out"]


def test_force_leaves_nothing_of_the_old_folder(tmp_path: Path) -> None:
    make(tmp_path / "out")
    (tmp_path / "out" / "adapter_model-rank-00007-of-00008.safetensors").write_text("old")
    make(tmp_path / "out", force=True)
    assert names(tmp_path / "out") == [MARKER]


def test_force_takes_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    make(tmp_path / "out", force=True)
    assert names(tmp_path / "out") == [MARKER]


@pytest.mark.parametrize("kind", ["folder", "file", "link", "dangling", "mixed"])
def test_force_replaces_only_own_folders(kind: str, tmp_path: Path) -> None:
    target = tmp_path / "out"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / MARKER).write_text("old")
    if kind == "folder":
        target.mkdir()
        (target / "thesis.txt").write_text("mine")
    elif kind == "file":
        target.write_text("mine")
    elif kind == "link":  # to a shard set: replacing it would leave that one dangling
        target.symlink_to(tmp_path / "other")
    elif kind == "dangling":
        target.symlink_to(tmp_path / "nowhere")
    else:  # a shard set that somebody put more files into
        target.mkdir()
        (target / MARKER).write_text("old")
        (target / "thesis.txt").write_text("mine")
    before = sorted(str(p) for p in tmp_path.rglob("*"))
    for force in (False, True):
        with pytest.raises(OutputError) as caught:
            make(target, force=force)
        assert str(target) in caught.value.message
    assert "-o" in caught.value.hint
    assert sorted(str(p) for p in tmp_path.rglob("*")) == before


def test_a_failed_run_leaves_the_old_folder(tmp_path: Path) -> None:
    make(tmp_path / "out", text="old")
    with pytest.raises(ValueError), whole_folder(tmp_path / "out", marker=MARKER, force=True):
        raise ValueError
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" / MARKER).read_text() == "old"


def test_a_failed_rename_puts_the_old_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "out", text="old")
    rename = Path.rename

    def failing(self: Path, target: Any) -> Path:
        if ".tmp-" in self.name:
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OutputError, match="Input/output error"):
        make(tmp_path / "out", force=True)
    monkeypatch.undo()
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" / MARKER).read_text() == "old"


def test_a_target_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with pytest.raises(OutputError), whole_folder(target, marker=MARKER):
        target.mkdir()
        (target / "other").write_text("mine")
    assert names(target) == ["other"] and names(tmp_path) == ["out"]


def test_a_file_as_parent(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError, match="cannot be written"):
        make(tmp_path / "file" / "out")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("code", "hint"),
    [
        (errno.EACCES, "may write to"),  # a read-only folder; permissions do not bind root
        (errno.EROFS, "may write to"),
        (errno.ENOSPC, "free some space"),
    ],
)
def test_what_to_do_about_a_folder_that_cannot_be_written(
    code: int, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> str:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(output_folder.tempfile, "mkdtemp", refuse)
    with pytest.raises(OutputError) as caught:
        make(tmp_path / "a" / "out")
    assert caught.value.exit_code == 6 and hint in caught.value.hint
    assert os.strerror(code) in caught.value.message
    assert names(tmp_path) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root")
def test_a_read_only_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(OutputError, match="cannot be written"):
            make(tmp_path / "out")
    finally:
        tmp_path.chmod(0o755)


def test_a_full_disk_in_the_middle(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with pytest.raises(OutputError, match="No space"), whole_folder(target, marker=MARKER) as half:
        (half / "file").write_text("x")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert names(tmp_path) == []


def test_the_folder_has_the_usual_permissions(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        make(tmp_path / "out")
    finally:
        os.umask(old)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750  # not mkdtemp's 0o700


def test_a_file_where_a_folder_should_be(tmp_path: Path) -> None:
    """It was there before: the hint blames no other run."""
    (tmp_path / "file").write_text("mine")
    for target in (tmp_path / "file" / "out", tmp_path / "file" / "a" / "out"):
        with pytest.raises(OutputError, match="file is no folder") as caught:
            make(target)
        assert caught.value.hint == "name another folder with -o"


def test_a_folder_that_takes_no_new_ones() -> None:
    with pytest.raises(OutputError, match="no folder can be made in it") as caught:
        make(Path("/proc/moelora-out"))
    assert "removed" not in caught.value.hint
