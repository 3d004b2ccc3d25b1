"""`course plan`: a table in, a table out; the best plans, a page of them, and what runs one."""

import csv
import json

import pytest

from course_lib.cli import main
from course_lib.core.presets import MODELS
from course_lib.planner import cluster_names
from course_lib.planner.cluster import read_profile


@pytest.fixture
def plan(capsys):
    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(["plan", *map(str, arguments)])
        return ended.value.code, *capsys.readouterr()

    return run


def test_a_table_becomes_a_table(plan, tmp_path):
    rows, out = tmp_path / "rows.csv", tmp_path / "out.csv"
    rows.write_text("id,layers,hidden,heads,dp,mine\na,24,1024,16,8,x\nb,24,1024,7,8,y\n")
    code, said, warned = plan("--table", rows, "--out", out)
    assert (code, said) == (1, f"{out}: 1 of 2 plans predicted.\n")
    assert warned == f"{rows}: columns that no prediction reads: mine.\n"
    good, bad = csv.DictReader(out.read_text().splitlines())
    assert float(good["step_s"]) > 0
    assert good["error"] == ""
    assert "need hidden divisible by num_heads" in bad["error"]
    rows.write_text("id,layers,hidden,heads\na,24,1024,16\n")
    assert plan("--table", rows, "--out", out)[0] == 0


def test_what_cannot_be_read_or_written_is_one_sentence(plan, tmp_path):
    rows = tmp_path / "rows.csv"
    rows.write_text("id,layers,hidden,heads\na,24,1024,16\n")
    before = rows.read_text()
    for arguments, says in [
        (("--table", tmp_path / "none.csv"), "need a table of plans in CSV"),
        (("--table", rows, "--out", rows), "--out: need another file than the table"),
        (("--table", rows, "--out", tmp_path), "need a file that can be written"),
    ]:
        code, said, error = plan(*arguments)
        assert (code, said) == (1, "")
        assert says in error
        assert error.count("\n") == 1
    assert rows.read_text() == before


def test_the_best_plans_are_printed_with_why(plan):
    model = ("--model", "gpt2-medium", "--cluster", "selene-a100", "--global-batch-tokens", "64K")
    code, said, counted = plan(*model, "--seq", "1024", "--top", "3")
    assert code == 0
    assert "64 sequences of 1024 tokens on 8 GPUs (a100-80)" in counted
    assert "MFU" in said
    code, said, _ = plan(*model, "--seq", "1024", "--json", "--top", "2")
    first, second = json.loads(said)
    assert first["step_s"] <= second["step_s"]
    assert first["dp"] * first["tp"] * first["pp"] == 8
    assert sum(first["seconds"].values()) == pytest.approx(first["step_s"])
    code, said, _ = plan(*model, "--seq", "1024", "--explain", "2")
    assert "the optimizer's step" in said
    assert "100 %" in said
    head = said.splitlines()[1]
    assert head.startswith(f"{second['step_s']:.2f} s per step, ")
    assert (
        f"{second['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU, MFU {100 * second['mfu']:.0f} %"
        in head
    )
    assert f"{second['mfu'] * second['step_s']:.3f} " in said
    assert "at the GPU's peak" in said
    assert "no pipeline" in said.splitlines()[0]
    assert second["pp"] == 1
    assert "0.000" not in said
    assert "0 B" not in said
    assert "Times assume the constants of Megatron-LM" in said
    assert "the median error of the predicted step is 4.2 %" in " ".join(said.split())


def test_the_table_says_what_its_words_mean_and_how_far_to_trust_it(plan):
    model = ("--model", "llama2-13b", "--cluster", "selene-a100", "--nodes", "4")
    _, said, _ = plan(*model, "--global-batch-tokens", "2M", "--top", "4")
    words = " ".join(said.split())
    assert "zb-h1: zero-bubble schedule" in words
    assert "cannot run plans 1, 2 and 3. The time of plan 1 is optimistic for FSDP" in words
    assert "The first 3 of these 4 plans are within that of plan 1" in words
    assert "the next with more room is plan 2: 39.1 GiB" in words
    code, as_json, _ = plan(*model, "--global-batch-tokens", "2M", "--top", "1", "--json")
    assert code == 0
    assert len(json.loads(as_json)) == 1


