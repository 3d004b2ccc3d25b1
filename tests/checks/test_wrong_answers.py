"""Wrong answers beside the planted mistakes: each is rejected, with the words that help."""

import copy
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_lib.checks import CheckFailed, check, find_exercise
from course_lib.checks.right_answer import right_answer
from course_lib.planner import search
from course_lib.ranks import Ranks
from tests.checks import corpus
from tests.checks.test_planted_mistakes import each_exercise, kept_worlds, worlds  # noqa: F401

RETURNS = ("ranks-3", "zero-1", "zero-4", "zero-5")
RETURNS += ("data_parallel-3", "data_parallel-4", "data_parallel-5")


class Returns:
    """Nothing, whatever is called."""

    def save(self, *given):
        """Return nothing."""

    load = __init__ = lambda self, *given: None


@pytest.mark.usefixtures("kept_worlds")
@each_exercise
def test_a_forgotten_return_is_told(one):
    answer = Returns if one.key == "checkpoint-3" else lambda *args, **options: None
    with pytest.raises(CheckFailed) as caught:
        one.verdict(answer)
    if one.key in RETURNS:
        assert "Does your function return its result" in str(caught.value)


# --- ranks


def a_float(node, local_rank, size):
    return node / 1 * size + local_rank


def reduce_after_each_turn(rank, world_size, say):
    """A rooted collective orders only those it tells."""
    for turn in range(world_size):
        if turn == rank:
            say()
        dist.reduce(torch.zeros(1), dst=turn)


