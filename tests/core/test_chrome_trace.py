"""Recorded runs as Chrome traces: the published format, the same times, nothing lost."""

import gzip
import json
import math
import os
import re
from collections import Counter, defaultdict
from pathlib import Path

import jsonschema
import pytest

from course_lib.cli.trace_command import trace as course_trace
from course_lib.core import CourseError, Event, Ledger, RunRecord, find_model
from course_lib.core.chrome_trace import trace_of_events, trace_of_folder, write_trace
from course_lib.core.records import KINDS
from course_lib.ranks import Ranks
from course_lib.train.config import TrainConfig
from course_lib.train.trainer import train

SCHEMA = json.loads(Path(__file__).with_name("chrome_trace.schema.json").read_text())
SHAPES = {  # by lesson: strategy, ranks, and what else the run is told
    "05": ("naive-dp", 2, {}),
    "06": ("ddp", 2, {}),
    "07": ("single", 2, {"tp": 2}),
    "08": ("single", 2, {"pp": 2}),
    "09": ("zero3", 2, {}),
    "10": ("fsdp", 2, {}),
    "11": ("ddp", 4, {"pp": 2, "tp": 2, "schedule": "zb-h1"}),
}


def boxes_of(trace):
    return [part for part in trace["traceEvents"] if part["ph"] == "X"]


def check(trace):
    """The trace keeps the format, and the rules that a schema cannot say."""
    jsonschema.validate(trace, SCHEMA)
    threads = defaultdict(list)
    for box in boxes_of(trace):
        threads[box["pid"], box["tid"]].append((round(box["ts"] * 1e3), round(box["dur"] * 1e3)))
    for found in threads.values():  # boxes of a thread nest, or follow one another
        ends: list[int] = []
        for start, length in sorted(found, key=lambda box: (box[0], -box[1])):
            while ends and ends[-1] <= start:
                ends.pop()
            assert not ends or start + length <= ends[-1]
            ends.append(start + length)
    named = {
        (part["pid"], part["tid"]) for part in trace["traceEvents"] if part["name"] == "thread_name"
    }
    assert named == set(threads)
    arrows = defaultdict(dict)
    for part in trace["traceEvents"]:
        if part["ph"] in "sf":
            assert part["ph"] not in arrows[part["id"]]
            arrows[part["id"]][part["ph"]] = part
    for arrow in arrows.values():
        assert arrow["s"]["ts"] <= arrow["f"]["ts"]
        for end in arrow.values():
            at = round(end["ts"] * 1e3)
            around = threads[end["pid"], end["tid"]]
            assert any(start <= at <= start + length for start, length in around)
    return len(arrows)


def event(rank, kind, start_s, end_s, **more):
    return Event(rank=rank, kind=kind, start_s=start_s, end_s=end_s, **more)


def message(kind, start_s, end_s, num_bytes=8):
    """A send from rank 0 to rank 1, or its recv."""
    rank = int(kind == "recv")
    return event(
        rank, kind, start_s, end_s, peer=1 - rank, num_bytes=num_bytes, group=(0, 1), label=kind
    )


def test_a_run_by_hand():
    pair = {"num_bytes": 8, "group": (0, 1)}
    trace = trace_of_events(
        {
            "": [
                event(0, "forward", 5.0, 5.5, label="F0"),
                event(0, "send", 5.5, 5.75, peer=1, **pair),
                event(1, "recv", 5.0, 5.75, peer=0, **pair),
                event(1, "wait", 5.1, 5.75),
            ]
        }
    )
    assert check(trace) == 1
    us = {(box["pid"], box["name"]): (box["ts"], box["dur"]) for box in boxes_of(trace)}
    assert us == {
        (0, "forward F0"): (0, 5e5),
        (0, "send"): (5e5, 2.5e5),
        (1, "recv"): (0, 7.5e5),
        (1, "wait"): (1e5, 6.5e5),
    }
    threads = {
        (part["pid"], part["tid"]): part["args"]["name"]
        for part in trace["traceEvents"]
        if part["name"] == "thread_name"
    }
    lanes = {box["name"]: threads[box["pid"], box["tid"]] for box in boxes_of(trace)}
    assert lanes == {
        "forward F0": "compute",
        "wait": "compute",
        "send": "transfers",
        "recv": "transfers",
    }
    (send,) = [part for part in trace["traceEvents"] if part["ph"] == "s"]
    (recv,) = [part for part in trace["traceEvents"] if part["ph"] == "f"]
    assert (send["pid"], recv["pid"]) == (0, 1)
    assert next(box["args"] for box in boxes_of(trace) if box["name"] == "send") == {
        "bytes": 8,
        "peer": 1,
        "group": [0, 1],
    }


