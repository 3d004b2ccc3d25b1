"""Experts in the planner: what is computed, sent and held; dense models stay as they are."""

import time
from collections import Counter
from dataclasses import replace
from itertools import product

import pytest

from course_lib.core import CourseError
from course_lib.core.layers import layer_kinds, layers
from course_lib.core.parallelism import Parallelism
from course_lib.core.presets import MODELS as DENSE
from course_lib.core.specs import Experts, Rope
from course_lib.cost.flops import forward_flop
from course_lib.cost.params import count_params
from course_lib.memory.formulas import activations
from course_lib.planner import Plan, find_cluster, predict
from course_lib.planner import constants as k
from course_lib.planner.communication import one_layer, replicas, tensor_s
from course_lib.planner.compute import (
    Product,
    attention_time,
    layer_products,
    layer_time,
    product_s,
)
from course_lib.planner.experts import exchange_s, expert_group
from course_lib.planner.explorer import plan_explorer
from course_lib.planner.launches import course_train, megatron_lm, torchtitan
from course_lib.planner.memory import memory_on_stage, stages_of
from course_lib.planner.published_experts import MODELS
from course_lib.planner.scores import expert_errors
from course_lib.planner.searching import search, valid_plans
from course_lib.planner.stages import stage_clock
from course_lib.planner.table import predict_table

NODE = find_cluster("dgx-h100")
MIXTRAL = replace(
    MODELS["mixtral-8x22b"],
    name="mixtral-8x7b",
    hidden=4096,
    num_layers=32,
    num_heads=32,
    ffn_hidden=14336,
    vocab=32000,
    experts=Experts(count=8, active=2, ffn_hidden=14336),
)
DEEPSEEK, GPT_OSS = MODELS["deepseek-v3"], MODELS["gpt-oss-20b"]


def evenly(cluster, **more):
    """The cluster with a router that is forced to balance."""
    return replace(cluster, software=replace(cluster.software, imbalance=1.0, **more))


def placed(**sizes):
    plan = Plan(micro_batch=1, num_micro_batches=8, seq=4096)
    return plan.with_axes(**{"sequence_parallel": sizes.get("tp", 1) > 1} | sizes)


# --- dense models


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_a_dense_plan_is_the_same_with_its_expert_axes_written_out(tp):
    plan = placed(dp=8, tp=tp, zero=1)
    told = predict(DENSE["llama-8b"], NODE.with_nodes(8), plan)
    written = predict(DENSE["llama-8b"], NODE.with_nodes(8), plan.with_axes(ep=1, expert_tp=tp))
    assert written.seconds == told.seconds
    assert written.memory == told.memory
    assert told.ep_s == 0


def test_one_expert_for_all_tokens_is_an_mlp_with_a_router():
    """Only the router's product, the sorting of tokens and, with ep, the messages are added."""
    alone = Experts(count=1, active=1, ffn_hidden=DENSE["llama-8b"].ffn_hidden)
    model, cluster, plan = replace(DENSE["llama-8b"], experts=alone), evenly(NODE), placed()
    dense, routed = (layer_products(one, plan) for one in (DENSE["llama-8b"], model))
    router = Product(4096, 4096, 1)
    assert [one for one in routed if one != router] == dense
    assert len(routed) == len(dense) + 1
    moved_s = 4096 * 4096 * k.PERMUTED * 2 / (cluster.device.bytes_per_s * k.STREAMED)
    more_s = layer_time(model, cluster, plan).forward_s
    more_s -= layer_time(DENSE["llama-8b"], cluster, plan).forward_s
    router_s = product_s(router, cluster.device, "bf16", cluster.software.products)
    assert more_s == pytest.approx(moved_s + router_s)
    assert predict(model, cluster, plan).ep_s == 0


# --- what is computed


@pytest.mark.parametrize("name", MODELS)
def test_products_have_the_flop_of_the_forward_pass(name):
    model, plan = MODELS[name], replace(placed(), seq=3 * 4096)  # as many copies for each expert
    flop = forward_flop(model, 1, plan.seq)
    wanted = sum(v for part, v in flop.items() if part not in ("attention scores", "logits"))
    found = sum(
        2 * count * one.m * one.depth * one.n * one.number
        for kind, count in layer_kinds(model).items()
        for one in layer_products(model, plan, kind)
    )
    assert found == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("sizes", [{"dp": 8, "ep": 8}, {"dp": 4, "tp": 2, "ep": 4},
                                   {"dp": 4, "tp": 2, "ep": 8, "expert_tp": 1}])  # fmt: skip
def test_ranks_share_the_products_of_experts(sizes):
    """Each rank of a stage has the same part of the FLOP of tokens of all ranks of dp."""
    plan = placed(**sizes)
    one = [p for p in layer_products(MIXTRAL, plan) if p.number > 1 or sizes["ep"] == 8][-2:]
    whole = layer_products(MIXTRAL, placed())[-2:]
    flop = [sum(p.m * p.depth * p.n * p.number for p in some) for some in (one, whole)]
    assert flop[0] * 8 == flop[1] * sizes["dp"]


