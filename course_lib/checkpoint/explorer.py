"""Explorers of notebook 14_checkpoint: the interval between saves, and a rank that is killed."""

import html
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any

import ipywidgets
from matplotlib.figure import Figure

from course_lib.checkpoint.cost import mtbf_of
from course_lib.checkpoint.folder import latest
from course_lib.checkpoint.live import INTERVAL, YEAR_S
from course_lib.checkpoint.pictures import overhead_curve
from course_lib.display.explore import Explore, explore
from course_lib.display.show import has_widgets, widget_data
from course_lib.ranks import RankError, Ranks

POLL_S = 0.2


def interval_explorer() -> Explore:
    """Return the overhead over the interval, with sliders for cluster, failures, save, restart."""
    return explore(_curve, INTERVAL.finding, **INTERVAL.choices)


def _curve(
    gpus: int, years_between_failures_of_a_gpu: float, save_s: float, restart_min: float
) -> Figure:
    mtbf_s = mtbf_of(years_between_failures_of_a_gpu * YEAR_S, gpus)
    return overhead_curve(save_s, mtbf_s, 60 * restart_min, f"{gpus:,} GPUs")[0]


class FailureLab:
    """Two real ranks that train and save, and buttons that kill them; then they resume.

    `start`, `kill` and `wait` do what the buttons do. `log` has what happened, a line each.

    train    called on each rank as train(rank, config)
    config   a TrainConfig with `steps` and `save_every`; its `out` is a new folder each time
    """

    def __init__(self, train: Callable[..., Any], config: Any) -> None:
        self.train, self.config = train, config
        self.log: list[str] = []
        self.pids: list[int] = []
        self._thread: threading.Thread | None = None
        self._text = ipywidgets.HTML()
        names = {"Train": self.start, "Kill rank 0": lambda: self.kill(0),
                 "Kill rank 1": lambda: self.kill(1)}  # fmt: skip
        self._buttons = []
        for name, do in names.items():
            button = ipywidgets.Button(description=name)
            button.on_click(lambda _button, do=do: do())
            self._buttons.append(button)

    def start(self) -> None:
        """Start to train in the background, unless it runs."""
        if self._thread is None or not self._thread.is_alive():
            self.log.clear()
            self._thread = threading.Thread(target=self._train, daemon=True)
            self._thread.start()

    def kill(self, rank: int) -> None:
        """Kill a rank at once, if it lives."""
        if self.pids:
            self._say(f"You kill rank {rank}.")
            with suppress(ProcessLookupError):
                os.kill(self.pids[rank], signal.SIGKILL)

    def wait(self) -> list[str]:
        """Wait until the training is done; return the log."""
        if self._thread:
            self._thread.join()
        return self.log

    def _train(self) -> None:
        here = Ranks(2, cluster="laptop")
        with TemporaryDirectory() as out, here as ranks, ThreadPoolExecutor(1) as pool:
            config, is_done = replace(self.config, out=out), False
            while not is_done:
                step = _last_step(config)
                self._say(f"Two ranks train from step {step} of {config.steps}.")
                self.pids = ranks.run(_pid)
                job = pool.submit(ranks.run, self.train, replace(config, resume=step > 0))
                is_done = self._watch(config, job)
            self._say(f"Done: step {config.steps} is reached.")

    def _watch(self, config: Any, running: Future[Any]) -> bool:
        """Show the newest checkpoint until the ranks return or one dies; return whether all did."""
        while not running.done():
            self._show(f"Newest checkpoint: step {_last_step(config)}.")
            wait([running], POLL_S)
        self.pids = []
        try:
            running.result()
        except RankError as problem:
            self._say(str(problem).splitlines()[0])
            if problem.kind != "died":
                raise
            return False
        return True

    def _say(self, line: str) -> None:
        self.log.append(line)
        self._show("")

    def _show(self, last: str) -> None:
        self._text.value = "<br>".join(map(html.escape, [*self.log[-6:], last]))

    def _repr_mimebundle_(self, **_options: Any) -> dict[str, Any]:
        words = "Run this cell in JupyterLab: buttons start two ranks, and kill one of them."
        data: dict[str, Any] = {"text/plain": words, "text/html": f"<p>{words}</p>"}
        if has_widgets():
            data |= widget_data(ipywidgets.VBox([ipywidgets.HBox(self._buttons), self._text]))
        return data


def _pid(_rank: int) -> int:
    return os.getpid()


def _last_step(config: Any) -> int:
    found = latest(config.checkpoints)
    return found.step if found else 0
