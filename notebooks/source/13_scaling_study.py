# %% [markdown]
# # 13 Scaling study: was it worth using more GPUs?
#
# **How much faster does a training become with more GPUs, and which measured numbers can you
# trust?**
#
# *After this lesson you can*
#
# - find in a table of real runs what limits data parallelism, tensor parallelism and small
#   micro-batches;
# - fit a law with two parts to a few runs, predict other runs, and say how wrong it is;
# - recognize runs that you should not trust, and baselines that flatter;
# - measure a training step correctly, and plan a study on a cluster.
#
# **Prerequisites:** lessons 04, 06 and 09; 07, 08 and 12 help. **Time:** about 90 minutes of
# reading and running, 45 of exercises. The break is after section 6. All three exercises are
# *core*.
#
# | symbol | in code | meaning |
# |---|---|---|
# | $n$ | `run.nodes` | nodes of 8 GPUs |
# | $T_n$ | `run.step_s` | seconds of a step on $n$ nodes |
# | throughput | `tokens_per_s_per_gpu` | tokens per second; here per GPU |
# | speed-up | | $T_1 / T_n$: how many times faster than on one node |
# | efficiency | | $T_1 / (n\,T_n)$: speed-up divided by the number of nodes |
# | $f$, $s$ | `law.fixed_s`, `law.shared_s` | seconds of a step that nodes do not share; do share |
#
# All definitions hold in the same way for ranks in place of nodes.

# %%
# %load_ext course_lib.ranks
import math
from statistics import median

from course_lib.checks import check
from course_lib.core.units import GIB
from course_lib.display import claim, predict, reveal, show
from course_lib.ranks import Ranks
from course_lib.scaling_study import lab, pictures, playbook
from course_lib.scaling_study.results import own_or_sample, sample_results

# %% [markdown]
# ## 1 A table of real runs
#
# The earlier lessons said what each method *should* cost. A laptop cannot test such claims, because
# its ranks share two or four cores and its messages never leave the memory. So this lesson begins
# with runs that somebody else has paid for. For the Ultra-Scale Playbook, Tazi et al. (2025)
# started the same training with many combinations of DP, TP, PP, ZeRO and micro-batch size. They
# used two models (1B and 8B), on 1 to 64 nodes of 8 H100 GPUs. Nearly all runs have the same global
# batch: 256 sequences of 4,096 tokens.
#
# The authors set out to run every configuration that is possible (section "Lessons learned on
# benchmarking"), good or bad. Which share of the runs failed?

# %% tags=["predict"]
runs = playbook.playbook_runs()
print(f"{len(runs):,} runs; this is one of them:")
print(runs[0])
guess_failed = predict("runs that failed", unit="%")
### GUESS guess_failed.commit(10)

# %%
failed = [run for run in runs if run.failed]
reveal(guess_failed, 100 * len(failed) / len(runs))
print("share of failed runs   " + "".join(f"{nodes:>5}" for nodes in (1, 2, 4, 8, 16, 32, 64)))
for model in ("1B", "8B"):
    shares = []
    for nodes in (1, 2, 4, 8, 16, 32, 64):
        here = [run.failed for run in runs if (run.model, run.nodes) == (model, nodes)]
        shares.append(f"{100 * sum(here) / len(here):4.0f}%")
    print(f"{model}, by nodes           " + "".join(shares))
print("The cost model of lesson 12 on the failed runs:", playbook.verdicts(failed))
worked = [run for run in runs if not run.failed]
print("and on those that worked:", playbook.verdicts(worked))

# %% [markdown]
# The table calls these runs `crashed_or_oom` and does not say which of the two happened. Memory is
# the likely cause of most. The 8B model fails often on one node, where few GPUs share the model
# states, and rarely on 64 nodes. For about six failed runs in ten, the cost model of lesson 12
# predicts more than the 80 GiB of an H100; of the runs that worked, it predicts this for only a
# few. Other runs ask for more pipeline stages than the model has layers. The last group should fit:
# there the prediction may be too low, or the run crashed for another reason.
#
# Why does this matter for a study of speed? Because the runs that you *can* compare are those that
# survived. If you average over all runs on 2 nodes and over all runs on 32 nodes, you compare two
# different sets of configurations.
#
# **Only the runs that worked have a measured speed. Before you average, ask which runs failed or
# are missing, and why.**
#
# ## 2 Data parallelism: the same batch on more nodes
#
# To avoid that trap, we follow *one* configuration while only the number of nodes changes. We begin
# with the simplest one: plain data parallelism, the 1B model, and micro-batches of one sequence.
# The batch stays at 256 sequences, so each GPU gets fewer of them as nodes are added. This is
# **strong scaling**. (In *weak scaling*, the batch grows with the number of nodes. Its efficiency
# is usually higher, but the training is a different one: see section 9.)
#
# On one node, a GPU processes 32 sequences per step; on 32 nodes, it processes one. What is the
# efficiency on 32 nodes, compared with one node?