def one_barrier_more_if_alone(rank, world_size, say):
    for _ in range(rank):
        dist.barrier()
    say()
    for _ in range(world_size - 1 - rank + 2 // world_size):
        dist.barrier()


def reduce_and_broadcast(x):
    total = x.clone()
    dist.reduce(total, dst=0)
    dist.broadcast(total, src=0)
    return total / dist.get_world_size()


def logs_nothing(rank, loss, log):
    log(dist.all_reduce(loss))


def raises_another_error(x, rank, left, right):
    return x / len(())[0]


def test_the_notebooks_own_ranks_do_not_travel():
    with Ranks(1) as ranks, pytest.raises(CheckFailed, match=r"use dist\.get_world_size\(\)"):
        check("ranks-3", lambda x: x / ranks.world_size)


# --- memory


def the_whole_paper(spec, batch, seq, number_bytes):
    """Its MLP is 4h, its numbers are bf16."""
    sbh, scores = seq * batch * spec.hidden, spec.num_heads * seq * seq * batch
    return {"norms": 4 * sbh, "attention": 10 * sbh, "scores": 5 * scores, "mlp": 18 * sbh,
            "masks": 2 * sbh}  # fmt: skip


def its_sum(*sizes):
    return sum(right_answer("memory-4")(*sizes).values())


def as_floats(*sizes):
    return {part: float(size) for part, size in right_answer("memory-4")(*sizes).items()}


# --- data parallel, tensor parallel


def freezes_all(module):
    module.requires_grad_(False)
    right_answer("data_parallel-1")(module)


class Nothing(nn.Module):
    def __init__(self, up, down):
        super().__init__()

    def forward(self, x):
        return x


# --- mesh


def only_on_tp_0(mesh, parts, max_norm):
    """Right norm, but only the rank that counts scales what is whole along tp."""
    here = [g for g, split, first in parts if first and (split or not mesh.index("tp"))]
    squares = sum(((grad**2).sum() for grad in here), torch.zeros((), dtype=torch.float64))
    for axis in ("tp", "pp"):
        dist.all_reduce(squares, group=mesh.group(axis))
    norm = squares.sqrt()
    for grad in here:
        grad *= min(1.0, max_norm / norm)
    return norm


def loss_of_the_first_stage(mesh, loss, grads):
    """Broadcasts along pp from rank 0 of the group, which is the first stage."""
    total = torch.zeros((), dtype=torch.float64) if loss is None else loss.clone()
    group = mesh.group("pp")
    dist.broadcast(total, dist.get_process_group_ranks(group)[0], group=group)
    for value in (total, *grads):
        dist.all_reduce(value, group=mesh.group("dp"))
        value /= mesh.size("dp")
    return total


# --- planner, scaling study


def the_slowest_that_fits(model, cluster, batch, seq):
    return search(model, cluster, batch, seq=seq).steps[-1].plan


def the_least_memory(model, cluster, batch, seq):
    steps = search(model, cluster, batch, seq=seq).steps
    return min(steps, key=lambda step: step.memory_bytes).plan


def waits_at_the_end_only(device, micro_batches, steps, warmup, accumulated):
    """The clock starts on a busy device."""
    start_s = num_tokens = 0
    for step in range(steps):
        if step == warmup:
            start_s, num_tokens = device.now_s(), 0
        for _ in range(accumulated):
            tokens = next(micro_batches)
            device.backward(tokens)
            num_tokens += tokens
        device.step()
    device.synchronize()
    return device.now_s() - start_s, num_tokens


# --- checkpoint


def publish_and_rename_the_old(disk, files, manifest, new, old):
    """The new one takes the place of the old one's folder, file by file."""
    right_answer("checkpoint-1")(disk, files, manifest, new, old)
    for name in disk.names(new):
        disk.rename(f"{new}/{name}", f"{old}/{name}")


class Shallow:
    """Copies the containers, not the tensors."""

    def save(self, trainer):
        return copy.copy(trainer)

    def load(self, trainer, state):
        vars(trainer).update(vars(state))


WRONG = [
    ("ranks-1", a_float, "got 0.0. An int is needed"),
    ("ranks-2", reduce_after_each_turn, "when it speaks, it knows of the end of"),
    ("ranks-2", one_barrier_more_if_alone, "rank 0 of 1, the first call: calls too many"),
    ("ranks-3", reduce_and_broadcast, "budget: calls too many: need 0; got 1"),
    ("ranks-4", raises_another_error, "raised TypeError"),
    ("ranks-5", logs_nothing, "calls of log: need 0; got 1. Only rank 0 logs"),
    ("memory-4", the_whole_paper, "mlp: need"),
    ("memory-4", its_sum, "Return a dict with these keys"),
    ("memory-4", as_floats, "An int is needed"),
    ("memory-4", lambda *_: {"mlp": 1}, "got mlp"),
    ("memory-5", lambda states, acts, grads, n: states + sum(acts), "need"),
    ("speed-1", lambda spec, batch, seq, causal: 6 * batch * seq, "Print your parts"),
    ("data_parallel-1", freezes_all, "changed: need nothing; got requires_grad of"),
    ("tensor_parallel-2", Nothing, "nn.Parameters: need up_weight"),
    ("mesh-2", loss_of_the_first_stage, ""),
    ("mesh-3", only_on_tp_0, ""),
    ("planner-5", the_slowest_that_fits, "a step; the best one"),
    ("planner-5", the_least_memory, "a step; the best one"),
    ("scaling_study-3", waits_at_the_end_only, "still works on the warm-up"),
    ("checkpoint-1", publish_and_rename_the_old, ""),
    ("checkpoint-2", lambda saved, wanted: [(file, *wanted) for file, _, _ in saved], ""),
    ("checkpoint-3", Shallow, ""),
    ("checkpoint-4", lambda *measured: 100, ""),
]
# words that do not fit: a hint for another error, a line of the check itself, a second cause
LEFT_OUT = {
    raises_another_error: "neighbours",
    freezes_all: "line",
    waits_at_the_end_only: "start the clock when",
}


@pytest.mark.parametrize(("key", "answer", "says"), WRONG)
def test_a_wrong_answer_is_told_what_helps(key, answer, says):
    with pytest.raises(CheckFailed) as caught:
        find_exercise(key).verdict(answer)
    assert says in str(caught.value)
    assert answer not in LEFT_OUT or LEFT_OUT[answer] not in str(caught.value)


def test_the_check_leaves_the_random_numbers_as_they_are():
    random.seed(3)
    torch.manual_seed(3)
    need = random.getstate(), torch.get_rng_state().tolist()
    find_exercise("checkpoint-3").verdict(right_answer("checkpoint-3"))
    assert (random.getstate(), torch.get_rng_state().tolist()) == need


@pytest.mark.ci
def test_an_error_in_another_load_is_told_with_its_line():
    one = find_exercise("checkpoint-3")
    texts = (entry["text"] for entry in corpus.read() if entry["key"] == one.key)
    takes_out = next(text for text in texts if "given.pop" in text)
    with pytest.raises(CheckFailed, match=r"KeyError: 'python' \(line \d+ of your cell"):
        one.verdict(corpus.run(takes_out))
