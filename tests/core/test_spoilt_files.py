"""Every file that the kit reads, spoilt in all ways: the right kind of result, or one sentence.

Bits flip, the end is missing, values change their type or go. Nothing else than a CourseError of
one line may come of it, and nothing may hang.
"""

import copy
import json
import math
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import nbformat
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.core import CourseError, Event, Ledger, RunRecord
from course_lib.core.files import read_text
from course_lib.core.presets import find_model
from course_lib.core.specs import spec_fields
from course_lib.jobs.job import Job
from course_lib.jobs.lint.check import findings_text, lint_job
from course_lib.jobs.local.job import LocalJob, state_of
from course_lib.jobs.profile import Profile, profile_text, read_profile
from course_lib.jobs.scheduler import JobState
from course_lib.jobs.submissions import read_submission
from course_lib.memory.calculator import Setup
from course_lib.memory.explorer import accounting_table
from course_lib.scaling_study.measure_link import read_links
from course_lib.scaling_study.report import notes, tables
from course_lib.scaling_study.results import SAMPLES, read_results
from course_lib.scaling_study.study_run import StudyRun, read_list
from course_lib.workbooks.learner_progress import STATUSES, progress
from course_lib.workbooks.learner_work import carry_over, is_touched
from course_lib.workbooks.lessons import Lesson, read_notebook, write_notebook
from course_lib.workbooks.update import finish_cut_off

ODD = (
    *(None, True, -1, 0, 1, 7, 1.5, 1e-9, 1e300, 10**12, 2**63, 10**400),
    *(math.nan, math.inf, -math.inf, "", "x", "7", "a\nb", "\x1b[2J", "²", "../../x", "[/]", "$"),
    *([], [1], ["a"], [[]], {}, {"a": 1}, {"name": "x"}),
)
ODD_TOML = ("nan", "-1", '"x"', '"a\\nb"', "[[1]]", "{a = 1}", "1979-05-27", "9" * 5000, "")
SEED = st.integers(0, 2**32)
ROOT = Path(__file__).resolve().parents[2]
RUN = StudyRun(spec=find_model("tiny"), strategy="ddp", ranks=2, global_batch=4, seq=8, steps=8)
JOB = Job(name="06_ddp", program="06_ddp.py", arguments=("--turns", "3"), run_folder="runs/a-1")


