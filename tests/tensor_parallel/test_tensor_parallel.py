"""Tensor parallelism: the numbers of one process, in the collectives that the paper says."""

import gc
import io
import sys
import time
import weakref
from dataclasses import replace
from functools import partial
from itertools import pairwise
from unittest.mock import patch

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from course_lib.core import MODELS, CourseError, ModelSpec
from course_lib.core.links import INFINIBAND, NVLINK
from course_lib.core.parallelism import Parallelism
from course_lib.core.shards import Box
from course_lib.cost.flops import forward_flop
from course_lib.cost.hardware import H100
from course_lib.cost.params import count_params, params_on_rank
from course_lib.cost.traffic import sent_bytes, traffic_s
from course_lib.ddp import DDP
from course_lib.memory import activations
from course_lib.memory.layer_bytes import TORCH_CPU
from course_lib.memory.saved_tensors import measure_saved, tensors_of
from course_lib.mesh import Mesh, RankMesh, clip, clip_grad_norm_across
from course_lib.models import GPT, IGNORED, padded_batch, token_loss
from course_lib.models.gpt import Dropout
from course_lib.ranks import record
from course_lib.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    ShardedDropout,
    VocabParallelEmbedding,
    VocabParallelHead,
    all_reduce_both,
    finish_gradients,
    full_state_dict,
    gather_tensors,
    layers,
    load_full_state_dict,
    parallel_token_loss,
    parallelize,
    reduce_from_region,
    shard_tensors,
    split_columns,
    tensor_parallel,
    vocab_parallel_cross_entropy,
)
from course_lib.tensor_parallel import state as finishing_state
from course_lib.tensor_parallel.cost import (
    break_even_hidden,
    finished_params,
    gathered_bytes,
    megatron_widths,
    replicated_params,
    tensor_traffic,
)
from course_lib.tensor_parallel.finish_watch import finishing
from course_lib.tensor_parallel.lab import split_layer_bytes
from course_lib.tensor_parallel.regions import all_gather
from course_lib.tensor_parallel.state import shards_of_split
from tests.law.law import (
    LENGTHS,
    WORLDS,
    Alone,
    assert_broken,
    assert_laws,
    every_module,
    lasting,
    nightly,
    ways,
)
from tests.law.modules import build
from tests.refusals import assert_refused

cloudpickle.register_pickle_by_value(sys.modules[__name__])

TOLERANCE = {"rtol": 1e-12, "atol": 1e-12}  # float64: a split sum runs in another order
SIZES = (1, 2, 3, 4)
TINY = ModelSpec(hidden=24, num_layers=1, num_heads=12, ffn_hidden=36, vocab=48, max_seq=12)
UNTIED = replace(TINY, tied=False, bias=False)
LLAMA = {"gated": True, "norm": "rms", "positions": "rope", "bias": False}


# --- the law: the numbers of one process


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, weight_decay=0.01)


