"""The same state in PyTorch's own format: readable both ways, resharded, and never run."""

import os
import pickle
import sys
import warnings
from contextlib import suppress
from io import BytesIO

import cloudpickle
import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata

from course_lib.checkpoint import Broken, save
from course_lib.checkpoint.dcp import DcpCheckpoint, all_dcp, load_dcp, save_dcp
from course_lib.checkpoint.dcp_metadata import read_metadata
from course_lib.core import CourseError
from tests.checkpoint import engines
from tests.checkpoint.engines import Engine, tensors

for module in (engines, sys.modules[__name__]):
    cloudpickle.register_pickle_by_value(module)


def trained(strategy="plain", seed=0):
    engine = Engine(strategy, "adamw", seed=seed)
    engine.step(0)
    return engine


def weights(engine):
    return engine.state["model"].state_dict()


def same(found, expected):
    return found.keys() == expected.keys() and all(
        torch.equal(found[k], expected[k]) for k in found
    )


def quietly(fn, *args, **kwargs):
    """Plain DCP warns where there is no process group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fn(*args, **kwargs)


# --- PyTorch's own reader and writer


def test_plain_dcp_reads_what_save_dcp_writes(tmp_path):
    engine = trained()
    path = save_dcp({**engine.state, "tokens": 12, "lr": [0.1]}, tmp_path, step=3).path
    other = Engine("plain", "adamw", seed=9)
    exp_avg = torch.zeros_like(next(iter(weights(other).values())))
    name = f"exp_avg.{next(iter(weights(other)))}"
    state = {"model": weights(other), "optimizer": {name: exp_avg}, "tokens": 0}
    quietly(torch_dcp.load, state, checkpoint_id=path)
    assert same(weights(other), weights(engine))
    assert state["tokens"] == 12
    save({**engine.state}, tmp_path / "course", step=3)
    assert torch.equal(exp_avg, tensors(tmp_path / "course")[f"optimizer.{name}"])
    assert exp_avg.abs().sum() > 0


def test_load_dcp_reads_what_plain_dcp_writes(tmp_path):
    engine, other = trained(), Engine("plain", "adamw", seed=9)
    state = {"model": weights(engine), "nested": {"tokens": 12}, "half": torch.ones(3).bfloat16()}
    quietly(torch_dcp.save, state, checkpoint_id=tmp_path / "any name")
    half = torch.zeros(3, dtype=torch.bfloat16)
    found = load_dcp({"model": other.state["model"], "half": half}, tmp_path / "any name")
    assert same(weights(other), weights(engine))
    assert (found.step, found.values) == (0, {"nested": {"tokens": 12}})
    assert half.tolist() == [1, 1, 1]


# --- any strategy, any number of ranks


def start(rank, strategy, folders):
    """Train, and save in both formats."""
    engine = trained(strategy)
    save_dcp({**engine.state, "ranks": {rank: rank**2}}, folders[0], step=3)
    save(engine.state, folders[1], step=3)


def go_on(rank, strategy, source, target):
    engine = Engine(strategy, "adamw", seed=9)
    values = load_dcp(engine.state, source).values
    save(engine.state, target, step=3)
    return values["ranks"]


@pytest.mark.parametrize(("writes", "reads"), [("fsdp", "tp"), ("zero1", "fsdp")])
def test_another_strategy_at_another_size_loads_the_same_tensors(pools, tmp_path, writes, reads):
    pools(3).run(start, writes, [tmp_path / "dcp", tmp_path / "course"])
    ranks = pools(2).run(go_on, reads, tmp_path / "dcp", tmp_path / "after")
    assert ranks == [{"0": 0, "1": 1, "2": 4}] * 2
    assert same(tensors(tmp_path / "after"), tensors(tmp_path / "course"))
    files = sorted(os.listdir(tmp_path / "dcp/dcp-00000003"))
    assert [name for name in files if name.endswith(".distcp")] == [
        f"__{n}_0.distcp" for n in range(3)
    ]


def save_on_a_full_disk(rank, folder):
    """Rank 1 has no room; what each rank is told."""
    stream = FileSystem.create_stream

    def full(self, path, mode):
        raise OSError(28, "No space left on device")

    FileSystem.create_stream = full if rank == 1 else stream
    try:
        save_dcp({"w": torch.ones(2), "v": torch.ones(2)}, folder, step=4)
    except CourseError as error:
        return str(error)
    finally:
        FileSystem.create_stream = stream
    return "saved"


def test_one_rank_that_cannot_write_is_told_to_all_of_them(pools, tmp_path):
    told = pools(2).run(save_on_a_full_disk, tmp_path)
    assert told[0] == told[1]
    assert "rank 1, save_dcp: need" in told[0]
    assert "No space left on device" in told[0]
    assert os.listdir(tmp_path) == []


# --- whole, or not there


def test_keep_and_a_step_saved_twice(tmp_path):
    for step in (1, 2, 2, 3):
        save_dcp({"w": torch.full((2,), step)}, tmp_path, step=step, keep=2, run={"of": "me"})
    save_dcp({"w": torch.full((2,), 20)}, tmp_path, step=2, keep=2, run={"of": "me"})
    assert [one.step for one in all_dcp(tmp_path)] == [2]  # a run that went on from 2 has left 3
    w = torch.zeros(2, dtype=torch.int64)
    assert load_dcp({"w": w}, tmp_path).run == {"of": "me"}
    assert w.tolist() == [20, 20]
    assert os.listdir(tmp_path) == ["dcp-00000002"]


def test_a_save_cut_off_anywhere_is_never_the_latest(tmp_path, monkeypatch):
    """Each file that is opened for writing, and each renaming, fails in turn."""
    save_dcp({"w": torch.ones(2)}, tmp_path, step=1)
    calls = []

    def cut(number):
        def failing(real):
            def call(*args, **kwargs):
                calls.append(args)
                if len(calls) == number:
                    raise OSError(28, "No space left on device")
                return real(*args, **kwargs)

            return call

        calls.clear()
        monkeypatch.setattr(FileSystem, "create_stream", failing(FileSystem.create_stream))
        monkeypatch.setattr("pathlib.Path.rename", failing(os.rename))

    cut(0)
    save_dcp({"w": torch.ones(2)}, tmp_path, step=1)
    monkeypatch.undo()
    assert len(calls) == 5  # data, metadata, its place; the checkpoint of before; this one
    for step, last in ((1, 5), (2, 4)):
        for number in range(1, last + 1):
            cut(number)
            with pytest.raises(CourseError, match="No space left on device"):
                save_dcp({"w": torch.zeros(2)}, tmp_path, step=step)
            monkeypatch.undo()
            assert os.listdir(tmp_path) == ["dcp-00000001"]
            load_dcp({"w": (found := torch.zeros(2))}, tmp_path)
            assert found.tolist() == [1, 1]
    save_dcp({"w": torch.zeros(2)}, tmp_path, step=2)
    assert [one.step for one in all_dcp(tmp_path)] == [2, 1]


def test_what_a_killed_process_left_is_no_checkpoint_and_goes(tmp_path):
    save_dcp({"w": torch.ones(2)}, tmp_path, step=1)
    os.rename(tmp_path / "dcp-00000001", tmp_path / ".dcp-00000001.1234.tmp")
    assert all_dcp(tmp_path) == []
    save_dcp({"w": torch.ones(2)}, tmp_path, step=1)
    assert os.listdir(tmp_path) == ["dcp-00000001"]


def test_files_cut_off_or_gone_are_passed_over(tmp_path, capsys):
    for step in (1, 2, 3):
        save_dcp({"w": torch.full((2,), step)}, tmp_path, step=step)
    (tmp_path / "dcp-00000003/.metadata").unlink()
    data = tmp_path / "dcp-00000002/__0_0.distcp"
    os.truncate(data, data.stat().st_size - 1)
    w = torch.zeros(2, dtype=torch.int64)
    assert load_dcp({"w": w}, tmp_path).step == 1
    assert w.tolist() == [1, 1]
    told = capsys.readouterr().err
    assert "it cannot be read (No such file or directory)" in told
    assert f"bytes in __0_0.distcp; got {data.stat().st_size} bytes" in told
    assert [type(one) for one in all_dcp(tmp_path)] == [Broken, Broken, DcpCheckpoint]
    with pytest.raises(CourseError, match="need a whole checkpoint of step 3"):
        load_dcp({"w": w}, tmp_path, step=3)


def test_another_model_or_run_is_one_sentence(tmp_path):
    save_dcp({"model": torch.nn.Linear(3, 2)}, tmp_path, step=1, run={"of": "me"})
    for model, says in [
        (torch.nn.Linear(3, 2, bias=False), "has model.bias, too"),
        (torch.nn.Linear(3, 4), r"with model.weight of float32 \[4, 3\]; .* has float32 \[2, 3\]"),
        (torch.nn.Linear(3, 2).double(), r"with model.weight of float64 \[2, 3\]; .* has float32"),
        (torch.nn.Sequential(torch.nn.Linear(3, 2)), r"with model.0.weight of .* has none"),
    ]:
        with pytest.raises(CourseError, match=says):
            load_dcp({"model": model}, tmp_path)
    with pytest.raises(CourseError, match=r"need a folder of this run, .* is of"):
        save_dcp({"w": torch.ones(1)}, tmp_path, step=2, run={"of": "you"})
    with pytest.raises(CourseError, match="need a folder on a disk that all ranks see"):
        save_dcp({"w": torch.ones(1)}, "memory://x", step=2)


# --- a pickle that wants to run


class Runs:
    """Unpickled by pickle.load, it writes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"echo ran > {self.path}",)