def test_calls_at_the_same_time_have_a_thread_each_and_spans_nest():
    events = [
        event(0, "backward", 0.0, 1.0),
        event(0, "compute", 0.2, 0.4),
        event(0, "optimizer", 0.9, 1.2),  # overlaps without nesting: a thread of its own
        event(0, "all_gather", 0.1, 0.6),
        event(0, "reduce_scatter", 0.2, 0.5),
        event(0, "write", 0.6, 0.7),
    ]
    trace = trace_of_events({"": events})
    check(trace)
    tids = {box["name"]: box["tid"] for box in boxes_of(trace)}
    assert tids["backward"] == tids["compute"] != tids["optimizer"]
    assert tids["all_gather"] == tids["write"] != tids["reduce_scatter"]
    assert len(set(tids.values())) == 4


def test_messages_keep_their_order_and_lost_ones_have_no_arrow():
    ends = ((1.0, 8), (2.0, 8), (3.0, 16))
    sends = [message("send", 0.0, end, size) for end, size in ends]
    recvs = [message("recv", 0.0, end, size) for end, size in ends[:2]]
    trace = trace_of_events({"": [*sends, *recvs]})
    assert check(trace) == 2
    assert not any(box["name"].startswith("send send") for box in boxes_of(trace))


SENDS = [message("send", n, n + 0.1) for n in range(4)]
RECVS = [message("recv", n, n + 0.2) for n in range(4)]


def without(events, *lost):
    return [one for n, one in enumerate(events) if n not in lost]


@pytest.mark.parametrize("lost", [0, 2, 3])
def test_where_a_message_is_lost_no_arrow_is_false(lost):
    others = [message("send", 9, 9.1, num_bytes=4), message("recv", 9, 9.1, num_bytes=4)]
    for sends, recvs in ((without(SENDS, lost), RECVS), (SENDS, without(RECVS, lost))):
        assert check(trace_of_events({"": [*sends, *recvs, *others]})) == 1  # that of the others


def test_as_many_sends_as_recvs_that_do_not_belong_together_have_no_arrow():
    recvs = [message("recv", n, end_s) for n, end_s in enumerate((0.2, 3.5, 3.6))]
    trace = trace_of_events({"": [*without(SENDS, 0), *recvs]})  # the last recv is lost, too
    assert check(trace) == 0


def test_recvs_posted_together_end_in_the_order_of_their_sends():
    recvs = [message("recv", 0, n + 0.2) for n in range(4)]
    trace = trace_of_events({"": [*SENDS, *recvs]})
    assert check(trace) == 4
    ends = [[p["ts"] for p in trace["traceEvents"] if p["ph"] == end] for end in "sf"]
    waits_us = [round(end - start, 1) for start, end in zip(*ends, strict=True)]
    assert waits_us == [2e5] * 4


def test_runs_beside_each_other_start_together():
    runs = {"predicted": [event(0, "forward", 0, 1)], "measured": [event(0, "forward", 77, 78)]}
    trace = trace_of_events(runs, "F")
    check(trace)
    assert [box["ts"] for box in boxes_of(trace)] == [0, 0]
    names = [p["args"]["name"] for p in trace["traceEvents"] if p["name"] == "process_name"]
    assert names == ["predicted: rank 0", "measured: rank 0"]
    assert trace["otherData"]["unit"] == "a second of this trace stands for 1 F"


def test_every_kind_of_event_is_drawn():
    events = [event(0, kind, n, n + 1) for n, kind in enumerate(KINDS)]
    assert Counter(box["cat"] for box in boxes_of(trace_of_events({"": events}))) == Counter(KINDS)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    """A run of each parallel lesson on real ranks."""
    folder = tmp_path_factory.mktemp("runs")
    for lesson, (strategy, num_ranks, how) in SHAPES.items():
        config = TrainConfig(
            model=find_model("tiny"),
            strategy=strategy,
            steps=3,
            global_batch=8,
            every=0,
            out=str(folder / lesson),
            **how,
        )
        with Ranks(num_ranks) as ranks:
            ranks.run(train, config)
    return folder