def grads_of(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def seeded(spec, **options):
    torch.manual_seed(0)
    return GPT(spec, **options)


def the_mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


class ShardAxis(Alone):
    """All ranks have the whole batch, and begin alike."""

    name, same_seed = "tensor parallel", True
    reports = ("loss", "gradient", "state")

    def wrap(self, module):
        return parallelize(module, the_mesh(), self.law.options["sequence_parallel"])

    def backward(self, x, y):
        loss = self.law.options.get("loss_of", parallel_token_loss)(self.model(x), y, None)
        loss.backward()
        return loss

    def finish(self):
        self.law.options.get("finish", finish_gradients)(self.model)

    def gradients(self):
        grads = {n: p.grad for n, p in self.model.named_parameters(remove_duplicate=False)}
        whole = gather_tensors(self.model, {n: g for n, g in grads.items() if g is not None})
        return dict.fromkeys(grads) | whole

    def state(self):
        return full_state_dict(self.model)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_has_the_numbers_of_one_process(
    pools, sequence_parallel, world_size, length
):
    laws = every_module(sequence_parallel=sequence_parallel, optimizer="plain sgd")
    laws += ways(["GPT, uneven"], [{"sequence_parallel": sequence_parallel}])
    assert_laws(pools(world_size).run, ShardAxis, lasting(length, laws))


def assert_law(by_rank, wanted):
    for found in by_rank[1:]:
        torch.testing.assert_close(found, by_rank[0], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(by_rank[0], wanted, **TOLERANCE)


def copies_of(named):
    return {name: tensor.detach().clone() for name, tensor in named.items()}


def steps_of(
    model, finish=lambda: None, clip=nn.utils.clip_grad_norm_, how=(token_loss, copies_of)
):
    """Two clipped steps: losses, norms, and the gradients and weights after each, whole."""
    optimizer, (loss_of, whole), found = sgd(model), how, []
    for number in range(2):
        tokens, targets = padded_batch(number, batch=2, seq=12, vocab=48)
        optimizer.zero_grad()
        loss = loss_of(model(tokens), targets)
        loss.backward()
        finish()
        grads = whole(grads_of(model))
        norm = clip(model.parameters(), 0.1)
        optimizer.step()
        weights = whole(dict(model.named_parameters()))
        found.append((loss.detach(), norm, grads, weights))
    return found


def shared(kv_heads, window=5):
    """A model whose heads of keys are fewer than ranks, with all that needs a sum over ranks."""
    how = {**LLAMA, "tied": False, "bias": ("qkv", "out"), "qk_norm": "head", "head_dim": 4}
    return replace(TINY, **how, num_layers=2, num_heads=8, num_kv_heads=kv_heads, window=window)


WAYS = [{}, {"sequence_parallel": True}, {"sequence_parallel": True, "overlap": True}]


def split_steps(rank, specs, ways=WAYS, finish_of=finish_gradients):
    mesh, found = RankMesh(Mesh(tp=dist.get_world_size())), []
    for spec in specs:
        for way in ways:
            model = parallelize(seeded(spec).double(), mesh.device_mesh("tp", "cpu"), **way)
            clip = partial(clip_grad_norm_across, model, mesh)
            how = parallel_token_loss, partial(gather_tensors, model)
            finish = partial(finish_of, model)
            found.append(steps_of(model, finish, lambda _, most, clip=clip: clip(most), how))
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_heads_that_ranks_share_have_the_numbers_of_one_process(pools, world_size):
    """One or two heads of keys and values; losses, gradients, their norm and two clipped steps."""
    specs = [shared(1), shared(2, window=None)]
    wanted = [steps_of(seeded(spec).double()) for spec in specs for _ in WAYS]
    assert all(norm > 0.12 for steps in wanted for _, norm, _, _ in steps)
    assert_law(pools(world_size).run(split_steps, specs), wanted)


def each_copy_counts(module, mesh):
    split = shards_of_split(module)
    return {p for n, p in module.named_parameters() if n in split or mesh.index("tp") == 0}


def first_copy_only(group, how, one):
    """What each rank adds to the sum, without what the second copy of a head has seen."""
    if how and dist.get_rank(group) % how.copies:
        one.grad.zero_()
    return in_whole(group, how, one)


def sum_nothing(model):
    with finishing(model.parameters()):
        pass


in_whole = finishing_state._in_whole
FAULTS = {
    "each copy counts": (clip, "counted_here", each_copy_counts),
    "the first copy counts alone": (finishing_state, "_in_whole", first_copy_only),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_heads_that_are_not_summed_or_counted_right_fail_the_law(pools, fault):
    def steps(rank, place, attribute, broken):
        with patch.object(place, attribute, broken):
            return split_steps(rank, [shared(1)], [{}])

    wanted = [steps_of(seeded(shared(1)).double())]
    with pytest.raises(AssertionError):
        assert_law(pools(2).run(steps, *FAULTS[fault]), wanted)


def test_shared_heads_and_norms_that_are_not_summed_fail_the_law(pools):
    wanted = [steps_of(seeded(shared(1)).double())]
    with pytest.raises(AssertionError):
        assert_law(pools(2).run(split_steps, [shared(1)], [{}], sum_nothing), wanted)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_shared_heads_are_held_once_and_read_back(pools, kv_heads):
    """Whole tensors, the shards that a checkpoint is made of, and other ranks that load them."""
    spec = shared(kv_heads)

    def states(rank):
        model = parallelize(seeded(spec), the_mesh())
        torch.manual_seed(7)
        other = parallelize(GPT(spec), the_mesh())
        whole = full_state_dict(model)
        load_full_state_dict(other, whole)
        name = "blocks.1.attention.k.weight"
        shard = shards_of_split(model)[name](dict(model.named_parameters())[name])
        return whole, full_state_dict(other), shard.shape, [box for box, _ in shard.pieces]

    wanted = seeded(spec).state_dict()
    for p in (2, 4):
        by_rank = pools(p).run(states)
        for rank, (whole, loaded, shape, boxes) in enumerate(by_rank):
            assert all(torch.equal(whole[name], x) for name, x in wanted.items())
            assert all(torch.equal(loaded[name], x) for name, x in wanted.items())
            rows = max(1, kv_heads // p) * 4
            start = rank * kv_heads // p * 4
            assert (shape, boxes) == ((kv_heads * 4, 24), [Box((start, 0), (rows, 24))])


def test_replicas_of_a_split_model(pools):
    """Two replicas (dp) of a model over two ranks (tp): the numbers of the whole batch."""

    def step(rank):
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "pp", "tp"))
        model = parallelize(seeded(UNTIED).double(), mesh["tp"], sequence_parallel=True)
        wrapped = DDP(model, group=mesh["dp"].get_group())
        mine = slice(None, None, 2) if mesh["dp"].get_local_rank() else slice(1, None, 2)
        tokens, _ = padded_batch(0, batch=4, seq=12, vocab=48)
        loss = parallel_token_loss(wrapped(tokens[mine]), tokens[mine], mesh["tp"].get_group())
        loss.backward()
        wrapped.finish()
        finish_gradients(model)
        return gather_tensors(model, grads_of(model))

    model = seeded(UNTIED).double()
    tokens, _ = padded_batch(0, batch=4, seq=12, vocab=48)
    token_loss(model(tokens), tokens).backward()
    assert_law(pools(4).run(step), grads_of(model))


# --- broken ones fail the law


class BiasOnEveryRank(RowParallelLinear):
    def forward(self, x):
        return self.leave(F.linear(x, self.weight, self.bias))


class PartialGelu(nn.Module):
    """The first matrix by rows: GELU of each part of the sum."""

    def __init__(self, mlp, group):
        super().__init__()
        sizes = mlp.up.in_features, mlp.up.out_features
        self.up = RowParallelLinear(*sizes, True, group, whole=mlp.up)
        self.out = mlp.out

    def forward(self, x):
        part = F.linear(split_columns(x, self.up.group), self.up.weight)
        return self.out(reduce_from_region(F.gelu(part), self.up.group) + self.up.bias)


def every_pth(whole, dim, group=None, copies=1):
    """Rows me, me + p, ...: a piece of every head."""
    p, me = dist.get_world_size(group), dist.get_rank(group)
    return whole.index_select(dim, torch.arange(me, whole.shape[dim], p)).clone()


def local_loss(logits, targets, group):
    size = logits.shape[-1]
    index = targets - dist.get_rank(group) * size
    mine = (index >= 0) & (index < size)
    loss = token_loss(logits, index.masked_fill(~mine, IGNORED))
    return reduce_from_region(loss, group) / dist.get_world_size(group)


def same(x, group=None):
    return x


class NoMinusInf(VocabParallelHead):
    padding = 0.0


split_pair = tensor_parallel._split_pair
PLANTED = {
    "bias everywhere": (tensor_parallel, "RowParallelLinear", BiasOnEveryRank, "GPT, recomputed"),
    "no all_reduce in backward": (layers, "copy_to_region", same, "GPT, recomputed"),
    "no all_reduce in forward": (layers, "reduce_from_region", same, "GPT, recomputed"),
    "heads split": (layers, "own_shard", every_pth, "GPT, recomputed"),
    "what fills up counts": (tensor_parallel, "VocabParallelHead", NoMinusInf, "GPT, uneven"),
    "one mask for all parts": (
        tensor_parallel, "ShardedDropout", lambda p, group: Dropout(p), "GPT, dropout",
    ),
}  # fmt: skip


@pytest.mark.parametrize("planted", PLANTED)
def test_a_broken_layer_fails_the_law(pools, planted):
    place, attribute, broken, name = PLANTED[planted]
    (law,) = ways([name], [{"sequence_parallel": False}])
    assert_broken(pools(2), ShardAxis, law, lambda: patch.object(place, attribute, broken))


def test_gelu_before_the_sum_fails_the_law(pools):
    def split(module, names, *options):
        if "q" in names:
            split_pair(module, names, *options)

    def step(rank):
        with patch.object(tensor_parallel, "_split_pair", split):
            mesh = the_mesh()
            model = parallelize(seeded(TINY).double(), mesh)
        for block in model.blocks:
            block.mlp = PartialGelu(block.mlp, mesh.get_group())
        return parallel_token_loss(model(tokens), targets, mesh.get_group()).detach()

    tokens, targets = padded_batch(0, batch=2, seq=12, vocab=48)
    with pytest.raises(AssertionError):
        assert_law(pools(2).run(step), token_loss(seeded(TINY).double()(tokens), targets).detach())


@pytest.mark.parametrize(
    ("sequence_parallel", "broken"),
    [(False, {"loss_of": local_loss}), (True, {"finish": sum_nothing})],
    ids=["loss over the own vocabulary", "norms not added up"],
)
def test_a_broken_step_fails_the_law(pools, sequence_parallel, broken):
    options = {"sequence_parallel": sequence_parallel, **broken}
    with pytest.raises(AssertionError, match=r"off by|differs"):
        assert_laws(pools(2).run, ShardAxis, ways(["GPT, recomputed"], [options]))


def test_two_conventions_of_the_backward_of_a_sum(pools):
    """Losses that are summed over ranks need an all_reduce; the same loss on all, the identity."""

    def grads(rank):
        found = []
        for sums in (all_reduce_both, reduce_from_region):
            for factor in (10.0**rank, 1.0):
                x = torch.ones(1, dtype=torch.float64, requires_grad=True)
                (factor * sums(x)).sum().backward()
                found.append(x.grad.item())
        return found

    by_rank = pools(4).run(grads)
    assert by_rank == [[1111.0, 4.0, 10.0**rank, 1.0] for rank in range(4)]


# --- layers on their own


def layer_case(rank, make, x):
    """A layer from seed 0: its output, and the gradients of its input and its parameters."""
    torch.manual_seed(0)
    layer, x = make().double(), x.clone().requires_grad_()
    out = layer(x)
    (out * torch.arange(1.0, out.numel() + 1).view_as(out)).sum().backward()
    grads = grads_of(layer)
    if isinstance(layer, nn.Linear):
        return out.detach(), x.grad, grads
    return out.detach(), x.grad, gather_tensors(layer, grads)


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_layer_that_begins_and_ends_whole_is_a_linear_layer(pools, world_size):
    x = torch.linspace(-1, 2, 42, dtype=torch.float64).view(2, 3, 7)
    kinds = (
        partial(ColumnParallelLinear, gather_output=True),
        partial(RowParallelLinear, input_is_split=False),
    )

    def cases(rank):
        return [
            layer_case(rank, partial(kind, 7, 10, b), x) for kind in kinds for b in (True, False)
        ]

    wanted = [layer_case(0, partial(nn.Linear, 7, 10, bias), x) for bias in (True, False)]
    assert_law(pools(world_size).run(cases), [*wanted, *wanted])


FUNCTIONS = {  # of which the padding may be 0, not 0, or infinite, in forward or in backward
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "log of square": lambda x: torch.log(x * x),
    "root of size": lambda x: x.abs().sqrt(),
}


def trained_pair(function, split=lambda *pair: pair):
    """A pair of matrices with 5 hidden units after three steps, and the outputs before each."""
    torch.manual_seed(1)
    pair = nn.Sequential(*split(nn.Linear(4, 5).double(), nn.Linear(5, 3).double()))
    optimizer = torch.optim.SGD(pair.parameters(), lr=0.1, weight_decay=0.1)
    x, outs = torch.randn(2, 3, 4).double(), []
    for _ in range(3):
        optimizer.zero_grad()
        out = pair[1](function(pair[0](x)))
        (out**2).mean().backward()
        optimizer.step()
        outs.append(out.detach())
    return pair, outs


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("world_size", [2, 3, pytest.param(4, marks=nightly)])
def test_padding_gets_no_gradient_whatever_is_between_the_matrices(pools, world_size, name):
    """5 hidden units: 3 + 2, 2 + 2 + 1, or 2 + 2 + 1 + 0."""

    def trained(rank, overlap):
        pair, outs = trained_pair(
            FUNCTIONS[name],
            lambda a, b: (
                ColumnParallelLinear(4, 5, whole=a, overlap=overlap),
                RowParallelLinear(5, 3, whole=b),
            ),
        )
        shards = [pair[0].weight, pair[0].bias, pair[1].weight]
        squares = sum(shard.grad.square().sum() for shard in shards)
        dist.all_reduce(squares)
        return outs, gather_tensors(pair, grads_of(pair)), squares

    pair, outs = trained_pair(FUNCTIONS[name])
    grads = grads_of(pair)
    squares = sum(grad.square().sum() for name, grad in grads.items() if name != "1.bias")
    for overlap in (False, True):
        assert_law(pools(world_size).run(trained, overlap), (outs, grads, squares))


def both_ends(rank, vocab, embedding_of, head_of):
    """Embedding and head from seed 0: outputs and gradients."""
    torch.manual_seed(0)
    tokens = torch.arange(2 * vocab).view(2, vocab) % vocab
    embedding, head = embedding_of(vocab, 3).double(), head_of(3, vocab, bias=False).double()
    x = embedding(tokens)
    logits = head(x)
    (logits**2).sum().backward()
    grads = (grads_of(embedding), grads_of(head))
    if embedding_of is VocabParallelEmbedding:
        grads = gather_tensors(embedding, grads[0]), gather_tensors(head, grads[1])
    return x.detach(), logits.detach(), grads


@pytest.mark.parametrize("world_size", WORLDS)
def test_any_vocabulary_is_split(pools, world_size):
    """Also one with fewer tokens than ranks, and a head that gathers its logits."""
    head_of = partial(VocabParallelHead, gather_output=True)

    def ends(rank):
        return [both_ends(rank, vocab, VocabParallelEmbedding, head_of) for vocab in (2, 5, 12)]

    wanted = [both_ends(0, vocab, nn.Embedding, nn.Linear) for vocab in (2, 5, 12)]
    assert_law(pools(world_size).run(ends), wanted)


@pytest.mark.parametrize("index", [0, 3, -1])
def test_a_row_that_is_padding_gets_no_gradient(pools, index):
    def lookup(split=lambda whole: whole):
        torch.manual_seed(0)
        whole = nn.Embedding(5, 3, padding_idx=index).double()
        nn.init.normal_(whole.weight)
        layer = split(whole)
        out = layer(torch.tensor([[0, 3, 4, 3], [1, 0, 2, 4]]))
        (out**2).sum().backward()
        return out.detach(), layer

    def split(rank):
        out, layer = lookup(lambda whole: VocabParallelEmbedding(5, 3, whole=whole))
        return out, gather_tensors(layer, grads_of(layer))

    out, layer = lookup()
    assert_law(pools(2).run(split), (out, grads_of(layer)))


LOGITS = {
    "small": lambda x: x,
    "too large for exp": lambda x: 1e4 * x,
    "all below": lambda x: x - 1e6,
    "some impossible": lambda x: x.masked_fill(torch.arange(12) % 5 == 1, -torch.inf),
}


@pytest.mark.parametrize("world_size", WORLDS)
def test_cross_entropy_is_that_of_whole_logits(pools, world_size):
    torch.manual_seed(3)
    cases = [change(torch.randn(4, 3, 12, dtype=torch.float64)) for change in LOGITS.values()]
    targets = torch.tensor([[0, 5, 10], [IGNORED, 3, 4], [8, IGNORED, 9], [2, 7, 0]])

    def losses(rank):
        return [loss(logits.chunk(dist.get_world_size(), -1)[rank]) for logits in cases]

    def loss(logits):
        mine = logits.clone().requires_grad_()
        each = vocab_parallel_cross_entropy(mine, targets)
        parallel_token_loss(mine, targets).backward()
        return each.detach(), all_gather(mine.grad, -1)

    wanted = []
    for logits in cases:
        whole = logits.clone().requires_grad_()
        each = F.cross_entropy(whole.flatten(0, 1), targets.flatten(), reduction="none")
        token_loss(whole, targets).backward()
        wanted.append((each.detach().view(4, 3), whole.grad))
    assert_law(pools(world_size).run(losses), wanted)


def test_halves_add_up_their_exponentials_in_single(pools):
    torch.manual_seed(3)
    logits, targets = torch.randn(5, 4096).bfloat16(), torch.arange(5) * 1000

    def loss(rank):
        mine = logits.chunk(2, -1)[rank].clone().requires_grad_()
        losses = vocab_parallel_cross_entropy(mine, targets)
        losses.sum().backward()
        return losses.detach(), mine.grad.dtype

    wanted = F.cross_entropy(logits.float(), targets, reduction="none")
    for losses, dtype in pools(2).run(loss):
        assert dtype is torch.bfloat16
        torch.testing.assert_close(losses, wanted)


# --- dropout: which masks are the same, and which are not


def test_masks_of_replicated_tensors_agree_and_those_of_parts_differ(pools):
    def masks(rank):
        torch.manual_seed(0)
        ones = torch.ones(2, 6, 50)
        return [layer(ones) for layer in (Dropout(0.3), ShardedDropout(0.3), Dropout(0.3))]

    torch.manual_seed(0)
    whole = [Dropout(0.3)(torch.ones(2, n, 50)) for n in (6, 24, 6)]
    by_rank = pools(4).run(masks)
    for first, _, last in by_rank:
        assert torch.equal(first, whole[0])
        assert torch.equal(last, whole[2])
    parts = [part for _, part, _ in by_rank]
    assert torch.equal(torch.cat(parts, 1), whole[1])
    assert not any(torch.equal(a, b) for a, b in pairwise(parts))
    assert whole[1].count_nonzero().item() / whole[1].numel() == pytest.approx(0.7, abs=0.03)


def test_a_mask_keeps_no_more_than_its_part(pools):
    def kept(rank):
        found = []
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda t: found.append(t.untyped_storage().nbytes()) or t, lambda t: t
        )
        with hooks:
            ShardedDropout(0.3)(torch.ones(1, 6, 50, requires_grad=True))
        return found

    assert pools(4).run(kept) == [[300]] * 4


def test_a_split_model_evaluates_if_the_whole_one_did(pools):
    def modes(rank):
        model = seeded(TINY, flash=False, dropout=0.2).eval()
        return [module.training for module in parallelize(model, the_mesh(), True).modules()]

    assert not any(map(any, pools(2).run(modes)))


# --- what a rank holds, and whole states


@pytest.mark.parametrize(("sequence_parallel", "overlap"), [(0, 0), (1, 0), (1, 1)])
@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=nightly)])
def test_what_a_rank_keeps_for_backward_is_on_paper(pools, world_size, sequence_parallel, overlap):
    """With overlap tokens are gathered again, as the paper counts; else the whole input is kept."""
    cases = [(SPECS["gpt"], 0.0, True), (SPECS["gpt"], 0.2, False), (SPECS["llama"], 0.0, True)]
    tokens, targets = padded_batch(0, batch=3, seq=12, vocab=48)

    def saved(rank):
        return [saved_by(*case) for case in cases]

    def saved_by(spec, dropout, flash):
        model = seeded(spec, flash=flash, dropout=dropout)
        parallelize(model, the_mesh(), bool(sequence_parallel), overlap=bool(overlap))
        given = [*tensors_of(model), tokens, targets]
        kept = measure_saved(lambda: parallel_token_loss(model(tokens), targets), given=given)
        return sum(one.num_bytes for one in kept)

    how = {"number_bytes": 4, "kernels": TORCH_CPU}
    how["parallelism"] = Parallelism(tp=world_size, sequence_parallel=bool(sequence_parallel))
    wanted = []
    for spec, dropout, flash in cases:
        paper = activations(spec, 3, 12, dropout=dropout > 0, flash=flash, **how)
        indices = 2 * (8 + 1) * 36 + 4  # of int64, with a bool each (own token?); and a count
        kept_whole = sequence_parallel and not overlap
        gathered = gathered_bytes(spec, 3, 12, world_size, 4) * kept_whole
        wanted.append(sum(paper.values()) + indices + gathered)
    assert pools(world_size).run(saved) == [wanted] * world_size


