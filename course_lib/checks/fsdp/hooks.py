"""Exercise 2 of 10_fsdp: the hooks of a unit, from the gather before forward to the gradients."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.expectations import Bytes, Calls, Demand, Numbers
from course_lib.checks.fsdp.hooks_passes import EVALUATION, ROUNDS, passes, whole_passes
from course_lib.checks.fsdp.parts import MODULES, pack, packed_numel, rows_of
from course_lib.checks.on_ranks import At, OnRanks
from course_lib.checks.zero.parts import (
    ALL_WAITED,
    BESIDE,
    NOT_WAITED,
    OF_THE_CLASS,
    unless_alone,
)

WORLDS = (3, 2, 5, 1)

GATHER = Cause("Forward computed without its parameters: gather() in before_forward.")
NEVER_FREED = Cause("Not freed between forward and backward: free() in after_forward.")
AGAIN = Cause(
    "Backward computed with freed parameters (the check fills them with NaN): gather again when "
    "the output's gradient is there, with output.register_hook, and free after the last gradient."
)
FREE_LAST = Cause("The unit is still whole: free() after its last gradient.")
EVALUATE = Cause(
    "In evaluation, too, gather once and free; but hook nothing where no gradient is wanted: "
    "output.requires_grad."
)
SUMMED = Cause("{p} times too large: summed, not averaged. Divide by the number of ranks.")
AVERAGED_TWICE = Cause("{p} times too small: divide by the number of ranks once.")
OWN = Cause("Only this rank's own tokens are in it: the others' come with a reduce_scatter.")
OVERWRITTEN = Cause("Only the last backward is in it: shard.grad adds up until it is cleared.")
MEAN_OF_PASSES = Cause("The mean is over ranks; two backward passes add up.")
ANEW = Cause("`missing` begins anew with each backward: fill it again when everything is sent.")
NOT_SENT = Cause("A shard has no gradient: send when `missing` is empty, and set shard.grad.")
TAIL = Cause(
    "Those are numbers of the padded tail, or of the next parameter: a rank with fewer rows has "
    "padding between its gradients. unit.unpack(line) cuts it off."
)
PARAMETERS = Cause("Those are the parameters: send each param.grad, not its param.")
GRAD_SHAPE = Cause("A gradient has the shape of its shard: unit.unpack(line) gives them.")
INCOMPLETE = Cause(
    "Send when the last gradient of the unit is there, whichever comes last: those of all "
    "unit.params, packed in the order of unit.params."
)
X_GRAD = Cause("The gradient of the input is this rank's own: hooks do not change it.")
ONE_MESSAGE = Cause("All gradients of a unit travel as one reduce_scatter: pack them.")
ALL_REDUCE = Cause(
    "An all_reduce sends twice the bytes: nobody needs the others' part of the mean."
)
GATHER_ONCE = Cause("Gather once before the module computes.")
CALLS = Cause("Backward: one all_gather at the output's gradient, then one reduce_scatter.")
WHOLE_GRADS = Cause(
    "The whole gradients are still there, and the next backward would add to them: "
    "param.grad = None for each."
)
NESTED = Cause(
    "A layer of this module is a unit of its own, whose gradients never come here: count those of "
    "unit.params, not of module.parameters()."
)
KEEPS_BUFFER = Cause(
    "A shard's gradient is a view of a larger buffer, and keeps all of that alive: unpack a line "
    "that has memory of its own."
)
LEFT = Cause("Who holds whole gradients: an attribute, a list, a view?")


def _module(at: At) -> nn.Module:
    return MODULES[at.options["kind"]]()


def _is_twice(at: At) -> bool:
    """Return whether two forwards come before two backwards."""
    return bool(at.options.get("twice"))


def _number(at: At) -> int:
    """Return the number of the batch: evaluation uses the last one."""
    return 1 if _is_twice(at) else min(at.number, len(ROUNDS) - 1)


def _rounds(at: At) -> tuple[int, ...]:
    """Return the backward passes that are in the gradients."""
    return (0, 1) if _is_twice(at) else ROUNDS[_number(at)]


def _mean(at: At, number: int) -> list[Tensor]:
    """Return this rank's shards of the mean gradients of one pass."""
    by_rank = whole_passes(at.options["kind"], number, at.world_size).grads
    means = [torch.stack(grads).mean(0) for grads in zip(*by_rank, strict=True)]
    return [rows_of(mean, at.rank, at.world_size) for mean in means]