def test_the_fullest_rank_sets_the_pace_and_a_capacity_limits_it():
    plan = placed(dp=8, ep=8)
    even, loaded = (layer_time(MIXTRAL, c, plan).forward_s for c in (evenly(NODE), NODE))
    assert even < loaded < k.IMBALANCE * even
    capped = replace(MIXTRAL, experts=replace(MIXTRAL.experts, capacity=1.0))
    assert layer_time(capped, NODE, plan).forward_s == even


def test_flash_computes_only_the_window():
    windowed, whole = layer_kinds(GPT_OSS)
    assert (windowed.window, whole.window) == (128, None)
    short, full = (attention_time(GPT_OSS, NODE, placed(), kind) for kind in (windowed, whole))
    pairs = sum(min(query + 1, 128) for query in range(4096))
    every = 4096**2 / 2
    assert short.forward_s / full.forward_s == pytest.approx(pairs / every, rel=0.01)


@pytest.mark.parametrize("name", MODELS)
def test_a_single_layer_is_of_its_kind(name):
    for kind in layer_kinds(MODELS[name]):
        assert layers(one_layer(MODELS[name], kind)) == (kind,)
    nope = replace(MODELS[name], nope_layers=(0,), max_seq=4096)
    for kind in layer_kinds(nope):
        assert layers(one_layer(nope, kind)) == (kind,)


# --- what is sent


