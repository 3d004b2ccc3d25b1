"""The report: tables and pictures of made experiments, of the recorded sample, and of a folder."""

import html
import io
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer import Typer
from typer.testing import CliRunner

from course_lib.core import CourseError, find_model
from course_lib.cost.flops import train_step_flop
from course_lib.cost.params import count_params
from course_lib.display.gpu_links import links
from course_lib.display.losses import descents, losses
from course_lib.display.paired_bars import Pair, paired_bars
from course_lib.scaling_study import pictures as drawing
from course_lib.scaling_study.aggregate import Experiment
from course_lib.scaling_study.commands import report
from course_lib.scaling_study.curves import agreeing_digits, smooth, spread, steps_to
from course_lib.scaling_study.html_report import write_page
from course_lib.scaling_study.pictures import pictures, topology
from course_lib.scaling_study.plan import find_study
from course_lib.scaling_study.report import HEADERS, cells_of, notes, style_of, tables
from course_lib.scaling_study.results import (
    Results,
    in_order,
    read_results,
    sample_results,
    save_results,
)
from course_lib.scaling_study.study_run import StudyRun

MIB = 2**20
ALONE = StudyRun(spec=find_model("small"), global_batch=16, seq=64, steps=12)
LAPTOP = {"usable_cores": 2, "memory_bytes": 2**34, "torch": "2.13.0", "gpu_links": []}
MATRIX = [["X", "NV12", "SYS"], ["NV12", "X", "PIX"], ["SYS", "PIX", "X"]]
CARDS = {"usable_gpus": 3, "gpus": [{"name": "NVIDIA A100"}] * 3, "gpu_links": MATRIX}


