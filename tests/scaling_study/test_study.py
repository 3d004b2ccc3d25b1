"""The plan of a study, what it costs on paper, and what of it is started."""

import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path

import cloudpickle
import pytest
from typer.testing import CliRunner

from course_lib.core import CourseError, Link, ModelSpec, RunRecord, find_model
from course_lib.core.errors import ShapeError
from course_lib.core.specs import spec_fields
from course_lib.cost.flops import train_step_flop
from course_lib.cost.hardware import A100_80, RTX_2080_TI
from course_lib.cost.params import count_params
from course_lib.jobs.profile import Limits, Profile
from course_lib.jobs.submissions import read_submissions, refresh
from course_lib.scaling_study import array_element as element
from course_lib.scaling_study import run_local as here
from course_lib.scaling_study import submit
from course_lib.scaling_study.aggregate import aggregate
from course_lib.scaling_study.commands import study_app
from course_lib.scaling_study.costing import Costing, find_done
from course_lib.scaling_study.machines import (
    REACHED,
    Machine,
    machine_of_profile,
    machine_of_record,
    with_link,
)
from course_lib.scaling_study.measure_link import (
    SIZES,
    link_of,
    links_of,
    note_link,
    plain_links,
    read_links,
    round_trips,
)
from course_lib.scaling_study.plan import ACCUMULATED, STUDIES, Study, find_study
from course_lib.scaling_study.prediction import (
    HOST_LAYER_S,
    LOADED_LINK,
    fit_machine,
    hours,
    predict,
)
from course_lib.scaling_study.run_local import RunFailure, run_here
from course_lib.scaling_study.study_run import StudyRun, read_list, read_run, run_of
from course_lib.scaling_study.submit import make_jobs, submit_all, waiting
from course_lib.train.config import TrainConfig
from course_lib.train.trainer import train

cloudpickle.register_pickle_by_value(sys.modules[__name__])

INSTANT = Link(latency_s=0.0, bytes_per_s=1e30)
GPUS = Machine(device=A100_80, link=INSTANT)
SLOW = Machine(device=A100_80, link=Link(latency_s=1e-5, bytes_per_s=1e9))
SMALL_CARDS = Machine(device=RTX_2080_TI, link=INSTANT)
ALONE = StudyRun(spec=find_model("study-100m"), global_batch=16, seq=512, steps=200)
SITE = Profile(name="site", gpus_per_node=2, max_nodes=2, limits=Limits(max_jobs=3))


# -- the plan ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["laptop", "cluster"])
def test_a_study_has_every_run_once_in_a_place_of_its_own(name):
    runs = find_study(name).runs
    assert len({run.name for run in runs}) == len(set(runs)) == len(runs)
    for run in runs:  # what is compared has the same batch, cut alike, and the same steps
        alone = [one for one in runs if one.ranks == 1 and one.spec == run.spec]
        cut = run.num_micro_batches if run.pp == 1 else 1
        (baseline,) = [
            one
            for one in alone
            if (one.global_batch, one.seq, one.num_micro_batches)
            == (run.global_batch, run.seq, cut)
        ]
        assert (baseline.steps, baseline.dtype) == (run.steps, run.dtype)


def test_the_cluster_study_has_the_models_strategies_and_micro_batches_it_is_known_for():
    runs = find_study("cluster").runs
    assert len(runs) > 70
    assert {run.spec.name for run in runs if run.dtype == "float32"} == {"study-10m"}
    assert {run.steps for run in runs} == {200}
    assert {run.ranks for run in runs} == {1, 2, 4}
    labels = {run.label for run in runs}
    assert labels >= {"ddp", "tp", "pp", "zero1", "zero2", "zero3", "zero3-offload"}
    cut = [(run.pp, run.num_micro_batches) for run in runs if run.pp > 1 and run.tp == 1]
    assert cut[:4] == [(2, 2), (2, 8), (4, 4), (4, 16)]
    for run in runs:
        if run.parallelism.zero:
            assert run.num_micro_batches == ACCUMULATED
            assert run.global_batch == 16
            assert run.seq == (512 if run.spec.name in ("study-1b", "study-100m") else run.seq)
    assert {run.bucket_mib for run in runs} == {1, 5, 25, 100}


