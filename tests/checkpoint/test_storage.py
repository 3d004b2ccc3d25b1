"""Checkpoints in a folder, and in stores that fsspec reaches: whole, or not there."""

import pickle
import secrets
from typing import ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from course_lib.checkpoint import Broken, all_checkpoints, latest, load, read_tensor, save
from course_lib.checkpoint.storage import storage_of
from course_lib.core import CourseError
from course_lib.core.shards import Box


class ObjectStore(MemoryFileSystem):
    """A store of objects: no renaming, no appending; the connection may break after n writes."""

    protocol = "objects"
    writes_left: ClassVar[int] = 0
    written: ClassVar[list[str]] = []

    def _rename(self, *args, **kwargs):
        raise NotImplementedError("a store of objects cannot rename")

    mv = cp_file = copy = move = rename = _rename

    def mkdir(self, path, create_parents=True, **kwargs):
        assert not create_parents, "would make a bucket where a name was misspelt"
        super().mkdir(path, create_parents=False)

    makedirs = mkdir

    def _open(self, path, mode="rb", **kwargs):
        assert "a" not in mode
        if mode != "wb":
            return super()._open(path, mode=mode, **kwargs)
        self._count(path)
        file = super()._open(path, mode=mode, **kwargs)
        write = file.write
        file.write = lambda content: self._count(path) or write(content)
        return file

    def _count(self, path):
        if type(self).writes_left == 0:
            raise RuntimeError("the connection is lost")  # not an OSError: libraries have their own
        type(self).writes_left -= 1
        type(self).written.append(path.rpartition("/")[2])


class FolderStore(ObjectStore):
    """A store that wants a folder before a file in it."""

    protocol = "folders"

    def _open(self, path, mode="rb", **kwargs):
        if mode == "wb" and not self.isdir(path.rpartition("/")[0]):
            raise FileNotFoundError(path)
        return super()._open(path, mode=mode, **kwargs)


@pytest.fixture
def objects(monkeypatch):
    for store in (ObjectStore, FolderStore):
        fsspec.register_implementation(store.protocol, store, clobber=True)
        monkeypatch.setattr(store, "store", {})
        monkeypatch.setattr(store, "pseudo_dirs", ["", "/bucket"])
    monkeypatch.setattr(ObjectStore, "writes_left", 10**9)
    monkeypatch.setattr(ObjectStore, "written", [])
    return ObjectStore


@pytest.fixture(params=["plain", "file://", "memory://", "objects://", "folders://"])
def folder(request, objects, tmp_path):
    """A folder where nothing is yet, on a disk or in a store."""
    if request.param in ("plain", "file://"):
        return str(tmp_path) if request.param == "plain" else f"file://{tmp_path}"
    return f"{request.param}bucket/{secrets.token_hex(4)}/run"


def state(step):
    return {"w": torch.full((3, 4), float(step)), "b": torch.tensor(step), "tokens": 10 * step}


def test_a_folder_keeps_its_promises_everywhere(folder):
    storage = pickle.loads(pickle.dumps(storage_of(folder)))
    assert storage.list() == storage.list("step") == []
    assert storage.size("step/a") is None
    with storage.open_write("step/a") as file:
        file.write(b"0123")
        file.write(b"4567")
    with storage.alone():
        storage.publish("step/b", b"all")
        storage.publish("step/b", b"other")
    assert storage.list("step") == ["a", "b"]
    assert (storage.size("step/a"), storage.size("step/b")) == (8, 5)
    with storage.open_read("step/a") as file:
        file.seek(2)
        assert (file.read(3), file.read()) == (b"234", b"567")
    with pytest.raises(FileNotFoundError):
        storage.open_read("step/c").close()
    storage.remove("step/a")
    storage.remove("step/a")
    assert storage.list("step") == ["b"]
    storage.remove("step")
    assert "step" not in storage.list()


