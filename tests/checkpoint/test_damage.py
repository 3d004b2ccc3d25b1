"""A spoilt checkpoint is never loaded, nor mixed: the last whole one is, or there is a sentence."""

import errno
import hashlib
import json
import pickle
import resource
import sys
from contextlib import contextmanager

import cloudpickle
import pytest
import torch

from course_lib.checkpoint import Broken, Checkpoint, all_checkpoints, latest, load, save
from course_lib.checkpoint.storage import LocalStorage
from course_lib.core import CourseError

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def two(folder, group=None):
    """Two checkpoints: all numbers are 1 in the first, and 2 in the second."""
    for step in (1, 2):
        state = {"x": torch.full((4, 3), float(step)), "y": torch.full((5,), step), "n": step}
        save(state, folder, step=step)
    return folder / "step-00000002"


def loaded(folder):
    """What is loaded: its step, and the tensors."""
    x, y = torch.zeros(4, 3), torch.zeros(5, dtype=torch.int64)
    found = load({"x": x, "y": y}, folder)
    return found.step, found.values["n"], *{*x.flatten().tolist()}, *{*y.tolist()}


def data_of(place):
    (found,) = place.glob("data*")
    return found


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


class Runs:
    """Unpickled, it makes a file."""

    def __reduce__(self):
        return open, ("ran", "w")


@contextmanager
def manifest_of(place):
    """A checkpoint's manifest, to be changed."""
    path = place / "manifest.json"
    yield (manifest := json.loads(path.read_text()))
    path.write_text(json.dumps(manifest))


def another_files(place, content):
    """A data file that is something else, with its right size and hash in the manifest."""
    data_of(place).write_bytes(content)
    with manifest_of(place) as manifest:
        (saved,) = manifest["files"].values()
        saved |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def in_manifest(*path_and_value):
    """Set a value of the manifest; `*` stands for the only or the first name."""

    def spoil(place):
        *path, last, value = path_and_value
        with manifest_of(place) as found:
            for key in path:
                found = found[next(iter(found)) if key == "*" else key]
            if last == "*":
                found[value] = found.pop(next(iter(found)))
            else:
                found[last] = value

    return spoil


OTHER_FILE = f"data-{'0' * 16}-r00000.safetensors"
PIECE = ("tensors", "x", "pieces", 0)
X = {"dtype": "float32", "shape": [4, 3]}
HUGE = {"offsets": [0, 0], "sizes": [2**62, 1]}


def pieces(*boxes):
    """Pieces of x in the first file, all under its key."""

    def spoil(place):
        with manifest_of(place) as manifest:
            x = manifest["tensors"]["x"]
            x["pieces"] = [x["pieces"][0] | {"offsets": at, "sizes": sizes} for at, sizes in boxes]

    return spoil


def write(name, content):
    return lambda place: (place / name).write_bytes(content)


SPOILT = {
    "data truncated": lambda place: data_of(place).write_bytes(data_of(place).read_bytes()[:-1]),
    "data empty": lambda place: data_of(place).write_bytes(b""),
    "data missing": lambda place: data_of(place).unlink(),
    "data is a folder": lambda place: (data_of(place).unlink(), (place / data_name(place)).mkdir()),
    "a bit of the elements": lambda place: flip(data_of(place), -1),
    "a bit of the header": lambda place: flip(data_of(place), 20),
    "a bit of the header's length": lambda place: flip(data_of(place), 0),
    "zeros in the right size": lambda place: data_of(place).write_bytes(
        bytes(data_of(place).stat().st_size)
    ),
    "manifest empty": write("manifest.json", b""),
    "manifest is zeros": write("manifest.json", bytes(1000)),
    "manifest is no JSON": write("manifest.json", b"{"),
    "manifest is a list": write("manifest.json", b"[]"),
    "manifest too deep": write("manifest.json", b"[" * 10**5),
    "manifest is a pickle": write("manifest.json", pickle.dumps(Runs())),
    "manifest in part": lambda place: (place / "manifest.json").write_bytes(
        (place / "manifest.json").read_bytes()[:-40]
    ),
    "manifest is a folder": lambda place: (
        (place / "manifest.json").unlink(),
        (place / "manifest.json").mkdir(),
    ),
    "of another step": in_manifest("step", 1),
    "a later format": in_manifest("format", 2),
    "a step that is true": in_manifest("step", True),
    "no ranks": in_manifest("world_size", 0),
    "a field more": in_manifest("code", "import os"),
    "a path outside": in_manifest("files", "*", "../../evil.safetensors"),
    "a path from the top": in_manifest(*PIECE, "file", "/etc/passwd"),
    "the other one's file": in_manifest(*PIECE, "file", OTHER_FILE),
    "a size that is another": in_manifest("files", "*", "bytes", 10),
    "a size below 0": in_manifest("files", "*", "bytes", -1),
    "a hash that is another": in_manifest("files", "*", "sha256", "0" * 64),
    "boxes that overlap": pieces(([0, 0], [4, 2]), ([0, 1], [4, 2])),
    "a box twice": pieces(([0, 0], [4, 3]), ([0, 0], [4, 3])),
    "a box is missing": pieces(([0, 0], [4, 2])),
    "no box": pieces(),
    "a box outside": pieces(([1, 0], [4, 3])),
    "a box below 0": pieces(([-1, 0], [4, 3])),
    "a box of other dims": pieces(([0], [12])),
    "huge sizes": in_manifest("tensors", "x", {**X, "shape": [2**40, 2**40], "pieces": []}),
    "huge boxes": in_manifest(
        "tensors",
        "x",
        {**X, "shape": [2**62, 1], "pieces": [{"file": OTHER_FILE, "key": "0", **HUGE}]},
    ),
    "sizes beyond numbers": in_manifest("tensors", "x", "shape", [10**30, 3]),
    "sizes below 0": in_manifest("tensors", "x", "shape", [-4, -3]),
    "a dtype that is none": in_manifest("tensors", "x", "dtype", "float33"),
    "a dtype that is code": in_manifest("tensors", "x", "dtype", "__builtins__"),
}