def test_an_exchange_sends_what_each_rank_has_for_each_other():
    """Counted pair by pair: inside the node along its links, the rest through an adapter."""
    cluster, size, sent = evenly(NODE.with_nodes(4), sends_once=False), 32, 32e6
    group = expert_group(cluster, Parallelism(dp=32, ep=32))
    assert group == (32, 8)
    each = Counter(rank // 8 == 0 for rank in range(1, size))
    inside_s = each[True] * sent / size / cluster.inside.bytes_per_s
    outside_s = each[False] * sent / size / (cluster.outside.bytes_per_s * cluster.gather_share)
    latencies = 3 * cluster.outside.latency_s, 7 * cluster.inside.latency_s
    wanted = max(outside_s + latencies[0], inside_s + latencies[1])
    assert exchange_s(cluster, group, sent, 8) == pytest.approx(wanted)
    assert exchange_s(cluster, expert_group(cluster, Parallelism()), sent, 8) == 0


@pytest.mark.parametrize(("nodes", "active"), [(2, 2), (4, 3), (3, 5)])
def test_a_token_is_sent_to_a_node_once(nodes, active):
    """The mean over all choices of experts; here is one rank a node, so no link inside counts."""
    cluster = evenly(find_cluster("dgx-h100", nodes, gpus_per_node=1), sends_once=True)
    choices = [set(chosen) - {0} for chosen in product(range(nodes), repeat=active)]
    reached = sum(map(len, choices)) / len(choices)
    token_bytes = 1e9
    group = expert_group(cluster, Parallelism(dp=nodes, ep=nodes))
    found = exchange_s(cluster, group, active * token_bytes, active)
    found -= (nodes - 1) * cluster.outside.latency_s
    assert found == pytest.approx(reached * token_bytes / cluster.outside.bytes_per_s)


@pytest.mark.parametrize("sizes", [{"dp": 4, "tp": 2, "ep": 4}, {"dp": 8, "ep": 2},
                                   {"dp": 4, "tp": 2, "ep": 8, "expert_tp": 1}])  # fmt: skip
def test_experts_have_replicas_of_their_own(sizes):
    plan = placed(**sizes)
    axes = plan.parallelism
    holders = Counter(
        (rank % axes.expert_tensor, rank // axes.expert_tensor % axes.ep)
        for rank in range(axes.world_size)
    )
    (number,) = set(holders.values())
    found = {group.num_params: group for group in replicas(plan, 10, 4)}
    assert found[6][1:] == (axes.dp, axes.tp)
    if number == 1:
        assert 4 not in found
    else:
        assert found[4][1:] == (number, axes.ep * axes.expert_tensor)


def test_more_expert_ranks_send_more_and_hold_less():
    steps = [predict(MIXTRAL, NODE.with_nodes(8), placed(dp=64, ep=ep)) for ep in (1, 2, 4, 8)]
    sent, held = [one.ep_s for one in steps], [one.memory_bytes for one in steps]
    assert sent[0] == 0
    assert sent == sorted(set(sent))
    assert held == sorted(set(held), reverse=True)
    far = predict(DEEPSEEK, NODE.with_nodes(64), placed(dp=64, pp=8, ep=64))
    near = predict(DEEPSEEK, NODE.with_nodes(64), placed(dp=64, pp=8, ep=8))
    assert far.ep_s > 2 * near.ep_s
    assert far.memory_bytes < near.memory_bytes


def test_what_is_hidden_costs_only_contention():
    shown = evenly(NODE.with_nodes(32))
    hidden = evenly(NODE.with_nodes(32), hides_routing=True)
    plan = replace(placed(dp=32, pp=8, ep=32, zero=1), num_micro_batches=64)
    before, after = (predict(DEEPSEEK, one, plan) for one in (shown, hidden))
    assert after.ep_s == pytest.approx(shown.software.contention * before.ep_s)
    assert after.compute_s == before.compute_s


# --- what is held


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("pp", "chunks"), [(1, 1), (4, 1), (4, 2), (8, 3)])
def test_the_stages_hold_the_model(name, pp, chunks):
    model, plan = MODELS[name], placed(pp=pp)
    if chunks > 1:
        plan = replace(plan, schedule="interleaved", num_model_chunks=chunks)
    stages = stages_of(model, plan, False)
    kinds = Counter()
    for stage in stages:
        kinds.update(dict(stage.kinds))
    assert kinds == layer_kinds(model)
    assert sum(stage.num_params for stage in stages) == count_params(model)


@pytest.mark.parametrize(
    "sizes", [{"dp": 8, "pp": 4, "ep": 8, "zero": 1}, {"dp": 4, "tp": 2, "pp": 4, "ep": 8}]
)
@pytest.mark.parametrize("model", [DEEPSEEK, GPT_OSS, MIXTRAL], ids=lambda model: model.name)
def test_activations_of_each_stage_are_those_of_lesson_01(model, sizes):
    plan = placed(**sizes, expert_tp=1)
    for stage in range(4):
        wanted = activations(model, 1, 4096, parallelism=plan.parallelism, stage=stage)
        bill = memory_on_stage(model, plan, NODE.software, stage)
        assert bill["activations"] == sum(wanted.values())


@pytest.mark.parametrize("sp", [False, True])
def test_latent_attention_sends_its_small_vectors(sp):
    """Their matrices are whole on each rank: what enters the split ones is 1536 + 512 + 64 wide."""
    model = replace(DEEPSEEK, experts=None)
    narrow, plan = model.latent, placed(dp=1, tp=8, sequence_parallel=sp)
    width = narrow.q_rank + narrow.kv_rank + narrow.rope_dim
    usual = replace(model, latent=None, head_dim=64)
    sent, of_hidden = (tensor_s(one, NODE, plan)[0] for one in (model, usual))
    num_bytes = 4096 * model.hidden * 2
    kinds = ("all_gather", "reduce_scatter") if sp else (None, "all_reduce")
    less = [
        NODE.collective_s(kind, num_bytes, 8)
        - NODE.collective_s(kind, num_bytes // model.hidden * width, 8)
        if kind
        else 0.0
        for kind in kinds
    ]
    assert [sent.forward_s, sent.backward_s] == pytest.approx(
        [of_hidden.forward_s - less[0], of_hidden.backward_s - less[1]]
    )
    assert sent.backward_s < of_hidden.backward_s


def test_sliders_start_at_a_plan_with_experts():
    plan = placed(dp=8, ep=8, zero=1)
    explorer = plan_explorer(MIXTRAL, "dgx-h100", plan)
    assert explorer.predicted.plan == plan
    dense = explorer._at(**explorer.values() | {"model": "llama-8b"})
    assert dense.plan.parallelism.ep == 1


# --- plans: words, tables, search, refusals, programs


def test_a_plan_names_its_expert_axes():
    assert placed(dp=8, ep=8).short == "dp8 ep8"
    assert placed(dp=4, tp=2, ep=8, expert_tp=1).short == "dp4 tp2 ep8 etp1 sp"
    assert placed(dp=8).short == "dp8"


ROW = {
    **{"id": "mixtral-8x7b", "layers": "32", "hidden": "4096", "heads": "32", "kv_heads": "8"},
    **{"ffn": "14336", "gated": "1", "vocab": "32000", "seq": "4096", "experts": "8"},
    **{"active": "2", "gpu": "h100", "cluster": "dgx-h100", "dp": "8", "num_micro_batches": "8"},
}


def test_a_row_of_a_table_has_experts_and_their_axis():
    (row,) = predict_table([ROW | {"ep": "8"}])
    model = replace(MIXTRAL, max_seq=4096)
    step = predict(model, NODE, placed(dp=8, ep=8))
    assert row["error"] == ""
    assert float(row["step_s"]) == pytest.approx(step.step_s, rel=1e-5)
    assert float(row["ep_s"]) == pytest.approx(step.ep_s, rel=1e-5)
    empty, one = predict_table([ROW | {"ep": ""}, ROW | {"ep": "1", "expert_tp": "1"}])
    assert empty == one
    assert float(empty["ep_s"]) == 0


@pytest.mark.parametrize(
    ("cells", "says"),
    [
        ({"ep": "3"}, "need ep * expert_tp to divide dp * cp * tp = 8; got 3 * 1"),
        ({"ep": "0"}, "need ep as a whole number above 0"),
        ({"ep": "x"}, "ep: need a whole number; got 'x'"),
        ({"dp": "16", "ep": "16"}, "need experts.count of mixtral-8x7b divisible by ep"),
        ({"active": "9"}, "need active of at most count"),
        ({"dp": "4", "tp": "2"}, "need sequence_parallel with tp above 1"),
        ({"experts": ""}, "experts: need their number with active; got none."),
        ({"experts": "", "active": "", "ep": "8"}, "with experts for ep above 1; got ep=8"),
        ({"dense_layers": "33"}, "need experts.dense_layers below 32 layers"),
    ],
)
def test_a_wrong_row_gets_its_sentence(cells, says):
    (row,) = predict_table([ROW | cells])
    assert says in row["error"]
    assert row["step_s"] == ""


def test_the_search_divides_the_experts_in_every_way():
    plans = list(valid_plans(MIXTRAL, NODE, 8, 4096))
    axes = {plan.parallelism for plan in plans}
    assert len(plans) == len(set(plans))
    ways = {(one.dp, one.tp, one.ep, one.expert_tensor) for one in axes if one.pp == 1}
    wanted = {
        (dp, tp, ep, split)
        for dp, tp, ep, split in product((1, 2, 4, 8), repeat=4)
        if dp * tp == 8 and split in (1, tp) and dp * tp % (ep * split) == 0
    }
    assert ways == wanted
    for plan in plans:
        plan.check(MIXTRAL)
    assert {p.parallelism.ep for p in valid_plans(DENSE["llama-1b"], NODE, 8, 4096)} == {1}


def test_mixtral_is_searched_in_seconds_and_the_first_plans_divide_the_experts():
    begin = time.process_time()
    found = search(MIXTRAL, NODE.with_nodes(8), 256, seq=4096)
    assert time.process_time() - begin < 10
    assert found.num_plans > len(found.steps) > 100
    assert all(step.fits for step in found.steps)
    assert all(step.plan.parallelism.ep > 1 for step in found.best(5))


def test_megatron_gets_the_experts_and_latent_attention():
    plan = replace(placed(dp=8, pp=1, ep=8, zero=1), num_micro_batches=4)
    with pytest.raises(CourseError, match=r"a scaled rope .* a router of sigmoids"):
        megatron_lm(predict(DEEPSEEK, NODE, plan))
    plain = replace(DEEPSEEK, rope=Rope(), extras=())
    words = megatron_lm(predict(plain, NODE, plan)).arguments
    told = dict(zip(words, (*words[1:], ""), strict=True))
    wanted = {
        **{"num-experts": 256, "moe-router-topk": 8, "moe-ffn-hidden-size": 2048},
        **{"moe-shared-expert-intermediate-size": 2048, "expert-model-parallel-size": 8},
        **{"expert-tensor-parallel-size": 1, "kv-lora-rank": 512, "q-lora-rank": 1536},
        **{"qk-head-dim": 128, "qk-pos-emb-head-dim": 64, "v-head-dim": 128},
        "moe-layer-freq": f"[{','.join(['0'] * 3 + ['1'] * 58)}]",
    }
    assert {name: told.get(f"--{name}") for name in wanted} == {
        n: str(v) for n, v in wanted.items()
    }
    assert "--multi-latent-attention" in words
    assert told["--rope-type"] == "rope"  # with latent attention the default is another
    dense = megatron_lm(predict(DENSE["llama-8b"], NODE, placed(dp=8, zero=1))).arguments
    assert not [word for word in dense if "expert" in word or "moe" in word or "lora" in word]


def test_programs_that_lack_a_part_of_the_model_say_so():
    step = predict(GPT_OSS, NODE, placed(dp=8, ep=8, zero=1))
    with pytest.raises(CourseError, match="need a model that its options describe; got a window"):
        megatron_lm(step)
    with pytest.raises(CourseError, match="need a model without experts; got gpt-oss-20b"):
        course_train(step)
    with pytest.raises(CourseError, match=r"torchtitan v0\.2\.2: need one of llama-8b"):
        torchtitan(step)
    with pytest.raises(CourseError, match="need a dense model whose layers are alike"):
        stage_clock(MIXTRAL, NODE, placed())


def test_runs_in_no_fit_are_those_of_other_models_too():
    fitted, others = (expert_errors(fitted=one) for one in (True, False))
    assert (len(fitted), len(others)) == (8, 23)
    assert sum(abs(error) > 0.35 for error in others) <= 2
