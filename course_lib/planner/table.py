"""Predict a table of plans: a row in, a row out. `course plan --table rows.csv --out out.csv`.

A row that is no valid plan gets its sentence in the column `error`, and the others go on. Measured
times of a micro-batch (`t_f_ms`, `t_b_ms`, `t_w_ms`) take the place of the predicted ones where a
row has them. Notebook 12_planner.
"""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from course_lib.core.errors import CourseError
from course_lib.core.files import read_text
from course_lib.core.parallelism import Parallelism
from course_lib.core.specs import Experts, ModelSpec
from course_lib.core.units import GIB
from course_lib.cost.flops import mfu, train_step_flop
from course_lib.planner.cluster import Cluster, cluster_for
from course_lib.planner.pipeline_step import StepTimes, pipeline_step
from course_lib.planner.plan import Plan, schedule_named
from course_lib.planner.predicting import predict
from course_lib.planner.prediction import PredictedStep

Row = Mapping[str, str]

REQUIRED = ("id", "layers", "hidden", "heads")
DEFAULTS = {  # of a column that is empty or not there
    "kv_heads": "heads",
    "head_dim": "hidden / heads",
    "ffn": "4 * hidden; gated: 8/3 * hidden, up to a multiple of 256",
    "gated": "0",
    "vocab": "51200",
    "seq": "2048",
    "tied": "0 if gated, else 1",
    "experts": "0: a dense model",
    "active": "1",
    "expert_ffn": "ffn",
    "shared_ffn": "0",
    "dense_layers": "0",
    "gpu": "a100-80gb",
    "nodes": "as many as the ranks need",
    "gpus_per_node": "8",
    "dp": "1",
    "tp": "1",
    "pp": "1",
    "cp": "1",
    "ep": "1",
    "expert_tp": "tp",
    "chunks": "1",
    "micro_batch": "1",
    "num_micro_batches": "1",
    "zero": "0",
    "sequence_parallel": "0",
    "recompute": "none",
    "flash": "1",
    "precision": "bf16",
    "cluster": "the profile of the GPU",
    "schedule": "interleaved if chunks > 1, else 1f1b",
}
EXPERT_CELLS = ("active", "expert_ffn", "shared_ffn", "dense_layers")
TIMES = ("t_f_ms", "t_b_ms", "t_w_ms")
NOTHING = 1e-12  # seconds below it are what rounding leaves of differences
COLUMNS = (*REQUIRED, *DEFAULTS, *TIMES, "t_comm_ms")
RESULTS = (
    *("id", "step_s", "tokens_per_s_per_gpu", "mfu", "memory_gib", "fits", "compute_s", "tp_s"),
    *("ep_s", "bubble_s", "pp_s", "dp_s", "optimizer_s", "error"),
)


