"""The exercises of notebook 05_data_parallel: equal start, mean gradient, sampler, weight, age.

The first two run on ranks whose every tensor holds a number of its own; the others stand in
`data.py` and `staleness.py`.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.checks.data_parallel import replicas_answers as planted
from course_lib.checks.data_parallel.parts import (
    WORLD_SIZES,
    expect_calls,
    module_of,
    state_of,
    words,
)
from course_lib.checks.exercise import CheckFailed, Exercise, Mistake
from course_lib.checks.expect import expect_held, held_bytes, run
from course_lib.data_parallel.naive_ddp import broadcast_state
from course_lib.ranks import Ranks

# --- data_parallel-1: an equal start

LAST = "Let rank 0 send, not another one: src=0 on every rank."


def _made_equal(
    rank: int, answer: Callable[[nn.Module], Any]
) -> tuple[dict[str, Tensor], bool, bool]:
    """Return the result, whether tensors stayed in place, and whether autograd recorded it."""
    module = module_of(rank)
    before = {name: tensor.data_ptr() for name, tensor in state_of(module).items()}
    answer(module)
    after = {name: tensor.clone() for name, tensor in state_of(module).items()}
    in_place = all(before[name] == x.data_ptr() for name, x in state_of(module).items())
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        torch.stack([x.sum() for x in module.parameters() if x.requires_grad]).sum().backward()
    return after, in_place, any("c10d" in str(warning.message) for warning in warned)


def check_make_equal(answer: Callable[[nn.Module], Any]) -> str:
    """Check rank 0's state on 1 to 4 ranks, in the tensors the optimizer knows, sent once."""
    sizes = [tensor.nbytes for tensor in state_of(module_of(0)).values()]
    for p in WORLD_SIZES:
        with Ranks(p) as ranks:
            on = {
                "hang": "Every rank has to make the same calls: rank 0 sends in them.",
                "mismatch": "All name the same source, and bring their tensors in one order.",
            }
            found = run(ranks, _made_equal, answer, on=on)
            events = ranks.events
        for rank, (state, _, _) in enumerate(found):
            _expect_state_of_rank_0(state, rank, p)
        for rank, (_, in_place, watched) in enumerate(found):
            if watched:
                raise CheckFailed(
                    f"rank {rank} of {p}: autograd looks on, and PyTorch warns of it in the next "
                    "backward. Broadcast tensor.data, which is the same memory."
                )
            if not in_place:
                raise CheckFailed(
                    f"rank {rank} of {p}: these are new tensors. An optimizer made before keeps "
                    "the old ones: copy into what is there, in place."
                )
        says = "One broadcast a tensor; what is tied is one tensor."
        expect_calls(events, p, sizes, "broadcast", says)
    return "Rank 0's parameters and buffers on 1 to 4 ranks, each sent once."


def _expect_state_of_rank_0(state: dict[str, Tensor], rank: int, p: int) -> None:
    right = state_of(module_of(0))
    wrong = [name for name in right if not torch.equal(state[name], right[name])]
    if not wrong:
        return
    name, buffers = wrong[0], {name for name in right if name.startswith("norm.")}
    buffers -= {"norm.weight", "norm.bias"}
    own = [torch.equal(state[name], state_of(module_of(rank))[name]) for name in wrong]
    mean = words(right[name]) * sum(10**r for r in range(p)) / p
    causes = [
        (not all(own) and words(state[name]) == mean, "That is a mean: take rank 0's."),
        (words(state[name]) == mean * p, "That is a sum: take rank 0's."),
        (rank < p - 1 and words(state[name]) == words(right[name]) * 10 ** (p - 1), LAST),
        (
            not all(own) and words(state[name]) in {words(tensor) for tensor in right.values()},
            "That is another tensor of rank 0's: bring them in the same order on every rank (a set "
            "has none).",
        ),
        (rank == 0, "Rank 0's own state has changed: it is the one that sends."),
        (not all(own), LAST),
        (len(wrong) == len(right), "Nothing came: every rank starts from weights of its own."),
        (set(wrong) <= buffers, "The buffers are forgotten: batch norm's statistics are state."),
        (
            not set(wrong) & buffers and len(wrong) == len(right) - len(buffers),
            "Only buffers came: the parameters are forgotten.",
        ),
        (wrong[0].startswith("frozen"), "Frozen parameters differ too: they are never mended."),
    ]
    says = next((says for fits, says in causes if fits), "")
    raise CheckFailed(
        f"rank {rank} of {p}, {name}: need {words(right[name]):g}; got {words(state[name]):g}. "
        f"{says or 'Print the names of what you send.'}"
    )


EQUAL = Exercise(
    key="data_parallel-1",
    title="equal start",
    check=check_make_equal,
    reference=lambda module: broadcast_state(module),
    mistakes=(
        Mistake("no initial broadcast", lambda module: None, says="Nothing came"),
        Mistake("buffers forgotten", planted.only_parameters, says="The buffers are forgotten"),
        Mistake("frozen forgotten", planted.only_trained, says="Frozen parameters differ too"),
        Mistake("mean of all", planted.mean_of_states, says="That is a mean"),
        Mistake("from the last rank", planted.from_the_last, says="Let rank 0 send"),
        Mistake("new tensors", planted.into_new_tensors, says="these are new tensors"),
        Mistake("tied sent twice", planted.whole_state_dict, says="what is tied is one tensor"),
        Mistake("watched", planted.watched, says="autograd looks on"),
        Mistake("order of a set", planted.order_of_a_set, says="in the same order"),
        Mistake("each its own source", planted.own_source, says="All name the same source"),
        Mistake("only buffers", planted.only_buffers, says="Only buffers came"),
        Mistake("only rank 0 calls", planted.only_rank_0, says="has to make the same calls"),
    ),
)