@pytest.mark.parametrize("where", ["whole", "planner_data", "key"])
def test_malicious_metadata_is_refused_and_not_run(tmp_path, where):
    folder, runs = tmp_path / "x", Runs(tmp_path / "ran")
    quietly(torch_dcp.save, {"w": torch.ones(2)}, checkpoint_id=folder)
    metadata = read_metadata(folder)
    if where == "planner_data":
        metadata.planner_data = runs
    if where == "key":
        metadata.state_dict_metadata[runs] = None
    write_metadata(folder, runs if where == "whole" else metadata)
    with pytest.raises(CourseError, match=r"names \w+[.]system, which could run any code"):
        load_dcp({"w": torch.zeros(2)}, folder)
    assert not (tmp_path / "ran").exists()
    with suppress(AttributeError, TypeError), (folder / ".metadata").open("rb") as file:
        pickle.load(file)
    assert (tmp_path / "ran").exists(), "it would have run"


@pytest.mark.parametrize("item", [torch.ones(2), "a value"], ids=["tensor", "value"])
def test_a_malicious_data_file_is_refused_and_not_run(tmp_path, item):
    folder, content = tmp_path / "x", BytesIO()
    quietly(torch_dcp.save, {"w": item}, checkpoint_id=folder)
    torch.save(Runs(tmp_path / "ran"), content)
    (folder / "__0_0.distcp").write_bytes(content.getvalue())
    metadata = read_metadata(folder)
    (info,) = metadata.storage_data.values()
    info.length = len(content.getvalue())
    write_metadata(folder, metadata)
    with pytest.raises(CourseError, match="UnpicklingError: Weights only load failed"):
        load_dcp({"w": torch.zeros(2)} if isinstance(item, torch.Tensor) else {}, folder)
    assert not (tmp_path / "ran").exists()