@pytest.mark.parametrize(
    ("whole", "split", "how"),
    [
        (10, 24, {}),
        (4, 30, {"sequence_parallel": True}),
        (0, 34, {"sequence_parallel": True, "overlap": True}),
    ],
)
def test_a_layer_keeps_what_korthikanti_derives(pools, whole, split, how):
    """sbh(10 + 24/t + 5as/ht) and sbh/t (34 + 5as/h) to the byte, and the norms' statistics."""
    spec, batch, seq, p = replace(TINY, ffn_hidden=4 * TINY.hidden), 3, 8, 2
    scores = 5 * spec.num_heads * seq / spec.hidden
    statistics = 2 * 2 * 2 * seq * batch / (p if how else 1)  # two numbers per norm and token
    wanted = seq * batch * spec.hidden * (whole + (split + scores) / p) + statistics
    assert pools(p).run(split_layer_bytes, spec, batch, seq, **how) == [wanted] * p


def still_there(refs, within_s=10):
    """Names of what is still referenced; the thread that detects hangs may hold frames briefly."""
    end_s = time.monotonic() + within_s
    while (names := [name for name, ref in refs.items() if ref() is not None]) and (
        time.monotonic() < end_s
    ):
        gc.collect()
    return names


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("world_size", [1, 3, pytest.param(4, marks=nightly)])
def test_a_rank_holds_its_shards_and_nothing_else(pools, world_size, tied):
    spec = replace(TINY, tied=tied)

    def held(rank):
        model = seeded(spec)
        split = {
            name: weakref.ref(param)
            for name, param in model.named_parameters()
            if param.dim() == 2 and "positions" not in name
        }
        parallelize(model, the_mesh())
        storages = {param.untyped_storage().data_ptr(): param for param in model.parameters()}
        return (
            sum(param.untyped_storage().nbytes() for param in storages.values()),
            still_there(split),
        )

    wanted = 4 * params_on_rank(spec, Parallelism(tp=world_size))
    assert pools(world_size).run(held) == [(wanted, [])] * world_size