# --- data_parallel-2: the mean gradient

FINE = 1 + 2**-30  # what float32 loses


def _averaged(
    rank: int, answer: Callable[[nn.Module], Any]
) -> tuple[list[Tensor | None], bool, list[int]]:
    module = module_of(rank)
    for index, param in enumerate(module.parameters()):
        if param.requires_grad:
            param.grad = torch.full_like(param, (index + 1) * 10.0**rank * FINE)
    answer(module)
    grads = [param.grad for param in module.parameters()]
    same = all(
        torch.equal(tensor, state_of(module_of(rank))[name])
        for name, tensor in state_of(module).items()
    )
    return grads, same, [held_bytes(grad) for grad in grads if grad is not None]


def check_average_gradients(answer: Callable[[nn.Module], Any]) -> str:
    """Check the mean gradients on 1 to 4 ranks, one all-reduce each, parameters untouched."""
    trained = [param for param in module_of(0).parameters() if param.requires_grad]
    sizes = [param.nbytes for param in trained]
    for p in WORLD_SIZES:
        with Ranks(p) as ranks:
            on = {"raised": "A frozen parameter has no gradient: leave it out."}
            found = run(ranks, _averaged, answer, on=on)
            events = ranks.events
        for rank, (grads, same, held) in enumerate(found):
            _expect_mean_gradients(grads, same, rank, p)
            for num_bytes, needed in zip(held, sizes, strict=True):
                expect_held(num_bytes, needed, where=f"rank {rank} of {p}, a gradient")
        says = "One all-reduce a gradient: tied parameters have one, frozen ones none."
        expect_calls(events, p, sizes, "all_reduce", says)
    return "The mean of each gradient on 1 to 4 ranks, one all-reduce each."


def _expect_mean_gradients(grads: Sequence[Tensor | None], same: bool, rank: int, p: int) -> None:
    total = sum(10**r for r in range(p))
    for index, (grad, param) in enumerate(zip(grads, module_of(0).parameters(), strict=True)):
        where = f"rank {rank} of {p}, gradient {index}"
        if not param.requires_grad:
            if grad is not None:
                raise CheckFailed(f"{where}: a frozen parameter has got a gradient. Leave it None.")
            continue
        if grad is None:
            raise CheckFailed(f"{where}: got None. A trained parameter keeps a gradient.")
        need, got = (index + 1) * total / p * FINE, words(grad)
        if abs(got - need) <= 1e-12 * need:
            continue
        raise CheckFailed(f"{where}: need {need:g}; got {got:g}. {_why(got / need, same, rank, p)}")
    if not same:
        raise CheckFailed(f"rank {rank} of {p}: the parameters have changed. Only gradients do.")


def _why(ratio: float, same: bool, rank: int, p: int) -> str:
    """Return the cause of a gradient that is `ratio` times the right one."""
    if math.isnan(ratio):
        return "Its numbers are not all alike: who touched it while the sum was still under way?"
    if abs(ratio - 1) < 1e-6:
        return "Rounded on the way: keep the dtype of the gradients."
    own = 10**rank * p / sum(10**r for r in range(p))
    causes = [
        (own, not same, "You took the mean of the parameters: this is for the gradients."),
        (p, True, "That is the sum: divide it by the number of ranks."),
        (own, True, "It is this rank's own: nothing came, or was not written to param.grad."),
        (own / p, True, "It is this rank's own, divided: nothing came from the others."),
        (1 / p, True, "Divided twice: by the number of ranks once."),
        (
            own * 10 ** (p - 1 - rank),
            True,
            "That is the largest one: all_reduce adds up by default.",
        ),
        (p / 4, True, "Divide by the number of ranks, whatever it is, not by 4."),
    ]
    fits = (says for wrong, when, says in causes if when and abs(ratio / wrong - 1) < 1e-9)
    return next(fits, "Is every parameter in your loop, and only once?")


MEAN = Exercise(
    key="data_parallel-2",
    title="mean gradient",
    check=check_average_gradients,
    reference=planted.average_gradients,
    mistakes=(
        Mistake("sum for mean", planted.sum_of_gradients, says="That is the sum"),
        Mistake("parameters averaged", planted.mean_of_parameters, says="mean of the parameters"),
        Mistake("not written back", planted.mean_of_clones, says="not written to param.grad"),
        Mistake("divided alone", planted.divided_alone, says="nothing came from the others"),
        Mistake("divided twice", planted.divided_twice, says="Divided twice"),
        Mistake("always by 4", planted.always_by_4, says="not by 4"),
        Mistake("frozen ones too", planted.frozen_too, says="A frozen parameter has no gradient"),
        Mistake("zeros for frozen", planted.zeros_for_frozen, says="has got a gradient"),
        Mistake("tied ones twice", planted.tied_twice, says="tied parameters have one"),
        Mistake("first one only", planted.first_only, says="It is this rank's own"),
        Mistake("parameters as well", planted.both_averaged, says="parameters have changed"),
        Mistake("largest", planted.largest, says="That is the largest one"),
        Mistake("float32", planted.in_float32, says="Rounded on the way"),
        Mistake("not waiting", planted.not_waiting, says="still under way"),
        Mistake("views of one", planted.views_of_one, says="A view keeps the whole tensor"),
    ),
)
