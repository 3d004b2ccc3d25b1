"""Pictures and forms in a real kernel: saved whole, and the same again under strict nbval."""

import os
import subprocess
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

REPOSITORY = Path(__file__).parents[2]

CELLS = (
    """
from course_lib.core import Event
from course_lib.display import *

def turns(p):
    return [Event(rank=r, kind="forward", start_s=r, end_s=r + 1, label="F") for r in range(p)]
""",
    'show(timeline(turns(3), "Ranks take turns"), alt="Ranks take turns: 3 s")',
    'p = predict("steps")',
    "reveal(p, 6)",
    "p.commit(5)\nreveal(p, 6)",
    'explore(lambda p: timeline(turns(p), "Turns"), alt="{p} ranks: {p} s", p=(1, 8, 4))',
    """
message = Message(step=1, sender=0, receiver=1, shard=0)
stepper(frames_from_messages([message], root_everything(2)), "One message tells the other rank")
""",
    "reveal(guess_skipped, 6)",
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cells, run in a kernel and saved."""
    path = tmp_path_factory.mktemp("display") / "pictures.ipynb"
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = new_notebook(
        cells=[new_code_cell(cell.strip()) for cell in CELLS], metadata={"kernelspec": kernel}
    )
    client = nbclient.NotebookClient(notebook, timeout=60, store_widget_state=False)
    client.execute(cwd=str(REPOSITORY))
    nbformat.write(notebook, path)
    return path


def test_what_is_saved_can_be_seen_and_read_without_a_kernel(saved: Path) -> None:
    cells = nbformat.read(saved, 4).cells
    outputs = {
        number: [out.data for out in cell.outputs] for number, cell in enumerate(cells, start=1)
    }
    assert outputs[1] == []
    assert outputs[2][0]["text/plain"] == "Ranks take turns: 3 s"
    assert outputs[3][0]["text/plain"] == "Predict: steps. Commit with p.commit(12)."
    assert "You have not committed" in outputs[4][0]["text/plain"]
    assert outputs[5][-1]["text/plain"] == "steps: yours 5, true 6, ratio 0.833."
    assert outputs[6][0]["text/plain"] == "4 ranks: 4 s"
    assert "step 1 of 1: rank 0 sends shard 0 to rank 1" in outputs[7][0]["text/plain"]
    assert "asks for this prediction was not run" in outputs[8][0]["text/plain"]
    for number in (2, 6):
        assert "image/png" in outputs[number][0]
        assert f'alt="{outputs[number][0]["text/plain"]}"' in outputs[number][0]["text/html"]
    assert outputs[7][0]["image/svg+xml"].startswith("<svg")
    assert all(len(output) <= 2 for output in outputs.values())


@pytest.mark.parametrize("no_widgets", ["", "1"])
def test_strict_nbval_finds_the_same_again_with_and_without_widgets(
    saved: Path, no_widgets: str
) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--nbval"]
    command += ["--nbval-current-env", "--nbval-cell-timeout=60", str(saved)]
    environment = {**os.environ, "COURSE_NO_WIDGETS": no_widgets, "PYTHONPATH": str(REPOSITORY)}
    run = subprocess.run(
        command, cwd=saved.parent, env=environment, capture_output=True, text=True, check=False
    )
    assert f"{len(CELLS)} passed" in run.stdout, run.stdout + run.stderr