@pytest.mark.parametrize("name", STUDIES)
def test_the_training_loop_takes_every_run_for_what_it_is(name):
    for run in find_study(name).runs:
        config = run.config("runs/x")
        config.check_ranks(run.ranks)
        plain = config.plain(config.model, "synthetic", config.parallelism(run.ranks).dp)
        assert run_of(RunRecord(0, run.ranks, plain)) == run
        assert read_run(json.loads(json.dumps(run.plain()))) == run


def test_the_batch_of_convergence_grows_with_the_copies():
    runs = find_study("convergence").runs
    assert {run.global_batch // run.parallelism.dp for run in runs} == {8}
    assert [(run.label, run.ranks, run.warmup) for run in runs] == [
        ("single", 1, 100),
        ("tp", 2, 100),
        ("ddp", 2, 100),
        ("ddp", 4, 100),
        ("ddp", 4, 4),
        ("single", 1, 4),
    ]
    assert len({run.name for run in runs}) == len(runs)


def test_a_part_of_a_study_keeps_what_it_is_compared_with():
    part = find_study("cluster").only(["study-10m"], ["zero1", "pp"], [2])
    assert [(run.label, run.ranks, run.num_micro_batches) for run in part.runs] == [
        ("single", 1, 1),
        ("pp", 2, 2),
        ("pp", 2, 8),
        ("single", 1, 4),
        ("zero1", 2, 4),
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"models": ["gpt9"]}, "--model: need one of study-100m.*; got gpt9"),
        ({"strategies": ["zero4"]}, "--strategy: need one of ddp.*; got zero4"),
        ({"ranks": [3]}, "--ranks: need one of 1, 2, 4; got 3"),
    ],
)
def test_a_part_that_is_not_there_is_one_sentence(words, said):
    with pytest.raises(CourseError, match=said):
        find_study("cluster").only(**words)


def test_a_batch_that_cannot_be_cut_is_refused():
    with pytest.raises(ShapeError, match="need ranks = dp"):
        replace(ALONE, strategy="ddp", ranks=3)
    with pytest.raises(ShapeError, match="need ranks = dp"):
        replace(ALONE, ranks=4, pp=3)


# -- the cost ------------------------------------------------------------------------------------


def test_computing_is_flop_over_what_a_rank_reaches():
    flop = train_step_flop(ALONE.spec, 16, 512)
    assert predict(ALONE, GPUS).compute_s == pytest.approx(flop / (REACHED * 19.5e12))
    half = replace(ALONE, dtype="bfloat16", strategy="ddp", ranks=2)
    assert predict(half, GPUS).compute_s == pytest.approx(flop / 2 / (REACHED * 312e12))
    assert predict(ALONE, GPUS).wire_s == predict(ALONE, GPUS).bubble_s == 0


def test_ranks_that_share_cores_are_as_slow_together():
    laptop = Machine(device=A100_80, link=INSTANT, cores=2)
    times = [predict(replace(ALONE, strategy="ddp", ranks=p), laptop).compute_s for p in (2, 4)]
    assert times[0] == pytest.approx(times[1])
    assert times[0] == pytest.approx(predict(ALONE, laptop).compute_s / 2)


def test_the_bubble_of_a_pipeline_is_p_minus_1_over_m():
    for m in (4, 16):
        told = predict(replace(ALONE, ranks=4, pp=4, num_micro_batches=m), GPUS)
        assert told.bubble_s == pytest.approx(told.compute_s * 3 / m)