@pytest.mark.parametrize("world_size", WORLDS)
def test_the_whole_state_is_that_of_the_unsplit_model(pools, world_size):
    names = ("GPT", "GPT, uneven", "GPT, grouped keys")

    def states(rank, name):
        state = full_state_dict(parallelize(build(name, 0), the_mesh()))
        other = parallelize(build(name, 7), the_mesh(), sequence_parallel=True)
        load_full_state_dict(other, state)
        tied = state["embedding.weight"] is state["head.weight"]
        return state, full_state_dict(other), tied

    for by_name in pools(world_size).run(lambda rank: [states(rank, name) for name in names]):
        for name, (state, loaded, tied) in zip(names, by_name, strict=True):
            whole = build(name, 0)
            assert list(state) == list(whole.state_dict())
            for key, value in whole.state_dict().items():
                assert torch.equal(state[key], value)
                assert torch.equal(loaded[key], value)
            assert tied == whole.spec.tied
            build(name, 7).load_state_dict(state)


# --- traffic


def calls_of(events):
    return [(event.kind, event.num_bytes) for event in events if event.kind != "wait"]


SPECS = {
    "gpt": replace(TINY, num_layers=3),
    "llama": replace(TINY, **LLAMA, num_layers=2, num_heads=24, num_kv_heads=12, hidden=48),
    "shared": replace(shared(1), num_heads=12),
}


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=nightly)])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_every_collective_is_on_paper(pools, sequence_parallel, world_size):
    cases = [(spec, dtype) for spec in SPECS.values() for dtype in (torch.float64, torch.bfloat16)]

    def steps(rank):
        return [step(spec, dtype) for spec, dtype in cases]

    def step(spec, dtype):
        mesh = the_mesh()
        model = parallelize(seeded(spec).to(dtype), mesh, sequence_parallel)
        tokens, targets = padded_batch(0, batch=3, seq=12, vocab=48)
        with record() as log:
            parallel_token_loss(model(tokens), targets, mesh.get_group()).backward()
            finish_gradients(model)
        return calls_of(log.events)

    wanted, how = [], {"tp": world_size, "sequence_parallel": sequence_parallel}
    for spec, dtype in cases:
        paper = tensor_traffic(spec, 3, 12, dtype.itemsize, **how)
        wanted.append([(call.kind, call.num_bytes) for call in paper])
    assert pools(world_size).run(steps) == [wanted] * world_size


