"""What starts often starts fast: it imports nothing that it does not use. No clock is read."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

COMMAND = "import course_lib.cli\ntry: course_lib.cli.main({!r})\nexcept SystemExit: pass\n"
SEARCH = "plan --model llama-8b --cluster hf-h100 --top 1"
HEAVY = ("torch", "numpy", "matplotlib", "IPython", "nbformat", "jupyter_client", "asyncio")
IN_HELP = (*HEAVY, "rich.progress", "psutil", "importlib.metadata")  # what help needs even less
COMPILER = ("torch._dynamo", "torch._inductor", "torch.fx.experimental.symbolic_shapes", "sympy")
LATER = ("torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint")
ENGINES = ("deepspeed", "accelerate", "transformers", "lightning_fabric", "megatron", "matplotlib")
ON_DEMAND = (
    *("checkpoint", "collectives", "context_parallel", "data_parallel", "ddp", "expert_parallel"),
    *("fsdp", "mesh", "pipeline", "recompute", "tensor_parallel", "zero"),
)
RANK = """
import os, sys
from course_lib.train import __main__ as command_line, launcher
work = launcher.work
def told(config):
    before = set(sys.modules)
    code = work(config)
    if os.environ["RANK"] == "1":
        print(*set(sys.modules) - before, file=sys.stderr)
    return code
launcher.work = told
command_line.main("--steps 1 --every 0 --ranks 2".split())
"""


def run(code: str) -> str:
    """What a new Python says on stderr while it runs this."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


def imported_by(code: str) -> set[str]:
    return set(run(f"{code}\nimport sys\nprint(*sys.modules, file=sys.stderr)").split())


@pytest.mark.parametrize(
    ("code", "without"),
    [
        (COMMAND.format(["--help"]), IN_HELP),
        (COMMAND.format(["plan", "--help"]), (*HEAVY, "rich.progress", "psutil")),
        (COMMAND.format(SEARCH.split()), HEAVY),
        ("import course_lib.planner", (*HEAVY, "rich", "typer")),
        ("import course_lib.context_parallel.cost", HEAVY),
        ("import course_lib.expert_parallel.cost", HEAVY),
        ("import course_lib.train.launcher", HEAVY),
        ("import course_lib.train.trainer", (*COMPILER, *LATER, *ENGINES)),
    ],
)
def test_nothing_is_imported_that_is_not_used(code, without):
    found = imported_by(code)
    assert "course_lib.core" in found
    assert found.isdisjoint(without)


def test_formulas_need_nothing_but_python():
    """A page runs them where neither PyTorch nor NumPy can be installed."""
    files = [path.relative_to(ROOT) for path in ROOT.glob("course_lib/**/*.py")]
    names = [
        ".".join(path.with_suffix("").parts)
        for path in files
        if path.name in ("cost.py", "live.py")
    ]
    names += ["course_lib.pipeline.live_by_hand", "course_lib.planner.notes", "course_lib.cost"]
    code = f"import course_lib.pipeline, course_lib.planner, {', '.join(names)}"
    bare = [sys.executable, "-S", "-c", code]  # -S: no installed package
    done = subprocess.run(bare, capture_output=True, text=True, cwd=ROOT)
    assert len(names) > 10
    assert done.returncode == 0, done.stderr


def test_help_stays_small():
    """262 modules when this was written, of which typer and rich are 72, and Python's the most."""
    assert len(imported_by(COMMAND.format(["--help"]))) < 320


def test_a_forked_rank_imports_nothing_that_all_ranks_need():
    assert len(run(RANK).split()) < 10


@pytest.mark.parametrize("package", ON_DEMAND)
def test_names_on_demand_are_those_of_the_package(package):
    module = importlib.import_module(f"course_lib.{package}")
    assert set(module.__all__) <= set(dir(module))
    for name in module.__all__:
        assert type(getattr(module, name)) is not type(module), f"{name} is also a module's name"
    with pytest.raises(AttributeError, match=f"module 'course_lib.{package}' has no attribute 'x'"):
        _ = module.x