def test_save_and_load_are_the_same_everywhere(folder):
    for step in (1, 2, 3):
        saved = save(state(step), folder, step=step, keep=2, run={"of": "me"})
    assert [one.step for one in all_checkpoints(folder)] == [3, 2]
    assert (saved.path, saved.run) == (latest(folder).path, {"of": "me"})
    saved.verify()
    assert torch.equal(read_tensor(saved, "w", Box((1, 1), (2, 2))), torch.full((2, 2), 3.0))
    found = {"w": torch.zeros(3, 4), "b": torch.tensor(0)}
    assert load(found, folder).values == {"tokens": 30}
    assert torch.equal(found["w"], state(3)["w"])
    assert found["b"] == 3


def test_a_damaged_file_is_passed_over_everywhere(folder, capsys):
    for step in (1, 2):
        saved = save(state(step), folder, step=step)
    (name,) = saved.manifest.files
    with saved.storage.open_read(f"{saved.name}/{name}") as file:
        content = bytearray(file.read())
    content[-1] ^= 1
    with saved.storage.open_write(f"{saved.name}/{name}") as file:
        file.write(content)
    found = {"w": torch.zeros(3, 4), "b": torch.tensor(0)}
    assert load(found, folder).step == 1
    assert "has another hash than the manifest says" in capsys.readouterr().err
    with saved.storage.open_write(f"{saved.name}/{name}") as file:
        file.write(content[:-1])
    assert isinstance(all_checkpoints(folder)[0], Broken)
    assert latest(folder).step == 1


def test_a_connection_lost_after_any_write_leaves_the_checkpoint_before(objects):
    folder = "objects://bucket/run"
    save(state(1), folder, step=1)
    objects.written.clear()
    save(state(2), folder, step=2)
    *data, manifest = objects.written  # the parts of a rank's file, then what publishes it
    assert len(data) > 3
    assert all(name.startswith("data-") for name in data)
    assert manifest == "manifest.json"
    for writes_left in range(len(objects.written)):
        objects.writes_left = writes_left
        with pytest.raises(CourseError, match="the connection is lost"):
            save(state(3), folder, step=3)
        assert [one.step for one in all_checkpoints(folder)] == [2, 1]
        assert load({"w": torch.zeros(3, 4), "b": torch.tensor(0)}, folder).step == 2
    objects.writes_left = 10**9
    assert save(state(3), folder, step=3).values == {"tokens": 30}
    assert latest(folder).step == 3


def test_half_a_manifest_is_no_checkpoint(objects):
    folder = "objects://bucket/run"
    save(state(1), folder, step=1)
    whole = save(state(2), folder, step=2)
    text = whole.manifest.text().strip()
    for length in (0, 1, len(text) // 2, len(text) - 1):
        whole.storage.publish(f"{whole.name}/manifest.json", text[:length])
        assert [type(one).__name__ for one in all_checkpoints(folder)] == ["Broken", "Checkpoint"]
        assert latest(folder).step == 1


def test_a_store_that_cannot_be_reached_is_one_sentence(objects, monkeypatch):
    def refuse(self, *args, **kwargs):
        raise RuntimeError("no credentials")

    monkeypatch.setattr(ObjectStore, "_open", refuse)
    with pytest.raises(
        CourseError, match=r"objects://bucket/run; got: RuntimeError: no credentials\."
    ):
        save(state(1), "objects://bucket/run", step=1)
    with pytest.raises(OSError, match="no credentials"):
        storage_of("objects://bucket/run").open_read("a")


def test_what_the_caller_raises_while_it_writes_stays_what_it_is(objects):
    storage = storage_of("objects://bucket")
    with pytest.raises(CourseError, match="mine"), storage.open_write("a"):
        raise CourseError("mine")


def test_a_url_without_its_library_says_what_to_install(monkeypatch):
    def missing(protocol):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.get_filesystem_class", missing)
    with pytest.raises(CourseError) as raised:
        storage_of("s3://bucket/run")
    assert str(raised.value) == (
        "s3://bucket/run: need a library that is not installed. Install s3fs to access S3."
    )
    monkeypatch.undo()
    with pytest.raises(CourseError, match="got: Protocol not known: nowhere"):
        storage_of("nowhere://x")
