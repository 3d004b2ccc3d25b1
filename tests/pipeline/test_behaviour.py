"""Behavior of the pipeline engine besides its numbers: messages, events, memory, errors."""

import gc
import re
import sys
from functools import partial
from itertools import pairwise

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules as torch_schedules
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from course_lib.core import ModelSpec
from course_lib.core.records import COMPUTE_KINDS
from course_lib.ddp import DDP
from course_lib.memory.saved_tensors import activation_ledger
from course_lib.models import GPT, token_loss
from course_lib.pipeline import (
    Action,
    Pipeline,
    ScheduleError,
    Stage,
    breadth_first,
    dual_pipe_v,
    gpipe,
    interleaved,
    naive,
    one_f_one_b,
    simulate,
    split_model,
    v_placement,
    zero_bubble_h1,
    zero_bubble_v,
)
from course_lib.pipeline.actions import num_model_chunks_of, placement_of
from course_lib.ranks import RankError, record
from tests.refusals import assert_refused

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SPEC = ModelSpec(hidden=16, num_layers=4, num_heads=2, ffn_hidden=32, vocab=40, max_seq=6)


def linear_layers(count=4):
    torch.manual_seed(5)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(count)))


def batch(m, items=2):
    torch.manual_seed(6)
    return [torch.randn(items, 6) for _ in range(m)], [torch.randn(items, 6) for _ in range(m)]


def schedules(p, m):
    return [
        naive(p, m),
        gpipe(p, m),
        one_f_one_b(p, m),
        zero_bubble_h1(p, m),
        interleaved(p, m, 2),
        breadth_first(p, m, 2),
        zero_bubble_v(p, m),
        dual_pipe_v(p, 8),
    ]


# --- equal to torch's own


TORCH = {
    "gpipe": (pipelining.ScheduleGPipe, gpipe),
    "1f1b": (pipelining.Schedule1F1B, one_f_one_b),
    "interleaved": (pipelining.ScheduleInterleaved1F1B, lambda p, m: interleaved(p, m, 2)),
    "breadth-first": (
        torch_schedules.ScheduleLoopedBFS,
        lambda p, m: breadth_first(p, m, 2),
    ),
    "zb-h1": (torch_schedules.ScheduleInterleavedZeroBubble, zero_bubble_h1),
    "zb-v": (torch_schedules.ScheduleZBVZeroBubble, zero_bubble_v),
    "dualpipe-v": (torch_schedules.ScheduleDualPipeV, dual_pipe_v),
}


def grads_of(module):
    return [param.grad.clone() for param in module.parameters()]


def both(rank, m):
    """Gradients by ours and by torch's schedules, on the same stages."""
    p, found = dist.get_world_size(), {}
    inputs, targets = batch(m, items=3)
    for name, (torch_schedule, make) in TORCH.items():
        schedule = make(p, m)
        placement = placement_of(schedule)
        stage = split_model(linear_layers(), p, rank, placement=placement)
        Pipeline(stage, F.mse_loss).step(schedule, inputs, targets)
        ours = grads_of(stage)
        stage.zero_grad()
        theirs = [
            pipelining.PipelineStage(chunk, depth, len(placement), torch.device("cpu"))
            for chunk, depth in zip(stage.chunks, stage.depths, strict=True)
        ]
        single = issubclass(torch_schedule, torch_schedules.PipelineScheduleSingle)
        run = torch_schedule(theirs[0] if single else theirs, m, loss_fn=F.mse_loss)
        args = (torch.cat(inputs),) if rank == 0 else ()
        run.step(*args, target=torch.cat(targets) if rank == placement[-1] else None)
        found[name] = ours, grads_of(stage)
    return found


@pytest.mark.parametrize("p", [1, 2])
def test_gradients_are_those_of_torch_pipelining(pools, p):
    for found in pools(p).run(both, 4):
        for ours, theirs in found.values():
            # torch divides the sum by m at the end, we give each micro-batch its share: float32
            torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-7)


# --- messages and events