# %% tags=["predict"]
dp = playbook.series("1B")
for nodes, run in dp.items():
    print(f"{nodes:2} nodes: {run.num_micro_batches:2} micro-batches per GPU and step")
guess_dp = predict("efficiency of DP on 32 nodes", unit="%")
### GUESS guess_dp.commit(80)

# %% tags=["picture"]
reveal(guess_dp, 100 * dp[1].step_s / (32 * dp[32].step_s))
show(*pictures.strong_scaling())

# %% [markdown]
# Up to four nodes, about a tenth of the throughput is lost; on 32 nodes, more than half. The reason
# is what each GPU does in a step. Its computing shrinks with its number of micro-batches. Its
# all-reduce does not shrink: lesson 04 showed that a rank of a ring sends
# $2\,\frac{p-1}{p}$ times the bytes of the gradients, which is almost the same for 8 and for 256
# ranks. Backward can hide a part of this message, but only the backward pass of the *last*
# micro-batch, because gradients are complete only then (lesson 06). So the exposed communication
# stays about constant while the computing around it becomes shorter.
#
# ### Exercise 1 (core): efficiency from a table
#
# *Difficulty 2 of 5, importance 4 of 5, about 15 minutes, about 6 lines.*
#
# Return the efficiency of each run, in per cent and in the order of `runs`. Compare a run with its
# *base*: among the runs with the same `model`, `batch` and `seq`, the one with the fewest `nodes`;
# if several have so few, the fastest of them. The efficiency is nodes times `step_s` of the base,
# divided by nodes times `step_s` of the run. Example: 12 s on 1 node and 4 s on 4 nodes give 100
# and 75. You need this to compare configurations fairly.
#
# <details><summary>Hint: how to find the base</summary>
# <code>min(..., key=lambda one: (one.nodes, one.step_s))</code> compares nodes first, then seconds.
# </details>


# %% tags=["exercise"] exercise="scaling_study-1"
def efficiency(runs):
    """The efficiency of each run in per cent of the base with the same work."""

    ### BEGIN SOLUTION: what is the same work? the base of each run; then a ratio
    def work(run):
        return run.model, run.batch, run.seq

    percents = []
    for run in runs:
        same = [one for one in runs if work(one) == work(run)]
        base = min(same, key=lambda one: (one.nodes, one.step_s))
        percents.append(100 * base.nodes * base.step_s / (run.nodes * run.step_s))
    return percents
    ### END SOLUTION


# %% tags=["check"] exercise="scaling_study-1"
check("scaling_study-1", efficiency)

# %% [markdown]
# Which run is the base decides what an efficiency means. The next cell follows two configurations
# of the 8B model, TP 4 and TP 8, from 1 to 32 nodes. The first efficiency uses each configuration's
# *own* run on one node as the base; the second uses the fastest run of the model on one node, as in
# your exercise. Which configuration would you take?

# %%
measured = playbook.measured_runs()
common = dict(zip(measured, playbook.efficiencies(measured), strict=True))
for tp in (4, 8):
    found = playbook.series("8B", tp=tp)
    own = 100 * found[1].step_s / (32 * found[32].step_s)
    words = f"TP {tp} on 32 nodes: {found[32].tokens_per_s_per_gpu:,.0f} tokens/s per GPU, "
    print(words + f"efficiency {own:.0f} % of its own run, {common[found[32]]:.0f} % of the best")

