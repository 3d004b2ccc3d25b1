"""Exercise 2 of 07_tensor_parallel: an MLP that is split over the ranks."""

from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.expectations import DTYPE, Bytes, Demand, Untouched
from course_lib.checks.on_ranks import OnRanks
from course_lib.checks.tensor_parallel.parts import (
    APART,
    NEARLY,
    NOT_TRAINING,
    OUTSIDE,
    close,
    one_sum,
    same_bits,
)
from course_lib.checks.tensor_parallel.seen_mlp import use
from course_lib.checks.tensor_parallel.whole_mlp import (
    LATER,
    NAMES,
    bias_of,
    grads_of,
    is_bias_parted,
    is_uneven,
    is_whole,
    later_of,
    of_summed_x,
    out_of,
    params_of,
    part_bytes,
    without_gelu,
    without_up_bias,
    x_grad_of,
)

PARAMETERS = Cause("Wrap your part in nn.Parameter, and keep it under that name.")
WHOLE = Cause("That is the whole matrix: keep this rank's part.")
UNEVEN = Cause(
    "A rank's outputs of up are its inputs of down: up.weight[mine], down.weight[:, mine]. p need "
    "not divide the width."
)
UP_ROWS = Cause(
    "Give each rank whole outputs of up: GELU of a partial sum is not a part of GELU. weight is "
    "[out, in], so these are rows of up.weight, and one value each of up.bias."
)
DOWN_COLUMNS = Cause(
    "The inputs of down are the outputs of up that this rank has: columns of down.weight, which "
    "is [out, in]. Its bias is added after the sum, so whole on every rank."
)
TRANSPOSED = Cause("Transposed: keep a weight as [out, in], as nn.Linear and F.linear have it.")
BIAS_PARTS = Cause(
    "Each rank keeps a part of it, or all but one keep zeros: the sum is right now, but all ranks "
    "get the whole gradient, so a step of SGD changes the sum {p} times too much. Keep the whole "
    "bias on every rank, and add it after the sum."
)
MINE = Cause("A rank keeps its part of the hidden layer, the indices in `mine`, in order.")
SWAPPED = Cause(
    "f and g are swapped: copy_to_region (f) belongs in front, reduce_from_region (g) at the end."
)
NO_GELU = Cause("GELU is missing between up and down.")
NO_UP_BIAS = Cause("The bias of up is missing, in front of GELU.")
BIAS_EACH = Cause(
    "The bias of down was added {p} times: each rank adds it to its partial sum, and then those "
    "are summed. Add it once, after the sum."
)
NO_BIAS = Cause("The bias of down is missing.")
MEAN = Cause("That is the mean. The parts are terms of one sum, so do not divide.")
NOT_SUMMED = Cause("Nothing was summed: every rank has only a partial sum of each output.")
ORDER = Cause("First up and its bias, then GELU, then down; then the sum, then the bias of down.")
SHAPES = Cause(
    "What is summed must have the same shape on every rank, and the ranks' parts of the hidden "
    "layer have not: put f in front of up, and g behind down."
)
CALLERS = Cause(
    "It belongs to the caller, who still needs it: work on a copy. (Only the bias of down, which "
    "is whole on every rank, may be shared.)"
)
BETWEEN = Cause("No communication is needed between up and down: their parts match.")
NO_GRADIENT = Cause("Did detach or no_grad in forward cut the graph?")
NO_F = Cause(
    "That is this rank's own term: x is used on every rank. Pass it through copy_to_region, whose "
    "backward sums the gradients."
)
SUMS_TWICE = Cause("{p} times too large: is something summed twice?")
WHICH = Cause("Which ranks' terms does it contain?")
X_ONLY = Cause("Sum only x's gradient: that of a bias after the sum is whole on every rank.")
TOO_LARGE = Cause("{p} times too large: g passes its gradient on unchanged.")
TOO_SMALL = Cause("{p} times too small: divide nothing; add the whole bias, after the sum.")
NOT_TRAINED = Cause("It has no gradient: every rank has to train it, or ranks drift apart.")
STALE = Cause(
    "The weights have changed, the output has not: compute with the parameters as they are now, "
    "keep no copy of them."
)
VIEW = Cause("Keep four parts only. A view keeps its whole matrix alive: clone it.")
ALIVE = Cause("Somewhere your module still holds the whole layer: do not keep up and down.")


