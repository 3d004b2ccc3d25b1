"""Runs that differ in one place are told apart in that place; gradients that nobody sums, too."""

import sys
from dataclasses import replace

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn
from typer.testing import CliRunner

from course_lib.cli.commands import app
from course_lib.core import CourseError, ModelSpec
from course_lib.core.shards import Box
from course_lib.debugging import compare_runs, gradient_types, record_run
from course_lib.debugging.activations import ALL_RIGHT, where_activations_part
from course_lib.debugging.comparing import compare_copies
from course_lib.debugging.pictures import where_runs_differ
from course_lib.debugging.sketches import added, distance, sketch
from course_lib.debugging.value_records import read_values
from course_lib.train import forward_backward, optimizers
from course_lib.train.config import TrainConfig
from course_lib.train.trainer import train

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.mark.parametrize("shape", [(6,), (6, 5), (6, 2, 3), ()])
def test_a_sketch_is_linear_and_adds_up_over_shards(shape):
    x, y = (torch.randn(shape, dtype=torch.float64) for _ in range(2))
    whole = Box.whole(shape)
    total = added([sketch(x, whole, shape), sketch(y, whole, shape)])
    assert total == pytest.approx(sketch(x + y, whole, shape), abs=1e-12)
    assert distance(total, sketch(x - y, whole, shape)) > 1e-3
    if shape:
        boxes = [
            Box((0, *whole.offsets[1:]), (2, *shape[1:])),
            Box((2, *whole.offsets[1:]), (4, *shape[1:])),
        ]
        parts = [sketch(x[box.slices()], box, shape) for box in boxes]
        assert added(parts) == pytest.approx(sketch(x, whole, shape), abs=1e-12)
    swapped = x.flip(0) if shape else -x
    assert distance(sketch(swapped, whole, shape), sketch(x, whole, shape)) > 1e-3


# -- any training loop ---------------------------------------------------------------------------