# %% [markdown]
# TP 8 has the higher efficiency of the two by its own base, and is a third slower. It was already
# slow on one node, so it had little to lose. A slow baseline makes every efficiency look good.
#
# **With a fixed batch, the efficiency of data parallelism falls, because computing shrinks and
# communication does not. Judge a configuration by its throughput; an efficiency compares it only
# with its base.**
#
# ## 3 A law with two parts
#
# Could we have *predicted* the last of these six runs from the first? Amdahl (1967) divided the
# time of a program in two. Some seconds of a step do not become fewer with more nodes: exposed
# messages, and work that each rank repeats, such as the optimizer step. We call them $f$ (fixed).
# The other seconds, $s$, are shared by the nodes:
#
# $$T_n = f + \frac{s}{n}$$
#
# Two runs give two equations. On one node, $T_1 = f + s$. If we subtract the equation for $n$
# nodes, $f$ disappears: $T_1 - T_n = s\,(1 - \frac{1}{n})$. So
# $s = \frac{T_1 - T_n}{1 - 1/n}$, and $f = T_1 - s$. The efficiency follows from its definition:
#
# $$\frac{T_1}{n\,T_n} = \frac{f + s}{n f + s}$$
#
# The product $n f$ in the denominator grows with $n$. Therefore the efficiency falls to zero in the
# end, however small $f$ is, and the speed-up can never exceed $(f + s) / f$.
#
# ### Exercise 2 (core): how far does it scale?
#
# *Difficulty 3 of 5, importance 5 of 5, about 15 minutes, about 8 lines.*
#
# `experiment` ran on `experiment.run.ranks` ranks, 2 or more. `alone` lists experiments on one
# rank: take the one with the same `run.work`. All have `step_s`. Apply the law to ranks, and return
# the efficiency of `experiment` in per cent, the fixed seconds, and the largest number of ranks
# whose efficiency, by the law, is at least `percent` (`math.inf` if the fixed part is 0 or less).
# Example: 2 s alone, 1.25 s on 2 ranks and 80 % give 80, 0.5 and 2.
#
# <details><summary>Hint: the most ranks</summary>
# <code>T_1 / (p T_p)</code> is at least the limit; <code>p T_p</code> is linear in p.
# </details>


# %% tags=["exercise"] exercise="scaling_study-2"
def limit_of(experiment, alone, percent):
    """Efficiency in per cent, fixed seconds, the most ranks with at least percent efficiency."""
    ### BEGIN SOLUTION: the run of one rank with the same work; then two equations
    one = next(found for found in alone if found.run.work == experiment.run.work)
    ranks, step_s = experiment.run.ranks, experiment.step_s
    efficiency = one.step_s / (ranks * step_s) * 100
    shared_s = (one.step_s - step_s) / (1 - 1 / ranks)
    fixed_s = one.step_s - shared_s
    if fixed_s <= 0:
        return efficiency, fixed_s, math.inf
    return efficiency, fixed_s, math.floor((one.step_s * 100 / percent - shared_s) / fixed_s)
    ### END SOLUTION


# %% tags=["check"] exercise="scaling_study-2"
check("scaling_study-2", limit_of)

# %% [markdown]
# Now we fit the law to the runs on 1 and on 4 nodes, and predict the runs that it has not seen. The
# second line does the same for the 8B model with TP 4, whose replicas have 4 GPUs each.

# %%
for name, found in (("1B, DP", dp), ("8B, DP x TP 4", playbook.series("8B", tp=4))):
    law = playbook.fit(found, 1, 4)
    most = (law.fixed_s + law.shared_s) / law.fixed_s
    print(f"{name}: {law.fixed_s:.2f} s + {law.shared_s:.1f} s / n, speed-up at most {most:.0f}")
    for nodes, run in found.items():
        error = 100 * (law.step_s(nodes) / run.step_s - 1)
        seen = "fitted" if nodes in (1, 4) else f"error {error:+.1f} %"
        print(f"  {nodes:2} nodes: measured {run.step_s:6.2f} s, {seen}")

# %% [markdown]
# The law predicts 2, 8 and 16 nodes within a few per cent, from two cheap runs. On 32 nodes, the
# measured step is longer than predicted, for both models: the "fixed" part has grown. The
# backward pass that can hide the message is the same as before (that of the last micro-batch),
# but an all-reduce over more nodes is slower (lesson 05), and a step waits for the slowest of
# more GPUs. The table does not say which of the two it was. The last run of the 8B model is not a
# matter of per cent at all. It took about eight times as long as the law says, and no smooth law
# will explain it. We return to such runs in section 6.
#
# **A law fitted to small runs predicts larger ones as long as the bottleneck stays the same. Test
# it on runs that it has not seen, and print the error.**
#
# ## 4 Tensor parallelism, across nodes and with small micro-batches
#
# DP could not use 256 GPUs well, because each replica had only one sequence left. With TP, several
# GPUs share a replica, so fewer replicas share the batch. But TP sends messages in every layer
# (lesson 07). The next runs use the 1B model, 2 nodes, and micro-batches of one sequence. A replica
# first has 1 GPU, then 2, 4, 8, and finally 16, which is TP across both nodes. How fast is the
# replica with 16 GPUs, compared with the replica that is a single GPU?