def made(run, time_s, peak, *, machine=LAPTOP, busy=0.95, loss=7.0):
    """Nine steps after the warm-up, in so many seconds."""
    return Experiment(
        run=run,
        num_steps=9,
        time_s=time_s,
        num_tokens=9 * run.tokens_a_step,
        mean_bytes=peak / 2,
        sum_bytes=peak / 2 * run.ranks,
        peak_bytes=peak,
        utilisation=busy,
        held={"params": peak // 8, "grads": peak // 8, "optim_state": peak // (4 * run.ranks)},
        losses=(8.0, loss),
        machine=machine,
    )


EXPERIMENTS = (
    made(replace(ALONE, ranks=2, pp=2, num_micro_batches=8), 4.5, 40 * MIB),
    made(replace(ALONE, strategy="zero1", ranks=2), 6.0, 50 * MIB, loss=7.0001),
    made(replace(ALONE, strategy="ddp", ranks=4), 10.8, 80 * MIB),
    made(replace(ALONE, strategy="ddp", ranks=2), 4.5, 80 * MIB),
    made(ALONE, 9.0, 100 * MIB),
)
RESULTS = Results(experiments=EXPERIMENTS)


def printed(results):
    console = Console(width=220, file=io.StringIO())
    for table in tables(results):
        console.print(table)
    return console.file.getvalue()


def test_a_line_says_what_was_measured_and_what_it_means():
    rows = [cells_of(result) for result in in_order(RESULTS.judged())]
    assert [row[:2] for row in rows] == [
        ["single", "1"],
        ["pp, m = 8", "2"],
        ["zero1", "2"],
        ["ddp", "2"],
        ["ddp", "4"],
    ]
    found = [dict(zip(HEADERS, row, strict=True)) for row in rows]
    (single, _, zero1, _, ddp4) = found
    assert single["step"] == "1 s"
    assert single["tokens/s"] == "1,024"
    assert (single["speed-up"], single["efficiency"]) == ("1.00", "100 %")
    assert (zero1["speed-up"], zero1["efficiency"]) == ("1.50", "75 %")
    assert zero1["peak per rank"] == "50 MiB"
    flop = train_step_flop(ALONE.spec, 16, 64)
    assert float(single["TFLOP/s"]) == pytest.approx(flop / 1e12, rel=0.01)
    assert float(zero1["TFLOP/s"]) == pytest.approx(flop / (6 / 9) / 2 / 1e12, rel=0.01)
    assert (zero1["peak factor"], zero1["utilized"], zero1["last loss"]) == (
        "0.50",
        "95 %",
        "7.0001",
    )
    assert (ddp4["speed-up"], ddp4["efficiency"]) == ("0.83", "21 %")
    assert [style_of(result) for result in in_order(RESULTS.judged())] == [
        "",
        "green",
        "",
        "green",
        "red",
    ]


def test_the_prediction_stands_beside_and_starts_from_the_run_of_one_rank():
    by_label = {(r.experiment.run.label, r.experiment.run.ranks): r for r in RESULTS.judged()}
    assert by_label["single", 1].prediction.step_s == pytest.approx(1.0)
    assert cells_of(by_label["single", 1])[3] == ""
    two = by_label["ddp", 2].prediction
    assert two.step_s == pytest.approx(0.5, rel=0.1)  # and some communication
    four = by_label["ddp", 4].prediction  # two cores cannot do more
    assert four.compute_s == pytest.approx(two.compute_s)


def test_the_tables_have_a_title_for_each_model_and_batch():
    text = printed(RESULTS)
    assert "small (16 x 64 tokens): speed" in text
    assert "small (16 x 64 tokens): memory, utilization, loss" in text
    assert len(re.findall("^ddp", text, re.MULTILINE)) == 2 * 2
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    other = made(replace(ALONE, num_micro_batches=4), 9.0, MIB)
    assert "tokens in 4 micro-batches)" in printed(Results(experiments=(*EXPERIMENTS, other)))


def test_without_a_run_of_one_rank_there_are_no_factors():
    several = Results(experiments=EXPERIMENTS[:4])
    assert all(result.comparison is None for result in several.judged())
    assert "4 runs have no run of one rank beside them" in " ".join(notes(several))
    assert [alt for _, alt in pictures(several) if "efficiency" in alt] == []


def test_a_machine_that_was_busy_is_told():
    busy = made(ALONE, 9.0, MIB, busy=0.17)
    assert "had 17 % of a core" in " ".join(notes(Results(experiments=(busy,))))
    assert "of a core" not in " ".join(notes(RESULTS))


DRAWN = (
    "small (16 x 64 tokens): pp, m = 8, 2 ranks is the fastest, 2,048 tokens/s.",
    "small (16 x 64 tokens): 2 of 4 runs reach an efficiency of 80 %.",
    "small (16 x 64 tokens): pp, m = 8, 2 ranks has the lowest peak, 40 MiB per rank.",
    "small (16 x 64 tokens): pp, m = 8, 2 ranks keeps the least, 15 MiB of states per rank.",
    "The losses of 5 runs of small (16 x 64 tokens) are at most 0.0001 apart.",
)


def test_every_picture_says_its_finding():
    assert tuple(alt for _, alt in pictures(RESULTS)) == DRAWN


def test_bars_are_as_long_as_what_was_measured_and_predicted():
    figure, _ = drawing.throughput(RESULTS.judged(), "it")
    axes = figure.axes[0]
    lengths = [bar.get_width() for bar in axes.patches]
    assert lengths[0] == pytest.approx(1.024)  # alone, and nothing predicted
    assert lengths[1] == pytest.approx(2.048)
    assert len(lengths) == 1 + 2 * 4
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels[0] == "single, 1 rank"
    assert labels[-1] == "ddp, 4 ranks"
    ideals = [line.get_xdata()[0] for line in axes.lines]
    assert ideals == pytest.approx([1.024, 2.048, 2.048, 2.048, 4.096])


def test_the_states_of_each_run_stand_over_those_of_the_formula():
    figure, _ = drawing.states(RESULTS.judged(), "it")
    labels = [label.get_text().strip("\u200b") for label in figure.axes[0].get_yticklabels()]
    assert labels[:3] == ["single, 1 rank", "formula", "pp, m = 8, 2 ranks"]
    assert len(labels) == 2 * len(EXPERIMENTS)
    whole = [bar for bar in figure.axes[0].patches if round(bar.get_y() + 0.33) == 1]
    params = count_params(ALONE.spec)
    assert sum(bar.get_width() for bar in whole) == pytest.approx(16 * params / MIB)


def test_the_links_of_the_machine_are_drawn_where_there_are_some():
    assert topology(RESULTS) is None
    cards = Results(experiments=(made(ALONE, 9.0, MIB, machine=CARDS),))
    figure, alt = topology(cards)
    assert alt == "3 GPUs reach each other over NV12 and PIX and SYS."
    cells = [text.get_text() for text in figure.axes[0].texts]
    assert cells == [cell for row in MATRIX for cell in row]


def test_a_matrix_says_whether_some_links_are_closer_than_others():
    _, alt = drawing.link_matrix(MATRIX, "This machine")
    assert alt.startswith("This machine: 3 GPUs, some linked more closely than others; rows: X ")
    _, alt = drawing.link_matrix([["X", "NV18"], ["NV18", "X"]], "This machine")
    assert alt == "This machine: 2 GPUs, all over NV18; rows: X NV18 | NV18 X"


def test_the_first_step_is_compared_with_the_median_one():
    def record(rank, world_size, ends):
        steps = [{"start_s": end - 1.0, "end_s": end + extra} for end, extra in ends]
        return SimpleNamespace(rank=rank, world_size=world_size, steps=steps)

    slow = [(1.0, 2.0), (5.0, 0.0), (7.0, 0.5)]
    records = [record(0, 2, slow), record(1, 2, slow), record(0, 1, slow)]
    figure, alt = drawing.step_times(records)
    assert alt.startswith("One rank: the first step takes 2.0 times as long as the median step")
    dots = [line.get_ydata() for line in figure.axes[0].lines if len(line.get_xdata()) == 3]
    assert list(dots[-1]) == pytest.approx([3000, 1000, 1500])


def test_a_wrong_run_agrees_to_few_digits():
    assert agreeing_digits([2.0, 2.02], [2.0, 2.0]) == pytest.approx([8.0, 2.0], abs=1e-3)


def test_pictures_without_anything_to_draw_are_refused():
    with pytest.raises(CourseError, match="paired_bars: need a number"):
        paired_bars([Pair(name="x")], "nothing", x_label="x")
    with pytest.raises(CourseError, match="losses: need one curve"):
        losses({}, "nothing")
    with pytest.raises(CourseError, match="links: need a row and a column"):
        links([["X", "SYS"]], "nothing")
    with pytest.raises(
        CourseError,
        match="descents: need 1 to 4 first and 1 to 3 second",
    ):
        descents({}, "nothing", target=1.0, target_words="")


def test_curves_are_smoothed_compared_and_followed_down():
    assert spread([[1.0, 2.0], [1.5, 2.1, 9.0]]) == 0.5
    assert smooth([4.0, 2.0]) == [4.0, 3.0]
    assert smooth(range(30))[-1] == sum(range(20, 30)) / 10
    assert steps_to(2.0, [3.0, 2.0, 1.0]) == 2
    assert steps_to(0.5, [3.0, 2.0, 1.0]) is None


def falling(**changes):
    """An experiment whose loss comes down twice as fast with twice the batch."""
    run = StudyRun(spec=find_model("tiny"), seq=8, steps=40, **{"global_batch": 4, **changes})
    pace = run.global_batch / 4 * (2 if run.warmup == 4 else 1)
    losses = tuple(max(9.0 - 0.1 * pace * n, 0.5) for n in range(run.steps))
    return replace(RESULTS.experiments[0], run=run, losses=losses)


def test_who_is_down_first_is_told_and_drawn():
    runs = [falling(warmup=20), falling(warmup=20, ranks=2, tp=2)]
    runs += [falling(warmup=steps, ranks=2, global_batch=8, strategy="ddp") for steps in (20, 4)]
    figure, alt = drawing.convergence(Results(experiments=tuple(runs)))
    fast = smooth(runs[-1].losses)
    (first, *_) = [n for n, loss in enumerate(fast, 1) if loss <= smooth(runs[0].losses)[-1]]
    assert alt == (
        f"Batch 8, warm-up 4: {first} steps to the loss that batch 4, warm-up 20 reaches in 40."
    )
    lines = [line for line in figure.axes[0].lines if len(line.get_xdata()) == 40]
    assert list(lines[0].get_ydata()) == smooth(runs[0].losses)
    assert len(lines) == 3
    assert drawing.convergence(RESULTS) is None


def test_the_page_holds_every_line_and_picture_and_needs_nothing_else(tmp_path):
    page = write_page(RESULTS, tmp_path / "a" / "page.html").read_text()
    for alt in DRAWN:
        assert f'alt="{html.escape(alt)}"' in page
    for result in RESULTS.judged():
        assert all(f">{html.escape(cell)}</t" in page for cell in cells_of(result))
    assert set(re.findall(r'<img [^>]*src="([^,]*),', page)) == {"data:image/png;base64"}
    assert "://" not in page


def test_results_survive_a_file(tmp_path):
    path = save_results(RESULTS, tmp_path / "x" / "results.json", "Made by hand.")
    back = read_results(path)
    assert back.made == "Made by hand."
    for one, other in zip(back.experiments, EXPERIMENTS, strict=True):
        assert one.run == other.run
        assert one.time_s == other.time_s
        assert printed(back) == printed(RESULTS)
    path.write_text('{"experiments": 3}')
    with pytest.raises(CourseError, match="need run records in a folder, or results in a file"):
        read_results(path)


def test_a_folder_without_a_whole_run_is_one_sentence(tmp_path):
    with pytest.raises(CourseError, match="need the records of a whole run below"):
        read_results(tmp_path)


def test_the_recorded_sample_is_the_whole_laptop_study_and_says_where_it_was_made():
    sample = sample_results()
    assert {one.run for one in sample.experiments} == set(find_study("laptop").runs)
    assert re.search(r"2 cores", sample.made)
    assert notes(sample)[0] == sample.made
    for result in sample.judged():
        assert result.baseline is not None
        assert result.experiment.losses == pytest.approx(result.baseline.losses, rel=1e-4)
        assert result.experiment.num_tokens == 9 * 16 * 64
        assert 1 / 1.35 < result.prediction.step_s / result.experiment.step_s < 1.35
    assert len(list(pictures(sample))) > 10


def test_the_recorded_convergence_is_faster_with_a_large_batch_and_a_short_warm_up():
    sample = sample_results("convergence")
    assert {one.run for one in sample.experiments} == set(find_study("convergence").runs)
    losses_of = {(one.run.label, one.run.warmup): one.losses for one in sample.experiments}
    assert losses_of["tp", 100] == pytest.approx(losses_of["single", 100], rel=1e-4)
    assert (
        "steps to the loss that batch 8, warm-up 100 reaches in 150"
        in drawing.convergence(sample)[1]
    )


def test_the_command_prints_tables_and_writes_the_page(tmp_path):
    app = Typer()
    app.command()(report)
    path = save_results(RESULTS, tmp_path / "results.json", "Made by hand.")
    page = tmp_path / "page.html"
    done = CliRunner(env={"COLUMNS": "220"}).invoke(app, [str(path), "--html", str(page)])
    assert done.exit_code == 0
    assert "zero1" in done.output
    assert "Made by hand." in done.output
    assert page.is_file()
