"""Memory of a plan is that of the lessons' ledgers, stage by stage."""

from dataclasses import replace

import pytest

from course_lib.core.parallelism import Parallelism
from course_lib.core.presets import MODELS
from course_lib.cost.params import layer_params, params_on_rank
from course_lib.fsdp.cost import fsdp_ledger
from course_lib.fsdp.moves import UnitSizes
from course_lib.memory.formulas import activations, model_states
from course_lib.planner import Plan, find_cluster, predict
from course_lib.planner.constants import SOFTWARE
from course_lib.planner.memory import in_flight, memory_on_stage, plan_memory, stage_layers

MODEL = MODELS["llama-8b"]
MEGATRON = SOFTWARE["megatron"]
AXES = [
    Parallelism(),
    Parallelism(tp=4, sequence_parallel=True),
    Parallelism(dp=4, tp=2, pp=4, zero=1),
    Parallelism(dp=8, zero=2),
    Parallelism(dp=2, cp=4, pp=2),
]


@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_activations_are_those_of_lesson_01(axes, recompute):
    plan = Plan(parallelism=axes, micro_batch=2, num_micro_batches=16, recompute=recompute)
    for stage in {0, axes.pp - 1}:
        wanted = sum(
            activations(
                MODEL, 2, plan.seq, recompute=recompute, parallelism=axes, stage=stage
            ).values()
        )
        bill = memory_on_stage(MODEL, plan, MEGATRON, stage)
        one = activations(MODEL, 2, plan.seq, parallelism=replace(axes, pp=1, dp=1))
        layer = sum(v for k, v in one.items() if k not in ("embedding", "logits"))
        again = bill["activations"] - wanted  # the layer that is being recomputed
        assert again == 0 if recompute == "none" else 0 < again < layer / MODEL.num_layers * 1.1


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_states_are_those_of_lesson_09(axes):
    plan = Plan(parallelism=axes, num_micro_batches=16)
    for stage in range(axes.pp):
        wanted = model_states(params_on_rank(MODEL, axes, stage), MEGATRON.recipe, parallelism=axes)
        bill = memory_on_stage(MODEL, plan, MEGATRON, stage)
        assert {kind: bill[kind] for kind in wanted} == wanted


def test_fsdp_gathers_as_many_layers_as_in_lesson_10():
    """Two gathered layers in 16 bits at most, and one layer's gradients in fp32."""
    axes = Parallelism(dp=8, zero=3)
    small = replace(MODEL, vocab=1024)
    layer = layer_params(small)
    sizes = UnitSizes(numels=(0, *[layer] * 8), p=8, compute_bytes=2)
    gathered = max(fsdp_ledger(sizes).bytes_by_kind["params"]) - sizes.shard_bytes()
    bill = memory_on_stage(small, Plan(parallelism=axes), MEGATRON)
    assert bill["buffers"] == gathered + 4 * layer


def test_stages_divide_the_layers():
    for pp in (1, 2, 3, 4, 8, 16, 32):
        for balances in (False, True):
            layers = stage_layers(MODEL, pp, balances)
            assert sum(layers) == MODEL.num_layers
            assert len(layers) == pp


def test_counting_the_output_layer_leaves_the_last_stage_fewer():
    small = replace(MODELS["llama-1b"], num_kv_heads=32, vocab=131072)
    assert stage_layers(small, 4, True) == (5, 5, 5, 1)
    assert stage_layers(small, 4, False) == (4, 4, 4, 4)


def test_micro_batches_in_flight():
    def flying(schedule, stage, m=16, pp=4, chunks=1):
        plan = Plan(
            parallelism=Parallelism(pp=pp),
            schedule=schedule,
            num_model_chunks=chunks,
            num_micro_batches=m,
        )
        return in_flight(plan, stage)

    assert [flying("1f1b", stage) for stage in range(4)] == [4, 3, 2, 1]
    assert [flying("1f1b", stage, m=2) for stage in range(4)] == [2, 2, 2, 1]
    assert flying("gpipe", 3) == 16
    assert flying("interleaved", 0, chunks=3) == 4 * (1 + 3 / (4 * 3))
    assert flying("zb-h1", 3) == 4
    assert flying("zb-h2", 0) == 7


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_the_next_stage_of_zero_holds_less(zero):
    plans = [Plan(parallelism=Parallelism(dp=8, zero=stage)) for stage in (zero, zero + 1)]
    more, less = (plan_memory(MODEL, plan, MEGATRON) for plan in plans)
    states = ("params", "grads", "optim_state")
    assert sum(less[kind] for kind in states) < sum(more[kind] for kind in states)
    if zero < 2:  # stage 3 has to gather into something
        assert sum(less.values()) < sum(more.values())


def test_recomputing_and_more_ranks_hold_less():
    def held(**options):
        axes = Parallelism(**{k: options.pop(k) for k in ("tp", "pp", "cp") if k in options})
        plan = Plan(parallelism=axes, num_micro_batches=8, **options)
        return plan_memory(MODEL, plan, MEGATRON)["activations"]

    assert held(recompute="full") < held(recompute="selective", flash=False) < held(flash=False)
    assert held(tp=4) < held()
    assert held(cp=4) < held()
    assert held(micro_batch=2) == pytest.approx(2 * held(), rel=0.01)


def test_a_prediction_says_whether_it_fits():
    cluster = find_cluster("hf-h100", 1)
    plan = Plan(parallelism=Parallelism(dp=8), num_micro_batches=4)
    said = predict(MODEL, cluster, plan)
    assert not said.fits
    assert "Does not fit" in said.bound
    sharded = predict(MODEL, cluster, plan.with_axes(zero=3))
    assert sharded.fits
    assert sharded.memory_bytes < said.memory_bytes
    assert set(said.memory) == {"params", "grads", "optim_state", "activations", "buffers"}