# %% tags=["predict"]
guess_tp = predict("throughput of a replica of 16 GPUs, as a multiple of one GPU's")
### GUESS guess_tp.commit(8)

# %%
two_nodes = {tp: playbook.series("1B", tp=tp)[2] for tp in (1, 2, 4, 8, 16)}
alone = two_nodes[1].tokens_per_s_per_replica
reveal(guess_tp, two_nodes[16].tokens_per_s_per_replica / alone)
for tp, run in two_nodes.items():
    rate = run.tokens_per_s_per_replica
    print(f"TP {tp:2}: a replica has {rate:7,.0f} tokens/s, {rate / alone:.2f} times one GPU")

# %% [markdown]
# Sixteen GPUs together are *slower* than one. The list shows two separate effects.
#
# 1. *Within a node*, TP 2 helps; TP 4 and TP 8 add nothing. One sequence of a 1B model is little
#    work. Divided by 4 or 8, its matrix products are so small that other costs dominate: launching
#    kernels, and the latency of the all-reduces in each layer. These costs do not shrink with the
#    TP degree. (The table does not say which of the two dominates; a profile would.)
# 2. *Across nodes*, from TP 8 to TP 16, the replica becomes much slower although it has twice the
#    GPUs. Now the messages of every layer leave the node. All eight adapters together are nearly
#    as fast as NVLink for large messages (lesson 01b); these messages have only 17 MB and are
#    waited for one by one, so they come nowhere near that rate.
#
# If small work per kernel is the cause of the first effect, larger micro-batches should cure it.
# They should not cure the second: the messages become larger, but however the 256 sequences are
# grouped, TP sends the same bytes in a step and waits for them. The picture tests both.

# %% tags=["picture"]
show(*pictures.replicas_over_tp())
tp8 = {size: playbook.series("1B", tp=8, micro_batch=size)[16] for size in (1, 2, 4, 8)}
for size, run in tp8.items():
    memory = f"{run.memory_bytes / GIB:.0f} GiB"
    print(f"TP 8, micro-batch {size}: {run.tokens_per_s_per_gpu:6,.0f} tokens/s per GPU, {memory}")

# %% [markdown]
# Both expectations hold. With TP 8, four sequences per micro-batch instead of one give more than
# three times the throughput, for the same 256 sequences per step. The price is memory, because the
# activations of all sequences of a micro-batch are alive at once (lesson 02). From four to eight,
# the gain is small: the kernels are large enough now. Every curve falls when TP leaves the node.
#
# The following cell asks what matters in the end: which configuration of the 1B model is the
# fastest, for each number of nodes?

# %%
for nodes in (1, 4, 8, 16, 32):
    here = [run for run in measured if (run.model, run.nodes) == ("1B", nodes)]
    best = max(here, key=lambda run: run.tokens_per_s_per_gpu)
    plain = dp[nodes].tokens_per_s_per_gpu
    layout = f"DP {best.dp} x TP {best.tp}, ZeRO-{best.zero}, micro-batch {best.micro_batch}"
    print(f"{nodes:2} nodes: {layout}, {best.tokens_per_s_per_gpu / plain:.2f} times plain DP")

# %% [markdown]
# Up to 8 nodes, data parallelism wins, with TP 1. On 16 and 32 nodes, TP *inside* the node together
# with larger micro-batches is faster. On 32 nodes, for example, a replica of 4 GPUs has 4 sequences
# at a time, and each of its GPUs has only a quarter of the gradients to all-reduce.
#
# **Keep tensor parallelism inside a node, and make the micro-batch as large as memory allows
# until the throughput stops rising. Divide a model further only when the batch leaves too little
# work for each replica.** (With a pipeline, larger micro-batches also mean fewer of them, and so
# a larger bubble: lesson 08.)
#
# ## 5 What does ZeRO cost?
#
# Data parallelism keeps a full copy of the optimizer state on each GPU. ZeRO-1 divides it and sends
# about the same number of bytes: a reduce-scatter of gradients and an all-gather of parameters in
# place of one all-reduce (lesson 09). So it should cost no time. The table has stages 0 and 1 only;
# it says nothing about stages 2 and 3. We take all pairs of runs that differ in the stage alone,
# without pipelines. The cell prints the throughput with ZeRO-1 divided by that without: the median
# of the pairs, then the lowest and the highest.

