"""Every command of the README is run here as it stands, with arguments that keep it short."""

import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from PIL import Image

from docs.screenshot import VIEWPORT
from tests.terminal import ROOT, commands, run, started

README = (ROOT / "README.md").read_text()
WALK = ("course submit 00 --nodes 2", "course logs -f 00_hello_ranks-1", "course collect")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def course(tmp_path) -> Path:
    """A learner's copy of the course, free to write in."""
    for name in ("notebooks", "cluster"):
        shutil.copytree(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.fixture
def made(monkeypatch):
    """Skip where the tests do not run in an environment that make built: it would build one."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    import environment

    here = Path(sys.prefix)
    if environment.stamp_of(here) != environment.fingerprint(ROOT, here):
        pytest.skip("these tests do not run in an environment that make built")


def make_lab(command, course, tmp_path):
    port = free_port()
    arguments = f"--no-browser --port={port} --ServerApp.port_retries=0 --IdentityProvider.token="
    place = {"JUPYTER_CONFIG_DIR": str(tmp_path), "JUPYTER_RUNTIME_DIR": str(tmp_path)}
    with started(command, ROOT, LAB_ARGS=arguments, **place) as process:
        for lesson in sorted((ROOT / "notebooks").glob("*.ipynb")):
            url = f"http://127.0.0.1:{port}/api/contents/notebooks/{lesson.name}?content=0"
            assert f'"name": "{lesson.name}"' in answer(url, process)
        assert "JupyterLab" in answer(f"http://127.0.0.1:{port}/lab", process)


def answer(url: str, process: subprocess.Popen[str]) -> str:
    """What a server says, as soon as it is up."""
    give_up = time.monotonic() + 60
    while True:
        try:
            with urlopen(url, timeout=30) as page:
                return page.read().decode()
        except URLError:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < give_up, f"nothing answers at {url}"
            time.sleep(0.1)


def make_test(command, course, tmp_path):
    assert "-m pytest" in run(f"{command} --dry-run", ROOT)  # the rest is what runs just now


def make_cluster(command, course, tmp_path):
    assert "-m tools.cluster" in run(f"{command} --dry-run", ROOT)  # test_cluster_docs starts one


def make_gpu(command, course, tmp_path):
    out = shlex.quote(str(tmp_path))
    assert "make gpu: no CUDA GPU" in run(f'{command} GPU_ARGS="--out {out}"', ROOT)


def make_something(command, course, tmp_path):
    run(command, ROOT)


def make_notebooks(command, course, tmp_path):
    run(f"{command} NOTEBOOKS_ARGS=--check", ROOT)


def make_slides(command, course, tmp_path):
    for tool in ("node", "npm", "chromium"):
        if not shutil.which(tool):
            pytest.skip(f"{tool} is missing, which only the slides need")
    run(command, ROOT)
    decks = [deck.stem for deck in (ROOT / "slides").glob("[0-9]*.md")]
    assert decks
    for deck in decks:
        page = (ROOT / f"build/site/notebooks/{deck}.html").read_text()
        for kind in ("html", "pdf", "handout.pdf"):
            assert (ROOT / "build/slides" / f"{deck}.{kind}").stat().st_size > 10_000
            assert f"../slides/{deck}.{kind}" in page


def course_check(command, course, tmp_path):
    said = run(command, course, code=1)
    assert "ranks-1" in said
    assert "not done" in said


def course_progress(command, course, tmp_path):
    said = run(command, course)
    lessons = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
    assert [line.split()[0] for line in said.splitlines() if "_" in line.split(" ")[0]] == lessons


def course_reset(command, course, tmp_path):
    assert "is empty again" in run(command, course, typed="y\n")
    assert list((course / "notebooks/.backup").glob("00_ranks-*.ipynb"))


def course_update(command, course, tmp_path):
    run(f"git clone -q '{ROOT}' clone", tmp_path)
    assert "up to date" in run(command, tmp_path / "clone")


def course_doctor(command, course, tmp_path):
    assert "gloo" in run(command, course)


def course_grade(command, course, tmp_path):
    (course / "submissions" / "ada").mkdir(parents=True)
    shutil.copy(course / "notebooks/00_ranks.ipynb", course / "submissions/ada")
    run(command, course)
    assert "ranks-1" in (course / "grades/gradebook.csv").read_text()


def train_on_text(command, course, tmp_path):
    offline = {"https_proxy": "http://127.0.0.1:9", "no_proxy": "", "COURSE_CACHE": str(tmp_path)}
    said = run(f"{command} --steps 4 --every 2 --global-batch 4 --seq 32", course, **offline)
    assert "Going on with generated text instead." in said
    assert said.splitlines()[-1].startswith("4 steps, 512 tokens, loss ")


def train_under_torchrun(command, course, tmp_path):
    said = run(f"{command} --steps 2 --global-batch 4 --seq 16", course)
    assert said.splitlines()[-1].startswith("2 steps, 128 tokens, loss ")
    assert len(list((course / "runs/train").glob("*.jsonl"))) == 4


def course_trace(command, course, tmp_path):
    if not (course / "runs/gpt").is_dir():  # the line of the README before it makes it
        run("python -m course_lib.train --ranks 2 --steps 2 --out runs/gpt", course)
    assert "https://ui.perfetto.dev" in run(command, course)
    assert '"ph":"X"' in (course / "trace.json").read_text()


def torchrun(command, course, tmp_path):
    said = run(command, course)
    assert sorted(re.findall(r"rank \d of 4", said)) == [f"rank {r} of 4" for r in range(4)]
    assert "the sum over all ranks is 1111" in said
    assert len(list((course / "runs/00_hello_ranks").glob("*.jsonl"))) == 4


def study_plan(command, course, tmp_path):
    assert "runs" in run(command, course)


def course_plan(command, course, tmp_path):
    assert len(re.findall(r"^\d+ +dp\d+ .* \d+ x \d+ ", run(command, course), re.M)) == 10


RUNS = {
    "make lab": make_lab,
    "make test": make_test,
    "make test CHANGED=1": make_test,
    "make test-all": make_test,
    "make test-nightly": make_test,
    "make check": make_something,
    "make notebooks": make_notebooks,
    "make slides site": make_slides,
    "course check 00": course_check,
    "course progress": course_progress,
    "course reset 00 ranks-1": course_reset,
    "course update": course_update,
    "course doctor": course_doctor,
    "course grade submissions --out grades": course_grade,
    "python -m course_lib.train --ranks 2 --data shakespeare --out runs/gpt": train_on_text,
    "torchrun --nproc-per-node 4 -m course_lib.train --model llama-tiny --mesh tp=2 "
    "--strategy fsdp --out runs/train": train_under_torchrun,
    "course trace runs/gpt -o trace.json": course_trace,
    "torchrun --nproc-per-node 4 cluster/exercises/00_hello_ranks.py": torchrun,
    "course study plan": study_plan,
    "course plan --model llama-70b --cluster hf-h100 --nodes 8": course_plan,
    "make gpu": make_gpu,
    "make cluster": make_cluster,
}


@pytest.mark.parametrize("command", RUNS)
def test_a_command_of_the_readme_works(command, course, tmp_path, request):
    if command.startswith("make"):
        request.getfixturevalue("made")
    if "grade" in command:
        request.getfixturevalue("bubblewrap")
    RUNS[command](command, course, tmp_path)


def test_without_slurm_a_job_over_two_nodes_runs_here(course):
    submit, logs, collect = WALK
    assert "00_hello_ranks-1 is handed in" in run(submit, course)
    said = run(logs, course)
    assert said.count("the sum over all ranks is 1111") == 1
    assert said.count("on node 1") == 2
    assert "records of 4 of 4 ranks in runs/00_hello_ranks-1" in run(collect, course)


def test_every_command_of_the_readme_is_run_here():
    assert sorted(commands(README)) == sorted([*RUNS, *WALK])


def test_commands_are_found_in_every_block_and_without_comments():
    text = "```sh\na b  # c\n\n```\n```python\nno\n```\n```sh\nd --e=#1\n```\n"
    assert commands(text) == ["a b", "d --e=#1"]


def test_every_lesson_has_its_line():
    lessons = sorted(f"notebooks/{path.name}" for path in (ROOT / "notebooks").glob("*.ipynb"))
    assert re.findall(r"\((notebooks/\w+\.ipynb)\)", README) == lessons


def test_each_audience_has_at_most_fifteen_lines():
    sections = re.split(r"^## ", README, flags=re.MULTILINE)[1:]
    assert len(sections) == 6
    assert all(len(section.strip().splitlines()) <= 15 for section in sections)


def all_before(lesson: str, after: dict[str, set[str]]) -> set[str]:
    """All lessons that a lesson builds on, directly or not."""
    return after[lesson].union(*(all_before(other, after) for other in after[lesson]))


def test_the_map_draws_what_the_table_says():
    """An arrow for each lesson of *after* that no other lesson of *after* builds on already."""
    rows = re.findall(r"^\| \[(\d\d[a-z]?) .*\| ([^|]*) \| [^|]* \|$", README, re.MULTILINE)
    after = {lesson: set(re.findall(r"\d\d[a-z]?", names)) for lesson, names in rows}
    needed = {
        (first, lesson)
        for lesson, names in after.items()
        for first in names
        if not any(first in all_before(other, after) for other in names)
    }
    (lines,) = re.findall(r"```mermaid\ngraph LR\n(.*?)```", README, re.DOTALL)
    drawn = set()
    for line in lines.splitlines():
        bare = re.sub(r"\[.*?\]", "", line)
        groups = [re.findall(r"\d\d[a-z]?", part) for part in bare.split("-->")]
        for left, right in pairwise(groups):
            drawn |= {(a, b) for a in left for b in right}
    assert drawn == needed
    assert set(re.findall(r"(\d\d[a-z]?)\[\1 ", lines)) == set(after)  # each is named once


def test_the_screenshot_is_small_and_as_wide_as_the_tool_takes_it():
    picture = ROOT / "docs/lesson.png"
    assert picture.stat().st_size < 200_000
    with Image.open(picture) as opened:
        assert opened.size == tuple(VIEWPORT.values())
