"""Kill a rank at any moment, start again, and demand the bits of the run that never stopped.

    make faults          python -m tests.checkpoint.faults_kill --kills 200 --seed 0

One process imports torch and forks the ranks of every life of a run. The rank that is to die counts
the function calls within one phase of its life and sends itself SIGKILL before one of them: so the
moments are spread over all phases, and the same seed gives the same moments.
"""

import argparse
import faulthandler
import itertools
import os
import pickle
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._dynamo
import torch.distributed as dist

from course_lib.checkpoint import latest, saving
from course_lib.core import ModelSpec
from course_lib.fsdp import FSDP
from course_lib.train.config import TrainConfig
from course_lib.train.trainer import Trainer
from course_lib.zero import ZeRO3
from tests.train.training_runs import whole_state

WARM = (FSDP, ZeRO3, torch._dynamo)  # imported here, not in every rank
PLACES = (
    ("step", Trainer, "step"),
    ("staging", saving.Saving, "__init__"),
    ("staging", saving.Saving, "stage"),  # of an asynchronous save
    ("writing", saving.Saving, "_write_file"),
    ("publishing", saving.Saving, "_publish"),
    ("pruning", saving, "clear"),
)
PHASES = tuple(dict.fromkeys(phase for phase, *_ in PLACES))
BY_RANK_0 = ("publishing", "pruning")
KILLS_A_RUN = 8
END_S = 60  # until ranks that lost another one count as hung

SPEC = ModelSpec(hidden=16, num_layers=2, num_heads=2, ffn_hidden=32, vocab=40, max_seq=8)
CONFIG = TrainConfig(
    model=SPEC, steps=8, global_batch=6, seq=8, dropout=0.1, every=0, save_every=2, out="runs"
)


@dataclass(frozen=True)
class Kill:
    """The end of a rank: before a call of its n-th visit to a phase; visits count from 1."""

    rank: int
    phase: str
    visit: int
    call: int