def test_a_layer_sends_the_same_bytes_either_way():
    whole, split = (
        [
            call
            for call in tensor_traffic(TINY, 2, 12, sequence_parallel=sequence_parallel)
            if call.part in ("attention 0", "mlp 0")
        ]
        for sequence_parallel in (False, True)
    )
    stream = 2 * 12 * TINY.hidden * 2
    assert [call.kind for call in whole] == ["all_reduce"] * 4
    assert sorted(call.kind for call in split) == ["all_gather"] * 4 + ["reduce_scatter"] * 4
    for p in SIZES:
        assert sent_bytes(whole, p) == sent_bytes(split, p) == 4 * 2 * (p - 1) / p * stream
        assert traffic_s(whole, p, NVLINK) == pytest.approx(traffic_s(split, p, NVLINK))
    assert traffic_s(whole, 8, NVLINK) < traffic_s(whole, 8, INFINIBAND)
    assert traffic_s(whole, 1, INFINIBAND) == 0


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_gathering_again_costs_a_quarter_more(spec):
    """Megatron's choice: one more all_gather per region in backward, and less memory."""
    once, again = (
        [
            call
            for call in tensor_traffic(spec, 2, 12, sequence_parallel=True, gathers_again=more)
            if call.part not in ("loss", "norms")
        ]
        for more in (False, True)
    )
    assert sum(call.num_bytes for call in again) * 4 == sum(call.num_bytes for call in once) * 5
    for p in (2, 4):
        assert sent_bytes(again, p) == pytest.approx(5 / 4 * sent_bytes(once, p))
    regions = 2 * spec.num_layers + 1
    region_bytes = 2 * 12 * spec.hidden * 2
    assert gathered_bytes(spec, 2, 12, 4) == regions * region_bytes * 3 / 4
    assert [call.kind for call in again if call.phase == "forward"] == [
        call.kind for call in once if call.phase == "forward"
    ]


