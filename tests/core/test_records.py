"""What a run leaves behind can be read again, also when it was cut short."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.core import (
    KINDS,
    CourseError,
    Event,
    Ledger,
    Link,
    RunRecord,
    ShapeError,
    TwoLevelLink,
)
from course_lib.core.links import ETHERNET, INFINIBAND, NVLINK, PCIE
from course_lib.core.records import MEMORY_KINDS, read_runs
from course_lib.core.units import format_bytes, format_rate, format_seconds

SECONDS = st.floats(0, 1e6, allow_nan=False)
WORDS = st.text(max_size=20)
PLAIN = st.dictionaries(WORDS, st.integers() | SECONDS | WORDS | st.booleans(), max_size=4)
STEP = {"step": 1, "start_s": 0.5, "end_s": 2}
RANKS = st.lists(st.integers(0, 64), max_size=4)


@st.composite
def events(draw) -> Event:
    start_s, lasts_s = draw(SECONDS), draw(SECONDS)
    return Event(
        rank=draw(st.integers(0, 1024)),
        kind=draw(st.sampled_from(KINDS)),
        start_s=start_s,
        end_s=start_s + lasts_s,
        num_bytes=draw(st.integers(0, 2**60)),
        label=draw(WORDS),
        peer=draw(st.none() | st.integers(0, 64)),
        group=tuple(draw(RANKS)),
    )


@st.composite
def ledgers(draw) -> Ledger:
    ledger = Ledger(rank=draw(st.integers(0, 8)))
    for time_s in draw(st.lists(SECONDS, max_size=4)):
        kinds = draw(st.lists(st.sampled_from(MEMORY_KINDS), unique=True))
        ledger.add(time_s, **{kind: draw(st.integers(0, 2**50)) for kind in kinds})
    return ledger


@st.composite
def records(draw) -> RunRecord:
    return RunRecord(
        rank=draw(st.integers(0, 8)),
        world_size=draw(st.integers(1, 8)),
        run=draw(PLAIN),
        machine=draw(PLAIN),
        steps=draw(st.lists(PLAIN.map(lambda step: {**step, **STEP}), max_size=3)),
        events=draw(st.lists(events(), max_size=3)),
        ledger=draw(st.none() | ledgers()),
    )


def small_record() -> RunRecord:
    event = Event(rank=1, kind="all_reduce", start_s=0.5, end_s=1.5, num_bytes=4000, group=(0, 1))
    return RunRecord(rank=1, world_size=2, run={"strategy": "ddp"}, events=[event, event])


@given(record=records())
@settings(max_examples=50)
def test_a_written_record_reads_back_equal(record, tmp_path_factory):
    path = record.write(tmp_path_factory.mktemp("run") / "runs" / "rank.jsonl")
    assert RunRecord.read(path) == record
    assert [file.name for file in path.parent.iterdir()] == ["rank.jsonl"]


@given(record=records(), cut=st.integers(1, 30))
@settings(max_examples=30)
def test_a_last_line_cut_short_costs_that_line_only(record, cut, tmp_path_factory):
    path = record.write(tmp_path_factory.mktemp("run") / "rank.jsonl")
    whole = path.read_text().splitlines()
    if len(whole) == 1:
        return
    path.write_text("\n".join(whole)[: -min(cut, len(whole[-1]) - 1)])
    with pytest.warns(UserWarning, match=r"rank\.jsonl: the last line was cut short"):
        read = RunRecord.read(path)
    num_lines = 1 + len(read.steps) + len(read.events) + (read.ledger is not None)
    assert num_lines == len(whole) - 1


def test_any_other_unreadable_line_is_named(tmp_path):
    path = small_record().write(tmp_path / "rank.jsonl")
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "{nonsense", lines[2]]))
    with pytest.raises(CourseError, match=r"rank\.jsonl, line 2: .*nonsense"):
        RunRecord.read(path)


@pytest.mark.parametrize(
    "line",
    [
        "[1]",
        "7",
        "null",
        "[" * 100_000,
        '{"line": ["run"]}',
        '{"line": "event"}',
        '{"line": "event", "rank": 0, "kind": "send", "start_s": NaN, "end_s": 1}',
        '{"line": "event", "rank": "0", "kind": "send", "start_s": 0, "end_s": 1}',
        '{"line": "event", "rank": 0, "kind": ["send"], "start_s": 0, "end_s": 1}',
        '{"line": "step", "step": 0, "start_s": 0.5}',
        '{"line": "step", "step": 0, "end_s": 0.5}',
        '{"line": "step", "start_s": 0.5, "end_s": 1.5}',
        '{"line": "step", "step": 0.5, "start_s": 0.5, "end_s": 1.5}',
        '{"line": "step", "step": 0, "start_s": "0.5", "end_s": 1.5}',
        '{"line": "step", "step": 0, "start_s": 0.5, "end_s": true}',
        '{"line": "step", "step": 0, "start_s": 0.5, "end_s": NaN}',
        '{"line": "step", "step": 0, "start_s": 1.5, "end_s": 0.5}',
        '{"line": "ledger", "times_s": [0.5], "bytes_by_kind": {"params": [1, 2]}}',
        '{"line": "run", "rank": 1e400, "world_size": 2}',
    ],
)
def test_a_line_of_another_kind_is_named(tmp_path, line):
    path = small_record().write(tmp_path / "rank.jsonl")
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], line, lines[2]]))
    with pytest.raises(CourseError, match=r"rank\.jsonl, line 2: ") as told:
        RunRecord.read(path)
    assert len(str(told.value).splitlines()) == 1


@pytest.mark.parametrize("missing", STEP)
def test_a_step_that_lacks_something_is_named_also_in_the_last_line(tmp_path, missing):
    step = {name: value for name, value in STEP.items() if name != missing}
    path = RunRecord(0, 1, steps=[STEP, step]).write(tmp_path / "rank0.jsonl")
    needs = rf"rank0\.jsonl, line 3: .*\(step: need {missing}; it is not there\.\)"
    with pytest.raises(CourseError, match=needs):
        RunRecord.read(path)


def test_a_record_that_is_no_file_or_no_text_is_named(tmp_path):
    (tmp_path / "a.jsonl").mkdir()
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe")
    for name in ("a", "b", "c"):
        with pytest.raises(CourseError, match=rf"{name}\.jsonl: need a run record; it cannot be"):
            RunRecord.read(tmp_path / f"{name}.jsonl")


@pytest.mark.parametrize("text", ["", "{", '{"line": "event"}\n{"line": "event"}'])
def test_a_file_without_a_run_is_refused(tmp_path, text):
    path = tmp_path / "rank.jsonl"
    path.write_text(text)
    with pytest.raises(CourseError, match=r"rank\.jsonl"):
        RunRecord.read(path)


def test_an_interrupted_write_leaves_the_old_record(tmp_path):
    path = small_record().write(tmp_path / "rank.jsonl")
    broken = RunRecord(rank=0, world_size=1, run={"cannot": object()})
    with pytest.raises(TypeError):
        broken.write(path)
    assert RunRecord.read(path) == small_record()


def test_all_records_of_a_folder_are_read_in_order(tmp_path):
    for rank in (2, 0, 1):
        RunRecord(rank=rank, world_size=3).write(tmp_path / "ddp" / f"rank{rank}.jsonl")
    assert [record.rank for record in read_runs(tmp_path)] == [0, 1, 2]
    assert read_runs(tmp_path / "nothing") == []


def test_each_line_is_json_that_names_itself(tmp_path):
    path = small_record().write(tmp_path / "rank.jsonl")
    names = [json.loads(line)["line"] for line in path.read_text().splitlines()]
    assert names == ["run", "event", "event"]


def test_an_event_knows_its_kind_and_its_time():
    assert small_record().events[0].duration_s == 1.0
    with pytest.raises(CourseError, match="got 'allreduce'"):
        Event(rank=0, kind="allreduce", start_s=0, end_s=1)
    with pytest.raises(CourseError, match="end_s >= start_s"):
        Event(rank=0, kind="send", start_s=2, end_s=1)


def test_a_ledger_adds_up_and_knows_its_peak():
    ledger = Ledger(rank=0)
    assert ledger.peak_bytes() == 0
    ledger.add(0.0, params=100)
    ledger.add(1.0, params=100, grads=1000, activations=10_000)
    ledger.add(2.0, params=100, grads=1000)
    assert ledger.totals() == [100, 11_100, 1100]
    assert ledger.peak_bytes() == 11_100
    with pytest.raises(CourseError, match="weights"):
        ledger.add(3.0, weights=1)


def test_a_message_takes_alpha_plus_bytes_over_beta():
    link = Link(latency_s=0.001, bytes_per_s=1e6)
    assert link.time_s(0) == 0.001
    assert link.time_s(2e6) == pytest.approx(2.001)
    assert link.between(0, 7) is link


def test_two_levels_are_fast_inside_a_node_and_slow_between():
    link = TwoLevelLink(inside=NVLINK, outside=ETHERNET, ranks_per_node=4)
    assert link.between(0, 3) is link.between(6, 5) is NVLINK
    assert link.between(3, 4) is link.between(7, 0) is ETHERNET
    assert str(link) == "4 ranks a node: NVLink (3 us, 300 GB/s) inside, Ethernet (50 us, " \
        "1.25 GB/s) outside"  # fmt: skip


@pytest.mark.parametrize("num_bytes", [1e3, 1e6, 1e9])
def test_presets_keep_their_order(num_bytes):
    times = [link.time_s(num_bytes) for link in (NVLINK, INFINIBAND, PCIE, ETHERNET)]
    assert times[0] == min(times)
    assert times[-1] == max(times)


@pytest.mark.parametrize("wrong", [{"latency_s": -1.0}, {"bytes_per_s": 0.0}])
def test_an_impossible_link_is_refused(wrong):
    with pytest.raises(CourseError, match="Link: need latency_s >= 0"):
        Link(**{"latency_s": 0.0, "bytes_per_s": 1e9} | wrong)
    with pytest.raises(CourseError, match="ranks_per_node >= 1; got 0"):
        TwoLevelLink(inside=NVLINK, outside=PCIE, ranks_per_node=0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (format_bytes(0), "0 B"),
        (format_bytes(1023), "1,023 B"),
        (format_bytes(1536), "1.5 KiB"),
        (format_bytes(3 * 2**30), "3 GiB"),
        (format_bytes(-(2**20)), "-1 MiB"),
        (format_bytes(10**9), "954 MiB"),
        (format_seconds(2), "2 s"),
        (format_seconds(0.00123), "1.23 ms"),
        (format_seconds(45e-6), "45 us"),
        (format_rate(2.5e9), "2.5 GB/s"),
        (format_rate(300e6), "300 MB/s"),
    ],
)
def test_numbers_are_printed_with_a_fitting_unit(text, said):
    assert text == said


def test_a_shape_error_is_caught_as_either_kind():
    assert issubclass(ShapeError, CourseError)
    assert issubclass(ShapeError, ValueError)
