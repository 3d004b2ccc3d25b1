"""The exercises of lesson 14: right answers in another style pass, subtle wrong ones do not."""

import copy
import pickle
import random

import pytest
import torch

from course_lib.checks import CheckFailed, find_exercise


def publish_in_rounds(disk, files, manifest, new, old):
    """Writes all, then syncs all; hides the old one by a rename."""
    for name in files:
        disk.write(f"{new}/{name}", files[name])
    disk.write(f"{new}/m", manifest)
    for name in [*files, "m"]:
        disk.sync(f"{new}/{name}")
    disk.rename(f"{new}/m", f"{new}/manifest.json")
    for name in set(disk.names(new)) - {*files, "manifest.json"}:
        disk.remove(f"{new}/{name}")
    disk.sync_names()
    if old is not None:
        disk.rename(f"{old}/manifest.json", f"{old}/gone")
        for name in disk.names(old):
            disk.remove(f"{old}/{name}")


def pieces_by_sets(saved, wanted):
    found = []
    for file, offsets, sizes in reversed(saved):
        dims = [
            sorted(set(range(a, a + n)) & set(range(b, b + m)))
            for a, n, b, m in zip(offsets, sizes, *wanted, strict=True)
        ]
        if all(dims):
            here = torch.tensor([dim[0] for dim in dims], dtype=torch.int64)
            in_file, in_rank = here - torch.tensor(offsets), here - torch.tensor(wanted[0])
            found.append([file, in_file.tolist(), tuple(in_rank), [len(dim) for dim in dims]])
    return found


class Pickled:
    """Turns everything into bytes."""

    def save(self, trainer):
        state = [trainer.model, trainer.optimizer.state_dict(), trainer.scheduler.state_dict()]
        return pickle.dumps(
            [
                state,
                trainer.epoch,
                trainer.position,
                trainer.step,
                torch.get_rng_state(),
                random.getstate(),
            ]
        )

    def load(self, trainer, state):
        parts, trainer.epoch, *counts, numbers, python = pickle.loads(state)
        trainer.position, trainer.step = counts
        trainer.model.load_state_dict(parts[0].state_dict())
        trainer.optimizer.load_state_dict(parts[1])
        trainer.scheduler.load_state_dict(parts[2])
        torch.set_rng_state(numbers)
        random.setstate(python)


def interval_by_rates(save_s, step_s, restart_s, failures, seen_s, gpus_then, gpus):
    per_s = failures * gpus / (seen_s * gpus_then)
    steps = round((2 * save_s / per_s) ** 0.5 / step_s) or 1
    return torch.tensor(steps), save_s / (steps * step_s) + per_s * (steps * step_s / 2 + restart_s)


RIGHT = {1: publish_in_rounds, 2: pieces_by_sets, 3: Pickled, 4: interval_by_rates}


@pytest.mark.parametrize("number", RIGHT)
def test_another_right_answer_passes(number):
    assert find_exercise(f"checkpoint-{number}").verdict(RIGHT[number])


def publish_and_rename_the_old(disk, files, manifest, new, old):
    """The new one takes the place of the old one's folder, file by file."""
    publish_in_rounds(disk, files, manifest, new, old)
    for name in disk.names(new):
        disk.rename(f"{new}/{name}", f"{old}/{name}")


class Shallow(Pickled):
    """Copies the containers, not the tensors."""

    def save(self, trainer):
        return copy.copy(trainer)

    def load(self, trainer, state):
        vars(trainer).update(vars(state))


@pytest.mark.parametrize(
    ("number", "answer"),
    [
        (1, publish_and_rename_the_old),
        (1, lambda disk, files, manifest, new, old: None),
        (2, lambda saved, wanted: [(file, *wanted) for file, _, _ in saved]),
        (3, Shallow),
        (4, lambda *measured: 100),
    ],
)
def test_a_wrong_answer_is_rejected(number, answer):
    with pytest.raises(CheckFailed):
        find_exercise(f"checkpoint-{number}").verdict(answer)


def test_the_check_leaves_the_random_numbers_as_they_are():
    random.seed(3)
    torch.manual_seed(3)
    need = random.getstate(), torch.get_rng_state().tolist()
    find_exercise("checkpoint-3").verdict(Pickled)
    assert (random.getstate(), torch.get_rng_state().tolist()) == need


@pytest.mark.ci
def test_an_error_in_another_load_is_told_with_its_line():
    one = find_exercise("checkpoint-3")
    (takes_out,) = (wrong for wrong in one.wrong if "given.pop" in getattr(wrong, "new", ""))
    with pytest.raises(CheckFailed, match=r"KeyError: 'python' \(line \d+ of your cell"):
        one.verdict(takes_out.answer(one))