# %%
for model in ("1B", "8B"):
    for nodes in (2, 4, 8, 16, 32, 64):
        ratios = playbook.zero_ratios(model, nodes)
        ends = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(f"{model}, {nodes:2} nodes, {len(ratios):2} pairs: {median(ratios):.2f} ({ends})")
zero1 = playbook.series("1B", zero=1)
for nodes in (1, 32):
    gib = [found[nodes].memory_bytes / GIB for found in (dp, zero1)]
    rate = zero1[nodes].tokens_per_s_per_gpu / dp[nodes].tokens_per_s_per_gpu
    words = f"{gib[1]:.0f} instead of {gib[0]:.0f} GiB"
    print(f"plain DP, {nodes} node(s): with ZeRO-1 {words}, {rate:.2f} times the throughput")

# %% [markdown]
# Up to 8 nodes, the expectation holds: the median is within about two per cent of 1. In plain DP of
# the 1B model, a third of the memory is free again. On 32 nodes, the 1B model loses a tenth in the
# median, and plain DP more than a quarter. Equal bytes are not equal time. The all-gather follows
# the optimizer step, so no backward pass can hide it unless the implementation overlaps it with the
# next forward pass.
#
# Look also at the ranges. For the 8B model on 64 nodes, the ratios lie between a fifth and more
# than five, so the median of these pairs is not a measurement of ZeRO. Something else happened.
#
# **Up to 8 nodes, ZeRO-1 costs almost nothing in these runs; on 16 and 32 nodes it often costs
# time (1B: 5 and 11 % in the median). On 64 nodes the pairs contradict this, and nobody repeated
# them. Print the range next to each median.**
#
# ## 6 Runs far off their neighbors
#
# A single number in a table carries no error bar. Fortunately, one configuration of the 8B model
# (TP 8, ZeRO-1, 2 nodes) was run twice, and both runs have a throughput. By which factor do they
# differ?

# %% tags=["predict"]
guess_twice = predict("the faster run divided by the slower one")
### GUESS guess_twice.commit(1.05)

# %%
layout, nodes = ("8B", 8, 1, 1, 1), 2
twice = [run for run in measured if (run.layout, run.nodes) == (layout, nodes)]
rates = [run.tokens_per_s_per_gpu for run in twice]
reveal(guess_twice, max(rates) / min(rates))
for run in twice:
    print(f"{run.tokens_per_s_per_gpu:,.0f} tokens/s per GPU, {run.memory_bytes / GIB:.1f} GiB")
slow, of_all = playbook.outliers(times=2)
print(f"{len(slow)} of {of_all} runs with two neighbors are at least 2 times slower than both:")
for run in slow:
    words = f"{run.model}, DP {run.dp} x TP {run.tp} x PP {run.pp} on {run.nodes} nodes"
    print(f"  {words}: {run.tokens_per_s_per_gpu:,.0f} tokens/s per GPU")

# %% tags=["picture"]
show(*pictures.far_off())

# %% [markdown]
# The two runs also differ in their memory, so perhaps something else was different, which the table
# does not record. That is a finding, too: a table keeps only the settings that its author thought
# of.
#
# A *neighbor* is a run of the same configuration on half or on twice as many nodes. Throughput
# per GPU changes smoothly along such a series, so a run that is many times slower than both
# neighbors has probably measured something else than its method. Possible causes are a slow GPU
# or network card in the job, other jobs on the same network, or an allocator near the limit of
# its memory. The table cannot say which. The authors themselves report node failures, hanging
# jobs, and benchmarks that took hours in place of minutes (section "Lessons learned on
# benchmarking").
#
# The picture shows why this matters. From the run on 8 nodes alone, you would conclude that
# pipelines are useless. From its neighbors, and from the other configurations on the same number of
# nodes, you would not. An outlier that is *repeatable* may be a real property of a configuration;
# only a second run can tell.
#
# **One run is an anecdote. Compare each run with its neighbors, repeat those that are far off, and
# report the repetitions.**
#
# *A good place for a break.*
#
# ## 7 The method, at laptop size
#
# The table has taught us to distrust numbers. How do you produce numbers that deserve trust? This
# section practices the *method* on a laptop: what a run records, what is left out, when a clock may
# be read, and what to compare first. It says **nothing about scaling**: two ranks on two cores
# share one memory, the messages compete with the computing for the same cores, and four ranks would
# only take turns.

# %% tags=["measured"]
import tempfile
from pathlib import Path

