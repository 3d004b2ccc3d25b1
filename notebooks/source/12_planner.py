# %% [markdown]
# # 12 Planner: choose
#
# You can now shard, split and overlap a training in every way of this course. **Which of thousands
# of plans do you run on the cluster that you have, and how do you defend your choice?** One example
# goes through the lesson: a model of 13 billion parameters on 4 nodes of 8 A100s, with 4 million
# tokens per step.
#
# *After this lesson you can*
#
# - make a model fit, then reach its batch, then raise its throughput, by hand;
# - read the bill of a step, and say what bounds it;
# - search all plans, and say when a ranking means something;
# - say where such predictions fail, and how Alpa chooses.
#
# **Prerequisites:** lessons 01 and 07 to 11; 06 and 13 help. **Time:** about 65 minutes of reading
# and running, 75 of exercises. The break is after section 4. Exercises 1 to 3 are *core*, 4 and 5
# go *further*.
#
# | symbol | in code | meaning |
# |---|---|---|
# | dp, tp, pp | `plan.parallelism` | sizes of the axes; their product is the number of GPUs |
# | $b$ | `micro_batch` | sequences of a micro-batch |
# | $m$ | `num_micro_batches` | micro-batches of a step, in each replica |
# | $B$ | `global_batch` | sequences of a step: $b \cdot m \cdot \text{dp}$ |
# | MFU | `mfu` | FLOP of the model, divided by step time and peak (lesson 01) |

# %%
# %load_ext course_lib.ranks
from contextlib import suppress
from dataclasses import replace
from itertools import product
from statistics import median

from course_lib import planner
from course_lib.checks import check
from course_lib.core import MODELS, CourseError
from course_lib.core.units import GIB, format_bytes
from course_lib.display import claim, predict, reveal, show
from course_lib.memory import count_params, model_states
from course_lib.planner import Plan, lab, pictures, scores
from course_lib.planner.published_runs import published_runs

# %% [markdown]
# ## 1 First, fit
#
# The Ultra-Scale Playbook (Tazi et al. 2025, section "Finding the best training configuration")
# gives an order: make a step *fit*, reach the *global batch*, then raise the *throughput*. The
# cluster's software keeps 18 bytes per parameter: a bf16 weight, and in fp32 a gradient, a master
# copy and two moments. How many GiB of model states does the example have?

# %% tags=["predict"]
sizes = {"hidden": 5120, "num_layers": 40, "num_heads": 40, "ffn_hidden": 13824}
llama13 = replace(MODELS["llama2-7b"], name="llama2-13b", **sizes)  # Touvron et al. 2023
cluster = planner.find_cluster("selene-a100", num_nodes=4)
guess_states = predict("model states of llama2-13b", unit="GiB")
### GUESS guess_states.commit(150)

# %%
states = model_states(count_params(llama13), cluster.software.recipe)
reveal(guess_states, sum(states.values()) / GIB)
print(f"a GPU has {format_bytes(cluster.device.memory_bytes)}, of which a step can use", end=" ")
print(format_bytes(cluster.usable_bytes))

# %% [markdown]
# So at least four GPUs must share one copy. (A tenth of the memory stays free: the nine runs of the
# Playbook above 70 of 80 GiB took 3 to 7 times as long as predicted, probably because the allocator
# frees and retries.) Here are seven ways to use all 32 GPUs, with micro-batches of one sequence of
# 4,096 tokens. How many fit?