def _own(at: At, number: int) -> list[Tensor]:
    grads = whole_passes(at.options["kind"], number, at.world_size).grads[at.rank]
    return [rows_of(grad, at.rank, at.world_size) for grad in grads]


def _grads(
    factor: Callable[[At], float] = lambda _at: 1.0,
    of: Callable[[At, int], list[Tensor]] = _mean,
) -> Callable[[At], list[Tensor]]:
    """Return the gradients, all passes that are in them, times a factor."""

    def added(at: At) -> list[Tensor]:
        rounds = [of(at, number) for number in _rounds(at)]
        return [factor(at) * torch.stack(parts).sum(0) for parts in zip(*rounds, strict=True)]

    return added


def _one_pass(position: int) -> Callable[[At], list[Tensor]]:
    return lambda at: _mean(at, _rounds(at)[position])


def _params(at: At) -> list[Tensor]:
    params = [param.detach() for param in _module(at).parameters()]
    return [rows_of(param, at.rank, at.world_size) for param in params]


def _not_cut(at: At) -> list[Tensor]:
    """Return what comes of packed gradients where the padding stays between them."""
    by_rank = whole_passes(at.options["kind"], _rounds(at)[0], at.world_size).grads
    row = pack([torch.stack(g).mean(0) for g in zip(*by_rank, strict=True)], at.world_size)[at.rank]
    shards, begin = [], 0
    for shard in _params(at):
        shards.append(row[begin : begin + shard.numel()].view_as(shard))
        begin += shard.numel()
    return shards


def _out(at: At) -> Tensor:
    return whole_passes(at.options["kind"], _number(at), at.world_size).outs[at.rank]


def _x_grad(at: At) -> Tensor:
    return whole_passes(at.options["kind"], _number(at), at.world_size).x_grads[at.rank]


def _bytes(at: At) -> int:
    return 8 * packed_numel(_module(at), at.world_size)


def _needed(*kinds: str) -> Callable[[At], list[tuple[str, int]]]:
    return lambda at: [(kind, _bytes(at)) for kind in kinds] * (1 + _is_twice(at))


def _in_training(expectation: Callable[[At], None]) -> Callable[[At], None]:
    return lambda at: expectation(at) if at.label != EVALUATION else None


def _of_one_unit(expectation: Callable[[At], None]) -> Callable[[At], None]:
    return lambda at: None if at.options.get("nested") else expectation(at)


def _is_nan(_at: At, got: Tensor, _item: int | None) -> bool:
    return bool(got.isnan().any())


def _runs(p: int) -> list[dict[str, object]]:
    kinds: list[dict[str, object]] = [{"kind": kind} for kind in MODULES]
    uses = ("twice", "beside", "nested") if p == WORLDS[0] else ("beside",)
    return [*kinds, *({"kind": "three layers", use: True} for use in uses)]


BESIDE_ANOTHER = ((lambda at, *_: bool(at.options.get("beside")), OF_THE_CLASS),)
SENDS = "dist.reduce_scatter_single(mean, sent.flatten())"
DIVIDES = "mean /= dist.get_world_size()"
ADDS = "grad if shard.grad is None else shard.grad + grad"
PACKS = "unit.pack([param.grad for param in unit.params])"
REGATHERS = "output.register_hook(lambda grad: self.unit.gather())"
FILLS = "self.unit, self.missing = unit, set(unit.params)"
REFILLS = "            self.missing = set(unit.params)"
LAST = "if not self.missing:"
ZEROS = "[torch.zeros_like(p) if p.grad is None else p.grad for p in unit.params]"