@pytest.mark.parametrize("p", [2, 8])
def test_at_the_break_even_width_a_layer_communicates_as_long_as_it_computes(p):
    spec, seq = replace(TINY, hidden=96, ffn_hidden=384), 48
    bytes_per_s = 1e9
    flop_per_s = 9 / 2 * (96 + 48 / 6) / (p - 1) * bytes_per_s  # the intensity times bytes/s
    assert break_even_hidden(p, flop_per_s, bytes_per_s, seq) == pytest.approx(96)
    forward = forward_flop(spec, 5, seq)
    compute_s = 3 * (sum(forward.values()) - forward["logits"]) / p / flop_per_s
    calls = [c for c in tensor_traffic(spec, 5, seq) if c.part in ("attention 0", "mlp 0")]
    assert sent_bytes(calls, p) / bytes_per_s == pytest.approx(compute_s)
    assert break_even_hidden(1, flop_per_s, bytes_per_s) == 0


def test_published_models_are_wider_than_their_nvlink_needs():
    assert [p for p, _ in megatron_widths().values()] == [4, 8, 8, 8]
    for p, width in megatron_widths().values():
        assert width > break_even_hidden(p, H100.peak(), H100.links["NVLink"])
        assert width < break_even_hidden(p, H100.peak(), H100.links["PCIe 5"])


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_replicated_parameters_are_what_two_ranks_hold_twice(spec):
    twice = 2 * params_on_rank(spec, Parallelism(tp=2)) - count_params(spec)
    both = replicated_params(spec), finished_params(spec, 2, sequence_parallel=True)
    assert (both[0] if spec.kv_heads > 1 else both[1]) == twice