def test_every_way_to_split_pays_for_its_messages():
    ways = [
        {"strategy": "ddp"},
        {"tp": 4},
        {"pp": 4, "num_micro_batches": 4},
        *({"strategy": f"zero{n}", "num_micro_batches": 4} for n in (1, 2, 3)),
    ]
    costs = [predict(replace(ALONE, ranks=4, **way), SLOW).wire_s for way in ways]
    assert min(costs) > 0
    zero1, zero2, zero3 = costs[3:]
    assert zero1 < zero2 < zero3  # stages 2 and 3 speak in every micro-batch
    grads = 4 * count_params(ALONE.spec)
    assert zero1 == pytest.approx(2 * 3 / 4 * grads / 1e9, rel=0.01)


def test_what_ddp_sends_hides_behind_backward():
    ddp = replace(ALONE, strategy="ddp", ranks=2)
    all_reduce_s = 4 * count_params(ALONE.spec) / 1e9
    one_bucket = predict(replace(ddp, bucket_mib=1e6), SLOW).wire_s
    assert one_bucket == pytest.approx(all_reduce_s, rel=0.01)
    assert predict(ddp, SLOW).wire_s < 0.9 * one_bucket


def test_states_are_sharded_by_stage():
    num_params = count_params(ALONE.spec)
    held = {
        zero: predict(replace(ALONE, strategy=f"zero{zero}", ranks=4), GPUS).held
        for zero in (1, 2, 3)
    }
    whole = predict(ALONE, GPUS).held
    assert whole["params"] == 4 * num_params
    assert whole["optim_state"] >= 8 * num_params
    assert held[1]["optim_state"] == pytest.approx(whole["optim_state"] / 4, rel=0.01)
    assert held[3]["params"] == num_params
    assert held[2]["params"] == whole["params"]
    offload = replace(ALONE, strategy="zero3-offload", ranks=4)
    assert predict(offload, GPUS).held["optim_state"] < 0.01 * num_params


def test_what_does_not_fit_is_named_in_bytes():
    large = replace(ALONE, spec=find_model("study-1b"), global_batch=4, seq=1024)
    told = predict(large, SMALL_CARDS)
    assert told.missing_bytes == told.peak_bytes - RTX_2080_TI.memory_bytes > 0
    costing = Costing(
        find_study("cluster").only(["study-1b"], ["zero3"], [4]),
        SITE,
        Path("none"),
        SMALL_CARDS,
        {},
    )
    (line,) = [line for line in costing.sentences() if "single" in line and "m4" not in line]
    assert line.startswith("  single/study-1b/r1-batch4-seq1024: need 12.7 GiB per rank; there are")
    assert {run.run for run in costing.too_large}.isdisjoint(run.run for run in costing.left)


def test_hours_count_every_rank():
    pair = [predict(replace(ALONE, strategy="ddp", ranks=p), GPUS) for p in (2, 4)]
    wall, of_ranks = hours(pair)
    assert wall == pytest.approx((pair[0].run_s + pair[1].run_s) / 3600)
    assert of_ranks == pytest.approx((2 * pair[0].run_s + 4 * pair[1].run_s) / 3600)


def whole_record(run, rank=0, step_s=2.0):
    """A record of a run, as the training script leaves it."""
    plain = {**run.plain(), "model": spec_fields(run.spec)}
    steps = [
        {"step": n, "start_s": 0.0, "end_s": step_s, "num_tokens": 9} for n in range(run.steps)
    ]
    return RunRecord(rank, run.ranks, plain, {}, steps)


def test_a_measured_run_of_one_rank_is_predicted_exactly_and_speeds_the_others():
    measured = aggregate([whole_record(ALONE)])
    fitted = fit_machine(GPUS, measured)
    assert predict(ALONE, fitted).step_s == pytest.approx(2.0)
    two = predict(replace(ALONE, strategy="ddp", ranks=2), fitted)
    assert two.compute_s == pytest.approx(predict(ALONE, fitted).compute_s / 2)


def test_only_full_cores_slow_messages_and_hide_nothing():
    run = replace(ALONE, strategy="ddp", ranks=2)
    cores = {n: replace(SLOW, cores=n) for n in (2, 8)}
    full, roomy = (predict(run, cores[n]) for n in (2, 8))
    assert full.wire_s > LOADED_LINK * roomy.wire_s
    assert full.host_s == roomy.host_s == HOST_LAYER_S * run.num_micro_batches * run.spec.num_layers
    assert predict(replace(run, ranks=4), cores[2]).host_s == 2 * full.host_s
    assert predict(run, GPUS).host_s == 0