class Watch:
    """Counts a rank's calls in each visit of each phase; ends the rank where `kill` says so."""

    def __init__(self, kill: Kill | None) -> None:
        self.kill = kill
        self.calls: dict[str, list[int]] = {phase: [] for phase in PHASES}

    def around(self, phase: str, function: Any) -> Any:
        """Return the function, watched."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            count, deadly = 0, self._deadly_call(phase)

            def on_event(_frame: object, event: str, _arg: object) -> None:
                nonlocal count
                if event in ("call", "c_call"):
                    if count == deadly:
                        os.kill(os.getpid(), signal.SIGKILL)
                    count += 1

            before = sys.getprofile()  # a save may be written in a thread of its own
            sys.setprofile(on_event)
            try:
                return function(*args, **kwargs)
            finally:
                sys.setprofile(before)
                self.calls[phase].append(count)

        return watched

    def _deadly_call(self, phase: str) -> int | None:
        visit = len(self.calls[phase]) + 1
        is_it = self.kill and (self.kill.phase, self.kill.visit) == (phase, visit)
        return self.kill.call if self.kill and is_it else None


def be_rank(rank: int, world_size: int, config: TrainConfig, life: Path, kill: Kill | None) -> None:
    """Train as one rank of a life; leave the counted calls and, on rank 0, the whole state."""
    sizes = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(size) for name, size in sizes.items()})
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    log = os.open(life / f"log{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR2)
    store = dist.FileStore(str(life / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    watch = Watch(kill if kill and kill.rank == rank else None)
    with ExitStack() as patches:
        for phase, owner, name in PLACES:
            around = watch.around(phase, getattr(owner, name))
            patches.enter_context(mock.patch.object(owner, name, around))
        trainer = Trainer(rank, config)
        trainer.run()
    (life / f"result{rank}").write_bytes(pickle.dumps((watch.calls, whole_state(trainer))))


def live(
    world_size: int, config: TrainConfig, life: Path, kill: Kill | None, is_patient: bool
) -> list[Any] | None:
    """Let all ranks live; return what they leave, or None if one was killed.

    is_patient   the other ranks end by themselves; False: they are killed at once, too
    """
    life.mkdir()
    pids = {}
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                be_rank(rank, world_size, config, life, kill)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        pids[pid] = rank
    codes: dict[int, int] = {}
    give_up_s = time.monotonic() + END_S
    while pids:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[pids.pop(pid)] = os.waitstatus_to_exitcode(status)
            continue
        time.sleep(0.002)
        if not is_patient and -signal.SIGKILL in codes.values():
            _send(signal.SIGKILL, pids)
        if time.monotonic() > give_up_s:
            _send(signal.SIGUSR2, pids)  # say where you are
            time.sleep(1)
            raise SystemExit(f"ranks {sorted(pids.values())} hang after {kill}{_logs(life)}")
    if kill and codes[kill.rank] == -signal.SIGKILL:
        return None
    if any(codes.values()):
        raise SystemExit(f"ranks ended with {codes}{_logs(life)}")
    return [pickle.loads((life / f"result{rank}").read_bytes()) for rank in range(world_size)]


def _logs(life: Path) -> str:
    return "".join(f"\n--- {path.name}\n{path.read_text()}" for path in sorted(life.glob("log*")))


def _send(number: int, pids: dict[int, int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


class Faults:
    """Runs that are killed again and again, with a table of when."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.random, self.folder = random.Random(seed), folder
        self.table: Counter[tuple[str, bool]] = Counter()
        self.num_runs = 0
        self._numbers = itertools.count()
        self._references: dict[Any, Any] = {}
        self._phases = self._endless(PHASES)
        self._missed: str | None = None  # the phase in which nobody has died yet

    def _endless(self, values: Sequence[Any]) -> Iterator[Any]:
        """Yield all values in random order, again and again."""
        while True:
            yield from self.random.sample(values, len(values))

    def survive(self, num_kills: int) -> None:
        """Kill ranks this many times. Raises: SystemExit where something is lost"""
        cases = self._endless(
            list(itertools.product(("ddp", "fsdp", "zero3"), (2, 3), (False, True)))
        )
        while (left := num_kills - self.table.total()) > 0:
            self._survive_run(*next(cases), min(left, KILLS_A_RUN))

    def _survive_run(
        self, strategy: str, world_size: int, async_save: bool, num_kills: int
    ) -> None:
        case, out = (strategy, world_size, async_save), self._new_folder()
        config = replace(CONFIG, strategy=strategy, async_save=async_save, out=out)
        if case not in self._references:
            os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"
            self._references[case] = self._live(world_size, config, None)
            config = replace(config, out=self._new_folder())
        calls, reference = zip(*self._references[case], strict=True)
        result, step = None, 0
        for start in range(num_kills + 1):
            kill = self._kill(calls) if start < num_kills else None
            os.environ["TORCHELASTIC_RESTART_COUNT"] = str(start)
            result = self._live(world_size, config, kill)
            step = self._check(config, step)
            if result is not None:
                break
            self.table[kill.phase, async_save] += 1
            self._missed = None
        torch.testing.assert_close(result[0][1], reference[0], rtol=0, atol=0)
        self.num_runs += 1

    def _new_folder(self) -> str:
        return str(self.folder / f"run{next(self._numbers)}")

    def _live(self, world_size: int, config: TrainConfig, kill: Kill | None) -> list[Any] | None:
        life = self.folder / f"life{next(self._numbers)}"
        return live(world_size, config, life, kill, is_patient=self.random.random() < 0.5)

    def _kill(self, calls: Sequence[dict[str, list[int]]]) -> Kill:
        """Draw a moment: a phase in turn, then a rank, a visit and a call of that visit."""
        phase = self._missed = self._missed or next(self._phases)
        rank = 0 if phase in BY_RANK_0 else self.random.randrange(len(calls))
        visit = self.random.randint(1, 3)
        return Kill(rank, phase, visit, self.random.randrange(calls[rank][phase][visit - 1]))

    def _check(self, config: TrainConfig, before: int) -> int:
        """Check that the latest checkpoint is whole and none is lost; return its step."""
        found = latest(str(config.checkpoints))
        if found is None and before == 0:
            return 0
        if found is None or found.step < before:
            raise SystemExit(f"{config.out}: the checkpoint of step {before} is lost")
        found.verify()
        return found.step

    def __str__(self) -> str:
        head = f"{'killed during':14}{'sync':>6}{'async':>7}\n"
        rows = [
            f"{phase:14}{self.table[phase, False]:6}{self.table[phase, True]:7}" for phase in PHASES
        ]
        last = f"{self.table.total()} kills, {self.num_runs} runs, all of them bit-equal to the end"
        return head + "\n".join([*rows, last])


def main() -> None:
    """Run it from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        faults = Faults(options.seed, Path(folder))
        faults.survive(options.kills)
    print(faults)


if __name__ == "__main__":
    main()