@pytest.mark.parametrize(
    ("name", "more", "words"),
    [
        ("mixtral-8x7b", {}, "has experts"),
        ("deepseek-v3", {"experts": None}, "has latent attention"),
        ("tiny", {"qk_norm": "whole"}, "has norms of all heads at once"),
    ],
)
def test_a_model_that_is_not_split_has_no_traffic(name, more, words):
    """A router or a latent matrix is whole on every rank: counted as dense, the sums are wrong."""
    spec = replace(MODELS[name], **more)
    for count in (
        lambda: tensor_traffic(spec, 1, 8),
        lambda: finished_params(spec, 2),
        lambda: replicated_params(spec),
    ):
        with pytest.raises(CourseError, match=words):
            count()


# --- what goes wrong is told


def begun(spec=TINY, mesh=None, sequence_parallel=False, **options):
    """A split model."""
    return parallelize(seeded(spec, **options), mesh or the_mesh(), sequence_parallel)


def heads(num_heads, num_kv_heads):
    return lambda rank: begun(replace(TINY, num_heads=num_heads, num_kv_heads=num_kv_heads))


def finished_not_once(calls):
    def loop(rank):
        model = begun(sequence_parallel=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        do = {
            "forward": lambda: model(torch.ones(2, 8).long()),
            "backward": lambda: do["forward"]().sum().backward(),
            "finish": lambda: finish_gradients(model),
            "step": optimizer.step,
        }
        for _ in range(2):  # what went well once goes well again
            optimizer.zero_grad()
            for call in ("backward", "finish", "step"):
                do[call]()
        optimizer.zero_grad()
        for call in calls.split():
            do[call]()

    return loop


def other_weights(rank):
    torch.manual_seed(rank)
    parallelize(GPT(TINY), the_mesh())


def other_masks(rank):
    model = seeded(TINY, flash=False, dropout=0.1)
    torch.manual_seed(rank)
    parallelize(model, the_mesh())


def entropy(*targets):
    return lambda rank: vocab_parallel_cross_entropy(torch.ones(3, 4), torch.tensor(targets))


def embedding(**options):
    return lambda rank: VocabParallelEmbedding(8, 4, whole=nn.Embedding(8, 4, **options))


def clipped(clip, *options, replicated=False):
    """Clip after a backward, which another wrapper may have finished."""

    def on_rank(rank):
        mesh = two_axes()
        model = wrapped = begun(mesh=mesh["tp"])
        if replicated:
            wrapped = DDP(model, group=mesh["dp"].get_group())
        wrapped(torch.ones(2, 8).long()).sigmoid().sum().backward()
        if replicated:
            wrapped.finish()
        return clip(model.parameters(), *options)

    return on_rank


def unscaled(params):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(torch.optim.SGD(params, lr=0.1))


def two_axes():
    return init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))