from course_lib.core.records import read_runs
from course_lib.jobs.profile import read_profile
from course_lib.scaling_study.aggregate import aggregate
from course_lib.scaling_study.costing import cost_study
from course_lib.scaling_study.plan import find_study
from course_lib.scaling_study.run_local import run_all

folder = Path(tempfile.mkdtemp()) / "study-laptop"
costing = cost_study(find_study("laptop").only(models=["tiny"]), read_profile("laptop"), folder)
run_all(costing)  # what `course study run laptop --model tiny` calls
records = read_runs(folder)
two, one = (aggregate([r for r in records if r.world_size == n]) for n in (2, 1))
print(f"a line of a record: {records[-1].steps[0]}")

# %% tags=["picture", "measured"]
alone_s = [step["end_s"] - step["start_s"] for step in records[-1].steps]
show(*pictures.step_times(records))
claim("the first step is a slow one", alone_s[0] > median(alone_s))

# %% [markdown]
# Each rank wrote one file: a description of the run and the machine, and a line for each step. The
# first steps are often slow, because they allocate memory, start threads and fill caches. The study
# leaves out the first quarter of the steps as **warm-up**. To combine the ranks of a run, take the
# time of the slowest rank, because a step ends only then; count the tokens of each replica once;
# and take the largest peak of memory, because the fullest GPU decides whether a run fits.
#
# It is easy to count steps wrongly: 200 optimizer steps with 4 micro-batches each have 800 backward
# passes. It is also easy to time them wrongly, because a GPU queues work and completes it later.
# `lab.EmulatedDevice` does the same; its backward takes 30 ms. What time does the clock show after
# 100 calls of `backward`?

# %% tags=["predict"]
guess_clock = predict("the clock after 100 times backward", unit="s")
### GUESS guess_clock.commit(3)

# %%
device = lab.EmulatedDevice(backward_s=0.03)
for _ in range(100):
    device.backward(num_tokens=512)
reveal(guess_clock, device.now_s())
device.synchronize()
print(f"after synchronize(): {device.now_s():.2f} s")

# %% [markdown]
# ### Exercise 3 (core): a loop that may be timed
#
# *Difficulty 3 of 5, importance 5 of 5, about 15 minutes, about 10 lines.*
#
# A step is `accumulated` calls of `device.backward(next(micro_batches))`, then `device.step()`; a
# micro-batch is just a number of tokens. Run `steps` steps. The first `warmup` of them (0 or more)
# do not count. Return the seconds, by `device.now_s()`, and the tokens of the steps that count.
# Work from before your loop may still run on the device: do not time it. Example: 6 steps, 1 of
# them warm-up, of 2 micro-batches of 512 tokens give 5,120 tokens.
#
# <details><summary>Hint: if your time is almost zero</summary>
# You measured how long launching takes. <code>device.synchronize()</code> waits for the device. You
# need it twice: before each time you read the clock.
# </details>


# %% tags=["exercise"] exercise="scaling_study-3"
def timed_loop(device, micro_batches, steps, warmup, accumulated):
    """Seconds and tokens of all steps after the warm-up."""
    ### BEGIN SOLUTION: a loop over steps; when does the clock start?
    for step in range(steps):
        if step == warmup:
            device.synchronize()
            start_s, num_tokens = device.now_s(), 0
        for _ in range(accumulated):
            tokens = next(micro_batches)
            device.backward(tokens)
            if step >= warmup:
                num_tokens += tokens
        device.step()
    device.synchronize()
    return device.now_s() - start_s, num_tokens
    ### END SOLUTION


# %% tags=["check"] exercise="scaling_study-3"
check("scaling_study-3", timed_loop)

# %% [markdown]
# A correct clock can still time a wrong training. **Break it:** a common bug is that all replicas
# read the *first* part of the batch. A step takes exactly as long as without the bug. Two ranks now
# train with this bug. Can you see it in the loss curve?

# %% tags=["predict"]
seen = "is the first or the last loss more than 5 % off the right run's?"
guess_seen = predict(seen, choices=("yes", "no"))
### GUESS guess_seen.commit("yes")

# %% tags=["failure"]
from course_lib.train.trainer import Trainer


class SamePart(Trainer):
    def _part(self, whole):
        return whole.tensor_split(self.dp)[0]  # it should be the part with this copy's number


def train_wrong(rank, config):
    return [step["loss"] for step in SamePart(rank, config).run().steps]


with Ranks(2) as pair:
    wrong = pair.run(train_wrong, two.run.config(out=None))[0]
ends = [abs(wrong[at] / one.losses[at] - 1) for at in (0, -1)]
reveal(guess_seen, "yes" if max(ends) > 0.05 else "no")

