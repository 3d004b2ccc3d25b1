"""`course plan --table`: a row in, a row out, and each wrong row its own sentence."""

import csv
import io

import pytest

from course_lib.core import CourseError
from course_lib.core.units import GIB
from course_lib.planner import Plan, find_cluster, predict
from course_lib.planner.published_runs import published_runs
from course_lib.planner.table import (
    COLUMNS,
    RESULTS,
    predict_table,
    read_table,
    table_text,
    unknown_columns,
)

HEADER = ",".join(COLUMNS)
SMALL = {"id": "a", "layers": "24", "hidden": "1024", "heads": "16"}


def one(**cells):
    """The prediction of one row."""
    return next(predict_table([SMALL | cells]))


def seconds_of(row):
    return [float(row[name]) for name in RESULTS if name.endswith("_s") and name != "step_s"]


def test_a_published_run_as_a_row_is_what_predict_says():
    run = published_runs("korthikanti")[1]
    model, plan, axes = run.model, run.plan, run.plan.parallelism
    row = one(
        layers=str(model.num_layers),
        hidden=str(model.hidden),
        heads=str(model.num_heads),
        vocab=str(model.vocab),
        seq=str(plan.seq),
        gpu="a100-80gb",
        nodes=str(run.cluster.num_nodes),
        **{name: str(getattr(axes, name)) for name in ("dp", "tp", "pp")},
        chunks=str(plan.num_model_chunks),
        micro_batch=str(plan.micro_batch),
        num_micro_batches=str(plan.num_micro_batches),
        sequence_parallel=str(int(axes.sequence_parallel)),
        recompute=plan.recompute,
        flash="0",
    )
    step = run.predicted()
    assert row["error"] == ""
    assert float(row["step_s"]) == pytest.approx(step.step_s, rel=1e-5)
    assert float(row["memory_gib"]) == pytest.approx(step.memory_bytes / GIB, rel=1e-5)
    assert sum(seconds_of(row)) == pytest.approx(step.step_s, rel=1e-4)
    assert set(row) == set(RESULTS)


def test_what_is_empty_or_missing_has_its_default():
    full = dict.fromkeys(COLUMNS, "") | SMALL
    assert one() == next(predict_table([full])) == one(tp="1", seq="2048", gpu="A100-80GB")
    assert one(gated="1")["step_s"] != one()["step_s"]


def test_measured_times_take_the_place_of_predicted_ones():
    times = {"t_f_ms": "10", "t_b_ms": "12", "t_w_ms": "8", "t_comm_ms": "0"}
    row = one(pp="4", num_micro_batches="8", schedule="1F1B", **times)
    assert float(row["compute_s"]) == pytest.approx(8 * 0.03)
    assert float(row["bubble_s"]) == pytest.approx(3 * 0.03)  # (p - 1)(F + B + W)
    shorter = one(pp="4", num_micro_batches="8", schedule="ZB-1p", **times)
    assert float(shorter["bubble_s"]) == pytest.approx(3 * (10 + 12 - 8) / 1000, rel=1e-3)


@pytest.mark.parametrize(
    ("cells", "says"),
    [
        ({"layers": ""}, "layers: need a whole number; got ''"),
        ({"layers": "2.5"}, "layers: need a whole number; got '2.5'"),
        ({"hidden": "1e400"}, "hidden: need a whole number"),
        ({"hidden": "nan"}, "hidden: need a whole number"),
        ({"dp": "-1"}, "dp: need a whole number; got '-1'"),
        ({"dp": "0"}, "need dp as a whole number above 0"),
        ({"heads": "7"}, "need hidden divisible by num_heads"),
        ({"flash": "yes"}, "flash: need 0 or 1; got 'yes'"),
        ({"gpu": "tpu"}, "gpu: need one of"),
        ({"cluster": "mine"}, "cluster: need one of"),
        ({"zero": "4"}, "need zero as 0, 1, 2 or 3"),
        ({"recompute": "some"}, "need recompute out of"),
        ({"precision": "int4"}, "need precision out of"),
        ({"schedule": "x"}, "schedule: need one of"),
        ({"pp": "48"}, "need pp of at most the 24 layers"),
        ({"dp": "64", "nodes": "1"}, "64 ranks of the plan; got 1 of 8 GPUs. Try nodes=8."),
        ({"t_f_ms": "1"}, "t_b_ms: need milliseconds"),
        ({"t_f_ms": "-1", "t_b_ms": "1", "t_w_ms": "1"}, "t_f_ms: need milliseconds"),
        ({None: ["more"]}, "need as many values as columns"),
    ],
)
def test_a_wrong_row_gets_its_sentence_and_the_others_go_on(cells, says):
    first, second = predict_table([SMALL | cells, SMALL])
    assert says in first["error"]
    assert first["step_s"] == ""
    assert second["error"] == ""
    assert float(second["step_s"]) > 0


def test_a_file_is_read_and_written_as_csv(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("\ufeffhidden, heads,layers,mine,id\n1024,16,24,x,a\n,,,,\n1024,7,24,y,b\n")
    rows = read_table(path)
    assert [row["id"] for row in rows] == ["a", "b"]
    assert unknown_columns(rows) == ["mine"]
    found = list(csv.DictReader(io.StringIO(table_text(list(predict_table(rows))))))
    assert [row["id"] for row in found] == ["a", "b"]
    assert found[0]["error"] == ""
    assert "num_heads" in found[1]["error"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "with the columns"),
        (HEADER + "\n", "at least one row"),
        ("id,layers\na,2\n", "got none named hidden, heads"),
        ("id,layers,hidden,heads,id\na,2,64,4,b\n", "each column once; got id"),
        ('id,layers,hidden,heads\na,2,64,"4\n', "need a table of plans in CSV; line"),
    ],
)
def test_what_is_no_table_is_one_sentence(tmp_path, content, says):
    path = tmp_path / "rows.csv"
    path.write_text(content)
    with pytest.raises(CourseError, match=says):
        read_table(path)
    with pytest.raises(CourseError, match="need a table of plans in CSV"):
        read_table(tmp_path)


def test_a_v100_computes_in_fp16():
    cluster = find_cluster("a6000-pcie", gpu="v100")
    model = published_runs("sc21")[0].model
    assert predict(model, cluster, Plan(seq=2048)).step_s > 0
    assert one(gpu="v100")["error"] == ""