def data_name(place):
    return next(iter(json.loads((place / "manifest.json").read_text())["files"]))


@pytest.mark.parametrize("name", SPOILT)
def test_a_spoilt_checkpoint_is_passed_over_with_one_sentence(tmp_path, capsys, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    SPOILT[name](two(tmp_path))
    assert loaded(tmp_path) == (1, 1, 1.0, 1)
    said = capsys.readouterr().err
    assert said.startswith("load: passed over a damaged checkpoint: ")
    assert "step-00000002" in said
    assert said.count("\n") == 1
    with pytest.raises(CourseError, match="step-00000002"):
        load({"x": torch.zeros(4, 3)}, tmp_path, step=2)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["manifest before data", "half published"])
def test_what_was_never_published_is_no_checkpoint(tmp_path, capsys, name):
    place = two(tmp_path)
    if name == "half published":
        (place / "manifest.json").rename(place / ".manifest.json.123.tmp")
    else:  # the power went when the manifest was on the disk, and its data was not
        data_of(place).unlink()
    assert latest(tmp_path).step == 1
    assert loaded(tmp_path)[0] == 1
    assert len(capsys.readouterr().err.splitlines()) == (name == "manifest before data")
    save({"x": torch.zeros(4, 3)}, tmp_path, step=3, keep=2)
    assert [one.step for one in all_checkpoints(tmp_path) if isinstance(one, Checkpoint)] == [3, 1]


HEADER = {"dtype": "F32", "shape": [4, 3], "data_offsets": [0, 48]}


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(Runs()) + bytes(100),
        b"",
        (2**63).to_bytes(8, "little") + bytes(100),
        *(
            len(text).to_bytes(8, "little") + text + bytes(100)
            for text in (
                b"[]",
                b"{}",
                b"[" * 10**5,
                json.dumps({"0": {**HEADER, "dtype": "F64"}}).encode(),
                json.dumps({"0": {**HEADER, "shape": [3, 4]}}).encode(),
                json.dumps({"0": {**HEADER, "data_offsets": [-8, 40]}}).encode(),
                json.dumps({"0": {**HEADER, "data_offsets": [2**70, 2**70 + 48]}}).encode(),
                json.dumps({"0": {**HEADER, "data_offsets": [290, 338]}}).encode(),
                json.dumps({"0": 1}).encode(),
            )
        ),
    ],
)
def test_a_data_file_made_by_someone_else_is_refused_in_one_sentence(
    tmp_path, monkeypatch, content
):
    """Its hash is right: who made it has written the manifest, too."""
    monkeypatch.chdir(tmp_path)
    another_files(two(tmp_path), content + bytes(200))
    with pytest.raises(CourseError, match=r"need the file that was saved; .*older checkpoint"):
        load({"x": torch.zeros(4, 3)}, tmp_path, step=2)
    assert not (tmp_path / "ran").exists()


def test_nothing_whole_is_one_sentence(tmp_path):
    flip(data_of(two(tmp_path)), -1)
    flip(data_of(tmp_path / "step-00000001"), -1)
    with pytest.raises(CourseError, match=r"need a whole checkpoint in .*; got none"):
        loaded(tmp_path)
    assert [type(one) for one in all_checkpoints(tmp_path)] == [Checkpoint, Checkpoint]
    with pytest.raises(CourseError, match="another hash than the manifest says"):
        latest(tmp_path).verify()