def recorded(folder, fault="", *, rank=0, world_size=1, reduce=None, steps=3, values_of=()):
    """Train a small model on this rank's half of the data, with one fault from step 1 on."""
    torch.manual_seed(1 if fault == "seed" else 0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    data = torch.randn(steps, 6, 4, dtype=torch.float64, generator=torch.manual_seed(2))
    axes = {"dp": (rank, world_size)}
    with record_run(model, folder, optimizer, axes=axes, values_of=values_of):
        for step, batch in enumerate(data):
            is_on = step == 1
            if fault == "data" and is_on:
                batch = batch.flip(0)
            if fault == "module" and is_on:
                model[1].forward = lambda x: torch.tanh(x) * 1.0001
            out = model(batch.tensor_split(world_size)[rank])
            loss = out.square().mean() * (2 if fault == "loss" and is_on else 1)
            loss.backward()
            if fault == "gradient" and is_on:
                model[0].bias.grad *= 2
            if reduce:
                reduce([param.grad for param in model.parameters()])
            if fault == "moments" and is_on:
                optimizer.state.clear()
            optimizer.step()
            optimizer.zero_grad()


FAULTS = {  # by fault: step, phase and name of the first difference
    "seed": (0, "start", "0.weight"),
    "data": (1, "input", "model"),
    "module": (1, "forward", "1"),
    "loss": (1, "backward", "2"),
    "gradient": (1, "gradient", "0.bias"),
    "moments": (1, "parameter", "0.weight"),
}


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "right"
    recorded(folder)
    return folder


@pytest.mark.parametrize("fault", FAULTS)
def test_the_first_difference_is_where_the_fault_is(fault, right, tmp_path):
    recorded(tmp_path / "run", fault)
    found = compare_runs(tmp_path / "run", right)
    assert found.first.key[:3] == FAULTS[fault]
    assert found.first.ranks == (0,)
    assert 1e-5 < found.first.relative < 10
    figure, alt = where_runs_differ(found)
    assert f"step {FAULTS[fault][0]}" in alt
    assert (
        "1 of" in "".join(text.get_text() for text in figure.axes[0].texts) or fault != "gradient"
    )


def test_kept_values_say_which_elements_differ(tmp_path):
    for name, fault in (("a", "gradient"), ("b", "")):
        recorded(tmp_path / name, fault, values_of=[1])
    kept = torch.load(tmp_path / "b" / "rank0-step1.pt")[repr(("gradient", "0.bias", 0))][0]
    most = kept.abs().argmax().item()
    told = str(compare_runs(tmp_path / "a", tmp_path / "b"))
    assert (
        f"8 of 8 values differ, most at [{most}]: {2 * kept[most]:.6g} and {kept[most]:.6g}" in told
    )
    assert not (tmp_path / "a" / "rank0-step0.pt").exists()
    (tmp_path / "a" / "rank0-step1.pt").write_bytes(b"x")
    with pytest.raises(CourseError, match="need kept values; got a file that is spoilt"):
        str(compare_runs(tmp_path / "a", tmp_path / "b"))


def test_the_same_run_again_does_not_differ(right, tmp_path):
    recorded(tmp_path / "again")
    found = compare_runs(tmp_path / "again", right)
    assert found.first is None
    assert "No difference" in str(found)
    assert sum(found.num_compared.values()) == 4 + 3 * (1 + 4 + 4 + 4 + 4)


def sums(grads):
    for grad in grads:
        dist.all_reduce(grad)


def averages(grads):
    sums(grads)
    for grad in grads:
        grad /= dist.get_world_size()


def data_parallel(rank, folder):
    for name, reduce in (("averaged", averages), ("summed", sums), ("alone", None)):
        recorded(folder / name, rank=rank, world_size=2, reduce=reduce)


def test_data_parallelism_that_sums_or_does_not_reduce(pools, right, tmp_path):
    pools(2).run(data_parallel, tmp_path)
    assert compare_runs(tmp_path / "averaged", right).first is None
    assert compare_copies(tmp_path / "averaged").first is None
    assert compare_copies(tmp_path / "alone").first.key[1] == "gradient"
    for one in gradient_types(tmp_path / "alone", right):
        assert f"{one.name} is of each rank's own data over dp, and nobody averages it" in str(one)
    summed = str(gradient_types(tmp_path / "summed", right)[0])
    assert "is 2 times the right one: summed over dp (2 ranks)" in summed
    assert compare_runs(tmp_path / "summed", right).first.key[:2] == (0, "gradient")


# -- the trainer, on meshes ----------------------------------------------------------------------

SPEC = ModelSpec(hidden=8, num_layers=2, num_heads=2, ffn_hidden=16, vocab=20, max_seq=8)
RUN = TrainConfig(
    model=SPEC, steps=1, global_batch=4, seq=8, dtype="float64", every=0, optimizer="sgd"
)
SHARED = replace(SPEC, num_kv_heads=1)
MESHES = {  # a run on two ranks; what is patched away; parameters whose gradient is then partial
    "norms": (
        {"tp": 2, "sequence_parallel": True},
        ("tp", {"norm.weight", "blocks.0.attention_norm.bias", "positions.weight"}),
    ),
    "kv-heads": (
        {"tp": 2, "model": SHARED},
        ("tp", {"blocks.0.attention.k.weight", "blocks.1.attention.v.bias"}),
    ),
    "tied": ({"pp": 2}, ("pp", {"embedding.weight"})),
    "fsdp": ({"strategy": "fsdp"}, ()),
    "zero": ({"strategy": "zero2"}, ()),
    "torch-fsdp": ({"strategy": "torch-fsdp"}, ()),
    "zb-h1": ({"pp": 2, "schedule": "zb-h1", "micro_batch": 1}, ()),
}


def on_meshes(rank, folder):
    whole, pipeline = optimizers.finish_over_axes, forward_backward.Pipeline
    for name, (changes, fault) in MESHES.items():
        config = replace(RUN, **{"strategy": "ddp", **changes})
        train(rank, replace(config, record_values=str(folder / f"{name}-right")))
        if not fault:
            continue
        try:
            optimizers.finish_over_axes = lambda *_, **__: None
            forward_backward.Pipeline = lambda *a, **k: pipeline(*a, **k | {"sums_tied": False})
            train(rank, replace(config, record_values=str(folder / name)))
        finally:
            optimizers.finish_over_axes, forward_backward.Pipeline = whole, pipeline


def alone(rank, folder):
    train(rank, replace(RUN, record_values=str(folder / "one")))
    train(rank, replace(RUN, model=SHARED, record_values=str(folder / "one-kv-heads")))


@pytest.fixture(scope="module")
def meshes(pools, tmp_path_factory):
    folder = tmp_path_factory.mktemp("meshes")
    pools(1).run(alone, folder)
    pools(2).run(on_meshes, folder)
    return folder


@pytest.mark.parametrize("name", MESHES)
def test_a_gradient_that_nobody_sums_is_named(name, meshes):
    one = meshes / ("one-kv-heads" if name == "kv-heads" else "one")
    assert compare_runs(meshes / f"{name}-right", one).first is None
    records = read_values(meshes / f"{name}-right"), read_values(one)
    assert where_activations_part(*records, 0) == ALL_RIGHT
    if not MESHES[name][1]:
        return
    axis, partial = MESHES[name][1]
    found = {kind.name: kind for kind in gradient_types(meshes / name, one)}
    wrong = {kind.name for kind in found.values() if not kind.is_right}
    assert partial <= wrong
    assert all(found[n].over[axis] == "Partial" for n in wrong)
    assert found["blocks.0.mlp.up.weight"].is_right
    told = str(compare_runs(meshes / name, one))
    assert (
        f"the gradient of {min(partial & wrong)} is partial over {axis}, and nobody sums it" in told
    )


def test_types_of_parameters_are_told_before_the_reduction(meshes):
    found = gradient_types(meshes / "norms-right", meshes / "one", local=True)
    types = {kind.name: kind.param_types() for kind in found}
    assert types["norm.weight"] == {"tp": "Replicate"}
    assert types["blocks.0.mlp.up.weight"] == {"tp": "Varying"}
    assert not any(", and nobody" in str(kind) for kind in found)


# -- bad input, and the command ------------------------------------------------------------------

HEAD = '{"line": "values", "rank": 0, "world_size": 1, "axes": {}}\n'


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({}, "need a folder with the recorded values"),
        ({"rank0.values": ""}, "the file is empty"),
        ({"rank0.values": "[]\n"}, "rank0.values, line 1: need a line of recorded values"),
        ({"rank0.values": HEAD + '{"step": 1}\n'}, "rank0.values, line 2"),
        (
            {"rank1.values": HEAD.replace('"rank": 0', '"rank": 1')},
            "need the files of ranks 0 to 0",
        ),
        ({"rank0.values": HEAD}, "need two runs with a step in common"),
    ],
)
def test_a_folder_that_is_no_record_is_one_sentence(files, told, right, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(CourseError, match=told):
        compare_runs(tmp_path, right)


def test_a_second_record_needs_another_folder(right):
    with pytest.raises(CourseError, match="need a folder without recorded values"):
        recorded(right)


def in_two_parts(rank, folder, restart_count):
    config = replace(RUN, steps=4, save_every=2, out=str(folder / "out"))
    config = replace(config, record_values=str(folder / "values"))
    train(rank, replace(config, steps=2))
    if restart_count == "1":  # it has come further, and crashed there
        for first_step in (2, 3):
            (folder / "values" / f"rank0-from{first_step}.values").write_text("spoilt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_RESTART_COUNT", restart_count)
        train(rank, replace(config, resume=restart_count == "0"))
    train(rank, replace(RUN, steps=4, record_values=str(folder / "straight")))


@pytest.mark.parametrize("restart_count", ["0", "1"])
def test_a_run_that_goes_on_goes_on_recording(pools, tmp_path, restart_count):
    pools(1).run(in_two_parts, tmp_path, restart_count)
    assert (tmp_path / "values" / "rank0-from2.values").exists()
    found = compare_runs(tmp_path / "values", tmp_path / "straight")
    assert found.first is None, str(found)
    assert {step for step, _ in found.num_compared} == {0, 1, 2, 3}


def test_parts_on_other_meshes_are_not_joined(right, tmp_path):
    one = (right / "rank0.values").read_text()
    (tmp_path / "rank0.values").write_text(one)
    later = one.replace('"axes": {"dp": [0, 1]}', '"axes": {"tp": [0, 1]}')
    (tmp_path / "rank0-from2.values").write_text(later)
    with pytest.raises(CourseError, match=r"rank 0: need a record on one mesh; got .*'dp'.*'tp'"):
        compare_runs(tmp_path, right)


def test_the_command(right, tmp_path):
    def ran(*words):
        done = CliRunner().invoke(app, ["diff", *map(str, words)])
        return done.exit_code, done.output

    recorded(tmp_path / "run", "moments")
    assert ran(right, right)[0] == 0
    code, told = ran(tmp_path / "run", right, "--picture", tmp_path / "a.png")
    assert code == 1
    assert "first difference: the parameter 0.weight, on rank 0" in told
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    done = CliRunner().invoke(app, ["diff", str(right), str(right), "--picture", "a.txt"])
    assert "need a name that ends in" in str(done.exception)
    done = CliRunner().invoke(app, ["diff", str(right)])
    assert "need a run in which several ranks hold" in str(done.exception)