def bits(at: Random, whole: bytes) -> bytes:
    """Flip some bits, or leave out the end, or put other bytes in."""
    found = bytearray(whole)
    for _ in range(at.randint(0, 4)):
        found[at.randrange(len(found))] ^= 1 << at.randint(0, 7)
    start, how = at.randrange(len(found)), at.choice(["flipped", "cut", "put in"])
    if how == "cut":
        return bytes(found[:start])
    more = at.randbytes(8) if how == "put in" else b""
    return bytes(found[:start] + more + found[start:])


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every place in a JSON value, as what holds it and the key there."""
    keys = list(value) if isinstance(value, dict) else range(len(value))
    found = []
    for key in keys if isinstance(value, dict | list) else ():
        found.append((value, key))
        if isinstance(value[key], dict | list):
            found += places(value[key])
    return found


def other_json(at: Random, whole: bytes) -> bytes:
    """Put other values into a JSON text, or take some out."""
    value = json.loads(whole)
    for _ in range(at.randint(1, 3)):
        if there := places(value):
            holder, key = at.choice(there)
            if at.random() < 0.8:
                holder[key] = copy.deepcopy(at.choice(ODD))
            else:
                holder.pop(key)
    return json.dumps(value if at.random() < 0.95 else at.choice(ODD)).encode()


def other_toml(at: Random, whole: bytes) -> bytes:
    """Put other values into lines of TOML, or take lines out."""
    lines = whole.decode().splitlines()
    for _ in range(at.randint(1, 3)):
        number = at.randrange(len(lines))
        lines[number] = re.sub(r"= .*", lambda _: f"= {at.choice(ODD_TOML)}", lines[number])
    return "\n".join(lines).encode()


def spoilt(seed: int, whole: bytes, other: Callable[[Random, bytes], bytes]) -> bytes:
    at = Random(seed)
    return at.choice([bits, other])(at, whole)


def a_notebook(folder: Path) -> bytes:
    notebook = nbformat.read(folder / "00_toy.ipynb", 4)
    stream = nbformat.v4.new_output("stream", name="stdout", text="1\n2\n")
    picture = nbformat.v4.new_output("display_data", {"image/png": "abc", "text/plain": ["a"]})
    notebook.cells.append(nbformat.v4.new_code_cell("mine = 1", outputs=[stream, picture]))
    return nbformat.writes(notebook).encode()


def read_one_notebook(path: Path) -> None:
    notebook = read_notebook(path)
    is_touched(notebook)
    carried = carry_over(read_notebook(path.with_name("00_toy.ipynb")), notebook)[0]
    for one in (notebook, carried):
        write_notebook(one, path.with_name("again"))
        again = read_notebook(path.with_name("again")).cells
        assert [cell.source for cell in again] == [cell.source for cell in one.cells]


def accounting(path: Path) -> None:
    setup = Setup(model=str(path), gpu="h100", seq=128)
    accounting_table(setup)
    json.dumps(setup.accounting())


def lint_file(path: Path) -> None:
    profile = Profile(name="small", gpus_per_node=2, node_memory_gib=64)
    findings_text("job", lint_job(read_text(path, "a batch script"), path.parent, profile))


def report_file(path: Path) -> None:
    results = read_results(path)
    assert all(list(tables(results))) or not results.experiments
    assert all(notes(results))


def submission_of(path: Path) -> None:
    one = read_submission(path.parent)
    assert one.is_over in (True, False)
    assert one.gpu_hours >= 0
    assert one.jobs_left >= 0
    assert sorted([one.when, ""])[0] == ""


def local_job(path: Path) -> None:
    job = LocalJob.read(path.parent)
    for array_task in job.array_tasks[:3]:
        state_of(path.parent, job, array_task, lives=True)


def state_file(path: Path) -> None:
    state = state_of(path.parents[1], LOCAL, 0, lives=False)
    assert isinstance(state, JobState)


def small_results() -> bytes:
    told = json.loads((SAMPLES / "laptop_study.json").read_text())
    alone = [one for one in told["experiments"] if one["run"]["ranks"] == 1][:1]
    told["experiments"] = [*alone, *told["experiments"][:2]]
    for one in told["experiments"]:
        one["losses"] = one["losses"][:2]
    return json.dumps(told).encode()


def a_submission() -> bytes:
    states = [asdict(JobState(array_task=0, state="RUNNING", seconds=3.5))]
    words = {"id": "a-1", "job": asdict(JOB), "profile": "test", "scheduler": "local", "when": "x"}
    return json.dumps({**words, "token": "t", "job_id": "7", "seen": states}).encode()


LOCAL = LocalJob(
    **{"job_id": "7", "name": "a", "token": "t", "cwd": "/tmp", "log": "log-%j.out"},
    **{"append": False, "nodes": 1, "tasks_per_node": 1, "gpus_per_node": 0, "cpus_per_task": 1},
    **{"time_limit_s": 60.0, "is_array": False, "array_tasks": (0,)},
)
STATE = {"state": "FAILED", "exit_code": 1, "restarts": 0, "seconds": 1.5, "reason": ""}
LINKS = {"2": [1e-4, 1e9], "4": [2e-4, 1e9]}
PROFILE = profile_text(Profile(name="x", partition="gpu", modules=("gcc",), gpus_per_node=2))

CONFIG = {
    **{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 256},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128},
    **{"max_position_embeddings": 4096, "tie_word_embeddings": True},
}


def a_record() -> bytes:
    run = {**RUN.plain(), "model": spec_fields(RUN.spec), "memory": {"params": 3, "peak": 9}}
    machine = {"usable_cores": 2, "memory_bytes": 2**34, "torch": "2.13"}
    event = Event(rank=0, kind="all_reduce", start_s=0.5, end_s=1.5, num_bytes=40, group=(0, 1))
    record = RunRecord(rank=0, world_size=1, run=run | {"strategy": "single"}, machine=machine)
    times = ((n, n + 0.5 + n / 10) for n in range(RUN.steps))
    record.steps = [
        {"step": n, "start_s": start_s, "end_s": end_s, "num_tokens": 32, "loss": 5.0}
        for n, (start_s, end_s) in enumerate(times)
    ]
    record.events, record.ledger = [event], Ledger(rank=0)
    record.ledger.add(0.5, params=12)
    with TemporaryDirectory() as folder:
        return record.write(Path(folder) / "rank0.jsonl").read_bytes()


def other_lines(at: Random, whole: bytes) -> bytes:
    """Spoil a line of JSON, or put lines in another order."""
    lines = whole.splitlines()
    number = at.randrange(len(lines))
    lines[number] = other_json(at, lines[number])
    return b"\n".join(at.choice([lines, lines, at.sample(lines, len(lines))]))


def report_folder(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a last line that was cut short
        RunRecord.read(path)
    report_file(path.parent)


FILES: dict[str, tuple[str, bytes, Callable[[Path], Any], Callable[[Random, bytes], bytes]]] = {
    "results": ("results.json", small_results(), report_file, other_json),
    "record": ("runs/rank0.jsonl", a_record(), report_folder, other_lines),
    "config": ("config.json", json.dumps(CONFIG).encode(), accounting, other_json),
    "links": ("links.json", json.dumps(LINKS).encode(), lambda p: read_links(p.parent), other_json),
    "list": (
        "list.json",
        json.dumps([{"out": "runs/a", "run": RUN.plain()}] * 2).encode(),
        read_list,
        other_json,
    ),
    "submission": ("submission.json", a_submission(), submission_of, other_json),
    "local job": ("job.json", json.dumps(asdict(LOCAL)).encode(), local_job, other_json),
    "state": ("elements/0.json", json.dumps(STATE).encode(), state_file, other_json),
    "profile": ("own.toml", PROFILE.encode(), lambda p: profile_text(read_profile(p)), other_toml),
    "batch script": (
        "job.sbatch",
        (ROOT / "cluster" / "requeue.sbatch").read_bytes(),
        lint_file,
        bits,
    ),
}


def reads_or_says_why(read: Callable[[Path], Any], path: Path) -> None:
    told = ""
    try:
        read(path)
    except CourseError as error:
        told = str(error)
    assert len(told.splitlines()) <= 1, told


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=120)
@given(seed=SEED)
def test_a_spoilt_file_is_read_or_named_in_a_sentence(name, seed, tmp_path_factory):
    file, whole, read, other = FILES[name]
    path = tmp_path_factory.getbasetemp() / "spoilt" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(spoilt(seed, whole, other))
    reads_or_says_why(read, path)


@pytest.mark.parametrize("name", FILES)
def test_the_whole_file_is_read(name, tmp_path):
    file, whole, read, _ = FILES[name]
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_bytes(whole)
    read(tmp_path / file)


@pytest.fixture(scope="module")
def folder(toy_template, tmp_path_factory) -> Path:
    """A copy of the toy course, whose files these tests overwrite."""
    return Path(shutil.copytree(toy_template, tmp_path_factory.mktemp("toy") / "notebooks"))


@settings(max_examples=120)
@given(seed=SEED)
def test_a_spoilt_notebook_is_read_or_named_in_a_sentence(seed, folder, toy_template):
    path, whole = folder / "spoilt.ipynb", a_notebook(toy_template)
    path.write_bytes(spoilt(seed, whole, other_json))
    reads_or_says_why(read_one_notebook, path)


@settings(max_examples=60)
@given(seed=SEED)
def test_spoilt_verdicts_are_none_and_progress_goes_on(seed, folder):
    kept = {f"toy-{n}": {"status": "right", "written": ["abc"]} for n in range(1, 5)}
    whole = json.dumps(kept).encode()
    (folder / ".progress.json").write_bytes(spoilt(seed, whole, other_json))
    found = progress(Lesson("00_toy", folder))
    assert list(found) == ["toy-1", "toy-2", "toy-3", "toy-4"]
    assert set(found.values()) <= {*STATUSES, "not checked"}


@settings(max_examples=60)
@given(seed=SEED)
def test_a_spoilt_journal_is_followed_or_named_in_a_sentence(seed, folder, toy_template):
    backup = folder / ".backup" / "00_toy-1.ipynb"
    backup.parent.mkdir(exist_ok=True)
    whole = json.dumps({"backups": {"00_toy": backup.name}}).encode()
    shutil.copy(toy_template / "00_toy.ipynb", backup)
    journal = backup.with_name("update.json")
    journal.write_bytes(spoilt(seed, whole, other_json))
    reads_or_says_why(lambda path: finish_cut_off(folder), journal)
    work = (toy_template / "00_toy.ipynb").read_bytes()
    assert work in (backup.read_bytes() if backup.exists() else b"", *here(folder))


def here(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in folder.glob("*.ipynb")]
