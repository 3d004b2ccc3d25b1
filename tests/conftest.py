"""What several tests share: a toy course to build and grade, pools of ranks, a Slurm cluster."""

import gc
import io
import math
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import hypothesis
import nbformat
import psutil
import pytest
from nbformat import NotebookNode
from rich.console import Console

from course_lib.core import CourseError
from course_lib.workbooks.lessons import Lesson
from course_tools.authoring.build import build
from tests.browser import browser, screenshots  # noqa: F401 - fixtures
from tests.cluster.slurmbox import MISSING, SlurmBox
from tests.selection import (  # noqa: F401 - hooks of pytest
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_ignore_collect,
    pytest_xdist_make_scheduler,
)

# The same examples each time, however slow the machine: the same code has the same verdict.
hypothesis.settings.register_profile(
    "course",
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("course")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so it is for a job in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

CHECKS = """
from course_lib.checks import CheckFailed, Exercise


class Sum:
    def observe(self, answer):
        yield answer(1, 2)

    def judge(self, seen, exercise):
        (found,) = seen
        if found == -1:
            raise CheckFailed("rank 0: need 3; got -1. Subtracted, not added.")
        if found != 3:
            raise CheckFailed("something else")
        return "1 + 2 = 3."


EXERCISES = tuple(
    Exercise(key=f"toy-{n}", title="sum", check=Sum(), reference=sum) for n in range(1, 5)
)
"""

EXERCISE = '''
# %% tags=["exercise"] exercise="toy-{n}"
def add_{n}(x, y):
    """The sum."""
    ### BEGIN SOLUTION: add the two
    return x + y
    ### END SOLUTION


# %% tags=["check"] exercise="toy-{n}"
check("toy-{n}", add_{n})

# %%
print("walk", {n})
'''

SOURCE = """
# %% [markdown]
# # 00 Toy

# %%
import course_lib.checks

course_lib.checks.__path__.append("{checks}")
from course_lib.checks import check

# %% tags=["failure", "raises-exception"]
raise ValueError("broken on purpose")
"""


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """One thread, as on any rank: small products in threads wait for each other the longest."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def stays_in_its_folder() -> Iterator[None]:
    """Fail a test that leaves the next one in another folder."""
    before = os.getcwd()
    yield
    after = None  # where the folder has gone
    with suppress(FileNotFoundError):
        after = os.getcwd()
    os.chdir(before)
    assert after == before


class Toy:
    """The toy lesson in a folder of its own, and what tests do to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lesson = Lesson("00_toy", folder)

    def build(self, **options: bool) -> str:
        """Build the lesson; return what was told."""
        console = Console(width=300, file=io.StringIO())
        build(self.lesson, console, **options)
        return console.file.getvalue()

    def read(self) -> NotebookNode:
        return nbformat.read(self.lesson.student, 4)

    def write(self, notebook: NotebookNode) -> None:
        nbformat.write(notebook, self.lesson.student)

    def cell(self, notebook: NotebookNode, cell_id: str) -> NotebookNode:
        return next(cell for cell in notebook.cells if cell.id == cell_id)

    def fill(self, number: int, text: str) -> None:
        """Write `text` into an exercise cell of the student notebook."""
        notebook = self.read()
        self.cell(notebook, f"exercise-toy-{number}").source = text
        self.write(notebook)

    def edit_source(self, old: str, new: str) -> None:
        text = self.lesson.source.read_text()
        assert old in text
        self.lesson.source.write_text(text.replace(old, new))


@pytest.fixture(scope="session")
def toy_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy course, built once."""
    top = tmp_path_factory.mktemp("toy")
    (top / "checks").mkdir()
    (top / "checks" / "toy.py").write_text(CHECKS)
    toy = Toy(top / "notebooks")
    toy.lesson.source.parent.mkdir(parents=True)
    parts = [SOURCE.format(checks=top / "checks"), *(EXERCISE.format(n=n) for n in range(1, 5))]
    toy.lesson.source.write_text("".join(parts).lstrip())
    toy.build()
    return toy.folder


@pytest.fixture
def toy(toy_template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toy:
    """A fresh copy of the toy course in the current folder."""
    folder = tmp_path / "notebooks"
    shutil.copytree(toy_template, folder)
    monkeypatch.chdir(tmp_path)
    return Toy(folder)


class Kernels:
    """The Jupyter kernels that commands start."""

    def of(self, pid: int, within_s: float = 60) -> psutil.Process:
        """The kernel of a command, as soon as it is there."""
        give_up = time.monotonic() + within_s
        while time.monotonic() < give_up:
            for child in psutil.Process(pid).children(recursive=True):
                if "ipykernel" in " ".join(child.cmdline()):
                    return child
            time.sleep(0.1)
        raise TimeoutError("no kernel was started")

    def ends(self, kernel: psutil.Process, within_s: float = 60) -> bool:
        """Does it end soon? One that was still starting looks for its parent when it is up."""
        give_up = time.monotonic() + within_s
        with suppress(psutil.NoSuchProcess):
            while kernel.is_running() and kernel.status() != psutil.STATUS_ZOMBIE:
                if time.monotonic() > give_up:
                    return False
                time.sleep(0.1)
        return True


@pytest.fixture
def kernels() -> Kernels:
    return Kernels()


@pytest.fixture(scope="session")
def by_hand():
    """A run of one process on the whole batch, without any code of the training loop."""
    import torch

    from course_lib.models import GPT, next_tokens, token_batch, token_loss

    optimizers = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}

    def run(config):
        """The losses, and the state dicts of the model and the optimizer."""
        torch.manual_seed(config.seed)
        model, spec = GPT(config.model).double(), config.model
        optimizer = optimizers[config.optimizer](model.parameters(), lr=config.lr)
        grows = {"start_factor": 1 / max(config.warmup, 1), "total_iters": config.warmup - 1}
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, **grows) if config.warmup else None
        found = []
        for n in range(config.steps):
            tokens = token_batch(n, batch=config.global_batch, seq=config.seq, vocab=spec.vocab)
            inputs, targets = next_tokens(tokens)
            loss = token_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            if config.clip_norm:
                torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
            optimizer.step()
            if schedule:
                schedule.step()
            found.append(loss.item())
        state = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()["state"]}
        return found, state

    return run


@pytest.fixture(scope="session")
def undisturbed():
    """Measure again until nobody kept the processor from it: a busy machine only adds time."""

    def least_s(measure: Callable[[], float], expected_s: float, within: float = 0.1) -> float:
        found_s = math.inf
        for _ in range(10):
            found_s = min(found_s, measure())
            if found_s < (1 + within) * expected_s:
                break
        return found_s

    return least_s


@pytest.fixture
def alone(monkeypatch):
    """fn(0, ...) on the one rank of a world: this process itself, so that none has to start."""
    import torch.distributed as dist

    from course_lib.ranks.launch import ALONE  # not above: it starts a server

    for name, value in ALONE.items():
        monkeypatch.setenv(name, value)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield lambda fn, *args: fn(0, *args)
    dist.destroy_process_group()
    gc.collect()  # what still holds a group keeps gloo's threads


@pytest.fixture(scope="module")
def pools():
    """One pool of ranks a world size, started when first asked for."""
    from course_lib.ranks import Ranks

    started: dict[int, Ranks] = {}

    def pool(world_size: int) -> Ranks:
        if world_size not in started:
            started[world_size] = Ranks(world_size)
        return started[world_size]

    yield pool
    for ranks in started.values():
        ranks.close()


@pytest.fixture(scope="session")
def bubblewrap() -> None:
    """Bubblewrap, in which hostile submissions run; where it cannot work, these are skipped."""
    from course_tools.grading.sandbox import find_sandbox

    try:
        find_sandbox()
    except CourseError as problem:
        pytest.skip(str(problem))


@pytest.fixture(scope="session")
def slurm_box() -> Iterator[SlurmBox]:
    """A Slurm cluster of two nodes; without Slurm these tests are skipped."""
    if shutil.which("slurmctld", path=f"{os.environ['PATH']}:/usr/sbin") is None:
        pytest.skip(MISSING)
    with SlurmBox() as box:
        yield box


@pytest.fixture
def slurm(slurm_box: SlurmBox, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmBox]:
    """The cluster, with nothing to do, as the one that Slurm's commands talk to."""
    monkeypatch.setenv("SLURM_CONF", slurm_box.env["SLURM_CONF"])
    slurm_box.wait_idle()
    yield slurm_box
    slurm_box.cancel_all()


@pytest.fixture
def course(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """Run `course` with these words; returns what it says, and wants it to succeed or to fail."""
    from course_lib.cli.commands import main

    monkeypatch.setenv("COLUMNS", "160")

    def run(*words: str, fails: bool = False) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(words)
        said = capsys.readouterr()
        assert bool(ended.value.code) == fails, f"{words}: {said.out}\n{said.err}"
        return said.out + said.err if fails else said.out

    return run


@pytest.fixture
def profile(tmp_path: Path) -> Callable[..., str]:
    """Write a profile like another one, with other values; returns its path."""
    from course_lib.jobs.profile import read_profile, save_profile

    def write(name: str = "test", **values: object) -> str:
        own = read_profile(name)
        limits = {key: values.pop(key) for key in ("max_jobs", "gpu_hours") if key in values}
        changed = replace(own, **values, limits=replace(own.limits, **limits))
        return str(save_profile(changed, tmp_path / "own.toml"))

    return write


@pytest.fixture
def until() -> Callable[..., None]:
    """Wait until something is so; it is an error if that takes too long."""

    def wait(is_so: Callable[[], bool], what: str, within_s: float = 300) -> None:
        give_up = time.monotonic() + within_s
        while not is_so():
            assert time.monotonic() < give_up, f"never: {what}"
            time.sleep(0.1)

    return wait