def test_a_plan_takes_one_line_whose_words_are_explained(plan, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    model = ("--model", "llama2-13b", "--cluster", "selene-a100", "--nodes", "4")
    _, said, _ = plan(*model, "--global-batch-tokens", "2M")
    table, _, notes = said.partition("\n\n")
    assert len(table.splitlines()) == 11  # the header and ten plans
    assert len(said.splitlines()) < 40
    notes = " ".join(notes.split())
    rows = " ".join(table.split())
    for word in ("zero1", "zero3", "sp", "chunks", "recompute full", "interleaved", "1f1b"):
        assert (word in rows.replace(",", "")) == (f"{word}:" in notes), word


def test_the_help_says_that_a_table_is_predicted_by_closed_forms(plan):
    assert "a table is predicted by closed forms" in " ".join(plan("--help")[1].split())


GPT2_CONFIG = {
    **{"model_type": "gpt2", "n_embd": 1024, "n_layer": 24, "n_head": 16},
    **{"n_positions": 1024, "n_inner": None, "vocab_size": 50257},
}
LLAMA_CONFIG = {
    **{"model_type": "llama", "hidden_size": 5120, "num_hidden_layers": 40},
    **{"num_attention_heads": 40, "intermediate_size": 13824, "vocab_size": 32000},
    "max_position_embeddings": 4096,
}


@pytest.mark.parametrize(
    ("config", "preset"), [(GPT2_CONFIG, "gpt2-medium"), (LLAMA_CONFIG, "llama2-13b")]
)
def test_a_config_json_is_planned_like_the_preset_of_its_sizes(plan, tmp_path, config, preset):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    rest = ("--cluster", "selene-a100", "--nodes", "2", "--global-batch-tokens", "64K")
    rest = (*rest, "--seq", "1024", "--json", "--top", "3")
    code, said, _ = plan("--model", path, *rest)
    assert code == 0
    assert json.loads(said) == json.loads(plan("--model", preset, *rest)[1])
    code, _, error = plan("--model", tmp_path / "none.json", *rest)
    assert code == 1
    assert "need a config.json" in error


def test_more_tokens_than_learned_positions_are_refused(plan):
    code, _, error = plan("--model", "gpt2-medium", "--cluster", "selene-a100", "--seq", "4096")
    assert code == 1
    assert "--seq: need at most 1024, the learned positions of gpt2-medium; got 4096" in error
    assert error.endswith("Try --seq 1024.\n")


def test_the_presets_and_the_clusters_are_listed(plan, monkeypatch):
    code, said, _ = plan("--model", "list")
    assert code == 0
    assert all(f"{name} " in said for name in MODELS)
    monkeypatch.setenv("COLUMNS", "200")
    models, _, words = " ".join(plan("--help")[1].split()).partition("A profile, with")
    assert "--model list" in models
    for name in cluster_names():
        outside = read_profile(name).outside.bytes_per_s / 1e9
        assert f"{outside:g} GB/s" in words.partition(name)[2][:110]


SMALL = (
    *("--model", "gpt2-medium", "--cluster", "selene-a100"),
    *("--global-batch-tokens", "64K", "--seq", "1024"),
)


def test_the_table_is_never_cut_whatever_the_terminal(plan, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    _, said, _ = plan(*SMALL, "--top", "3")
    assert "…" not in said
    assert said.count("GiB") == 3
    assert "tokens/s/GPU" in said


def test_emit_writes_what_runs_the_chosen_plan(plan, tmp_path):
    folder = tmp_path / "runs" / "plan"
    code, said, told = plan(*SMALL, "--json", "--top", "2", "--explain", "2", "--emit", folder)
    assert code == 0
    second = json.loads(said)[1]
    written = {path.name for path in folder.iterdir()}
    assert {"plan.md", "course_train.args", "course_train.sbatch"} <= written
    assert told.count(": written.") == len(written)
    mesh = f"pp={second['pp']},dp={second['dp']},tp={second['tp']}"
    assert f"--mesh {mesh}\n" in (folder / "course_train.args").read_text()
    before = (folder / "plan.md").read_text()
    code, _, told = plan(*SMALL, "--emit", folder)
    assert code == 1
    assert "need a folder without the files of a plan; got one with course_train.args" in told
    assert (folder / "plan.md").read_text() == before


def test_html_writes_one_page_with_table_and_pictures(plan, tmp_path):
    path = tmp_path / "plans.html"
    code, said, told = plan(*SMALL, "--top", "2", "--html", path)
    assert code == 0
    assert f"{path}: written.\n" in told
    page = path.read_text()
    assert page.count("<tr>") == 3
    assert page.count('src="data:image/png;base64,') == 4  # all bills, all plans, and two bills
    assert all('alt="' in image for image in page.split("<img")[1:])
    assert "://" not in page  # self-contained
    rows = [line for line in said.splitlines() if line[:1].isdecimal() and "GiB" in line]
    assert len(rows) == 2
    assert all(row.split("  ")[1].strip() in page for row in rows)
    assert "<p>Times assume the constants of Megatron-LM of 2021 and 2022" in page
    assert "<p>Measured: the median error" in page
    plan(*SMALL, "--top", "5", "--explain", "5", "--html", path)
    headings = [part[:6] for part in path.read_text().split("<h2>")[3:]]
    assert headings == ["Plan 1", "Plan 2", "Plan 3", "Plan 5"]
    _, _, told = plan(*SMALL, "--top", "1", "--html", path)
    assert f"{path}: written in place of an older file.\n" in told
    assert path.read_text().count("<tr>") == 2


def test_a_place_that_cannot_be_written_is_said_before_the_search(plan, tmp_path):
    code, said, told = plan(*SMALL, "--html", tmp_path)
    assert (code, said) == (1, "")
    assert told.startswith(f"{tmp_path}: need a file that can be written")
    (tmp_path / "file").write_text("")
    code, _, told = plan(*SMALL, "--emit", tmp_path / "file" / "plan")
    assert code == 1
    assert "need a file that can be written" in told


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--table", "rows.csv", "--html", "page.html"), "--html: need --model and --cluster"),
        (("--table", "rows.csv", "--emit", "folder"), "--emit: need --model and --cluster"),
        ((), "need either --model and --cluster, or --table"),
        (("--model", "llama-8b"), "need either --model and --cluster, or --table"),
        (("--model", "llama-8b", "--cluster", "mine"), "cluster: need one of"),
        (("--model", "llama-405b", "--cluster", "selene-a100"), "plans of llama-405b fits into 8"),
        (
            ("--model", "llama-8b", "--cluster", "hf-h100", "--global-batch-tokens", "5000"),
            "need a multiple of the 4096 tokens of a sequence; got 5000. Try 4096",
        ),
        (
            (
                *("--model", "llama-70b", "--cluster", "hf-h100", "--nodes", "3"),
                *("--global-batch-tokens", "3840K", "--explain", "100"),
            ),
            "--explain: need a plan from 1 to",
        ),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(plan, arguments, says):
    code, said, error = plan(*arguments)
    assert (code, said) == (1, "")
    assert says in error
