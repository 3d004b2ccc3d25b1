"""From a Megatron-Core engine's construction to its end: process groups, bytes, devices."""

import gc
import os
import sys
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_lib.core import CourseError, MeshError, ModelSpec
from course_lib.frameworks import (
    MegatronEngine,
    alive_bytes,
    alive_storages,
    megatron_engine,
    megatron_on_cpu,
)
from course_lib.frameworks.megatron_on_cpu import stand_ins
from course_lib.mesh import Mesh
from course_lib.mesh.cost import MeshStep
from course_lib.models import GPT, next_tokens, token_batch
from course_lib.pipeline import beside_frameworks as pipelines
from course_lib.pipeline.beside_frameworks import run_pipeline
from course_lib.ranks import RankError, Ranks
from course_lib.tensor_parallel import beside_frameworks as splits
from course_lib.tensor_parallel.beside_frameworks import run_tensor_parallel
from course_lib.train import mesh_lab as lab
from course_lib.train.beside_frameworks import run_mesh
from course_lib.train.config import TrainConfig
from course_lib.train.trainer import train

pytest.importorskip("megatron.core")
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SPEC = ModelSpec(hidden=32, num_layers=2, num_heads=4, ffn_hidden=64, vocab=64, max_seq=16)
SGD = partial(torch.optim.SGD, lr=0.1)
BATCHES = [next_tokens(token_batch(n, batch=4, seq=16, vocab=64)) for n in range(2)]
STEP = MeshStep(spec=SPEC, mesh=Mesh(pp=1, dp=1, tp=2), batch=4, seq=16, num_micro_batches=2)
RUNS = {
    "mesh": (run_mesh, STEP, 2),
    "pipeline": (run_pipeline, SPEC, BATCHES, 2),
    "tensor parallel": (run_tensor_parallel, SPEC, BATCHES),
}


# -- process groups ------------------------------------------------------------------------------


def held():
    """How many process groups, file descriptors and threads this rank has."""
    gc.collect()
    counted = [len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task")]
    return [len(dist.distributed_c10d._world.pg_map), *counted]


def held_around(rank, run, args, is_ours):
    run(rank, *args, is_ours)  # imports, and autograd's threads
    before = held()
    for _ in range(2):
        run(rank, *args, is_ours)
    return before, held()


@pytest.mark.parametrize("is_ours", [True, False], ids=["ours", "megatron"])
@pytest.mark.parametrize("name", RUNS)
def test_a_comparison_leaves_no_process_groups(pools, name, is_ours):
    run, *args = RUNS[name]
    for before, after in pools(2).run(held_around, run, args, is_ours):
        assert after[0] == before[0]
        assert all(now <= then for then, now in zip(before, after, strict=True))


def two_engines(rank):
    """A second engine is refused, and the first goes on; after `close` there is room for it."""
    first = MegatronEngine(GPT(SPEC), SGD, tp=2)
    with pytest.raises(MeshError, match=r"need the only engine .* got a second\. Try engine\.clo"):
        MegatronEngine(GPT(SPEC), SGD, pp=2)
    loss = first.step(*BATCHES[0])
    first.close()
    first.close()
    for call in (partial(first.step, *BATCHES[0]), first.update, first.weights):
        with pytest.raises(CourseError, match=r"need an open engine; .* closed\. Try a new"):
            call()
    second = MegatronEngine(GPT(SPEC), SGD, pp=2)
    first.close()  # not the second
    second.step(*BATCHES[0], num_micro_batches=2)
    second.close()
    return loss


def test_there_is_one_engine_at_a_time(pools):
    one, other = pools(2).run(two_engines)
    assert one == other


def refuses(params):
    raise ValueError("no such optimizer")


def lost_engines(rank):
    """Groups after a constructor that failed, and after an engine that was never closed."""
    before = held()[0]
    with pytest.raises(ValueError, match="no such optimizer"):
        MegatronEngine(GPT(SPEC), refuses, tp=2)
    failed = held()[0]
    MegatronEngine(GPT(SPEC), SGD, tp=2)
    MegatronEngine(GPT(SPEC), SGD, tp=2).close()
    return before, failed, held()[0]


def test_engines_that_are_lost_leave_nothing(pools):
    for before, *after in pools(2).run(lost_engines):
        assert after == [before, before]


# -- axes, dtypes and bytes ----------------------------------------------------------------------


def told_in(rank, step):
    try:
        run_mesh(rank, step, 1, False)
    except MeshError as error:
        return str(error)


def test_another_order_of_axes_is_refused(pools):
    step = replace(STEP, mesh=Mesh(tp=2, dp=2))
    for told in pools(4).run(told_in, step):
        assert told == (
            "run_mesh: need the axes in Megatron-Core's order, pp, dp, tp from outermost to "
            "innermost; got Mesh(tp=2, dp=2). Try Mesh(dp=2, tp=2)."
        )
    for told in pools(4).run(told_in, STEP):
        assert told == (
            "run_mesh: need a mesh of the world's 4 ranks; got Mesh(pp=1, dp=1, tp=2). "
            "Try Ranks(2)."
        )
    step = replace(STEP, mesh=Mesh(tp=2, pp=1, dp=1))
    assert pools(2).run(told_in, step) == [None, None]


@pytest.mark.parametrize(("number_bytes", "near"), [(4, 1e-5), (8, 1e-11)])
def test_a_mesh_computes_in_the_numbers_of_its_step(pools, number_bytes, near):
    step = replace(STEP, number_bytes=number_bytes)
    losses, _ = lab.train_alone(step, torch.optim.SGD, 2, lr=0.1)
    for run in pools(2).run(run_mesh, step, 2, False):
        assert run.losses == pytest.approx(losses, rel=near)
        if number_bytes == 4:
            assert run.losses != pytest.approx(losses, rel=1e-12)


def bytes_of(rank, tp):
    """What an engine holds, the model that it copied still there but not counted."""
    model = GPT(SPEC)
    earlier = alive_storages()
    engine = MegatronEngine(model, SGD, tp=tp)
    del model
    found = alive_bytes(besides=earlier)
    engine.close()
    return found


def trained_bytes(rank, tp):
    """What a training run says that a rank holds."""
    config = TrainConfig(
        model=SPEC, steps=2, global_batch=4, seq=16, every=0, strategy="megatron", tp=tp
    )
    return train(rank, config).run["memory"]["tensors"]


def test_a_rank_holds_its_shards_only(pools):
    params = list(GPT(SPEC).parameters())
    whole = 4 * sum(param.numel() for param in params)
    split = 4 * sum(param.numel() for name, param in GPT(SPEC).named_parameters() if _split(name))
    for tp in (1, 2):
        mine = whole - split + split // tp
        for found in pools(2).run(bytes_of, tp):
            assert 2 * mine <= found < 2.1 * mine  # parameters and gradients
        for found in pools(2).run(trained_bytes, tp):
            assert 4 * mine <= found < 4.3 * mine  # and AdamW's two moments


def _split(name):
    column = any(f"{part}." in name for part in ("q", "k", "v", "gate", "up"))
    return name == "embedding.weight" or column or name.endswith("out.weight")


# -- devices -------------------------------------------------------------------------------------

META = torch.device("meta")


def devices_of_megatron(rank):
    """Where the inputs are that Megatron-Core's schedule gets."""
    from megatron.core import pipeline_parallel

    engine, seen = MegatronEngine(GPT(SPEC), SGD), []

    def schedule(*, data_iterator, **_):
        seen.extend(tensor.device.type for part in data_iterator[0] for tensor in part)
        return []

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pipeline_parallel, "get_forward_backward_func", lambda: schedule)
        patched.setattr(megatron_engine, "rank_device", lambda: META)
        engine.forward_backward(*BATCHES[0], 2)
    engine.close()
    return seen


