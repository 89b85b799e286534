"""A store of objects behaves alike as a folder, in memory and over the S3 protocol, and says in one line why not."""

import shutil
import uuid

import pytest
from object_stores import gs_server, s3_server

from nanochat_lib import objects
from nanochat_lib.errors import UserError
from nanochat_lib.objects import Store, StoreError


@pytest.fixture(scope="module")
def s3():
    with s3_server() as server:
        yield server


@pytest.fixture(scope="module")
def gs():
    with gs_server("bucket") as url:
        yield url


@pytest.fixture
def store(request, tmp_path):
    name = uuid.uuid4().hex
    if request.param == "s3":
        server = request.getfixturevalue("s3")
        server.fault = lambda method, path: None
        return Store(f"{server.bucket(name)}/my run/x")
    if request.param == "gs":
        return Store(f"{request.getfixturevalue('gs')}/{name}/my run")
    urls = {"folder": str(tmp_path / "my store"), "file": f"file://{tmp_path}/f", "memory": f"memory://{name}"}
    return Store(urls[request.param])


every_store = pytest.mark.parametrize("store", ["folder", "file", "memory", "s3", "gs"], indirect=True)


@every_store
def test_what_is_put_comes_back(store, tmp_path):
    store.check()
    assert store.sizes() == {} and store.read("none") is None and store.read_json("none") is None
    for name, data in (("a.json", b"[1]"), ("sub/deep/b.bin", b"defg"), ("empty", b"")):
        path = tmp_path / "from" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    names = ["a.json", "sub/deep/b.bin", "empty"]
    store.put_all(tmp_path / "from", names, "up")
    store.write("sub.json", b"{")
    assert store.sizes() == {"up/a.json": 3, "up/sub/deep/b.bin": 4, "up/empty": 0, "sub.json": 1}
    assert store.sizes("up/sub") == {"up/sub/deep/b.bin": 4} and store.sizes("other") == {}
    assert store.read_json("up/a.json") == [1] and store.read_json("sub.json") is None
    store.get_all(names, tmp_path / "to", "up")
    assert [(tmp_path / "to" / name).read_bytes() for name in names] == [b"[1]", b"defg", b""]
    store.write("sub.json", b"22")
    assert store.read("sub.json") == b"22"
    store.remove(["up/a.json", "sub.json"])
    store.remove([])
    assert store.sizes() == {"up/sub/deep/b.bin": 4, "up/empty": 0}


@every_store
def test_an_upload_that_arrives_cut_short_is_noticed(store, tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"12345")
    store.check()
    whole = store.fs.put_file

    def cut(local, remote, **options):
        (tmp_path / "cut").write_bytes(b"12")
        whole(str(tmp_path / "cut"), remote, **options)

    monkeypatch.setattr(store.fs, "put_file", cut)
    with pytest.raises(StoreError, match="run/a has 2 bytes there instead of 5"):
        store.put_all(tmp_path, ["a"], "run")


def one_line(excinfo, *words):
    text = str(excinfo.value)
    assert "\n" not in text and all(word in text for word in words), text


def test_no_bucket(s3):
    with pytest.raises(StoreError) as e:
        Store("s3://nosuchbucket/run").check()
    one_line(e, "s3://nosuchbucket/run cannot be used", "does not exist", "check")


def test_no_bucket_of_google_s(gs):
    with pytest.raises(StoreError) as e:
        Store("gs://nosuchbucket/run").check()
    one_line(e, "gs://nosuchbucket/run cannot be used")


@pytest.mark.parametrize("method", ["PUT", "GET", "POST"])
def test_a_store_that_forbids_something_is_found_by_the_check(s3, method):
    store = Store(s3.bucket(uuid.uuid4().hex))
    s3.fault = lambda asked, path: 403 if asked == method else None
    with pytest.raises(StoreError) as e:
        store.check()
    s3.fault = lambda method, path: None
    one_line(e, store.url, "PermissionError")


def test_a_bucket_that_vanishes_is_an_error_not_an_empty_store(s3):
    name = uuid.uuid4().hex
    store = Store(f"{s3.bucket(name)}/run")
    store.check()
    s3.request("DELETE", name)
    for call in (store.sizes, lambda: store.sizes("base"), lambda: store.write("a", b"1")):
        with pytest.raises(StoreError):
            call()


def test_a_folder_that_vanishes_is_not_made_again(tmp_path):
    store = Store(str(tmp_path / "disk"))
    store.check()
    (tmp_path / "a").write_bytes(b"1")
    shutil.rmtree(tmp_path / "disk")
    for call in (store.sizes, lambda: store.write("a", b"1"), lambda: store.read("a"),
                 lambda: store.put(tmp_path / "a", "a")):  # fmt: skip
        with pytest.raises(StoreError, match="disk is gone"):
            call()
    assert not (tmp_path / "disk").exists()


def test_no_server():
    with s3_server() as server:
        store = Store(server.bucket("gone"))
        server.stop()
        with pytest.raises(StoreError) as e:
            store.write("a", b"1")
    one_line(e, "s3://gone cannot be used", "network")


def test_a_missing_package_names_the_extra(monkeypatch):
    import fsspec.core

    def missing(*args, **kwargs):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(UserError) as e:
        Store("s3://b/run")
    one_line(e, "s3://b/run", "s3fs", "NANOCHAT_EXTRAS=cloud")


def test_an_unknown_protocol():
    with pytest.raises(UserError) as e:
        Store("sftpp://b/run")
    one_line(e, "sftpp://b/run")


def test_the_first_line_of_an_error_is_enough():
    with pytest.raises(StoreError) as e, objects.clear_store_errors("x://y"):
        raise RuntimeError("first\nsecond")
    one_line(e, "RuntimeError: first)")