def recorded(rank, given):
    """Events of the first and of the second step of each schedule."""
    p, found = dist.get_world_size(), []
    for schedule in given:
        stage = split_model(linear_layers(8), p, rank, placement=placement_of(schedule))
        pipeline, logs = Pipeline(stage, F.mse_loss), []
        m = 1 + max(action.micro_batch for action in schedule[0])
        for _ in range(2):
            with record() as log:
                pipeline.step(schedule, *batch(m))
            logs.append(log.events)
        found.append(logs)
    return found


@pytest.mark.parametrize("p", [1, 2, 4])
def test_events_are_those_of_the_simulator(pools, p):
    given = schedules(p, 4)
    by_rank = pools(p).run(recorded, given)
    for rank, found in enumerate(by_rank):
        for schedule, logs in zip(given, found, strict=True):
            simulated = [e for e in simulate(schedule).events() if e.rank == rank]
            wanted = [(e.kind, e.label) for e in simulated if e.kind in COMPUTE_KINDS]
            for events in logs:
                computed = [e for e in events if e.kind in COMPUTE_KINDS]
                assert [(e.kind, e.label) for e in computed] == wanted


@pytest.mark.parametrize("p", [1, 2, 4])
def test_each_border_is_crossed_once_each_way_by_each_micro_batch(pools, p):
    given = schedules(p, 4)
    by_rank = pools(p).run(recorded, given)
    for number, schedule in enumerate(given):
        first, second = (
            [e for found in by_rank for e in found[number][step] if e.kind == "send"]
            for step in range(2)
        )
        borders = sum(rank != after for rank, after in pairwise(placement_of(schedule)))
        crossings = borders * (1 + max(action.micro_batch for action in schedule[0]))
        assert len(second) == 2 * crossings
        assert {e.num_bytes for e in second} <= {2 * 6 * 4}
        headers = [e for e in first if e.num_bytes == 80]  # once, as shapes are not known before
        assert len(headers) == crossings
        assert len(first) == 3 * crossings


def test_a_receive_is_posted_before_its_message_is_needed(pools):
    def step(rank):
        stage = split_model(linear_layers(), 2, rank)
        pipeline = Pipeline(stage, F.mse_loss)
        for _ in range(2):
            with record() as log:
                pipeline.step(gpipe(2, 4), *batch(4))
        return log.events

    events = pools(2).run(step)[1]
    receives = sorted((e for e in events if e.kind == "recv"), key=lambda e: e.start_s)
    forwards = [e for e in events if e.kind == "forward"]
    for ahead, forward in zip(receives[1:], forwards, strict=False):
        assert ahead.start_s < forward.start_s


# --- what is held