def devices_of_ours(rank, module, run, *args):
    """Where our model and its inputs are when the first layer or the pipeline gets them."""
    seen = []

    class Seen(Exception):
        pass

    def first_call(self, inputs, *_):
        raise Seen(inputs.device.type)

    def pipeline_step(self, schedule, inputs, targets):
        raise Seen(inputs[0].device.type, targets[0].device.type)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "rank_device", lambda: META)
        if module is splits:
            patched.setattr(module, "init_device_mesh", lambda *_: None)
            patched.setattr(module, "parallelize", lambda model, _: seen.append(_device(model)))
            patched.setattr(GPT, "forward", first_call)
        else:
            patched.setattr(module.Pipeline, "step", pipeline_step)
            stage_of = module.split_model
            patched.setattr(
                module,
                "split_model",
                lambda model, *sizes, **how: (
                    seen.append(_device(model)) or stage_of(model, *sizes, **how)
                ),
            )
        with pytest.raises(Seen) as found:
            run(rank, *args, True)
    return [*seen, *found.value.args]


def _device(model):
    return next(model.parameters()).device.type


def test_models_and_inputs_are_on_the_device_of_the_rank(pools):
    assert pools(2).run(devices_of_megatron) == [["meta"] * 4] * 2
    found = pools(2).run(devices_of_ours, splits, run_tensor_parallel, SPEC, BATCHES)
    assert found == [["meta"] * 2] * 2
    found = pools(2).run(devices_of_ours, pipelines, run_pipeline, SPEC, BATCHES, 2)
    assert found == [["meta"] * 3] * 2


def test_a_pool_takes_more_comparisons_than_there_are_file_descriptors_for():
    with Ranks(2) as ranks:
        ranks.run(few_files)
        for _ in range(6):
            ranks.run(run_mesh, STEP, 1, False)


def few_files(rank):
    import resource

    here = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (here + 150, here + 150))


def test_an_error_in_a_step_does_not_keep_the_next_engine_out(pools):
    with pytest.raises(RankError, match="need a batch divisible by the 3 micro-batches"):
        pools(2).run(run_pipeline, SPEC, BATCHES, 3, False)
    pools(2).run(run_pipeline, SPEC, BATCHES, 2, False)


def test_on_a_gpu_nothing_is_replaced_and_the_ranks_gpu_is_current(monkeypatch):
    current = []

    @contextmanager
    def device(one):
        current.append(one)
        yield
        current.pop()

    gpu, cuda = torch.device("cuda", 1), torch.Tensor.cuda
    monkeypatch.setattr(megatron_on_cpu, "rank_device", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "device", device)
    with stand_ins():
        assert current == [gpu]
        assert torch.Tensor.cuda is cuda
    assert current == []


def test_the_loss_is_not_replaced_on_a_cpu_either(monkeypatch):
    """float64 stays float64 without a stand-in, so that a GPU computes as a CPU does."""
    from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy

    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "99")  # more than there are GPUs
    before = dict(vars(VocabParallelCrossEntropy))
    with stand_ins():
        assert dict(vars(VocabParallelCrossEntropy)) == before