UP = "x = F.gelu(F.linear(copy_to_region(x), self.up_weight, self.up_bias))"
DOWN = "return reduce_from_region(F.linear(x, self.down_weight)) + self.down_bias"
TAKE_UP, TAKE_DOWN = "up.weight.detach()[mine]", "down.weight.detach()[:, mine]"
TAKE = "torch.arange(up.out_features).tensor_split(p)[rank]"
KEEP = "self.up_weight = nn"
ADD_EACH = "return reduce_from_region(F.linear(x, self.down_weight, self.down_bias))"

MLP = Exercise(
    key="tensor_parallel-2",
    title="a split MLP",
    check=OnRanks(
        observe_on_rank=use,
        trouble=(
            ("mismatch", "", SHAPES),
            ("hang", "", SHAPES),
            ("raised", "dtype", DTYPE),
            ("raised", "shapes cannot be multiplied|size of tensor|out of bounds", UNEVEN),
        ),
        expect=(
            Demand(
                lambda at: not at.seen.others,
                lambda at: f"need {at.seen.others[0]}",
                PARAMETERS,
            ),
            close(
                "params",
                params_of,
                names=lambda _at: NAMES,
                predicates=(
                    (is_whole, WHOLE),
                    (is_uneven, UNEVEN),
                    (
                        lambda at, got, i: got.mT.shape == params_of(at)[i].shape != got.shape,
                        TRANSPOSED,
                    ),
                    (lambda at, got, i: got.shape != params_of(at)[i].shape and i < 2, UP_ROWS),
                    (lambda at, got, i: got.shape != params_of(at)[i].shape, DOWN_COLUMNS),
                ),
                causes=(
                    (TRANSPOSED, lambda at: [param.t() for param in params_of(at)]),
                    (BIAS_PARTS, lambda at: [param / at.world_size for param in params_of(at)]),
                    (BIAS_PARTS, lambda at: [param * 0.0 for param in params_of(at)]),
                ),
                look=MINE,
            ),
            close(
                "out",
                out_of,
                what="the output",
                causes=(
                    (SWAPPED, of_summed_x),
                    (NO_GELU, without_gelu),
                    (NO_UP_BIAS, without_up_bias),
                    (BIAS_EACH, lambda at: out_of(at) + (at.world_size - 1) * bias_of(at)),
                    (NO_BIAS, lambda at: out_of(at) - bias_of(at)),
                    (MEAN, lambda at: (out_of(at) - bias_of(at)) / at.world_size + bias_of(at)),
                ),
                otherwise=((lambda at, *_: not at.seen.forward, NOT_SUMMED),),
                look=ORDER,
            ),
            same_bits("out", "the output"),
            Demand(
                lambda at: not at.seen.alive or at.seen.changed,
                lambda at: f"the whole of {' and '.join(at.seen.alive)} is still in memory",
                ALIVE,
            ),
            Bytes("kept_bytes", part_bytes, VIEW),
            Untouched(CALLERS),
            one_sum("forward", lambda at: out_of(at).nbytes, BETWEEN),
            Demand(lambda at: at.seen.x_grad is not None, "no gradient arrives at x", NO_GRADIENT),
            close(
                "x_grad",
                x_grad_of,
                what="the gradient of x",
                causes=((SUMS_TWICE, lambda at: x_grad_of(at) * at.world_size),),
                otherwise=((lambda at, *_: not at.seen.backward, NO_F),),
                look=WHICH,
            ),
            same_bits("x_grad", "the gradient of x"),
            one_sum("backward", lambda at: x_grad_of(at).nbytes, X_ONLY),
            close(
                "grads",
                grads_of(),
                what="the gradient",
                names=lambda _at: NAMES,
                predicates=((lambda _at, got, _item: got is None, NOT_TRAINED),),
                causes=(
                    (TOO_LARGE, grads_of(lambda at: at.world_size)),
                    (TOO_SMALL, grads_of(lambda at: 1 / at.world_size)),
                ),
                look=WHICH,
            ),
            close(
                "later",
                later_of,
                what="the output",
                names=lambda _at: LATER,
                predicates=(
                    (is_bias_parted, BIAS_PARTS),
                    (lambda _at, _got, i: i in (1, 2), STALE),
                ),
                look=NOT_TRAINING,
            ),
            Demand(
                lambda at: not at.seen.outside,
                "all_reduce got a tensor that requires a gradient",
                OUTSIDE,
            ),
        ),
        success="As one process on 1 to 4 ranks, also uneven; a part of the weights on each.",
    ),
    wrong=(
        Edit(DOWN, ADD_EACH, BIAS_EACH),
        Edit(
            DOWN,
            ADD_EACH.replace("self.down_bias", "self.down_bias / dist.get_world_size()"),
            TOO_SMALL,
        ),
        Edit(
            DOWN,
            ADD_EACH.replace("self.down_bias", "None if dist.get_rank() else self.down_bias"),
            NOT_TRAINED,
        ),
        Edit(
            TAKE_UP,
            "up.weight.detach()[:, self.of_x]",
            UP_ROWS,
            also=(
                (
                    "mine = ",
                    "self.of_x = torch.arange(up.in_features).tensor_split(p)[rank]\nmine = ",
                ),
                ("up.bias.detach()[mine]", "up.bias.detach().clone()"),
                (TAKE_DOWN, "down.weight.detach().clone()"),
                ("copy_to_region(x)", "copy_to_region(x)[..., self.of_x]"),
            ),
        ),
        Edit("copy_to_region(x)", "x", NO_F),
        Edit(DOWN, DOWN.replace("reduce_from_region", ""), NOT_SUMMED),
        Edit(
            UP,
            "x = copy_to_region(F.gelu(F.linear(x, self.up_weight, self.up_bias)))",
            SHAPES,
        ),
        Edit(
            UP,
            "x = F.gelu(F.linear(copy_to_region(x), self.up_weight)) + self.up_bias",
            ORDER,
        ),
        Edit(" + self.down_bias", " / dist.get_world_size() + self.down_bias", MEAN),
        Edit(
            KEEP,
            f"self.mine, self.width = mine, up.out_features\n{KEEP}",
            BETWEEN,
            also=(
                (
                    UP,
                    f"{UP}\n"
                    "whole = x.new_zeros(*x.shape[:-1], self.width).index_copy(-1, self.mine, x)\n"
                    "x = reduce_from_region(whole)[..., self.mine]",
                ),
            ),
        ),
        Edit(TAKE, "torch.arange(up.out_features // p) + rank * (up.out_features // p)", UNEVEN),
        Edit(TAKE_DOWN, "down.weight.detach()[mine]", UNEVEN),
        Edit(TAKE_DOWN, "down.weight.detach().clone()", UNEVEN),
        Edit(TAKE_UP, "up.weight.detach()[mine[0] : mine[-1] + 1]", VIEW),
        Edit(KEEP, f"self.layers = [up, down]\n{KEEP}", ALIVE),
        Edit(KEEP, f"self.both = [nn.Linear(8, 8).double()]\n{KEEP}", VIEW),
        Edit(KEEP, f"self.whole = lambda: (up, down)\n{KEEP}", ALIVE),
        Edit(
            KEEP,
            f"self.mine = mine\n{KEEP}",
            WHOLE,
            also=(
                (TAKE_UP, "up.weight.detach().clone()"),
                ("up.bias.detach()[mine]", "up.bias.detach().clone()"),
                (UP, f"{UP}[..., self.mine]"),
            ),
        ),
        Edit(
            DOWN,
            ADD_EACH,
            BIAS_PARTS,
            also=(("down.bias.detach().clone()", "down.bias.detach() / p"),),
        ),
        Edit(
            DOWN,
            ADD_EACH,
            BIAS_PARTS,
            also=(("down.bias.detach().clone()", "down.bias.detach() * (rank == 0)"),),
        ),
        Edit(
            TAKE_UP,
            f"{TAKE_UP}.T.contiguous()",
            TRANSPOSED,
            also=((UP, UP.replace("_weight", "_weight.T")),),
        ),
        Edit(TAKE, "torch.arange(rank, up.out_features, p)", MINE),
        Edit(UP, UP.replace("F.gelu", ""), NO_GELU),
        Edit(UP, UP.replace(", self.up_bias", ""), NO_UP_BIAS),
        Edit(
            "copy_to_region",
            "reduce_from_region",
            SWAPPED,
            also=((DOWN, DOWN.replace("reduce_from", "copy_to")),),
        ),
        Edit("def forward(self, x):", "@torch.no_grad()\ndef forward(self, x):", NO_GRADIENT),
        Edit(
            DOWN,
            "x = F.linear(x, self.down_weight)\ndist.all_reduce(x)\nreturn x + self.down_bias",
            OUTSIDE,
        ),
        Edit(f"nn.Parameter({TAKE_UP})", TAKE_UP, PARAMETERS),
        Edit(UP, f"given = x.data\n{UP}\ngiven.zero_()", CALLERS),
        Edit(
            DOWN,
            "out = reduce_from_region(F.linear(x, self.down_weight)) + self.down_bias\n"
            "if out.requires_grad:\n"
            "    out.register_hook(lambda grad: [grad.clone(), grad.zero_()][0])\n"
            "return out",
            CALLERS,
        ),
        Edit(
            f"self.up_weight = nn.Parameter({TAKE_UP})",
            f"up.weight.data = {TAKE_UP}\nself.up_weight = up.weight",
            CALLERS,
        ),
        Edit(TAKE_UP, f"{TAKE_UP}.float()", DTYPE),
        Edit(" + self.down_bias", " + self.down_bias.double()", DTYPE),
        Edit(" + self.down_bias", ".float() + self.down_bias.float()", DTYPE),
        Edit(
            UP,
            "if not torch.is_grad_enabled():\n"
            "    x = F.gelu(F.linear(x, self.up_weight, self.up_bias))\n"
            f"    return F.linear(x, self.down_weight, self.down_bias)\n{UP}",
            NOT_TRAINING,
        ),
        Edit(
            UP,
            "if torch.is_grad_enabled() and not x.requires_grad:\n"
            "    x = F.gelu(F.linear(x, self.up_weight, self.up_bias))\n"
            f"    return F.linear(x, self.down_weight, self.down_bias)\n{UP}",
            NOT_TRAINING,
        ),
        Edit(
            UP,
            f"given, frozen = x, not x.requires_grad\n{UP}\nif frozen:\n    given.zero_()",
            CALLERS,
        ),
        Edit(
            UP,
            "now = self.up_weight\n"
            "self.first = getattr(self, 'first', now.detach().clone())\n"
            + UP.replace("self.up_weight", "self.first + now - now.detach()"),
            STALE,
        ),
        Edit(
            DOWN,
            "x = F.linear(x, self.down_weight)\n"
            "if x.dtype == torch.float32:\n    x = x.bfloat16()\n"
            "return reduce_from_region(x).to(self.down_bias.dtype) + self.down_bias",
            NEARLY,
        ),
        Edit(
            DOWN,
            "x = F.linear(x, self.down_weight)\n"
            "return x + (reduce_from_region(x.detach()) - x.detach()) + self.down_bias",
            APART,
        ),
        Edit(
            UP,
            "if not torch.is_grad_enabled():\n"
            "    vars(self).setdefault('first', self.up_weight.detach().clone())\n"
            + UP.replace("self.up_weight", "self.first").replace("x = ", "    x = ")
            + f"\nelse:\n    {UP}",
            STALE,
        ),
        Edit(KEEP, f"down.bias.requires_grad_(False)\n{KEEP}", CALLERS),
        Edit(KEEP, f"up.eval()\n{KEEP}", CALLERS),
        Edit(KEEP, f"down.zero_grad()\n{KEEP}", CALLERS),
        Edit(KEEP, f"whole = up.weight.detach().clone()\nself.f = lambda: whole\n{KEEP}", VIEW),
        Edit(KEEP, f"F.__dict__['whole'] = up.weight.detach().clone()\n{KEEP}", VIEW),
    ),
)