def test_a_measured_link_is_kept_and_predicts(tmp_path):
    alone = predict(replace(ALONE, strategy="ddp", ranks=2, bucket_mib=1e6), GPUS)
    (tmp_path / "links.json").write_text('{"2": [1e-5, 1e9]}')
    links = read_links(tmp_path)
    assert links_of(plain_links(links), "links") == links
    for spoilt in ("[", "7", '{"2": 3}', '{"2": [1]}', '{"x": [1, 2]}', '{"2": [NaN, 1]}'):
        (tmp_path / "other" / "links.json").parent.mkdir(exist_ok=True)
        (tmp_path / "other" / "links.json").write_text(spoilt)
        with pytest.raises(CourseError, match=r"links\.json"):
            read_links(tmp_path / "other")
    two = with_link(GPUS, links, 2)
    assert with_link(GPUS, links, 4) is GPUS
    told = predict(alone.run, two)
    assert told.wire_s == pytest.approx(4 * count_params(ALONE.spec) / 1e9, rel=0.01)
    note_link(tmp_path, 2)  # it is known
    note_link(tmp_path, 1)  # nobody to reach
    assert read_links(tmp_path) == links


def test_a_link_is_measured_by_messages_that_are_as_slow_as_it_is(pools):
    link, p = Link(latency_s=2e-3, bytes_per_s=5e8), 4
    times = {n: 2 * (p - 1) * link.time_s(n / p) for n in SIZES}
    found = link_of(p, times)
    assert found.latency_s == pytest.approx(link.latency_s)
    assert found.bytes_per_s == pytest.approx(link.bytes_per_s)
    by_rank = pools(2).run(round_trips)
    assert list(by_rank[0]) == list(SIZES)
    assert by_rank[0] == by_rank[1]  # the slowest rank's, on every rank
    assert min(by_rank[0].values()) > 0


def test_machines_are_known_by_their_names():
    record = {
        "usable_gpus": 2,
        "gpus": [{"name": "NVIDIA H100 80GB HBM3"}] * 2,
        "gpu_links": [["X", "NV18"], ["NV18", "X"]],
    }
    found = machine_of_record(record, 2)
    assert found.device.name == "h100"
    assert found.link.inside.name == "NVLink"
    pcie = machine_of_record(record | {"gpu_links": [["X", "SYS"], ["SYS", "X"]]}, 2)
    assert pcie.link.inside.name == "PCIe"
    here = {"usable_cores": 2, "memory_bytes": 2**34}
    assert machine_of_record(here, 2).cores == 2
    assert machine_of_profile(Profile(name="x", gpus_per_node=4, gpu_type="h200"), here).has_gpus
    assert not machine_of_profile(Profile(name="x", scheduler="local"), here).has_gpus


# -- starting ------------------------------------------------------------------------------------


def test_only_a_whole_record_of_the_same_run_is_done(tmp_path):
    two = replace(ALONE, strategy="ddp", ranks=2, steps=8)
    for rank in (0, 1):
        whole_record(two, rank).write(tmp_path / two.name / f"rank{rank}.jsonl")
    assert set(find_done([two, ALONE], tmp_path)) == {two}
    longer = replace(two, steps=12)
    assert longer.name == two.name
    assert find_done([longer], tmp_path) == {}
    (tmp_path / two.name / "rank1.jsonl").unlink()
    assert find_done([two], tmp_path) == {}