# %% [markdown]
# A wrong run's curve can fall, too. So do not look at curves: count how many digits of each loss
# agree with the run on one process, which is $-\log_{10}$ of the relative difference. Numbers in
# fp32 have about seven digits.

# %% tags=["measured"]
from course_lib.scaling_study.curves import agreeing_digits

for name, found in (("DDP", two.losses), ("the wrong run", wrong)):
    digits = agreeing_digits(found, one.losses)
    print(f"{name}: {min(digits):.1f} to {max(digits):.1f} digits agree with one process")

# %% [markdown]
# **Compare the losses first. Then leave out the warm-up, count optimizer steps, and synchronize
# with the device before you read the clock.**
#
# ## 8 Other links, another order
#
# The table comes from nodes with NVLink inside and a fast network between them. Would the same
# methods win on cheaper hardware? An unpublished report of 2025 (*the PCIe study*) measured one
# to four commodity GPUs over PCIe, without NVLink. You cannot open it, so take from it only an
# order, for two GPUs: DP and ZeRO-1 were the most efficient, TP came clearly after them, and the
# pipeline came last. Over several PCIe bridges, the efficiency of all methods fell strongly. That
# TP falls behind DP on slow links agrees with section 4, which you can check in a public table.
# The pipeline's last place does not come from its links, because it sends few bytes (lesson 11).
# The bubble or the software is a likelier reason, and the report does not separate them. In the
# public table, too, the order depended on the software: Tazi et al. report that TP beat PP until
# they optimized their PP code ("Benchmarking thousands of configurations").
#
# So before you choose, look at the links. The links of a machine form a *matrix*
# (`nvidia-smi topo -m`). The picture shows yours if you have several GPUs, otherwise an invented
# example. NV means NVLink, PIX at most one PCIe bridge, PXB several bridges, SYS the link between
# CPU sockets (NUMA nodes). On which pair of the example would you run TP 2?

# %% tags=["picture", "measured"]
from course_lib.ranks.machine import describe_machine

mine = describe_machine()["gpu_links"]
own = (mine, "This machine") if len(mine) > 1 else (lab.EXAMPLE_LINKS, "An example")
show(*pictures.link_matrix(*own))

# %% [markdown]
# In the example, GPUs 0 and 1 are a good pair: at most one bridge lies between them. GPUs 1 and 2
# would be a bad pair, because their messages cross the CPU sockets.
#
# **The order of methods depends on the links. Give the method with the most messages the fastest
# links that you have.**
#
# ## 9 Faster steps, or fewer?
#
# However you split a given batch, the training stays the same (up to rounding, without dropout).
# In section 2, strong scaling failed because each GPU ran out of work. The way out seems easy:
# let the batch grow with the GPUs. Then the gradient is less noisy, but the training is
# *different*. Settings that were right for the small batch need not be right for the large one.
# Goyal et al. (2017) multiplied the learning rate by the same number as the batch, and warmed it
# up over the first five epochs. With both changes, a ResNet-50 lost no accuracy with batches of
# up to 8,192 images.
#
# A recorded experiment with a small model compares batches of 8 and 32 sequences, and a
# learning-rate warm-up of 100 and of 4 steps. How many steps does each need to reach the loss at
# which the small batch ends? (Each was run once, so only large differences count: section 6.)

# %%
from course_lib.scaling_study.curves import smooth, steps_to

recorded = sample_results("convergence")
unsplit = {(r.run.global_batch, r.run.warmup): r for r in recorded.experiments if r.run.tp == 1}
base = smooth(unsplit[8, 100].losses)  # means of some steps: single batches vary
for batch, warmup in ((32, 100), (8, 4), (32, 4)):
    steps = steps_to(base[-1], smooth(unsplit[batch, warmup].losses))
    times = f"{steps * batch / (len(base) * 8):.1f} times the tokens"
    print(f"batch {batch}, warm-up {warmup}: {steps} of {len(base)} steps, {times}")

# %% tags=["picture"]
show(*pictures.convergence(recorded))