def write_metadata(folder, metadata):
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


NAMES = [
    *("builtins eval", "builtins setattr", "os system", "torch load", "torch.hub load"),
    *("torch.serialization load", "torch.distributed.checkpoint.metadata os"),
    *("torch.distributed.checkpoint.metadata Metadata.__init__", "pathlib Path"),
]


@pytest.mark.parametrize("name", NAMES)
def test_only_the_classes_of_the_metadata_are_known(tmp_path, name):
    module, _, attribute = name.partition(" ")
    words = [f"\x8c{chr(len(one))}{one}" for one in (module, attribute)]
    (tmp_path / ".metadata").write_bytes(f"\x80\x04{words[0]}{words[1]}\x93.".encode("latin-1"))
    with pytest.raises(CourseError, match=f"names {module}.{attribute}, which could run any code"):
        read_metadata(tmp_path)


def test_metadata_cannot_change_the_classes_it_names(tmp_path):
    name = f"c{Metadata.__module__}\n{Metadata.__qualname__}\n"
    state = "N}(Vversion\nVspoilt\nVadded\nVspoilt\nu\x86b"  # (None, {...}), set on the class
    (tmp_path / ".metadata").write_bytes(f"{name}{state}.".encode("latin-1"))
    with pytest.raises(CourseError, match="holds something else"):
        read_metadata(tmp_path)
    assert Metadata.version is None
    assert not hasattr(Metadata, "added")
    pickle.loads((tmp_path / ".metadata").read_bytes())
    assert (Metadata.version, Metadata.added) == ("spoilt", "spoilt"), "it would have"
    Metadata.version = None
    del Metadata.added


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda found: b"", "no pickle of it .EOFError"),
        (lambda found: b"\x80\x04.", "no pickle of it"),
        (lambda found: pickle.dumps([1]), "holds something else .AttributeError"),
        (lambda found: with_path(found, "../x"), "data files that are not in this folder"),
        (lambda found: with_path(found, "/etc/passwd"), "data files that are not in this folder"),
        (lambda found: without_chunk(found), "chunks do not cover 'w' exactly once"),
    ],
)
def test_damaged_metadata_is_one_sentence(tmp_path, spoil, says):
    folder = tmp_path / "x"
    quietly(torch_dcp.save, {"w": torch.ones(2)}, checkpoint_id=folder)
    spoilt = spoil(read_metadata(folder))
    (folder / ".metadata").write_bytes(spoilt)
    with pytest.raises(CourseError, match=says):
        load_dcp({"w": torch.zeros(2)}, folder)


def with_path(found, path):
    for info in found.storage_data.values():
        info.relative_path = path
    return pickle.dumps(found)


def without_chunk(found):
    found.state_dict_metadata["w"].chunks.clear()
    return pickle.dumps(found)


class AnyAttribute:
    """A pickle that asks for an attribute of what may be named."""

    def __reduce__(self):
        return getattr, (torch.Size, "numel")


def test_a_pickle_gets_members_of_the_metadatas_enum_and_no_other_attribute(tmp_path):
    """Python before 3.11.4 pickles a member of an enum as getattr(enum, name)."""
    write_metadata(tmp_path, AnyAttribute())
    with pytest.raises(CourseError, match=r"names builtins.getattr, which could run any code"):
        read_metadata(tmp_path)