def test_job_arrays_have_a_task_per_run_and_the_nodes_they_need(tmp_path, monkeypatch):
    runs = [replace(ALONE, strategy="ddp", ranks=p) for p in (2, 4, 1)]
    runs.append(replace(ALONE, ranks=4, tp=4))
    jobs = make_jobs([predict(run, GPUS) for run in runs], tmp_path, SITE, math.inf)
    shape = [(job.nodes, job.gpus_per_node, job.ranks_per_node, job.array) for job in jobs]
    assert shape == [(1, 1, 1, "0-0%1"), (1, 2, 2, "0-0%1"), (2, 2, 2, "0-1%1")]
    started = []
    monkeypatch.setattr(element, "work", started.append)
    monkeypatch.setattr(sys, "argv", ["element", *jobs[2].arguments])
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    element.main()
    (_, second) = read_list(jobs[2].arguments[0])
    assert {one.run for one in read_list(jobs[2].arguments[0])} == {runs[1], runs[3]}
    assert started == [second.run.config(str(tmp_path / second.run.name))]
    lists = [json.loads(path.read_text()) for path in sorted((tmp_path / "lists").iterdir())]
    assert [len(lines) for lines in lists] == [1, 1, 2]


def test_as_many_runs_are_submitted_as_the_limit_of_gpu_hours_has_room_for(tmp_path):
    runs = [replace(ALONE, steps=50 * (6 - n), ranks=1 + n % 2, strategy="ddp") for n in range(6)]
    predicted = [predict(run, GPUS) for run in runs]
    whole = make_jobs(predicted, tmp_path, SITE, math.inf)
    assert [len(job.array_tasks) for job in whole] == [3, 3]
    hours = sum(job.gpu_hours for job in whole)
    for share in (0.1, 0.4, 0.7, 1.0):
        jobs = make_jobs(predicted, tmp_path, SITE, share * hours)
        num = [len(job.array_tasks) for job in jobs]
        fit = [job for job in jobs if len(job.array_tasks) > 1]
        assert sum(job.gpu_hours for job in fit) <= share * hours
        listed = [read_list(job.arguments[0]) for job in jobs]
        assert [len(tasks) for tasks in listed] == num
        for tasks in listed:  # the shortest first
            assert [task.run.steps for task in tasks] == sorted(task.run.steps for task in tasks)
        assert (num == [3, 3]) == (share == 1)
        assert min(num) >= 1  # one that does not fit is refused when it is submitted