@pytest.mark.parametrize("lesson", SHAPES)
def test_a_run_of_each_parallel_lesson_is_a_trace(recorded, lesson):
    trace = trace_of_folder(recorded / lesson)
    num_arrows = check(trace)
    records = [RunRecord.read(path) for path in sorted((recorded / lesson).glob("*.jsonl"))]
    assert len(records) == SHAPES[lesson][1]
    for pid, record in enumerate(records):
        own = [box for box in boxes_of(trace) if box["pid"] == pid]
        kinds = Counter(one.kind for one in record.events) | Counter(step=len(record.steps))
        assert Counter(box["cat"] for box in own) == kinds
        for box, step in zip([b for b in own if b["cat"] == "step"], record.steps, strict=True):
            assert box["args"]["loss"] == step["loss"]
    sends = sum(one.kind == "send" for record in records for one in record.events)
    assert num_arrows == sends
    assert (num_arrows > 0) == (lesson in ("08", "11"))


def test_a_folder_of_runs_is_one_trace(recorded, tmp_path, capsys):
    path = tmp_path / "all.json.gz"
    course_trace(recorded, path)
    said = capsys.readouterr().out
    assert said.startswith(f"{path}: 16 run records, ")
    assert re.search(
        r"\n(0[5-9]|1[01]): rank \d communicates for \d.*s, of which \d.*s exposed", said
    )
    assert "https://ui.perfetto.dev" in said
    trace = json.loads(gzip.decompress(path.read_bytes()))
    check(trace)
    names = {p["args"]["name"] for p in trace["traceEvents"] if p["name"] == "process_name"}
    assert {"05: rank 0", "11: rank 3"} <= names


def test_the_trace_lies_in_the_run_unless_told_otherwise(recorded):
    course_trace(recorded / "06" / "rank1.jsonl")
    trace = json.loads((recorded / "06" / "trace.json").read_text())
    assert {p["args"]["name"] for p in trace["traceEvents"] if p["name"] == "process_name"} == {
        "rank 1"
    }


def test_a_run_that_went_on_is_a_run_of_its_own_and_memory_is_a_counter(tmp_path):
    ledger = Ledger()
    ledger.add(0.5, params=100, grads=20)
    first = RunRecord(0, 1, events=[event(0, "forward", 0, 1)], ledger=ledger)
    first.write(tmp_path / "rank0.jsonl")
    RunRecord(0, 1, events=[event(0, "forward", 0, 2)]).write(tmp_path / "rank0-from50.jsonl")
    trace = trace_of_folder(tmp_path)
    check(trace)
    names = [p["args"]["name"] for p in trace["traceEvents"] if p["name"] == "process_name"]
    assert sorted(names) == ["from50: rank 0", "rank 0"]
    (counter,) = [part for part in trace["traceEvents"] if part["ph"] == "C"]
    assert counter["ts"] == 5e5
    assert counter["args"]["params"] == 100


@pytest.mark.parametrize("what", ["nothing", "empty", "no events"])
def test_what_holds_no_run_is_told(tmp_path, what):
    folder = tmp_path / "runs"
    if what != "nothing":
        folder.mkdir()
    if what == "no events":
        RunRecord(0, 1).write(folder / "rank0.jsonl")
    got = {"nothing": "no such folder", "empty": "0 records", "no events": "1 record w"}[what]
    with pytest.raises(CourseError, match=f"need run records, .*got {got}"):
        trace_of_folder(folder)


def test_the_same_trace_has_the_same_bytes(tmp_path, monkeypatch):
    trace = trace_of_events({"": [event(0, "forward", 0, 1)]})
    found = []
    for time_s in (1e9, 2e9):  # a gzip file holds the time at which it was written
        monkeypatch.setattr(gzip.time, "time", lambda time_s=time_s: time_s)
        path = tmp_path / f"{time_s}.json.gz"
        assert write_trace(trace, path) == path.stat().st_size
        found.append(path.read_bytes())
    assert found[0] == found[1]