def read_table(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file by column.

    Raises: CourseError for a file that cannot be read, without rows, or with a wrong column
    """
    need = "a table of plans in CSV"
    text = read_text(path, need).removeprefix("\ufeff")
    try:
        lines = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        columns = [name.strip() for name in lines.fieldnames or ()]
        lines.fieldnames = columns
        rows = [row for row in lines if any(row.values())]
    except csv.Error as problem:
        raise CourseError(f"{path}: need {need}; line {lines.line_num}: {problem}.") from None
    if missing := [name for name in REQUIRED if name not in columns]:
        raise CourseError(
            f"{path}: need {need} with the columns {', '.join(REQUIRED)}; got none named "
            f"{', '.join(missing)}."
        )
    if twice := sorted({name for name in columns if columns.count(name) > 1}):
        raise CourseError(f"{path}: need each column once; got {', '.join(twice)} more often.")
    if not rows:
        raise CourseError(f"{path}: need {need} with at least one row below the header; got none.")
    return rows


def unknown_columns(rows: Sequence[Row]) -> list[str]:
    """Return the names of columns that no prediction reads."""
    return [name for name in rows[0] if name is not None and name not in COLUMNS]


def predict_table(rows: Sequence[Row]) -> Iterator[dict[str, str]]:
    """Yield for each row its prediction, by the columns of `RESULTS`."""
    for row in rows:
        found = dict.fromkeys(RESULTS, "") | {"id": (row.get("id") or "").strip()}
        try:
            if None in row:
                raise CourseError("need as many values as columns; got more. Try quotes.")
            yield found | _predict_row(row)
        except CourseError as error:
            yield found | {"error": str(error)}


def table_text(results: Sequence[Row]) -> str:
    """Return predictions as CSV."""
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, RESULTS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(results)
    return out.getvalue()


def _predict_row(row: Row) -> dict[str, str]:
    cells = _Cells(row)
    model, plan = _model(cells), _plan(cells)
    cluster = _cluster(cells, plan)
    step = predict(model, cluster, plan)
    if any(cells.text(name) for name in (*TIMES, "t_comm_ms")):
        return _with_times(cells, step)
    seconds = step.seconds
    seconds["compute_s"] += seconds.pop("launch_s")
    return _result(step, step.step_s, seconds)


def _with_times(cells: "_Cells", step: PredictedStep) -> dict[str, str]:
    """Return the prediction from measured times of a stage's micro-batch: F, B (input) and W."""
    plan = step.plan
    forward_s, input_s, weight_s = (cells.milliseconds(name) / 1000 for name in TIMES)
    message_s = cells.milliseconds("t_comm_ms", 0.0) / 1000
    p, m = plan.parallelism.pp, plan.num_micro_batches
    times = StepTimes([forward_s] * p, [input_s] * p, [weight_s] * p, message_s)
    found = pipeline_step(plan.schedule, m, times, plan.num_model_chunks)
    compute_s = m * (forward_s + input_s + weight_s)
    seconds = {
        "compute_s": compute_s,
        "tp_s": 0.0,  # within the measured times
        "ep_s": 0.0,
        "bubble_s": max(0.0, found.step_s - compute_s),
        "pp_s": found.messages_s,
        "dp_s": step.dp_s,
        "optimizer_s": step.optimizer_s,
    }
    return _result(step, sum(seconds.values()), seconds)


def _result(step: PredictedStep, step_s: float, seconds: Mapping[str, float]) -> dict[str, str]:
    plan, device = step.plan, step.cluster.device
    flop = train_step_flop(step.model, plan.global_batch, plan.seq)
    peak = device.peak("fp32" if plan.precision == "fp32" else "bf16")
    numbers = {
        "step_s": step_s,
        "tokens_per_s_per_gpu": plan.tokens / (step_s * plan.world_size),
        "mfu": mfu(flop, step_s, peak, world_size=plan.world_size),
        "memory_gib": step.memory_bytes / GIB,
        **seconds,
    }
    told = {name: f"{value if value > NOTHING else 0:.6g}" for name, value in numbers.items()}
    return told | {"fits": str(int(step.fits))}


def _model(cells: "_Cells") -> ModelSpec:
    gated, hidden = cells.switch("gated", False), cells.count("hidden")
    ffn = -(-8 * hidden // (3 * 256)) * 256 if gated else 4 * hidden
    ffn = cells.count("ffn", ffn)
    return ModelSpec(
        name=cells.text("id"),
        hidden=hidden,
        num_layers=cells.count("layers"),
        num_heads=cells.count("heads"),
        num_kv_heads=cells.count("kv_heads", cells.count("heads")),
        head_dim=cells.count("head_dim", 0) or None,
        ffn_hidden=ffn,
        vocab=cells.count("vocab", 51200),
        max_seq=cells.count("seq", 2048),
        tied=cells.switch("tied", not gated),
        gated=gated,  # as in Llama, with what goes with it; else as in GPT-2
        norm="rms" if gated else "layer",
        positions="rope" if gated else "learned",
        bias=not gated,
        experts=_experts(cells, ffn),
    )


def _experts(cells: "_Cells", ffn: int) -> Experts | None:
    """Return the experts of a row's model, in all its layers but the first `dense_layers`."""
    if not (count := cells.count("experts", 0)):
        if unused := [name for name in EXPERT_CELLS if cells.text(name)]:
            raise CourseError(f"experts: need their number with {', '.join(unused)}; got none.")
        return None
    return Experts(
        count=count,
        active=cells.count("active", 1),
        ffn_hidden=cells.count("expert_ffn", ffn),
        shared_hidden=cells.count("shared_ffn", 0),
        dense_layers=tuple(range(min(cells.count("dense_layers", 0), 10**5))),
    )


def _plan(cells: "_Cells") -> Plan:
    chunks = cells.count("chunks", 1)
    word = cells.text("schedule") or ("interleaved" if chunks > 1 else "1f1b")
    return Plan(
        parallelism=Parallelism(
            **{name: cells.count(name, 1) for name in ("dp", "tp", "pp", "cp", "ep")},
            expert_tp=cells.count("expert_tp", 0) or None,
            zero=cells.count("zero", 0),
            sequence_parallel=cells.switch("sequence_parallel", False),
        ),
        schedule=schedule_named(word),
        num_model_chunks=chunks,
        micro_batch=cells.count("micro_batch", 1),
        num_micro_batches=cells.count("num_micro_batches", 1),
        seq=cells.count("seq", 2048),
        recompute=cells.text("recompute").lower() or "none",
        flash=cells.switch("flash", True),
        precision=cells.text("precision").lower() or "bf16",
    )


def _cluster(cells: "_Cells", plan: Plan) -> Cluster:
    gpus_per_node = cells.count("gpus_per_node", 8)
    nodes = cells.count("nodes", max(1, -(-plan.world_size // max(1, gpus_per_node))))
    gpu = cells.text("gpu").lower() or "a100-80gb"
    cluster = cluster_for(gpu, nodes, gpus_per_node, cells.text("cluster"))
    if plan.world_size > cluster.num_gpus:
        raise CourseError(
            f"nodes: need nodes for the {plan.world_size} ranks of the plan; got {nodes} of "
            f"{cluster.gpus_per_node} GPUs. Try "
            f"nodes={-(-plan.world_size // cluster.gpus_per_node)}."
        )
    return cluster


class _Cells:
    """The cells of a row, read as what a column holds."""

    def __init__(self, row: Row) -> None:
        self._row = row

    def text(self, name: str) -> str:
        """Return a cell's text; nothing where the column is not there."""
        return (self._row.get(name) or "").strip()

    def count(self, name: str, default: int | None = None) -> int:
        """Return a whole number. Raises: CourseError"""
        text = self.text(name)
        if not text and default is not None:
            return default
        try:
            value = float(text)
            if value != int(value) or not 0 <= value < 10**12:
                raise ValueError
        except (ValueError, OverflowError):
            raise CourseError(f"{name}: need a whole number; got {text[:40]!r}.") from None
        return int(value)

    def switch(self, name: str, default: bool) -> bool:
        """Return whether a flag is set: 1 or true, 0 or false. Raises: CourseError"""
        text = self.text(name).lower()
        if text not in ("", "0", "1", "true", "false"):
            raise CourseError(f"{name}: need 0 or 1; got {text[:40]!r}.")
        return text in ("1", "true") if text else default

    def milliseconds(self, name: str, default: float | None = None) -> float:
        """Return a time. Raises: CourseError"""
        text = self.text(name)
        if not text and default is not None:
            return default
        try:
            value = float(text)
            if not 0 <= value < float("inf"):
                raise ValueError
        except ValueError:
            raise CourseError(
                f"{name}: need milliseconds, in {', '.join(TIMES)} alike; got {text[:40]!r}."
            ) from None
        return value