def test_what_the_limit_refuses_is_told_and_can_follow_later(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runs = tuple(replace(ALONE, strategy="ddp", ranks=2, steps=steps) for steps in (100, 200, 300))
    (both,) = make_jobs([predict(run, GPUS) for run in runs[:2]], tmp_path, SITE, math.inf)
    site = replace(SITE, limits=Limits(max_jobs=3, gpu_hours=both.gpu_hours))
    taken = []
    monkeypatch.setattr(submit, "_taken", lambda job, *_: taken.append(job) or True)
    costing = Costing(Study(name="x", runs=runs), site, tmp_path / "x", GPUS, {})
    assert submit_all(costing) == 1
    assert [len(job.array_tasks) for job in taken] == [2]
    assert "1 runs are left: the same command again" in capsys.readouterr().out


def test_more_ranks_than_a_site_has_are_refused(tmp_path):
    eight = replace(ALONE, strategy="ddp", ranks=8)
    with pytest.raises(CourseError, match="need 8 ranks on whole nodes; profile site has 2 of 2"):
        make_jobs([predict(eight, GPUS)], tmp_path, SITE, math.inf)


TINY = StudyRun(spec=find_model("tiny"), global_batch=4, seq=8, steps=4)


def test_a_run_here_leaves_a_whole_record_and_a_failure_its_last_words(tmp_path):
    assert run_here(TINY, tmp_path) is None
    assert set(find_done([TINY], tmp_path)) == {TINY}
    too_long = replace(TINY, seq=65)
    failure = run_here(too_long, tmp_path)
    assert failure.said.startswith("--seq: need at most the 64 tokens")
    assert find_done([too_long], tmp_path) == {}


# -- the commands --------------------------------------------------------------------------------


def course(*words):
    return CliRunner(env={"COLUMNS": "80"}).invoke(study_app, list(words))


def test_the_plan_tells_every_run_and_its_price_and_starts_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = course("plan", "cluster", "--profile", "test", "--model", "study-1b", "--ranks", "4")
    assert done.exit_code == 0
    lines = done.output.splitlines()
    assert lines[0].strip() == "study-1b (4 x 1024 tokens)"
    assert len([line for line in lines if line.rstrip().endswith("to run")]) == 11
    assert "0 of 11 runs are done, 11 to run" in done.output
    assert "GPU-hours, on test (a100-80). Records: runs/study-cluster" in done.output
    assert list(tmp_path.iterdir()) == []


def test_what_fails_here_does_not_stop_the_rest_and_is_told_at_the_end(tmp_path, monkeypatch):
    started = []

    def pretend(run, folder):
        started.append(run)
        for rank in range(run.ranks):
            whole_record(run, rank).write(folder / run.name / f"rank{rank}.jsonl")
        if run.label != "single":
            (folder / run.name / "rank0.jsonl").unlink()
            return RunFailure(run=run, said="rank 1 was killed by SIGKILL", log=folder / "log.txt")

    monkeypatch.setattr(here, "run_here", pretend)
    monkeypatch.setattr(here, "note_link", lambda *_: None)
    words = ("run", "laptop", "--profile", "laptop", "--model", "tiny", "--out", str(tmp_path))
    first = course(*words)
    assert first.exit_code == 1
    assert [run.label for run in started] == ["single", "ddp"]
    assert "ddp/tiny/r2-batch16-seq64 failed: rank 1 was killed by SIGKILL" in first.output
    again = course(*words)
    assert [run.label for run in started] == ["single", "ddp", "ddp"]
    assert "1 of 2 runs are done, 1 to run" in again.output
    course(*words, "--no-resume")
    assert len(started) == 5


HERE = Profile(name="here", scheduler="local")


def test_what_waits_is_not_handed_in_twice_and_what_has_ended_is_done(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    study, folder = Study(name="x", runs=(TINY,)), Path("runs/x")
    costing = Costing(study, HERE, folder, GPUS, {})
    assert [submit_all(costing), submit_all(costing)] == [0, 0]
    told = capsys.readouterr().out
    assert told.count("1 runs are handed in") == told.count("1 runs wait or run already") == 1
    (one,) = read_submissions()
    give_up = time.monotonic() + 240
    while not refresh(one).is_over and time.monotonic() < give_up:
        time.sleep(0.2)
    assert [state.state for state in refresh(one).seen] == ["COMPLETED"]
    assert waiting([refresh(one)]) == set()
    assert set(find_done([TINY], folder)) == {TINY}


SPEC = ModelSpec(hidden=16, num_layers=2, num_heads=2, ffn_hidden=32, vocab=40, max_seq=8)
HALF = TrainConfig(model=SPEC, steps=4, global_batch=8, seq=8, dtype="bfloat16", every=0)
SPLITS = [
    *({"strategy": name} for name in ("ddp", "torch-ddp", "zero1", "zero2", "zero3")),
    {"strategy": "zero3-offload", "micro_batch": 2},
    {"strategy": "torch-fsdp", "micro_batch": 2},
    {"tp": 2},
    {"pp": 2, "micro_batch": 2},
]


def test_in_bfloat16_every_strategy_trains_alike(pools):
    alone = pools(1).run(train, HALF)[0]
    for split in SPLITS:
        found = pools(2).run(train, replace(HALF, **split))[0]
        # 8 bits of a number: about 0.4 %, more after some steps that add them up in another order
        for step, other in zip(found.steps, alone.steps, strict=True):
            assert step["loss"] == pytest.approx(other["loss"], rel=0.02)
        assert found.run["memory"]["params"] <= 2 * count_params(SPEC) + 64


def test_a_run_of_a_model_that_is_not_trained_is_refused():
    """Counted as a dense one, its messages and its memory would be wrong."""
    with pytest.raises(CourseError, match="StudyRun, spec: need a dense model"):
        replace(TINY, spec=find_model("mixtral-8x7b"))