def test_the_list_says_why_one_is_broken(tmp_path):
    data_of(two(tmp_path)).unlink()
    broken, whole = all_checkpoints(tmp_path)
    assert isinstance(broken, Broken)
    assert (broken.step, whole.step) == (2, 1)
    assert "got no such file" in broken.why


# --- a world


def spoilt_in_a_world(rank, folder):
    """Every rank has a file of each checkpoint; one of the second's is spoilt."""
    import torch.distributed as dist

    x = torch.zeros(4, 3)
    states = [{"x": x, "mine": {rank: torch.full((2,), float(step))}} for step in (1, 2)]
    for step, state in enumerate(states, 1):
        x.fill_(step)
        found = save(state, folder, step=step)
    if rank == 0:
        flip(folder / "step-00000002" / sorted(found.manifest.files)[1], -1)
    dist.barrier()
    mine = torch.zeros(2)
    return load({"x": x, "mine": {rank: mine}}, folder).step, *x.unique(), *mine.tolist()


def test_all_ranks_agree_on_the_one_that_is_loaded(pools, tmp_path):
    assert pools(2).run(spoilt_in_a_world, tmp_path) == [(1, 1.0, 1.0, 1.0)] * 2


def disk_full(rank, folder):
    """The disk is full for rank 1: the kernel lets no file grow beyond 2 KB."""
    numbers = torch.zeros(1000 * (1 + rank))
    save({"all": {rank: numbers}}, folder, step=1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        save({"all": {rank: numbers + 1}}, folder, step=2)
    except CourseError as error:
        said = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    left = [path.name for path in (folder / "step-00000002").glob("*")]
    load({"all": {rank: numbers}}, folder)
    save({"all": {rank: numbers}}, folder, step=3)
    return said, left, numbers.sum().item()


def test_a_full_disk_is_one_sentence_and_leaves_the_old_checkpoints(pools, tmp_path):
    found = pools(2).run(disk_full, tmp_path)
    assert found[0][0] == found[1][0]
    assert "save: need room and permission" in found[0][0]
    assert "File too large" in found[0][0]
    assert [numbers for _, _, numbers in found] == [0.0, 0.0]
    assert [one.step for one in all_checkpoints(tmp_path)] == [3, 1]
    assert not (tmp_path / "step-00000002").exists(), "nothing half remains after the next save"


@pytest.mark.parametrize("place", ["file/inside", "/proc/inside"])
def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(CourseError, match=r"save: need room and permission .* Try another folder"):
        save({"x": torch.zeros(1)}, place, step=1)
    with pytest.raises(CourseError, match="need a"):
        load({"x": torch.zeros(1)}, place)


def test_a_folder_that_became_read_only_keeps_its_checkpoints(tmp_path, monkeypatch):
    """As root may write anywhere, the system's answer is played."""
    two(tmp_path)

    def refuse(*_):
        raise OSError(30, "Read-only file system")

    for call in ("open_write", "publish"):
        with monkeypatch.context() as patch:
            patch.setattr(LocalStorage, call, refuse)
            with pytest.raises(CourseError, match="got: Read-only file system"):
                save({"x": torch.zeros(4, 3)}, tmp_path, step=3)
        assert [one.step for one in all_checkpoints(tmp_path)] == [2, 1]
        assert not list(tmp_path.glob("step-00000003/*"))


def test_what_cannot_be_read_now_is_not_passed_over(tmp_path, monkeypatch):
    two(tmp_path)
    right = LocalStorage.open_read
    for name in ("data", "manifest"):

        def fails(storage, path, name=name):
            if f"step-00000002/{name}" in path:
                raise OSError(errno.EIO, "Input/output error")
            return right(storage, path)

        monkeypatch.setattr(LocalStorage, "open_read", fails)
        with pytest.raises(CourseError, match=r"need to read .*; got: Input/output error"):
            loaded(tmp_path)
    monkeypatch.setattr(LocalStorage, "open_read", right)
    assert loaded(tmp_path)[0] == 2


def test_a_checkpoint_stays_whatever_fails_after_it_is_published(tmp_path, monkeypatch):
    two(tmp_path)

    def fails(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("course_lib.checkpoint.saving.clear", fails)
    save({"x": torch.full((4, 3), 3.0), "y": torch.full((5,), 3), "n": 3}, tmp_path, step=2)
    assert loaded(tmp_path)[1] == 3
    monkeypatch.undo()
    right = LocalStorage.publish

    def publishes_and_fails(storage, name, content):
        right(storage, name, content)
        fails()

    monkeypatch.setattr(LocalStorage, "publish", publishes_and_fails)
    with pytest.raises(CourseError, match="Input/output error"):
        save({"x": torch.full((4, 3), 4.0), "y": torch.full((5,), 4), "n": 4}, tmp_path, step=2)
    assert loaded(tmp_path)[1] == 4