def test_numbers_that_json_does_not_have_are_written_as_text(tmp_path):
    step = {"step": 0, "start_s": 0.0, "end_s": 1.0, "loss": math.nan, "more": [1, -math.inf]}
    events = [event(0, "forward", 0, 1)]
    record = RunRecord(0, 1, {"lr": math.inf, "seed": 7}, steps=[step], events=events)
    record.write(tmp_path / "rank0.jsonl")
    course_trace(tmp_path)
    text = (tmp_path / "trace.json").read_text()
    trace = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    check(trace)
    (box,) = [box for box in boxes_of(trace) if box["cat"] == "step"]
    assert box["args"] == {"step": 0, "loss": "nan", "more": "[1, -inf]"}
    assert trace["otherData"] == {"run": {"lr": "inf", "seed": 7}}


def a_run(folder, num_ranks=1, events=(("forward", 0, 1),)):
    for rank in range(num_ranks):
        own = [event(rank, *one) for one in events]
        RunRecord(rank, num_ranks, events=own).write(folder / f"rank{rank}.jsonl")
    return folder


@pytest.mark.parametrize("out", ["run/rank0.jsonl", "run/new.jsonl", "link.json"])
def test_a_run_record_is_not_written_over(tmp_path, out):
    record = a_run(tmp_path / "run") / "rank0.jsonl"
    (tmp_path / "link.json").symlink_to(record)
    before = record.read_bytes()
    with pytest.raises(CourseError, match=r"need a path for a trace, .*; got .*record.* Try -o"):
        course_trace(tmp_path / "run", tmp_path / out)
    assert record.read_bytes() == before
    assert [path.name for path in record.parent.iterdir()] == ["rank0.jsonl"]


def test_a_record_by_another_name_is_not_written_over_either(tmp_path):
    record = a_run(tmp_path).joinpath("rank0.jsonl").rename(tmp_path / "trace.json")
    with pytest.raises(CourseError, match="got one of the run's own records"):
        course_trace(record)  # to trace.json in its folder


def test_the_path_of_its_own_choice_is_checked_before_the_run_is_read(tmp_path, monkeypatch):
    (a_run(tmp_path) / "trace.json").mkdir()
    monkeypatch.setattr(RunRecord, "read", lambda path: pytest.fail("the run was read"))
    with pytest.raises(CourseError, match=r"trace\.json: need a file that can be written; got"):
        course_trace(tmp_path)


def test_no_folder_is_made_where_there_is_no_run(tmp_path):
    with pytest.raises(CourseError, match="got no such folder"):
        course_trace(tmp_path / "runs" / "nowhere")
    assert list(tmp_path.iterdir()) == []


def test_a_link_stays_a_link_and_a_pipe_a_pipe(tmp_path):
    run, link, pipe = a_run(tmp_path / "run"), tmp_path / "link.json", tmp_path / "pipe"
    link.symlink_to(tmp_path / "there.json")
    course_trace(run, link)
    assert link.is_symlink()
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        course_trace(run, pipe)
        assert os.read(reader, 2**16) == (tmp_path / "there.json").read_bytes()
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_the_command_counts_records_and_events(tmp_path, capsys):
    course_trace(a_run(tmp_path))
    said = capsys.readouterr().out
    assert ": 1 run record, 1 event, " in said
    assert "communicates" not in said
    a_run(tmp_path, 2)
    RunRecord(0, 2).write(tmp_path / "rank0-from4.jsonl")
    course_trace(tmp_path)
    assert ": 3 run records, 2 events, " in capsys.readouterr().out


def test_the_command_names_the_rank_with_the_most_exposed_communication(tmp_path, capsys):
    for rank, times_s in enumerate([(1.5, 2.1), (1.2, 2.4), (0.5, 1.9)]):  # 0.1, 0.4, 0 exposed
        events = [event(rank, "backward", 0, 2), event(rank, "all_reduce", *times_s)]
        RunRecord(rank, 3, events=events).write(tmp_path / f"rank{rank}.jsonl")
    course_trace(tmp_path)
    said = capsys.readouterr().out.splitlines()
    assert said[1:] == ["rank 1 communicates for 1.2 s, of which 400 ms exposed"]
