"""Files are whole or absent, and a manifest finds every kind of damage."""

import errno
import os

import pytest

from nanochat_lib import storage
from nanochat_lib.errors import UserError


def names(folder):
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*"))


def test_writes_make_folders_and_replace(tmp_path):
    path = tmp_path / "a" / "b.json"
    storage.atomic_write_json(path, {"x": [1, 2.5, "é"]})
    storage.atomic_write_json(path, {"x": 2})
    assert storage.read_json(path) == {"x": 2}
    storage.atomic_write_text(tmp_path / "t", "a\nb é")
    assert (tmp_path / "t").read_bytes() == "a\nb é".encode()
    assert names(tmp_path) == ["a", "a/b.json", "t"]  # no temporary left behind


def test_not_a_number_is_refused(tmp_path):
    with pytest.raises(ValueError):
        storage.atomic_write_json(tmp_path / "x", float("nan"))
    assert names(tmp_path) == []


@pytest.mark.parametrize("stage", ["open", "fsync", "replace"])
@pytest.mark.parametrize(
    ("number", "word"),
    [(errno.ENOSPC, "bytes free"), (errno.EROFS, "read-only"), (errno.EACCES, "permissions")],
)
def test_a_refusing_disk_keeps_the_old_file(tmp_path, monkeypatch, stage, number, word):
    path = tmp_path / "f"
    storage.atomic_write_bytes(path, b"old")

    def refuse(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    if stage == "open":
        monkeypatch.setattr(storage, "open", refuse, raising=False)
    else:
        monkeypatch.setattr(storage.os, stage, refuse)
    with pytest.raises(UserError) as caught:
        storage.atomic_write_bytes(path, b"new")
    assert str(path) in str(caught.value) and word in str(caught.value) and "\n" not in str(caught.value)
    assert path.read_bytes() == b"old" and names(tmp_path) == ["f"]


def test_a_file_where_a_folder_should_be(tmp_path):
    (tmp_path / "a").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        storage.atomic_write_text(tmp_path / "a" / "b", "x")


@pytest.mark.parametrize(("content", "message"), [(b"", "empty"), (b"{", "not valid JSON"), (b"\xff\xfe", "not valid")])
def test_damaged_json_names_the_file(tmp_path, content, message):
    path = tmp_path / "meta.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        storage.read_json(path)
    assert str(path) in str(caught.value)


def test_missing_json_names_the_file(tmp_path):
    with pytest.raises(UserError, match="nothing.json does not exist"):
        storage.read_json(tmp_path / "nothing.json")


def build(folder):
    (folder / "sub").mkdir(parents=True)
    (folder / "a.bin").write_bytes(b"abc")
    (folder / "sub" / "b.bin").write_bytes(b"defg")
    storage.write_manifest(folder)
    return folder


def test_publish_is_one_rename_and_never_overwrites(tmp_path):
    temporary = build(storage.temporary_name(tmp_path / "step"))
    final = storage.publish_dir(temporary, tmp_path / "step")
    assert not temporary.exists() and storage.verify_manifest(final) == []
    again = build(storage.temporary_name(tmp_path / "step"))
    with pytest.raises(UserError, match="exists already"):
        storage.publish_dir(again, final)
    assert storage.verify_manifest(final) == []


def test_manifest_lists_size_and_sha256(tmp_path):
    folder = build(tmp_path / "x")
    files = storage.read_json(folder / storage.MANIFEST)["files"]
    assert list(files) == ["a.bin", "sub/b.bin"]
    assert files["a.bin"] == {
        "size": 3,
        "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",  # FIPS 180 example "abc"
    }


DAMAGE = {
    "zero bytes": (lambda f: (f / "a.bin").write_bytes(b""), "a.bin has 0 bytes instead of 3"),
    "cut": (lambda f: (f / "sub/b.bin").write_bytes(b"de"), "b.bin has 2 bytes instead of 4"),
    "changed byte": (lambda f: (f / "a.bin").write_bytes(b"abX"), "a.bin was changed"),
    "missing file": (lambda f: (f / "a.bin").unlink(), "a.bin is missing"),
    "missing manifest": (lambda f: (f / "manifest.json").unlink(), "never finished"),
    "empty manifest": (lambda f: (f / "manifest.json").write_bytes(b""), "is damaged"),
    "odd manifest": (lambda f: (f / "manifest.json").write_text("[]"), "does not list"),
    "odd entry": (lambda f: (f / "manifest.json").write_text('{"files": {"a.bin": 3}}'), "does not list"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_manifest_finds(tmp_path, damage):
    folder = build(tmp_path / "x")
    (folder / "stray.txt").write_text("left by a file browser")
    assert storage.verify_manifest(folder) == []
    hurt, message = DAMAGE[damage]
    hurt(folder)
    problems = storage.verify_manifest(folder)
    assert len(problems) == 1 and message in problems[0]


def test_no_folder(tmp_path):
    assert "not a folder" in storage.verify_manifest(tmp_path / "none")[0]


def test_free_bytes_of_a_path_to_be_made(tmp_path):
    assert storage.free_bytes(tmp_path / "not" / "yet") > 0


def test_room_is_checked(tmp_path, monkeypatch):
    storage.check_room(tmp_path, 1000)
    assert names(tmp_path) == []
    monkeypatch.setattr(storage, "free_bytes", lambda path: 999)
    with pytest.raises(UserError, match="needs 1,000 bytes and 999 are free"):
        storage.check_room(tmp_path, 1000)


def test_errors_of_the_program_pass_through():
    for error in (ValueError("a bug"), RuntimeError("a bug"), KeyError("a bug")):
        with pytest.raises(type(error)), storage.clear_disk_errors("x"):
            raise error