# %% tags=["predict"]
def plan_of(micro_batch=1, batch=1024, **axes):
    """A plan with these axes, and as many micro-batches as the global batch needs."""
    plan = Plan(micro_batch=micro_batch).with_axes(**axes)
    return replace(plan, num_micro_batches=batch // (micro_batch * plan.parallelism.dp))


ways = {
    "DP 32": plan_of(dp=32),
    "ZeRO-1": plan_of(dp=32, zero=1),
    "ZeRO-2": plan_of(dp=32, zero=2),
    "FSDP": plan_of(dp=32, zero=3),
    "PP 4": plan_of(dp=8, pp=4),
    "PP 4, ZeRO-1": plan_of(dp=8, pp=4, zero=1),
    "TP 8": plan_of(dp=4, tp=8, sequence_parallel=True),
}
guess_fit = predict("of these seven, how many fit")
### GUESS guess_fit.commit(5)

# %% tags=["picture"]
steps = {name: planner.predict(llama13, cluster, plan) for name, plan in ways.items()}
reveal(guess_fit, sum(step.fits for step in steps.values()))
figure, alt = pictures.memory_by_kind(steps)
show(figure, alt=alt)

# %% [markdown]
# | what divides it | parameters | gradients | optimizer state | activations |
# |---|---|---|---|---|
# | ZeRO-1, 2, 3 (lessons 09, 10) | 3 | 2, 3 | 1, 2, 3 | no |
# | TP with sequence parallelism (07) | yes | yes | yes | yes |
# | PP, 1F1B, stage 1 (08) | yes | yes | yes | no: up to pp micro-batches, $1/\text{pp}$ of layers |
# | recomputation (03) | no | no | no | yes |
#
# ### Exercise 1 (core): the memory of a plan
#
# Return the GiB of model states on one rank: 2 bytes per parameter for the weight, 4 for its
# gradient, 12 for the optimizer (master copy and two moments). TP and PP split the parameters
# evenly; ZeRO shards over dp. About 9 lines.
#
# <details><summary>Hint: with ZeRO it is too small</summary>
# ZeRO-1 divides the optimizer's bytes only, ZeRO-2 also the gradient's, ZeRO-3 all. dp divides
# nothing else.
# </details>


# %% tags=["exercise"] exercise="planner-1"
def states_gib(num_params, dp, tp, pp, zero):
    """GiB of weights, gradients and optimizer state on one rank."""
    ### BEGIN SOLUTION: which parameters are here, and which bytes does dp share?
    mine = num_params / (tp * pp)
    weights, grads, states = 2 * mine, 4 * mine, 12 * mine
    if zero >= 1:
        states /= dp
    if zero >= 2:
        grads /= dp
    if zero >= 3:
        weights /= dp
    return (weights + grads + states) / 2**30
    ### END SOLUTION


# %% tags=["check"] exercise="planner-1"
check("planner-1", states_gib)

# %% [markdown]
# **Fit first. ZeRO divides states, TP with sequence parallelism also activations; the first stage
# of a 1F1B pipeline holds up to pp micro-batches.**
#
# ## 2 Then, the batch
#
# Learning, not the cluster, decides the global batch (lesson 13, section 6). 4 million tokens are
# $B = 1024$ sequences. With FSDP on 32 GPUs each rank computes 32 micro-batches of one sequence.
# With 8 stages and 4 replicas, 256 micro-batches pass each pipeline, and its bubble,
# $(\text{pp} - 1)/m$ of the computing time, is small. Somebody now asks for a batch of 64
# sequences, to finish more steps per hour. How large is the bubble of those 8 stages?

# %% tags=["predict"]
guess_bubble = predict("8 stages, 4 replicas, 64 sequences: bubble / computing time", unit="%")
### GUESS guess_bubble.commit(10)

# %%
kinds = {"FSDP": {"dp": 32, "zero": 3}, "PP 8": {"dp": 4, "pp": 8, "zero": 1}}
m = plan_of(batch=64, **kinds["PP 8"]).num_micro_batches
reveal(guess_bubble, 100 * (8 - 1) / m)
for batch in (1024, 256, 64):
    plans = {name: plan_of(batch=batch, **axes) for name, axes in kinds.items()}
    found = {name: planner.predict(llama13, cluster, plan) for name, plan in plans.items()}
    rates = [f"{name} {step.tokens_per_s_per_gpu:,.0f}" for name, step in found.items()]
    print(f"B = {batch:4}: tokens/s/GPU of {', '.join(rates)}")

# %% [markdown]
# **The batch is $b \cdot m \cdot \text{dp}$: a small one leaves a pipeline too few micro-batches,
# and one below dp leaves replicas without a sequence.**
#
# ## 3 Then, the throughput
#
# `planner.predict` adds up formulas of earlier lessons. Nothing is simulated, so predicting a plan
# takes microseconds:
#
# | part of the bill | what it counts | lesson |
# |---|---|---|
# | compute | FLOP at the efficiency of each product's shape; norms, loss; recomputation | 01, 03 |
# | TP messages | collectives: counted as exposed, except one gather that a product hides | 07 |
# | bubble | $(\text{pp} - 1)/m$, divided by the model chunks; waits for the slowest | 08 |
# | PP messages | those that the schedule cannot hide | 08 |
# | DP messages | gradients and shards: what computation does not hide | 06, 09, 10 |
# | host, optimizer | launches of kernels; bytes of AdamW / memory bandwidth | |
#
# TP 8 needed the least memory. Which share of its step are exposed TP messages?

# %% tags=["predict"]
guess_tp = predict("TP 8 on NVLink: exposed TP messages / step", unit="%")
### GUESS guess_tp.commit(10)

# %% tags=["picture"]
eight = steps["TP 8"]
reveal(guess_tp, 100 * eight.tp_s / eight.step_s)
figure, alt = pictures.bill_waterfall(eight)
show(figure, alt=alt)

# %% [markdown]
# Left of the dashed line is what a GPU would need at its peak: MFU $\times$ step time. Computing,
# too, takes longer than with FSDP: an eighth of a matrix is a narrow product, which fills a GPU
# less. Beside the other plans that fit:

# %% tags=["picture"]
fitting = {name: step for name, step in steps.items() if step.fits}
quick = min(fitting, key=lambda name: fitting[name].step_s)
slow = max(fitting, key=lambda name: fitting[name].step_s)
ratio = fitting[slow].step_s / fitting[quick].step_s
title = f"Of the plans that fit, {slow} takes {ratio:.1f} times as long as {quick}"
figure, alt = pictures.bills(fitting, title)
show(figure, alt=alt)
for b in (1, 2, 4):
    step = planner.predict(llama13, cluster, plan_of(b, dp=32, zero=3))
    print(f"FSDP, b = {b}: {step.step_s:.1f} s, {format_bytes(step.memory_bytes)}. {step.bound}")

# %% [markdown]
# ZeRO-2 reduces gradients in every micro-batch, and here there are many; this cluster's software
# does not overlap them (its constants are those of Megatron-LM, 2021). FSDP is assumed to
# overlap, and it can: computing a layer of this model takes longer than gathering the next one.
# With overlap, in buckets of 40 to 160 MB, ZeRO-2 comes within 1 % of FSDP: their
# ranking follows from the assumption. Larger micro-batches make matrix products more efficient.
#
# ### Exercise 2 (core): what stays exposed
#
# Return the seconds of a step from: the computation of one micro-batch on a stage, forward and
# backward; TP's messages of one micro-batch, which nothing hides; the micro-batches; the stages of
# 1F1B; the all-reduce of the gradients, in equal buckets. Backward is 2/3 of the computation;
# during the last micro-batch's backward, a bucket is ready after each equal part. About 5 lines.
#
# <details><summary>Hint: which part of the gradients is exposed?</summary>
# Draw two rows, computation and messages. If a bucket takes longer than the next one needs to be
# ready, buckets queue; if not, only the last one is late.
# </details>


# %% tags=["exercise"] exercise="planner-2"
def step_seconds(compute_s, tp_s, num_micro_batches, num_stages, dp_s, num_buckets):
    """Seconds of a step: bubble and TP exposed, gradients in part."""
    ### BEGIN SOLUTION: how long is the pipeline, and what of a bucket is late?
    one_s = compute_s + tp_s
    pipeline_s = (num_micro_batches + num_stages - 1) * one_s
    bucket_s, ready_s = dp_s / num_buckets, 2 / 3 * compute_s / num_buckets
    exposed_s = bucket_s + (num_buckets - 1) * max(0.0, bucket_s - ready_s)
    return pipeline_s + exposed_s
    ### END SOLUTION


# %% tags=["check"] exercise="planner-2"
check("planner-2", step_seconds)

# %% [markdown]
# **The bill says what to change: exposed TP, a smaller tp; a bubble, more micro-batches or chunks;
# exposed DP, more tokens per reduction or fewer replicas.**
#
# ## 4 All plans
#
# By hand you have compared a handful of plans. A program can go through all of them: it lists them,
# leaves out those that cannot run, predicts the others and sorts them.
#
# ### Exercise 3 (core): prune
#
# Return the plans that obey six rules. A plan is a dict with `dp`, `tp`, `pp`, `micro_batch` and
# `num_micro_batches`; a job is a dict with `gpus`, `gpus_per_node`, `layers`, `heads`, `batch` and
# `gib`. The rules: all GPUs are used, no more; tp divides the heads, and is at most
# `gpus_per_node` (more would be slow); pp is at most `layers`; the batch is the job's, in
# sequences; `memory(plan)` is at most the GPU's GiB.


# %% tags=["exercise"] exercise="planner-3"
def prune(plans, job, memory):
    """The plans that can run."""

    ### BEGIN SOLUTION: six conditions
    def can_run(plan):
        return (
            plan["dp"] * plan["tp"] * plan["pp"] == job["gpus"]
            and job["heads"] % plan["tp"] == 0
            and plan["tp"] <= job["gpus_per_node"]
            and plan["pp"] <= job["layers"]
            and plan["dp"] * plan["micro_batch"] * plan["num_micro_batches"] == job["batch"]
            and memory(plan) <= job["gib"]
        )

    return [plan for plan in plans if can_run(plan)]
    ### END SOLUTION


# %% tags=["check"] exercise="planner-3"
check("planner-3", prune)

# %% [markdown]
# Plans differ in axes, ZeRO stage, micro-batch, schedule, chunks, recomputation. How many obey all
# rules but memory?

# %% tags=["predict"]
guess_plans = predict("plans that obey all rules but memory")
### GUESS guess_plans.commit(300)

# %% tags=["picture"]
found = planner.search(llama13, cluster, global_batch=1024)
reveal(guess_plans, found.num_plans)
figure, alt = pictures.time_against_memory(found, {"FSDP, b = 1": steps["FSDP"]})
show(figure, alt=alt)
best = found.best(10)  # their pipelines are simulated
for step in best[:6]:
    way = f"{step.plan}, {step.plan.pipeline_words}"
    print(f"{step.step_s:.1f} s, {format_bytes(step.memory_bytes)}: {way}")
print(f"the tenth takes {best[-1].step_s / best[0].step_s - 1:.0%} longer than the first")

# %% [markdown]
# The *Pareto front* has the plans that no other one beats in both time and memory: you pay for less
# memory with time. The first ten plans are within 7 % of each other: keep that in mind
# for section 6.
#
# **Break it.** Two planners that somebody might write: one forgets the bubble, the other assumes
# that all messages overlap. For $B = 1024$ both choose the same plan as ours. Now $B = 32$, a
# sequence per GPU. Take the plan that the first planner chooses, and count all its costs: its step
# is how many times as long as the best plan's?

# %% tags=["predict"]
guess_forgot = predict("step of that choice, as a multiple of the best")
### GUESS guess_forgot.commit(1.2)

# %% tags=["failure"]
beliefs = {
    "counts everything": lambda step: step.step_s,
    "forgets the bubble": lambda step: step.step_s - step.bubble_s,
    "assumes full overlap": lambda step: step.compute_s + step.bubble_s + step.optimizer_s,
}
few = planner.search(llama13, cluster, global_batch=32)
chosen = {name: min(few.steps, key=believed) for name, believed in beliefs.items()}
counted_s = [step.step_s for step in chosen.values()]
reveal(guess_forgot, counted_s[1] / counted_s[0])
for name, step in chosen.items():
    says = f"believes {beliefs[name](step):.2f} s, fully counted {step.step_s:.2f} s"
    print(f"{name}: {says}; {step.plan}, {step.plan.pipeline_words}")
title = f"Without the bubble in mind: {counted_s[1]:.1f} s per step, not {counted_s[0]:.1f} s"
figure, alt = pictures.bills(chosen, title)
show(figure, alt=alt)

# %% [markdown]
# **A search can choose a plan because of a cost that the planner leaves out.**
#
# *A good place for a break.*
#
# ## 5 Explore
#
# Sliders for model, cluster and plan. dp follows from the GPUs, $m$ from the batch. Try: the fewest
# nodes on which llama-70b fits; its best pp on 8 nodes with a batch of 64; how TP slows down on
# `a6000-pcie`.

# %% tags=["picture"]
from course_lib.planner.explorer import plan_explorer

plan_explorer(llama13, "selene-a100", plan_of(dp=8, tp=2, pp=2, zero=1), num_nodes=4)

# %% [markdown]
# ## 6 Is it true?
#
# Four published tables, 206 runs on A100 and H100. The planner has fewer than twenty fitted
# constants, such as the share of the peak that large products reach. None belongs to one run or one
# plan, but those used here were fitted on these very tables. What is its median error on them?

# %% tags=["predict"]
guess_error = predict("median error of the predicted step", unit="%")
### GUESS guess_error.commit(20)

# %% tags=["picture"]
names = {"Korthikanti 2022": "korthikanti", "Megatron SC21": "sc21", "vTrain": "vtrain"}
names |= {"llm-foundry": "llm-foundry"}
tables = {name: published_runs(table) for name, table in names.items()}
errors = [abs(error) for runs in tables.values() for error in scores.step_errors(runs)]
reveal(guess_error, 100 * median(errors))
figure, alt = pictures.predicted_against_published(tables)
show(figure, alt=alt)

# %% [markdown]
# On models left out of the fit, the error is 3.2 to 8.1 % (`docs/planner.md` names the runs).
#
# What counts for a choice is the ranking. For 14 pairs of model and nodes the Playbook measured 13
# to 121 plans each, with the same batch. If you run the plan that the planner puts first, how much
# throughput do you lose to the best of the measured ones?

# %% tags=["predict"]
guess_lost = predict("median of the throughput lost, over 14 groups", unit="%")
### GUESS guess_lost.commit(10)

# %%
lost = scores.regrets(scores.alternatives())
reveal(guess_lost, 100 * median(lost.values()))
print(", ".join(f"{group}: {share:.0%}" for group, share in lost.items()))
measured = [run for run in scores.alternatives() if run.group == "8B, 32 nodes"]
fastest = min(measured, key=lambda run: run.step_s)
searched = planner.search(fastest.model, fastest.cluster, global_batch=256)
print(f"8B, 32 nodes: fastest of {len(measured)} measured: {fastest.plan}")
print(f"first of {searched.num_plans} searched, measured or not: {searched.steps[0].plan}")

# %% [markdown]
# Most losses are small, three are not. Where does it go wrong? The table has 1,027 of the
# Playbook's more than 4,100 runs:

# %% tags=["picture"]
figure, alt = pictures.errors_by_mfu(published_runs("ultrascale"))
show(figure, alt=alt)
for run in published_runs("llm-foundry"):
    if run.group == "13b" and run.cluster.name == "selene-a100" and run.plan.seq in (2048, 4096):
        longer = run.step_s / run.predicted().step_s - 1
        how = f"{longer:+.0%} against the prediction, MFU {run.mfu:.0%}"
        print(f"MPT-13B on 8 A100s, seq {run.plan.seq}, {run.plan}: {how}")

# %% [markdown]
# *Efficient runs are predicted well; of the runs left of the dashed line, half took more than twice
# as long as predicted*: on 64 nodes with TP of at most 8, plans that differ only in the micro-batch
# or the ZeRO stage differ by up to a factor of 8, where the prediction says 1.1. And the MFU is
# known only after the run. (The constants were fitted on runs with an MFU of 20 % or more; from
# 30 % on, `docs/planner.md` limits the median error.)
#
# The last lines are near our example: 13 billion parameters, FSDP, A100s. The run without
# recomputation took 16 % longer than predicted, the run with it 6 % less. The run without it also
# had a tenth of the tokens per micro-batch, so recomputation need not be the cause.
#
# **A prediction rules out most plans. Among plans closer than its error, take the simplest
# with the most free memory, or measure each for twenty steps.**
#
# ## 7 Alpa: let the compiler choose
#
# Our search splits every layer alike. Alpa (Zheng et al. 2022) chooses on two levels.
#
# *Inter-operator* (its section 5): cut the layers into stages, and give each stage a part of the
# GPUs. The first micro-batch passes all stages, $t_1 + \dots + t_S$ seconds; each other one ends
# $\max t_i$ after the one before. So a step takes $\sum t_i + (m - 1) \max t_i$. For each possible
# maximum, dynamic programming over layers and GPUs finds the smallest sum. Llama-1B has 16 layers,
# and an output layer of 128,256 logits. With four stages of four layers, and the output layer on
# the last one, how much longer than with the best stages is a step?

# %% tags=["predict"]
guess_stages = predict("step of equal stages, as a multiple of the best ones'")
### GUESS guess_stages.commit(1.1)

# %%
from course_lib.planner.stages import choose_stages, equal_stages, num_items, stage_clock

small, plan = MODELS["llama-1b"], Plan(micro_batch=8, num_micro_batches=16)
clock, items = stage_clock(small, cluster, plan, layers_per_item=2), num_items(small, 2)
equal = equal_stages(clock, items, 4, 8, 16, num_stages=4)
unequal = choose_stages(clock, items, 4, 8, 16)
reveal(guess_stages, equal.step_s / unequal.step_s)
for name, layout in {"equal": equal, "Alpa": unequal}.items():
    words = [f"{2 * (s.end - s.first)} layers on {s.mesh.num_gpus}" for s in layout.stages]
    print(f"{name}: {layout.step_s:.2f} s: {', '.join(words)} GPUs")

# %% [markdown]
# (The output layer is printed as two layers here; it computes for about as long as four.)
#
# *Intra-operator* (its section 4): inside a stage, each matrix is split by columns, rows or tokens.
# Each split has its own messages, and where two successive matrices disagree, a tensor is resharded
# (split in another way). Choosing is an integer program; on a chain of matrices, dynamic
# programming solves it. Which splits are cheapest for an MLP on 8 GPUs and 4,096 tokens, if every
# GPU has all of these tokens?

# %% tags=["predict"]
options = ("columns, columns", "columns, rows", "rows, columns", "tokens, tokens")
guess_split = predict("the two matrices of the MLP, 4,096 tokens", choices=options)
### GUESS guess_split.commit("tokens, tokens")

# %%
from course_lib.planner.sharding import ChainProduct, ShardedChain, collective_clock

h, f = llama13.hidden, llama13.ffn_hidden
mlp, clock = [ChainProduct("up", h, f), ChainProduct("down", f, h)], collective_clock(cluster, 8)
for tokens, layout in ((4096, "whole"), (4096, "tokens"), (65536, "tokens")):
    chain = ShardedChain(mlp, tokens, clock, enters=layout, ends=layout)
    splits = ", ".join(way.split for way in chain.best())
    sent = [kind for way in chain.best() for kind, _ in (way.forward, way.backward) if kind]
    enters = "split" if layout == "tokens" else "whole"
    print(f"{tokens} tokens that enter {enters}: {splits}; {', '.join(sent)}")
    if layout == "whole":
        reveal(guess_split, splits)

# %% [markdown]
# Three lines, three methods: Megatron's tensor parallelism, its sequence parallelism, and, with
# more tokens than the MLP's width, data parallelism (reducing gradients in each micro-batch).
# The program was given the splits, their costs, and the layout at both ends.
#
# **Alpa derives the known splits from costs, also for models with unequal layers. Its answer is
# only as good as these costs.**
#
# ## 8 A plan in miniature
#
# Does a real pipeline take as long as its bill says? Four ranks run the schedules of PP 4 with 8
# micro-batches. Ranks, schedules and messages are real; the kernels sleep for their predicted time,
# and all is ten times shorter. How many times as fast as 1F1B is the zero-bubble schedule ZB-H1?

# %% tags=["predict"]
guess_zero = predict("measured step of 1F1B / of ZB-H1")
### GUESS guess_zero.commit(1.3)

# %% tags=["measured"]
from course_lib.display.paired_bars import Pair, paired_bars
from course_lib.pipeline import interleaved, one_f_one_b, zero_bubble_h1

short = plan_of(batch=64, dp=8, pp=4, zero=1)
schedules = {"1f1b": one_f_one_b(4, 8), "interleaved": interleaved(4, 8, 2)}
schedules["zb-h1"] = zero_bubble_h1(4, 8)
measured = lab.measure_pipelines(llama13, cluster, short, schedules, divided_by=10)
first, *_, last = (median(seconds) for seconds in measured.values())
reveal(guess_zero, first / last)

# %% tags=["picture", "measured"]
pairs = []
for name, seconds in measured.items():
    plan = replace(short, schedule=name, num_model_chunks=1 + (name == "interleaved"))
    paper_s = lab.pipeline_s(planner.predict(llama13, cluster, plan))
    pairs.append(Pair(name=name, measured=median(seconds), predicted=paper_s))
claim("ZB-H1 is faster than 1F1B", last < first)
title = f"Eight micro-batches take {first:.1f} s with 1F1B, {last:.1f} s with ZB-H1"
show(paired_bars(pairs, title, x_label="time of the pipeline (s)"), alt=title)

# %% [markdown]
# What is measured is longer: each action and its messages cost Python 1 to 2 ms, which count
# tenfold, as measured times are multiplied by ten. Lesson 13 predicts steps of your machine.
#
# ## 9 What it costs, and your cluster
#
# A training costs GPU-hours: tokens, divided by tokens/s/GPU and 3,600. More GPUs can finish
# earlier, but cost the same only while the throughput of each GPU stays the same. With a fixed
# batch, more GPUs get fewer sequences each; in section 2, too, a pipeline with fewer was slower.
#
# ### Exercise 4 (further): a budget
#
# Each plan is a tuple: GPUs, tokens per second *per GPU*, whether it fits. Return the number of the
# plan (from 0) that trains `num_tokens` within `days` for the fewest dollars, and these dollars;
# None if no plan does. A GPU costs `price` dollars per hour until the last token. About 8 lines.


# %% tags=["exercise"] exercise="planner-4"
def cheapest(plans, num_tokens, days, price):
    """Number and dollars of the cheapest plan that is done in time; None if there is none."""
    ### BEGIN SOLUTION: hours of each plan first, then what they cost
    found = []
    for number, (gpus, tokens_per_s, fits) in enumerate(plans):
        hours = num_tokens / (gpus * tokens_per_s) / 3600
        if fits and hours <= 24 * days:
            found.append((gpus * hours * price, number))
    if not found:
        return None
    cost, number = min(found)
    return number, cost
    ### END SOLUTION


# %% tags=["check"] exercise="planner-4"
check("planner-4", cheapest)

# %% [markdown]
# ### Exercise 5 (further): choose for a cluster
#
# Return a plan for any model and cluster on which one fits; `batch` has at least two sequences per
# GPU. Your plan uses all GPUs, has `batch` sequences of `seq` tokens, fits, and its predicted step
# is at most a quarter longer than that of the best plan. Try axes, micro-batches, ZeRO stages and
# recomputation with `planner.predict`, which raises `CourseError` for what cannot run. About 14
# lines.
#
# <details><summary>Hint: how many plans are enough?</summary>
# All combinations of a few values: 1, 2, 4 and 8, for stages also 16. What is left for dp follows
# from the GPUs, and the number of micro-batches from the batch.
# </details>


# %% tags=["exercise"] exercise="planner-5"
def choose(model, cluster, batch, seq):
    """A plan that fits, near the fastest one."""
    ### BEGIN SOLUTION: which sizes are worth a try? Keep the fastest that fits.
    best, sizes = None, (1, 2, 4, 8)
    choices = product(sizes, (*sizes, 16), sizes, (0, 1, 3), ("none", "full"))
    for tp, pp, micro_batch, zero, again in choices:
        dp = cluster.num_gpus // (tp * pp)
        num = batch // max(1, dp * micro_batch)
        if dp * tp * pp != cluster.num_gpus or num * dp * micro_batch != batch:
            continue
        with suppress(CourseError):
            plan = Plan(seq=seq, micro_batch=micro_batch, num_micro_batches=num, recompute=again)
            plan = plan.with_axes(dp=dp, tp=tp, pp=pp, zero=zero, sequence_parallel=tp > 1)
            step = planner.predict(model, cluster, plan)
            if step.fits and (best is None or step.step_s < best.step_s):
                best = step
    return best.plan
    ### END SOLUTION


# %% tags=["check"] exercise="planner-5"
check("planner-5", choose)

# %% [markdown]
# ## 10 Defend it
#
# Five sentences defend a plan: it fits; it has the batch; what its step loses; what else you
# considered; what would change your mind. For the example:

# %%
mine, top = steps["FSDP"], best[0]
held, usable = format_bytes(mine.memory_bytes), format_bytes(cluster.usable_bytes)
print(f"1 It fits: {held} of {usable}. With ZeRO-1: {steps['ZeRO-1'].bound}")
print(f"2 It has the batch: {mine.plan}: {mine.plan.tokens:,} tokens.")
print(f"3 A step takes {mine.step_s:.0f} s, MFU {mine.mfu:.0%}. {mine.bound}")
saved, more = 1 - top.step_s / mine.step_s, format_bytes(top.memory_bytes)
print(f"4 Of the {found.num_plans:,} plans that obey all rules but memory, the fastest that fits")
print(f"  saves {saved:.0%} and needs {more}.")
print(f"5 A run of 13B on 8 A100s took {longer:.0%} longer than predicted. If twenty steps")
print("  here take longer than that, or if the batch shrinks, I choose again.")

# %% [markdown]
# The same in a terminal, for the presets that `--model list` prints:
#
# ```sh
# course plan --model llama-8b --cluster selene-a100 --nodes 4 --global-batch-tokens 4M
# course plan --model llama-8b --cluster selene-a100 --nodes 4 --explain 1
# ```
#
# ## What to keep
#
# - Fit, then batch, then throughput.
# - ZeRO or FSDP as far as each replica has enough tokens to hide its messages; TP inside a node, as
#   much as memory needs, or more where the batch is too small for more replicas; PP across nodes,
#   with many micro-batches.
# - A bill names the next change. A search finds plans that you did not think of, some that
#   profit from its formulas' gaps.
# - Where plans differ by less than the predictor's error: measure.
# - A plan that fits with much memory left can be changed tomorrow.
#
# Lesson 13 measures; lesson 14 survives failures.
#
# **Read on**
#
# - Tazi et al. 2025, *The Ultra-Scale Playbook*: fit, batch, throughput, and thousands of runs.
# - Narayanan et al. 2021, *Efficient Large-Scale Language Model Training on GPU Clusters*, section
#   3: rules for choosing, with the arithmetic.
# - Korthikanti et al. 2022, section 6: where the time of the largest models goes.
# - Zheng et al. 2022, *Alpa*, sections 4 and 5: the two levels.
# - Bang et al. 2024, *vTrain*: a simulator, checked on many plans.
# - Qi et al. 2024, *Zero Bubble Pipeline Parallelism*, sections 2.3 and 3: steps from
#   $T_F$, $T_B$, $T_W$.
