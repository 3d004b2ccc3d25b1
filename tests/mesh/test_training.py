"""The law on a mesh: the losses, gradients and weights of one process; its traffic by axis."""

import sys
from dataclasses import replace

import cloudpickle
import pytest
import torch

from course_lib.core.errors import MeshError, ShapeError
from course_lib.core.links import Link, TwoLevelLink
from course_lib.core.presets import find_model
from course_lib.mesh import Mesh
from course_lib.mesh.cost import MeshStep, all_orders, axis_seconds, axis_sent_bytes, mesh_step_s
from course_lib.models import GPT, token_loss
from course_lib.ranks import Ranks
from course_lib.train import mesh_lab as lab
from course_lib.train.trainer import Trainer

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SPEC = replace(find_model("tiny"), num_layers=3, hidden=32, num_heads=4, vocab=64)
STEP = MeshStep(
    spec=SPEC, mesh=Mesh(pp=2, dp=2, tp=2), batch=8, seq=8, num_micro_batches=2, number_bytes=8
)
MESHES = [
    Mesh(pp=2, dp=2, tp=2),
    Mesh(tp=2, dp=2, pp=2),
    Mesh(dp=4, pp=1, tp=2),
    Mesh(pp=2, dp=4, tp=1),
    Mesh(pp=2, dp=1, tp=4),
]
SGD = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
NEAR = 1e-12
FROZEN = ("blocks.1.mlp", "embedding")


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_three_steps_are_those_of_one_process_in_any_order_of_the_axes(pools, mesh):
    step, (optimizer, settings) = replace(STEP, mesh=mesh), SGD
    alone = lab.train_alone(step, optimizer, **settings)
    for trained in pools(8).run(lab.train_on_mesh, step, optimizer, **settings):
        assert trained[1].keys() == alone[1].keys()
        assert lab.furthest_apart(trained, alone) < NEAR


class Frozen(Trainer):
    def _whole_model(self):
        model = super()._whole_model()
        for name, param in model.named_parameters():
            param.requires_grad_(not name.startswith(FROZEN))
        return model


def with_frozen_parameters(rank):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lab, "Trainer", Frozen)
        return lab.train_on_mesh(rank, STEP, torch.optim.SGD, 2, lr=0.1)


def test_a_frozen_parameter_stays_and_the_others_learn_as_in_one_process(pools):
    torch.manual_seed(0)
    model = GPT(SPEC).double()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith(FROZEN))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for number in range(2):
        tokens, targets = lab.batch_of(STEP, number)
        optimizer.zero_grad()
        token_loss(model(tokens), targets).backward()
        optimizer.step()
    for _, weights in pools(8).run(with_frozen_parameters):
        for name, weight in model.state_dict().items():
            torch.testing.assert_close(weights[name], weight, rtol=0, atol=NEAR)
            assert torch.equal(weights[name], before[name]) == name.startswith((*FROZEN, "head"))


def drawn(rank, mesh):
    loss = lab.take_step(lab.trainer_of(rank, replace(STEP, mesh=mesh), dropout=0.2))
    return torch.rand(1).item(), loss


def test_ranks_of_a_tp_group_draw_alike_and_all_others_their_own(pools):
    draws = [draw for draw, _ in pools(8).run(drawn, STEP.mesh)]
    for group in STEP.mesh.groups("tp"):
        assert len({draws[rank] for rank in group}) == 1
    assert len(set(draws)) == STEP.mesh.world_size // STEP.mesh.size("tp")


def test_with_dropout_too_the_order_of_the_axes_does_not_change_the_loss(pools):
    orders = [Mesh(pp=2, dp=2, tp=2), Mesh(dp=2, tp=2, pp=2), Mesh(tp=2, pp=2, dp=2)]
    losses = [pools(8).run(drawn, mesh)[0][1] for mesh in orders]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-12)


@pytest.mark.parametrize(
    "mesh", [Mesh(tp=2, dp=1, pp=3), Mesh(pp=3, dp=2, tp=1), Mesh(pp=2, dp=3, tp=1)], ids=str
)
def test_on_six_ranks_too_the_numbers_and_the_bytes_are_right(pools, mesh):
    step = replace(STEP, mesh=mesh, batch=12)
    optimizer, settings = SGD
    alone = lab.train_alone(step, optimizer, **settings)
    for trained in pools(6).run(lab.train_on_mesh, step, optimizer, **settings):
        assert lab.furthest_apart(trained, alone) < NEAR
    for rank, events in enumerate(pools(6).run(lab.events_of_a_step, step)):
        assert lab.bytes_by_axis(mesh, rank, events) == axis_sent_bytes(step, rank)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_what_is_sent_along_each_axis_is_what_the_formula_says(pools, mesh):
    step = replace(STEP, mesh=mesh)
    for rank, events in enumerate(pools(8).run(lab.events_of_a_step, step)):
        assert lab.bytes_by_axis(mesh, rank, events) == axis_sent_bytes(step, rank)


def test_only_tp_outermost_takes_long_on_a_two_level_link():
    """On links far slower than this machine: 9 times the communication is a slower step."""
    link = TwoLevelLink(
        inside=Link(latency_s=2e-4, bytes_per_s=400e6),
        outside=Link(latency_s=1e-2, bytes_per_s=20e6),
        ranks_per_node=4,
    )
    step = replace(STEP, number_bytes=4, batch=16, num_micro_batches=4)
    right, wrong = Mesh(pp=2, dp=2, tp=2), Mesh(tp=2, dp=2, pp=2)
    steps = [replace(step, mesh=mesh) for mesh in (right, wrong)]
    said = {one.mesh: mesh_step_s(one, link) for one in steps}
    assert said[wrong] > 3 * said[right]
    with Ranks(8, link=link) as ranks:
        seconds = lab.time_orders(ranks, steps)
    assert seconds[wrong] > seconds[right]
    assert seconds[wrong] > said[wrong]  # at least what is communicated


def test_the_order_that_puts_tp_inside_a_node_is_predicted_fastest():
    link = TwoLevelLink(
        inside=Link(latency_s=1e-6, bytes_per_s=300e9),
        outside=Link(latency_s=1e-5, bytes_per_s=25e9),
        ranks_per_node=2,
    )
    seconds = {mesh: mesh_step_s(replace(STEP, mesh=mesh), link) for mesh in all_orders(STEP.mesh)}
    assert len(seconds) == 6
    fast = {mesh for mesh in seconds if [*mesh.sizes][-1] == "tp"}
    assert max(seconds[mesh] for mesh in fast) < min(
        seconds[mesh] for mesh in seconds.keys() - fast
    )
    apart = axis_seconds(replace(STEP, mesh=Mesh(pp=2, dp=2, tp=2)), link)
    assert apart["tp"] < axis_seconds(replace(STEP, mesh=Mesh(tp=2, pp=2, dp=2)), link)["tp"]


@pytest.mark.parametrize(
    ("change", "error", "told"),
    [
        ({"mesh": Mesh(cp=2)}, MeshError, "need axes out of pp, dp, tp; got cp"),
        ({"mesh": Mesh(tp=3)}, MeshError, "divisible by tp"),
        ({"mesh": Mesh(pp=4)}, MeshError, "need pp of at most the 3 layers"),
        ({"batch": 6}, ShapeError, r"divisible by dp \* num_micro_batches; got 6 and 2 \* 2"),
        ({"num_micro_batches": 0}, ShapeError, "got 8 and 2"),
    ],
)
def test_a_step_that_cannot_be_says_so(change, error, told):
    with pytest.raises(error, match=told):
        replace(STEP, **change)