# %% [markdown]
# Here, with the same learning rate, four times the batch saves few steps and reads more than
# three times as many tokens. With a larger rate it could save more: the shorter warm-up, which
# raises the rate sooner, does. It saves steps with *either* batch, so it has nothing to do with
# splitting. A comparison that changes both at once would credit the wrong one. McCandlish et al.
# (2018) measure the *critical batch size*, beyond which a larger batch hardly saves steps, with a
# learning rate that is tuned for each batch. It depends on the task, and grows during training.
#
# **Efficiency is about one step. The time to a given loss is seconds per step times steps, so ask
# for both.**
#
# ## 10 Your own study on a cluster
#
# You know what to measure, how, and what to distrust. Two things are left to do before you submit:
# compute the cost, and check the script. You pay for every GPU of a job from the job's start until
# its last rank has finished:
#
# $$\text{GPU-hours} = \text{nodes} \cdot \text{GPUs per node} \cdot
# \frac{\text{start} + \text{steps} \cdot \text{seconds per step}}{3600}$$
#
# *Question.* A run holds 2 nodes of 4 GPUs; it starts for 60 s, then takes 200 steps of 1 s. How
# many GPU-hours is that?
#
# <details><summary>Answer</summary>
# 8 GPUs for 260 s: 8 · 260 / 3600, about 0.58. The start alone is almost a quarter of it.
# </details>

# %%
from course_lib.scaling_study.prediction import hours

site = read_profile("slurm")
plan = cost_study(find_study("cluster"), site, Path("runs/study-cluster"))
wall_hours, gpu_hours = hours(plan.predictions)
print(f"{len(plan.predictions)} runs, {wall_hours:.1f} hours one after the other")
print(f"{gpu_hours:.1f} GPU-hours; limits: {site.limits.gpu_hours:g} in all")

# %% [markdown]
# This Slurm script should ask for 2 nodes with 2 GPUs each, for two hours. How many mistakes do you
# find before you run the second cell?

# %%
for number, line in enumerate(lab.BROKEN_SCRIPT.splitlines(), start=1):
    print(f"{number:2}  {line}")

# %%
from course_lib.jobs.lint.check import findings_text, lint_job

print(findings_text("study.sbatch", lint_job(lab.BROKEN_SCRIPT)))

# %% [markdown]
# Slurm ignores a directive that it does not recognize as one, and says nothing. So a wrong script
# may wait for hours and fail in a second.
#
# With access to a cluster, run the study from its login node. On a laptop, the first two commands
# show the procedure, and no more than that.
#
# ```sh
# course study run laptop                       # skips runs that are done
# course report runs/study-laptop --html report.html
#
# course cluster init                           # once: describes your cluster
# course study plan cluster --profile site      # its runs and their cost
# course study run cluster --profile site       # submits what the limits allow; repeat for the rest
# course status                                 # their progress
# course report runs/study-cluster
# ```
#
# With your own results, repeat the questions of this lesson. Which runs failed, and was it memory?
# What are $f$ and $s$, and how wrong is the law on the run that it has not seen? Which run is far
# off its neighbors, and what does a second run say? The cell prints the form of a report: your own
# results if there are any, otherwise those of a recorded laptop study, whose speeds mean nothing
# for GPUs.

# %% tags=["measured"]
from rich.console import Console

from course_lib.scaling_study.report import notes, tables

mine, whose = own_or_sample()
print(whose)
console = Console(width=100, force_jupyter=False, force_terminal=False)
console.print(next(iter(tables(mine))), "")
for note in notes(mine):
    console.print(note, highlight=False)

# %% [markdown]
# **Compute the GPU-hours of a job before you submit it, and let a program check the script, such as
# `course lint-job FILE`.**
#
# ## What to keep
#
# - With a fixed batch, the work per GPU shrinks and its communication does not: efficiency falls.
# - An efficiency needs a base with the same work, and a slow base flatters. Compare throughput.
# - Two runs give a law, $T_n = f + s/n$. Test it on runs that it has not seen.
# - Keep TP inside the node; enlarge micro-batches as far as memory allows. (With a pipeline,
#   larger micro-batches also mean fewer of them, and so a larger bubble: lesson 08.)
# - Compare each run with its neighbors. Repeat what is far off.
# - Compare losses first, leave out the warm-up, and synchronize before you read the clock.
#
# ## Read on
#
# - Tazi et al. 2025, *The Ultra-Scale Playbook*, "Finding the best training configuration":
#   the authors' own reading of these runs, and what went wrong in them.
# - Amdahl 1967, *Validity of the single processor approach*: the fixed part.
# - McCandlish et al. 2018, *An empirical model of large-batch training*: when a larger batch saves
#   steps.
# - Goyal et al. 2017, *Accurate, large minibatch SGD*: learning rate and warm-up for large batches.
# - Hoefler and Belli 2015, *Scientific benchmarking of parallel computing systems*: twelve rules
#   for reporting.