HOOKS = Exercise(
    key="fsdp-2",
    title="the hooks of a unit",
    check=OnRanks(
        observe_on_rank=passes,
        worlds=WORLDS,
        runs=_runs,
        trouble=(
            ("raised", BESIDE, OF_THE_CLASS),
            ("raised", "hook on a tensor that doesn't require", EVALUATE),
            ("raised", "assign a gradient", GRAD_SHAPE),
            ("raised", "pass [23].*NoneType", ANEW),
            ("raised", "NoneType", INCOMPLETE),
        ),
        expect=(
            ALL_WAITED,
            Numbers(
                "out",
                _out,
                rtol=1e-11,
                what="the output",
                predicates=((lambda at, *_: at.label == EVALUATION, EVALUATE), *BESIDE_ANOTHER),
                look=GATHER,
            ),
            _of_one_unit(
                Calls(
                    unless_alone(_needed("all_gather"), "forward"),
                    other_kind=GATHER_ONCE,
                    look=GATHER_ONCE,
                    value="forward",
                )
            ),
            Demand(
                lambda at: at.label != EVALUATION or not at.seen.whole_between,
                "the unit is still whole",
                EVALUATE,
            ),
            Demand(
                lambda at: not at.seen.whole_between,
                "the unit is still whole after forward",
                NEVER_FREED,
            ),
            _in_training(
                Numbers(
                    "x_grad",
                    _x_grad,
                    rtol=1e-11,
                    what="the gradient of the input",
                    predicates=(*BESIDE_ANOTHER, (_is_nan, AGAIN)),
                    look=X_GRAD,
                )
            ),
            _in_training(
                Numbers(
                    "grads",
                    _grads(),
                    rtol=1e-11,
                    what="the gradient of a shard",
                    predicates=(
                        *BESIDE_ANOTHER,
                        (lambda at, got, _i: got is None and "nested" in at.options, NESTED),
                        (lambda _at, got, _item: got is None, NOT_SENT),
                        (_is_nan, AGAIN),
                    ),
                    causes=(
                        (SUMMED, _grads(lambda at: at.world_size)),
                        (AVERAGED_TWICE, _grads(lambda at: 1 / at.world_size)),
                        (OWN, _grads(of=_own)),
                        (OWN, _grads(lambda at: 1 / at.world_size, _own)),
                        (OVERWRITTEN, _one_pass(-1)),
                        (ANEW, _one_pass(0)),
                        (MEAN_OF_PASSES, _grads(lambda at: 1 / len(_rounds(at)))),
                        (PARAMETERS, _params),
                        (TAIL, _not_cut),
                    ),
                    shape=GRAD_SHAPE,
                    look=INCOMPLETE,
                )
            ),
            Demand(
                lambda at: at.seen.beside_sent, "the second object has no gradient", OF_THE_CLASS
            ),
            _of_one_unit(
                _in_training(
                    Calls(
                        unless_alone(_needed("all_gather", "reduce_scatter"), "backward"),
                        other_kind=ALL_REDUCE,
                        symptoms=((lambda got, need: len(got) > len(need), ONE_MESSAGE),),
                        look=CALLS,
                        value="backward",
                    )
                )
            ),
            Demand(lambda at: not at.seen.whole_after, "backward has ended", FREE_LAST),
            Demand(
                lambda at: not at.seen.with_grad,
                lambda at: f"{at.seen.with_grad} parameters have a gradient",
                WHOLE_GRADS,
            ),
            Bytes(
                "grad_bytes",
                lambda at: _bytes(at) // at.world_size,
                KEEPS_BUFFER,
                what="the gradients of the shards keep",
            ),
            Bytes("alive_bytes", lambda at: _bytes(at) - 1, LEFT, what="after backward it keeps"),
        ),
        success="Gathered, used, freed, twice; then shards of the mean, one message, nothing left.",
    ),
    wrong=(
        Edit("self.unit.gather()\n\n", "pass\n\n", GATHER),
        Edit("self.unit.free()\n        if output", "if output", NEVER_FREED),
        Edit(
            "self.unit.free()\n        if output.requires_grad:",
            "if output.requires_grad:\n            self.unit.free()",
            EVALUATE,
        ),
        Edit("if output.requires_grad:", "if True:", EVALUATE),
        Edit(REGATHERS, "pass", AGAIN),
        Edit(
            REGATHERS,
            "pass",
            AGAIN,
            also=(
                (
                    "self.missing.discard(param)",
                    "if len(self.missing) == len(self.unit.params):\n    self.unit.gather()\n"
                    "self.missing.discard(param)",
                ),
            ),
        ),
        Edit("            unit.free()", "            pass", FREE_LAST),
        Edit(DIVIDES, "pass", SUMMED),
        Edit(DIVIDES, "mean /= dist.get_world_size() ** 2", AVERAGED_TWICE),
        Edit(SENDS, "mean = sent[dist.get_rank()].clone()", OWN),
        Edit(SENDS, "mean = sent[dist.get_rank()].clone() * dist.get_world_size()", OWN),
        Edit(SENDS, "dist.all_reduce(sent)\nmean = sent[dist.get_rank()].clone()", ALL_REDUCE),
        Edit(SENDS, "dist.reduce_scatter_single(mean, sent.flatten(), async_op=True)", NOT_WAITED),
        Edit(
            PACKS,
            "unit.pack([param.grad for param in unit.params])\n"
            "for grad in [param.grad for param in unit.params[1:]]:\n"
            "    each = unit.pack([torch.zeros_like(p) for p in unit.params])\n"
            "    dist.reduce_scatter_single(each[0].clone(), each.flatten())",
            ONE_MESSAGE,
        ),
        Edit(ADDS, "grad", OVERWRITTEN),
        Edit(ADDS, "grad if shard.grad is None else (shard.grad + grad) / 2", MEAN_OF_PASSES),
        Edit("self.missing = set(unit.params)\n            ", "", ANEW),
        Edit("param.grad = None", "pass", WHOLE_GRADS),
        Edit(
            LAST,
            "if len(self.missing) == len(self.unit.params) - 1:",
            AGAIN,
            also=((PACKS, f"unit.pack({ZEROS})"),),
        ),
        Edit(
            LAST,
            "if param is self.unit.params[0]:",
            AGAIN,
            also=((PACKS, f"unit.pack({ZEROS})"),),
        ),
        Edit(PACKS, "unit.pack([param.detach() for param in unit.params])", PARAMETERS),
        Edit(
            "unit.unpack(mean)",
            "[part.view_as(shard) for shard, part in zip(unit.shards, mean.split([*[s.numel() for "
            "s in unit.shards], len(mean) - sum(s.numel() for s in unit.shards)]))]",
            TAIL,
        ),
        Edit("unit.unpack(mean)", "[mean for _ in unit.shards]", GRAD_SHAPE),
        Edit(PACKS, f"{PACKS}\nself.__dict__.setdefault('all', []).append(sent)", LEFT),
        Edit(
            SENDS,
            f"{SENDS}\nsent[dist.get_rank()] = mean\nmean = sent[dist.get_rank()]",
            KEEPS_BUFFER,
        ),
        Edit(
            FILLS,
            "self.unit, self.module, self.missing = unit, module, set(module.parameters())",
            NESTED,
            also=((REFILLS, "            self.missing = set(self.module.parameters())"),),
        ),
        Edit(
            "self.unit.gather()\n\n",
            "self.unit.gather()\n        self.missing = set(self.unit.params)\n\n",
            ANEW,
            also=((f"{REFILLS}\n", ""),),
        ),
        Edit(
            FILLS,
            "self.unit = unit\nself.missing.update(unit.params)",
            OF_THE_CLASS,
            also=(
                ("def __init__", "missing = set()\n\ndef __init__"),
                (REFILLS, "            self.missing.update(unit.params)"),
            ),
        ),
        Edit(
            "self.unit, self.missing = unit, set(unit.params)",
            "self.unit, Hooks.missing = unit, set(unit.params)",
            OF_THE_CLASS,
            also=(
                (
                    "self.missing = set(unit.params)\n            ",
                    "Hooks.missing = set(unit.params)\n            ",
                ),
            ),
        ),
        Edit(
            "self.unit, self.missing = unit, set(unit.params)",
            "Hooks.unit, self.missing = unit, set(unit.params)",
            OF_THE_CLASS,
        ),
    ),
)