STAYS = "MeshError: parallelize: need {} tp, as a head stays whole; got 3 and 2"
MESH = "MeshError: parallelize: need a DeviceMesh of one axis; got "
UNSPLIT = "parallelize: need an unsplit GPT; got "
ONCE = "rank {rank}, tensor parallel: need finish_gradients(model) once per step, "
ONCE += "after the last backward; got "
ALIKE = "MeshError: rank {rank}, parallelize: need the same "
PART = "CourseError: tensor and pipeline parallelism: need code that knows of the gradients of "
PART += "all ranks; got torch.nn."
ACROSS = "Try clip_grad_norm_across(part, mesh, max_norm) of course_lib.mesh"
EMBEDDING = "CourseError: VocabParallelEmbedding: need an nn.Embedding without ... got "
ENTROPY = "ShapeError: rank {rank}, vocab_parallel_cross_entropy: need "
REFUSED = [
    (STAYS.format("num_heads of own divisible by"), heads(3, 3)),
    (STAYS.format("kv_heads of own as a multiple or a divisor of"), heads(6, 3)),
    (MESH + '2 axes. Try mesh["tp"]', lambda rank: begun(mesh=two_axes())),
    (MESH, lambda rank: begun(mesh=dist.group.WORLD)),
    (UNSPLIT + "one that is split already", lambda rank: parallelize(begun(), the_mesh())),
    (UNSPLIT + "Linear", lambda rank: parallelize(nn.Linear(2, 2), the_mesh())),
    (
        "rank {rank}: need a model that is split",
        lambda rank: finish_gradients(GPT(TINY)),
    ),
    (ONCE + "a second call.", finished_not_once("backward finish finish")),
    (ONCE + "a backward after it.", finished_not_once("backward finish backward finish")),
    (ONCE + "a step without it.", finished_not_once("backward step forward")),
    (ALIKE + "weights on all ranks", other_weights),
    (ALIKE + "random state on all ranks", other_masks),
    (
        "ShapeError: rank {rank}, sequence parallel: need seq divisible by tp; got 7 and 2. "
        "Try seq=8, or",
        lambda rank: begun(sequence_parallel=True)(torch.ones(2, 7).long()),
    ),
    (
        "ShapeError: rank {rank}, VocabParallelEmbedding: need tokens from 0 to 47; got 48 to 48",
        lambda rank: begun()(torch.full((2, 3), 48)),
    ),
    (PART + "utils.clip_grad_norm_, ... " + ACROSS, clipped(nn.utils.clip_grad_norm_, 1.0)),
    (PART + "utils.clip_grad_norm_", clipped(nn.utils.clip_grad_norm_, 1.0, replicated=True)),
    (
        PART + "utils.clip_grads_with_norm_, ... " + ACROSS,
        clipped(nn.utils.clip_grads_with_norm_, 1.0, torch.ones(())),
    ),
    ("got torch.amp.GradScaler, ... Try bfloat16", clipped(unscaled)),
    (EMBEDDING + "max_norm=0.5. Try one without it, or", embedding(max_norm=0.5)),
    (EMBEDDING + "scale_grad_by_freq=True", embedding(scale_grad_by_freq=True)),
    (EMBEDDING + "sparse=True", embedding(sparse=True)),
    (ENTROPY + "tokens from 0 to 7; got -1 to 8", entropy(1, -1, 8)),
    (ENTROPY + "a target for each row", entropy(1, 1)),
    (
        "ShapeError: rank {rank}, shard_tensors: need embedding.weight with 41 in dim 0; "
        "got [42, 24]",
        lambda rank: shard_tensors(
            begun(replace(TINY, vocab=41)), GPT(replace(TINY, vocab=42)).state_dict()
        ),
    ),
    (
        "ShapeError: tensor_traffic: need batch, seq and number_bytes",
        lambda rank: tensor_traffic(TINY, 0, 12),
    ),
]


def test_what_cannot_be_is_told_in_one_sentence(pools):
    assert_refused(pools(2), REFUSED)


def test_values_and_replicated_parameters_are_clipped_as_before(pools):
    """Each by itself; and the norms are whole on every rank."""

    def largest(rank):
        params = clipped(list)(rank)
        nn.utils.clip_grad_value_(params, 1e-3)
        norms = [p for p in params if p.dim() == 1 and len(p) == TINY.hidden]
        return max(p.grad.abs().max().item() for p in params), nn.utils.clip_grad_norm_(norms, 1.0)

    (value, norm), other = pools(2).run(largest)
    assert value == pytest.approx(1e-3)
    assert other[1] == norm > 0


def test_parameters_are_saved_without_what_watches_them(pools):
    def loaded(rank):
        params = [*parallelize(seeded(TINY), the_mesh(), sequence_parallel=True).parameters()]
        torch.save(params, file := io.BytesIO())
        file.seek(0)
        return all(map(torch.equal, torch.load(file, weights_only=True), params))

    assert pools(2).run(loaded) == [True] * 2