class Product(nn.Module):
    """Autograd keeps the input and nothing else; outputs of other stages can be watched."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))
        self.outputs, self.most_alive = [], 0

    def forward(self, x):
        out = x * self.weight
        self.outputs.append(StorageWeakRef(out.untyped_storage()))
        self.most_alive = max(self.most_alive, self.alive())
        return out

    def alive(self):
        return sum(not ref.expired() for ref in self.outputs)


def first_sum(out, target):
    return out.sum() * target.sum()


def held(rank, given):
    """For each schedule: most micro-batches autograd held, what the engine says, what is left."""
    found = []
    inputs = [torch.ones(1000) * (1 + i) for i in range(8)]
    for schedule in given:
        stage = Stage([Product() for _ in range(num_model_chunks_of(schedule))])
        pipeline = Pipeline(stage, first_sum)
        pipeline.step(schedule, inputs, [torch.ones(1)] * 8)
        known = [*inputs, *stage.parameters()]
        gc.disable()  # nothing may wait for it
        ledger = activation_ledger(
            lambda s=schedule, q=pipeline: q.step(s, inputs, [torch.ones(1)] * 8), given=known
        )
        gc.enable()
        alive = [(chunk.most_alive, chunk.alive()) for chunk in stage.chunks]
        most = round(ledger.peak_bytes() / 4000)
        found.append((most, pipeline.peak_in_flight, ledger.totals()[-1], alive))
    return found


@pytest.mark.parametrize("p", [2, 4])
def test_activations_held_are_those_of_the_simulator_and_go(pools, p):
    given = schedules(p, 8)
    by_rank = pools(p).run(held, given)
    for number, schedule in enumerate(given):
        wanted = simulate(schedule).peak_in_flight()
        for rank in range(p):
            most, told, left, alive = by_rank[rank][number]
            assert told == wanted[rank]
            if rank > 0:  # the inputs of the first stage are the batch's own
                assert most == wanted[rank]
            for most_alive, after in alive:  # what was sent; one more may not have arrived
                assert most_alive <= wanted[rank] + 1
                assert after == 0
            assert left == 0


def test_a_rank_holds_its_own_stage_only(pools):
    def sizes(rank):
        gc.collect()
        before = live_numbers()
        torch.manual_seed(0)
        stage = split_model(SPEC, dist.get_world_size(), rank)
        gc.collect()
        return live_numbers() - before, sum(p.numel() for p in stage.parameters())

    whole = sum(param.numel() for param in GPT(SPEC).parameters())
    by_rank = pools(4).run(sizes)
    assert all(live == mine for live, mine in by_rank)
    assert sum(mine for _, mine in by_rank) == whole + SPEC.vocab * SPEC.hidden  # tied: two copies
    assert max(mine for _, mine in by_rank) < whole / 2


def live_numbers():
    return sum(one.numel() for one in gc.get_objects() if isinstance(one, nn.Parameter))


def test_pieces_keep_the_names_and_the_numbers_of_the_whole_model():
    torch.manual_seed(0)
    whole = GPT(SPEC).state_dict()
    found = {}
    for rank in range(2):
        torch.manual_seed(0)
        for chunk in split_model(SPEC, 2, rank, num_model_chunks=2).chunks:
            assert not set(chunk.state_dict()) & set(found)
            found |= chunk.state_dict()
    assert set(found) == set(whole)
    assert all(torch.equal(found[name], whole[name]) for name in whole)


def test_a_heavy_head_gets_fewer_blocks_beside_it():
    spec = ModelSpec(hidden=16, num_layers=6, num_heads=2, ffn_hidden=64, vocab=400, max_seq=6)
    blocks = [len(split_model(spec, 2, rank).chunks[0].blocks) for rank in range(2)]
    assert sum(blocks) == 6
    assert blocks[0] > blocks[1]


def test_copies_of_a_tied_parameter_begin_equal_whatever_the_seeds(pools):
    def weights(rank):
        torch.manual_seed(rank)
        stage = split_model(SPEC, 2, rank)
        Pipeline(stage, token_loss)
        return [tied.param.detach() for tied in stage.tied]

    ours, theirs = pools(2).run(weights)
    assert len(ours) == 1
    assert torch.equal(ours[0], theirs[0])


# --- what goes wrong is told


def stage_of(rank, **options):
    return split_model(linear_layers(), 2, rank, **options)


def step(schedule, inputs, targets=None, **options):
    """A step with these numbers of inputs and of targets."""

    def on_rank(rank):
        pipeline = Pipeline(stage_of(rank, **options), F.mse_loss)
        pipeline.step(schedule, batch(inputs)[0], batch(targets or inputs)[1])

    return on_rank


def moved():
    schedule = one_f_one_b(2, 2)
    schedule[1] = [schedule[1][1], schedule[1][0], *schedule[1][2:]]
    return schedule


def circle():
    return [
        [Action("backward", 0, 0), Action("forward", 0, 0)],
        [Action("forward", 1, 0), Action("backward", 1, 0)],
    ]


def another_ranks_group(rank):
    groups = [dist.new_group([0]), dist.new_group([1])]
    Pipeline(stage_of(rank), F.mse_loss, groups[1 - rank])


def cut(**options):
    return lambda rank: split_model(linear_layers(), **{"num_stages": 2, "stage": 0, **options})


def clipped(clip, *options):
    def on_rank(rank):
        stage = stage_of(rank)
        Pipeline(stage, F.mse_loss)
        sum(param.sum() for param in stage.parameters()).backward()
        clip(stage.parameters(), *options)
        return next(stage.parameters()).grad.max().item()

    return on_rank


CLIPS = "tensor and pipeline parallelism: need code that ... got torch.nn.utils.{}, ... "
CLIPS += "Try clip_grad_norm_across(part, mesh, max_norm) of course_lib.mesh"
PIPELINE = "ScheduleError: rank {rank}, Pipeline: need "
REFUSED = [
    ("ScheduleError ... rank 1: need F0, then B0", step(moved(), 2)),
    ("ScheduleError ... rank 0: need F0, then", step(circle(), 1)),
    (PIPELINE + "a schedule for the 2 ranks", step(one_f_one_b(3, 2), 2)),
    (
        PIPELINE + "a schedule for the stage's 1 model chunks; got one for 2",
        step(interleaved(2, 2, 2), 2),
    ),
    ("ScheduleError ... need F2, then B2", step(one_f_one_b(2, 2), 3)),
    ("ScheduleError ... need micro-batches 0 to 1; got F2, B2", step(one_f_one_b(2, 3), 2)),
    (
        PIPELINE + "the model chunks [ ... placement=[0, 1, 1, 0])",
        step(zero_bubble_v(2, 4), 4, num_model_chunks=2),
    ),
    (
        PIPELINE + "the model chunks [ ... placement=[0, 1, 0, 1])",
        step(interleaved(2, 4, 2), 4, placement=v_placement(2)),
    ),
    ("MeshError: rank {rank}, Pipeline: need a group that holds", another_ranks_group),
    (CLIPS.format("clip_grad_norm_"), clipped(nn.utils.clip_grad_norm_, 1.0)),
    (
        CLIPS.format("clip_grads_with_norm_"),
        clipped(nn.utils.clip_grads_with_norm_, 1.0, torch.ones(())),
    ),
    (
        "MeshError: DDP: need a group whose ranks hold the same parameters; got ranks [0, 1], and "
        "a pipeline has split the model with ",
        lambda rank: DDP(Pipeline(stage_of(rank), F.mse_loss).stage),
    ),
    ("need a stage from 0 to 1; got 2", cut(stage=2)),
    (
        "need num_layers for 4 layers (of a GPT: embedding, blocks, head)",
        cut(num_layers=[1, 2]),
    ),
    (
        "need layers for 2 stages x 1 model chunks, none empty; got num_la",
        cut(num_layers=[4, 0]),
    ),
    ("need layers for 2 stages x 1 model chunks", cut(num_layers=[2, 1, 1])),
    ("need layer_times for 4 layers", cut(layer_times=[1.0] * 3)),
    ("need 1 to 4 parts, as none may be empty; got 6", cut(num_model_chunks=3)),
]


def test_what_cannot_be_is_told_before_anything_is_sent(pools):
    assert_refused(pools(2), REFUSED, silent=True)


def test_values_are_clipped_on_a_stage_and_norms_where_it_is_the_only_one(pools):
    assert pools(2).run(clipped(nn.utils.clip_grad_value_, 0.5)) == [0.5, 0.5]
    (alone,) = pools(1).run(clipped(nn.utils.clip_grad_norm_, 1.0))
    assert 0 < alone < 1


def test_after_a_refusal_a_step_is_right_again(pools):
    def steps(rank):
        pipeline = Pipeline(stage_of(rank), F.mse_loss)
        with pytest.raises(ScheduleError):
            pipeline.step(one_f_one_b(2, 3), *batch(2))
        return pipeline.step(one_f_one_b(2, 2), *batch(2))

    inputs, targets = (torch.cat(tensors) for tensors in batch(2))
    wanted = F.mse_loss(linear_layers()(inputs), targets)
    torch.testing.assert_close(pools(2).run(steps)[1], wanted.detach())


class Whole(nn.Module):
    def forward(self, x):
        return x.round().long()


class Pair(nn.Module):
    def forward(self, x):
        return x, x


class Fails(nn.Linear):
    def forward(self, x):
        raise RuntimeError("a fault of its own")


def of_layers(*layers):
    return lambda rank: Pipeline(layers[rank], F.mse_loss).step(one_f_one_b(2, 2), *batch(2))


def without_targets(rank):
    Pipeline(stage_of(rank), F.mse_loss).step(gpipe(2, 2), batch(2)[0], None)


def targets_that_do_not_count(rank):
    targets = [torch.full((2,), -100)] * 2
    Pipeline(stage_of(rank), F.cross_entropy).step(gpipe(2, 2), batch(2)[0], targets)


def losing(loss_fn):
    """A step with class targets and no weights."""

    def on_rank(rank):
        targets = [torch.tensor([1, 4])] * 2
        Pipeline(stage_of(rank), loss_fn).step(gpipe(2, 2), batch(2)[0], targets)

    return on_rank


def another_shape_than_before(rank):
    stage = stage_of(rank)
    pipeline = Pipeline(stage, F.mse_loss)
    pipeline.step(gpipe(2, 1), *batch(1))
    if rank == 0:
        stage.chunks[0] = nn.Linear(6, 5)
    pipeline.step(gpipe(2, 1), *batch(1))


SUMS = nn.CrossEntropyLoss(reduction="sum"), partial(F.cross_entropy, reduction="sum")
ON_ONE_RANK = [
    ("need targets for 2 micro-batches; got none", without_targets),
    ("mean over its targets .* got one with reduction='sum'. Try", losing(SUMS[0])),
    ("reduction='sum'", losing(SUMS[1])),
    ("got one with ignore_index=0", losing(nn.CrossEntropyLoss(ignore_index=0))),
    ("got one with weight=", losing(nn.CrossEntropyLoss(torch.arange(6.0)))),
    ("got one with weight=", losing(partial(F.cross_entropy, weight=torch.arange(6.0)))),
    ("need at least one target that counts; got none", targets_that_do_not_count),
    (
        "rank 0, Pipeline, F0: need a stage's output with a floating",
        of_layers(Whole(), nn.Linear(6, 6)),
    ),
    (
        "rank 0, Pipeline, F0: need a stage with one tensor .* got tuple",
        of_layers(Pair(), nn.Linear(6, 6)),
    ),
    (
        r"rank 1, Pipeline, F0: need a stage that takes .* got \[2, 5\] float32, and mat1 and mat2",
        of_layers(nn.Linear(6, 5), nn.Linear(6, 6)),
    ),
    ("rank 0 raised RuntimeError: a fault of its own", of_layers(Fails(6, 6), nn.Linear(6, 6))),
    (
        r"rank 0, Pipeline, F0: need \[2, 6\] float32, as in the first step.* got \[2, 5\] float32."
        " Try a new Pipeline",
        another_shape_than_before,
    ),
]


@pytest.mark.parametrize(("says", "broken"), ON_ONE_RANK)
def test_what_one_rank_cannot_do_ends_the_job(pools, says, broken):
    with pytest.raises(RankError) as caught:
        pools(2).run(broken)
    text = " ".join(str(caught.value).split())
    assert re.search(says, text), text


def test_a_sum_is_right_with_weights(pools):
    def step(rank):
        stage = stage_of(rank)
        pipeline = Pipeline(stage, SUMS[0])
        targets = [torch.tensor([1, 4])] * 2
        return pipeline.step(gpipe(2, 2), batch(2)[0], targets, weights=[1.0, 1.0])

    wanted = SUMS[0](linear_layers()(torch.cat(batch(2)[0])), torch.tensor([1, 4, 1, 4]))
    torch.testing.assert_close(pools(2).run(step)[1], wanted.detach())


def test_inputs_of_other_shapes_are_no_trouble(pools):
    def steps(rank):
        pipeline = Pipeline(stage_of(rank), F.mse_loss)
        return [pipeline.step(one_f_one_b(2, 2), *batch(2, items)) for items in (2, 3, 2, 1)]

    losses = pools(2).run(steps)[1]
    for items, loss in zip((2, 3, 2, 1), losses, strict=True):
        inputs, targets = (torch.cat(tensors) for tensors in batch(2, items))
        torch.testing.assert_close(loss, F.mse_loss(linear_layers()(inputs), targets).detach())
