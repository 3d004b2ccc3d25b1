"""`course plan`: predict plans of a model on a cluster, and choose among them."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from course_lib.core import CourseError
from course_lib.core.files import check_result_path, write_result
from course_lib.core.plain_text import one_line
from course_lib.core.units import GIB, format_bytes
from course_lib.jobs.commands import plain_table

if TYPE_CHECKING:  # imported where they are used: `course --help` should not wait for them
    from course_lib.planner import PredictedStep, SearchResult

EPILOG = (
    "A row of --table is a plan. The columns id, layers, hidden and heads are required; kv_heads, "
    "head_dim, ffn, gated, vocab, seq, tied, experts, active, expert_ffn, shared_ffn, "
    "dense_layers, gpu, nodes, gpus_per_node, dp, tp, pp, cp, ep, expert_tp, chunks, micro_batch, "
    "num_micro_batches, zero, sequence_parallel, recompute, flash, precision, cluster and schedule "
    "have defaults where they are empty. t_f_ms, t_b_ms, t_w_ms and "
    "t_comm_ms are measured times of a micro-batch, which replace predicted ones. With pp above "
    "1, the seconds of a plan differ from those in the ranked list, mostly by less than 1 %: a "
    "table is predicted by closed forms, and the list is simulated. docs/planner.md says how "
    "accurate the predictions are."
)
UNITS = {"K": 2**10, "M": 2**20}
WIDE = 132  # columns of the table of plans: in a narrow terminal its lines wrap, and none is cut


def add_plan_command(app: typer.Typer) -> None:
    """Add `plan` to the command line."""
    app.command(epilog=EPILOG)(plan)


ModelName = Annotated[
    str,
    typer.Option(
        "--model",
        help="A preset such as llama-70b, or the path of a Hugging Face config.json "
        "(docs/models.md says which). --model list prints the presets.",
    ),
]
ClusterName = Annotated[
    str,
    typer.Option(
        "--cluster",
        help="A profile, with the speed between nodes per GPU: selene-a100 and vtrain-a100 (nodes "
        "of 8 A100 80 GB, NVLink; 22 GB/s), hf-h100 (8 H100, NVLink; 20 GB/s), torchtitan-h100 (8 "
        "H100, NVLink; 45 GB/s), dgx-h100 (the same, 45 GB/s, as fitted on models with experts), "
        "dgx-h200 and dgx-b200 (8 H200 or B200; 45 GB/s), gb200-nvl72 (64 of a rack's 72 GB200, "
        "NVLink; 45 GB/s), a6000-pcie (4 A6000, PCIe; 1.2 GB/s), laptop (4 processes on a CPU; 1 "
        "GB/s). Or the links.json that `course study` measured.",
    ),
]
NodesOption = Annotated[int, typer.Option("--nodes", min=1, help="Nodes of the cluster.")]
BatchTokens = Annotated[
    str,
    typer.Option(
        "--global-batch-tokens", metavar="TOKENS", help="Tokens per step; 4M is 4 * 2**20."
    ),
]
SeqOption = Annotated[int, typer.Option("--seq", min=1, help="Tokens per sequence.")]
TopOption = Annotated[int, typer.Option("--top", min=1, max=100, help="Number of plans to print.")]
ExplainOption = Annotated[
    int,
    typer.Option(
        "--explain",
        metavar="N",
        min=0,
        max=100,
        help="Show the bill of the N-th plan: its time by cause, and its memory.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the plans as JSON.")]
HtmlOption = Annotated[
    Path | None,
    typer.Option(
        "--html", metavar="FILE", help="Write a page with the table, and the bills as pictures."
    ),
]
EmitOption = Annotated[
    Path | None,
    typer.Option(
        "--emit",
        metavar="FOLDER",
        help="Write the files that run the first plan, or the plan of --explain: batch scripts, "
        "arguments of course_lib.train, options of torchtitan and Megatron-LM.",
    ),
]
TableOption = Annotated[
    Path | None,
    typer.Option("--table", metavar="CSV", help="Predict the plans of this table instead."),
]
PredictionsOption = Annotated[
    Path, typer.Option("--out", metavar="CSV", help="With --table: file for the predictions.")
]


def plan(
    model: ModelName = "",
    cluster: ClusterName = "",
    nodes: NodesOption = 1,
    batch: BatchTokens = "4M",
    seq: SeqOption = 4096,
    top: TopOption = 10,
    explain: ExplainOption = 0,
    as_json: JsonOption = False,
    html: HtmlOption = None,
    emit: EmitOption = None,
    table: TableOption = None,
    out: PredictionsOption = Path("predictions.csv"),
) -> None:
    """Print the best plans for a model on a cluster; or predict a table of plans.

    \b
    course plan --model llama-70b --cluster hf-h100 --nodes 8 --global-batch-tokens 4M
    course plan --model llama-8b --cluster selene-a100 --nodes 4 --explain 1
    course plan --model llama-8b --cluster selene-a100 --nodes 4 --html plans.html --emit runs/8b
    course plan --table rows.csv --out predictions.csv

    A row of the table that is not a valid plan gets a sentence in the column `error`. The exit
    code is 0 if all rows are valid, otherwise 1.
    """
    if model == "list":
        raise typer.Exit(list_models())
    if (table is None) != bool(model and cluster):
        raise CourseError(
            "course plan: need either --model and --cluster, or --table. "
            "Try course plan --model llama-8b --cluster hf-h100."
        )
    if table is not None:
        if option := "--html" if html else "--emit" if emit else "":
            raise CourseError(f"{option}: need --model and --cluster; got --table.")
        raise typer.Exit(_predict_table(table, out))
    check_result_path(html)
    found = _search(model, cluster, nodes, batch, seq)
    best = found.best(max(top, explain))
    if explain > len(best):
        raise CourseError(f"--explain: need a plan from 1 to {len(best)}; got {explain}.")
    _print_best(found, best, (top, explain), as_json)
    if html:
        _write_html(found, best, (top, explain), html)
    if emit:
        _emit(best[max(explain, 1) - 1], emit)


def list_models() -> int:
    """Print the presets; return the exit code."""
    from course_lib.core.presets import MODELS
    from course_lib.cost.params import count_params

    rows = plain_table("--model", "parameters", "layers", "hidden", "heads", "vocabulary")
    for name, spec in MODELS.items():
        sizes = spec.num_layers, spec.hidden, spec.num_heads, spec.vocab
        rows.add_row(name, f"{count_params(spec) / 1e6:,.1f} M", *map(str, sizes))
    Console().print(rows)
    return 0


def _search(model: str, cluster: str, nodes: int, batch: str, seq: int) -> "SearchResult":
    from course_lib.core.presets import find_model
    from course_lib.hub.config import read_config
    from course_lib.planner import find_cluster
    from course_lib.planner.searching import search

    spec = read_config(model) if model.endswith(".json") else find_model(model)
    if spec.positions == "learned" and seq > spec.max_seq:
        raise CourseError(
            f"--seq: need at most {spec.max_seq}, the learned positions of {spec.name}; got {seq}. "
            f"Try --seq {spec.max_seq}."
        )
    machines = find_cluster(cluster, nodes)
    global_batch = _sequences(batch, seq)
    found = search(spec, machines, global_batch, seq=seq)
    if not found.steps:
        raise CourseError(
            f"course plan: none of {found.num_plans:,} plans of {spec.name} fits into "
            f"{machines.num_gpus} GPUs of {format_bytes(machines.usable_bytes)}. Try more --nodes."
        )
    print(
        f"{len(found.steps):,} of {found.num_plans:,} plans fit; {global_batch} sequences of {seq} "
        f"tokens on {machines.num_gpus} GPUs ({machines.device.name}).",
        file=sys.stderr,
    )
    return found


def _write_html(
    found: "SearchResult", best: "list[PredictedStep]", asked: tuple[int, int], path: Path
) -> None:
    from course_lib.planner.html_report import write_page

    replaced = " in place of an older file" if path.is_file() else ""
    top, explain = asked
    write_page(found, best[: max(top, explain)], path, explain)
    print(f"{path}: written{replaced}.", file=sys.stderr)


def _emit(step: "PredictedStep", folder: Path) -> None:
    from course_lib.planner.emit import emit

    for path in emit(step, folder):
        print(f"{path}: written.", file=sys.stderr)


def _sequences(batch: str, seq: int) -> int:
    """Return the sequences of a batch of tokens such as 4M. Raises: CourseError"""
    unit = UNITS.get(batch[-1:].upper(), 1)
    try:
        tokens = int(batch[:-1] if unit > 1 else batch) * unit
    except ValueError:
        tokens = 0
    if tokens < seq or tokens % seq:
        raise CourseError(
            f"--global-batch-tokens: need a multiple of the {seq} tokens of a sequence; got "
            f"{batch}. Try {max(1, round(tokens / seq)) * seq}."
        )
    return tokens // seq


def _print_best(
    found: "SearchResult", steps: "list[PredictedStep]", asked: tuple[int, int], as_json: bool
) -> None:
    from course_lib.planner.notes import table_notes
    from course_lib.planner.prediction import HEADERS

    top, explain = asked
    if as_json:
        print(json.dumps([_facts(step) for step in steps[:top]], indent=1))
        return
    if explain:
        _print_bill(steps[explain - 1])
        return
    rows = plain_table("", *HEADERS)
    for number, step in enumerate(steps[:top], 1):
        rows.add_row(str(number), *step.cells)
    console = Console()
    Console(width=max(console.width, WIDE)).print(rows)
    for note in table_notes(steps[:top], found.steps):
        console.print("", note, sep="\n", highlight=False, markup=False)


def _print_bill(step: "PredictedStep") -> None:
    from course_lib.planner import CAUSES
    from course_lib.planner.notes import plan_notes
    from course_lib.planner.prediction import AT_PEAK

    where = f"{step.cluster.num_gpus} {step.cluster.device.name}"
    print(f"{step.model.name} on {where}: {step.plan}; {step.plan.pipeline_words}")
    print(
        f"{step.step_s:.2f} s per step, {step.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, "
        f"MFU {100 * step.mfu:.0f} %"
    )
    bill = plain_table("seconds", "share", "of what")
    for name, seconds in step.shown_seconds.items():
        bill.add_row(f"{seconds:.3f}", f"{100 * seconds / step.step_s:.1f} %", CAUSES[name])
    bill.add_row(f"{step.step_s:.3f}", "100 %", f"a step: {step.bound}")
    bill.add_row(f"{step.peak_s:.3f}", f"{100 * step.mfu:.1f} %", AT_PEAK)
    memory = plain_table("memory", "of what, on the fullest rank")
    for kind, num_bytes in step.memory.items():
        if num_bytes:
            memory.add_row(format_bytes(num_bytes), kind)
    memory.add_row(
        format_bytes(step.memory_bytes), f"of {format_bytes(step.cluster.usable_bytes)} usable"
    )
    console = Console()
    console.print(bill, "", memory)
    for note in plan_notes(step):
        console.print("", note, sep="\n", highlight=False, markup=False)


def _facts(step: "PredictedStep") -> dict[str, Any]:
    plan, axes = step.plan, step.plan.parallelism
    return {
        **{name: getattr(axes, name) for name in ("dp", "tp", "pp", "cp", "ep", "zero")},
        "expert_tp": axes.expert_tensor,
        "sequence_parallel": axes.sequence_parallel,
        "schedule": plan.schedule,
        "chunks": plan.num_model_chunks,
        "micro_batch": plan.micro_batch,
        "num_micro_batches": plan.num_micro_batches,
        "recompute": plan.recompute,
        "step_s": step.step_s,
        "tokens_per_s_per_gpu": step.tokens_per_s_per_gpu,
        "mfu": step.mfu,
        "memory_gib": step.memory_bytes / GIB,
        "seconds": step.seconds,
        "bound": step.bound,
    }


def _predict_table(table: Path, out: Path) -> int:
    """Predict the plans of a table; return the exit code."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

    from course_lib.planner.table import predict_table, read_table, table_text, unknown_columns
    from course_lib.train.progress import terminal_bar

    rows = read_table(table)
    if out.exists() and out.samefile(table):
        raise CourseError(f"--out: need another file than the table; got {out}.")
    check_result_path(out)
    if unknown := unknown_columns(rows):
        names = ", ".join(map(one_line, unknown))
        print(f"{table}: columns that no prediction reads: {names}.", file=sys.stderr)
    columns = TextColumn("predicted"), BarColumn(), MofNCompleteColumn()
    with terminal_bar(*columns) as bar:
        found = list(bar.track(predict_table(rows), total=len(rows)))
    write_result(out, table_text(found))
    wrong = sum(bool(row["error"]) for row in found)
    print(f"{out}: {len(found) - wrong} of {len(found)} plans predicted.")
    return 1 if wrong else 0
