# %% [markdown]
# # 13 Scaling study: what did splitting gain?
#
# **How much faster does splitting make a training, and which measured numbers can you trust?**
#
# *After this lesson you can*
#
# - summarize the records of many ranks in one line of a table;
# - compute, from two runs, up to how many ranks a batch stays efficient;
# - explain where measurement and prediction differ;
# - compute the cost of a study before it runs.
#
# **Prerequisites:** lessons 04, 06 and 09; 07 and 08 help. **Time:** about 75 minutes of reading
# and running, 75 of exercises. The break is after section 4. Exercises 1 to 3 are *core*, 4 and 5
# go *further*.
#
# | symbol | in code | meaning |
# |---|---|---|
# | $p$ | `run.ranks` | ranks of a run |
# | $T_1$, $T_p$ | `step_s` | seconds of a step, on one rank and on $p$ |
# | throughput | `tokens_per_s` | tokens per second, all ranks together |
# | overhead | `overhead_percent` | $(T_p / T_1 - 1) \cdot 100$; negative if splitting is faster |
# | factor | `throughput_factor` | throughput on $p$ ranks divided by the throughput on one |
# | efficiency | `efficiency_percent` | $\text{factor} / p \cdot 100 = T_1 / (p\,T_p) \cdot 100$ |
# | $N$, $D$ | | parameters of a model, tokens in a step |
#
# *The PCIe study* is an unpublished report of 2025 that measured DP, TP, PP and ZeRO on one to four
# GPUs over PCIe. Our cluster study (section 5) uses its models.

# %%
# %load_ext course_lib.ranks
import math
import tempfile
from pathlib import Path

from course_lib.checks import check
from course_lib.jobs.profile import read_profile
from course_lib.core.records import read_runs
from course_lib.display import claim, predict, reveal, show
from course_lib.ranks import Ranks
from course_lib.scaling_study import lab, pictures
from course_lib.scaling_study.aggregate import against, aggregate
from course_lib.scaling_study.costing import cost_study
from course_lib.scaling_study.plan import find_study
from course_lib.scaling_study.results import in_order, sample_results
from course_lib.scaling_study.run_local import run_all

# %% [markdown]
# ## 1 What a run leaves
#
# A study is a list of runs; each has a model, a strategy and a number of ranks. Compare runs with
# the *same* global batch, divided among the copies of the model. The smallest part of the laptop
# study is one run on one rank and one run on two ranks, which communicate once per step. What is
# the throughput of two ranks, divided by that of one?

# %% tags=["predict"]
folder = Path(tempfile.mkdtemp()) / "study-laptop"
costing = cost_study(find_study("laptop").only(models=["tiny"]), read_profile("laptop"), folder)
for run in costing.study.runs:
    print(f"{run.label}, {run.ranks} rank(s): {run.steps} steps of {run.tokens_a_step} tokens")
guess_two = predict("throughput of two ranks, as a multiple of one rank's")
### GUESS guess_two.commit(1.7)

# %% tags=["measured"]
on_paper = [one.tokens_per_s for one in costing.predictions]
run_all(costing)  # what `course study run laptop --model tiny` calls
records = read_runs(folder)
two, one = (aggregate([r for r in records if r.world_size == n]) for n in (2, 1))
reveal(guess_two, two.tokens_per_s / one.tokens_per_s)
print(f"the cost model said {on_paper[1] / on_paper[0]:.2f}, before it had seen your runs")
print(f"a line of a record: {records[-1].steps[0]}")

# %% [markdown]
# Each rank wrote one file: a description of the run and the machine, and a line for each step.

# %% tags=["picture", "measured"]
from statistics import median

alone_s = [step["end_s"] - step["start_s"] for step in records[-1].steps]
show(*pictures.step_times(records))
claim("the first step is a slow one", alone_s[0] > median(alone_s))
with_warmup = one.run.tokens_a_step * len(alone_s) / sum(alone_s)
print(f"tokens/s on one rank: {one.tokens_per_s:,.0f}; with its first steps {with_warmup:,.0f}")

# %% [markdown]
# First steps are often slow, because they allocate memory, start threads and fill caches. The study
# leaves out the first quarter of the steps as **warm-up**. The other steps vary, so a single
# step says little.
#
# ### Exercise 1 (core): from ranks to a run
#
# Summarize `records` (already sorted by rank) in a dictionary. Do not change the records.
#
# - `time_s`: add up each rank's step times, and take the largest sum.
# - `num_tokens`: count the tokens of each copy of the model once. A copy has `tp * pp` consecutive
#   ranks, tp innermost. Take the largest number in its last *stage*, because some of its `tp` ranks
#   may report 0.
# - `mean_bytes`, `sum_bytes`: compute the mean of each rank's `memory_bytes`; return the mean and
#   the sum of these means.
# - `peak_bytes`: the largest peak of any rank.
#
# A step has `start_s`, `end_s`, `num_tokens`, `memory_bytes`; the peak is in
# `record.run["memory"]["peak"]`. The first `warmup` steps of each rank do not count, except for the
# peak. Ranks may differ in their numbers of steps. About 12 lines, 15 minutes.
#
# <details><summary>Hint: your tokens are right for DP, but too many for TP</summary>
# One copy has <code>tp * pp</code> ranks. For each copy, take the largest of its last
# <code>tp</code> numbers; then sum over copies.
# </details>


# %% tags=["exercise"] exercise="scaling_study-1"
def experiment_of(records, tp, pp, warmup):
    """A dictionary with time_s, num_tokens, mean_bytes, sum_bytes, peak_bytes."""
    ### BEGIN SOLUTION: steps after warm-up; totals of each rank; then of all
    steps = [record.steps[warmup:] for record in records]
    times = [sum(step["end_s"] - step["start_s"] for step in mine) for mine in steps]
    tokens = [sum(step["num_tokens"] for step in mine) for mine in steps]
    means = [sum(step["memory_bytes"] for step in mine) / len(mine) for mine in steps]
    peaks = [record.run["memory"]["peak"] for record in records]
    ends = range(tp * pp, len(tokens) + 1, tp * pp)  # where each copy of the model ends
    return {
        "time_s": max(times),
        "num_tokens": sum(max(tokens[end - tp : end]) for end in ends),
        "mean_bytes": sum(means) / len(means),
        "sum_bytes": sum(means),
        "peak_bytes": max(peaks),
    }
    ### END SOLUTION


# %% tags=["check"] exercise="scaling_study-1"
check("scaling_study-1", experiment_of)

# %% [markdown]
# **The ranks of a run are not repetitions of a measurement. Take the slowest rank's time, each
# copy's tokens once, and the largest peak memory.**
#
# ## 2 Compared with one rank
#
# Compare with one rank and the *same batch*: if a step takes as long on two ranks as on one, the
# efficiency is 50 %.
#
# ### Exercise 2 (core): how far does it scale?
#
# Apply Amdahl's argument (1967) to a step. Some seconds, *fixed*, do not shrink with more ranks
# (messages, and work that each rank repeats). The other seconds, *shared*, are divided by $p$:
# $T_p = \text{fixed} + \text{shared} / p$. So two runs determine both parts.
#
# `experiment` ran on `experiment.run.ranks` ranks, 2 or more. `alone` has experiments on one rank;
# take the one with the same `run.work` (model, batch, micro-batches). All have `step_s`. Return
# three numbers: the efficiency of `experiment` in per cent; the fixed seconds; and the largest
# number of ranks whose efficiency, by this formula, is at least `percent` (`math.inf` where the
# fixed part is 0 or less). About 8 lines, 15 minutes.
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

# %% tags=["measured"]
from course_lib.scaling_study.amdahl import StrongScaling

found = against(two, one)
words = f"overhead {found.overhead_percent:+.0f} %, factor {found.throughput_factor:.2f}"
print(f"your two ranks: {words}, efficiency {found.efficiency_percent:.0f} %")
split = StrongScaling.of(one.step_s, 2, two.step_s)
print(f"fixed: {1e3 * split.fixed_s:.1f} ms; at least 80 % on up to {split.most_ranks(80)} rank(s)")

# %% [markdown]
# The PCIe study calls an efficiency of about 80 % good, and below 70 % poor. Splitting a fixed
# global batch is **strong scaling**: with more ranks, each rank computes less, but DP's gradients
# keep their size. If the batch grows with the number of ranks (**weak scaling**), the efficiency is
# usually higher, but the training is different (section 6).
#
# For the Ultra-Scale Playbook, Tazi et al. 2025 trained a model of 1.3 billion parameters with data
# parallelism on up to 256 H100 GPUs, with a fixed batch. The line is fitted only to the runs on 16
# and 32 GPUs.

# %% tags=["picture"]
show(*pictures.published_scaling())

# %% [markdown]
# These two runs predict the throughput on 64 GPUs within 2 %. With more GPUs it is lower than
# predicted, so the fixed part has grown. Most likely, the all-reduce takes longer between more
# nodes (lesson 05). A fit holds only while the bottleneck stays the same.
#
# **An efficiency needs a baseline with the same model, batch and accumulation (a pipeline's has no
# micro-batches).**
#
# ## 3 What is a step, and when is it over?
#
# It is easy to count wrongly: 200 steps with 4 micro-batches each have 800 backward passes, and the
# PCIe study first confused these numbers. It is also easy to time wrongly: a GPU queues work and
# completes it later. `lab.EmulatedDevice` does the same; its backward takes 30 ms. What time does
# its clock show after 100 calls of `backward`?

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
# A step is `accumulated` calls of `device.backward(next(micro_batches))`, then `device.step()`. A
# micro-batch is just a number of tokens here. Run `steps` steps; the first `warmup` of them (0 or
# more) do not count. Take exactly `steps * accumulated` micro-batches. Return the seconds (by
# `device.now_s()`) and the tokens of the steps that count, not rounded. Work from before your loop
# may still run on the device: do not time it. About 10 lines, 15 minutes.
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
# **Count optimizer steps. Synchronize with the device before you read the clock.**
#
# ## 4 A recorded study
#
# In this recorded laptop study, four ranks shared two cores. If messages cost nothing, what is the
# highest efficiency that four ranks can have? And which method is the most efficient on two ranks?

# %% tags=["predict"]
results = sample_results()
print(results.made)
sets = results.sets()
for name, found in sets.items():
    print(f"{name}: {len(found)} runs")
guess_four = predict("highest possible efficiency of four ranks, messages free", unit="%")
### GUESS guess_four.commit(80)
guess_best = predict("the most efficient on two ranks", choices=("ddp", "tp", "pp"))
### GUESS guess_best.commit("tp")

# %% tags=["picture"]
small, small_name = next((found, name) for name, found in sets.items() if "small" in name)
cores = results.experiments[0].machine["usable_cores"]
reveal(guess_four, 100 * min(1, cores / 4))
pairs = [r for r in in_order(small) if r.experiment.run.ranks == 2 and r.comparison]
best = max(pairs, key=lambda result: result.comparison.efficiency_percent)
reveal(guess_best, best.experiment.run.label.removeprefix("torch-"))
show(*pictures.efficiency(small, small_name))

# %% [markdown]
# The predictions use the number of cores, the speed of one rank and the link (lesson 04). *1 MiB*
# is a bucket's size (06), *m* the number of micro-batches (08).
#
# - *Special here*: gloo uses the cores that compute. So our cost model overlaps no bucket, and its
#   messages take 1.7 times as long as on an idle machine. The model also adds 4 ms of Python time
#   per layer and micro-batch. Both numbers are fitted to these runs; the predicted steps are within
#   30 % of the measured ones.
# - *TP on two ranks* differs most from its prediction, perhaps because each of its messages waits
#   for the later rank.
# - *Four ranks* share two cores, so their bars are not a comparison of the methods.
#
# The ZeRO runs have 4 micro-batches per step, and a baseline with 4, too. Which ZeRO stage has the
# longest step?

# %% tags=["predict"]
guess_stage = predict("the slowest", choices=("zero1", "zero2", "zero3"))
### GUESS guess_stage.commit("zero3")

# %% tags=["picture"]
zero, zero_name = next((found, name) for name, found in sets.items() if "micro-batches" in name)
zero = [result for result in zero if result.experiment.run.ranks <= 2]  # a core for each
slowest = max(zero, key=lambda result: result.experiment.step_s)
reveal(guess_stage, slowest.experiment.run.label)
show(*pictures.overhead(zero, zero_name))

# %% [markdown]
# Stage 1 communicates once per step, stage 2 in each micro-batch, and stage 3 for every module in
# each micro-batch. So stages 2 and 3 send more bytes and more messages, each of which costs the
# link's *latency*. The picture compares the memory of a rank's parameters, gradients and optimizer
# state with the formula.

# %% tags=["picture"]
show(*pictures.states(zero, zero_name))

# %% [markdown]
# At stage 1, each of the three kinds has exactly the formula's bytes. From stage 2 on, the
# gradients have more: memory was read at the end of backward, when the last bucket (the
# embedding's gradient) and the rank's part of its sum were there. *When* you measure is part of the
# result.
#
# Before you trust a speed, ask whether the runs computed *the same*:

# %%
print(pictures.loss_curves(small, small_name)[1])

# %% [markdown]
# **Break it.** A common bug is that all copies read the *first* part of the batch. A step takes as
# long as without the bug. Two ranks now train with this bug. Can you see it in the loss curve?

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

# %% tags=["picture", "measured"]
show(*pictures.digits_of_losses(one.losses, {"DDP": two.losses, "the wrong run": wrong}))

# %% [markdown]
# A wrong run's curve can fall, too. So count how many digits agree with the run on one process
# ($-\log_{10}$ of the relative difference). fp32 has about 7; in the picture, 8 means no
# difference.
#
# **Compare the losses first, then the bytes, then the speed. Put a prediction beside each
# measurement.**
#
# *A good place for a break.*
#
# ## 5 Predicting the cluster study
#
# Computing time is predicted from the FLOP of a step, about $6ND$: 2 FLOP per parameter and token
# in forward, and 4 in backward (Kaplan et al. 2020, section 2.1). The cell counts the embedding in
# $N$, as Hoffmann et al. 2022 do (appendix F); Kaplan et al. do not. $6ND$ omits attention scores;
# our cost model counts them.
#
# First the cell prints what the PCIe study measured on two GPUs. Small models gained nothing there,
# pipelines were poor, and ZeRO-2 was slower than ZeRO-1 and 3. On four GPUs, over several PCIe
# bridges, all efficiencies fell strongly; ZeRO's stayed highest, at about 60 %. These GPUs are not
# those of the picture, so compare the *order* of the methods, not their numbers. Move the sliders.
# Which order do formulas predict, and why is it not the measured one?

# %% tags=["picture"]
from course_lib.scaling_study.explorer import study_explorer
from course_lib.scaling_study.prediction import six_nd_share

for strategy, percent in lab.PUBLISHED.items():
    print(f"PCIe study: {strategy}, about {percent:.0f} % efficiency")
for run in {run.spec: run for run in find_study("cluster").runs}.values():
    share = f"{100 * six_nd_share(run):.0f} %"
    print(f"{run.spec.name}: 6ND is {share} of the FLOP of all matrix products")
study_explorer()

# %% [markdown]
# The formulas put DP far above ZeRO-1, but the study found them equal: the model hides DP's
# messages behind backward (lesson 06), and none of ZeRO's, although ZeRO-1 can hide its
# reduce-scatter, too. That difference is an assumption, not a prediction. They also favor
# pipelines, above all those of small models, because they ignore the time to launch kernels: on
# four GPUs over bridges, the pipeline's prediction falls least.
#
# A machine's links form a *matrix* (`nvidia-smi topo -m`). The picture shows yours if you have
# several GPUs, otherwise an invented example. PIX means at most one PCIe bridge, PXB several
# bridges, SYS the link between CPU sockets (NUMA nodes). On which pair of the example would you run
# TP = 2?

# %% tags=["predict"]
for number, row in enumerate(lab.EXAMPLE_LINKS):
    print(f"GPU{number}  " + "".join(f"{kind:5}" for kind in row))
guess_pair = predict("GPUs for TP = 2", choices=("0 and 1", "1 and 2", "2 and 3"))
### GUESS guess_pair.commit("0 and 1")

# %% tags=["picture", "measured"]
from course_lib.ranks.machine import describe_machine

reveal(guess_pair, "0 and 1")
mine = describe_machine()["gpu_links"]
own = (mine, "This machine") if len(mine) > 1 else (lab.EXAMPLE_LINKS, "An example")
show(*pictures.link_matrix(*own))

# %% [markdown]
# **What formulas leave out can reverse a ranking: measure. The matrix of links tells which GPUs to
# ask for.**
#
# ## 6 Faster steps, or fewer?
#
# However you split a given batch, the training stays the same (up to rounding, without dropout). If
# each copy gets a batch of its *own*, the global batch grows. The gradient is less noisy, but the
# training is *different*, and settings that were right for the small batch need not be right for
# the large one. (Goyal et al. 2017 let the learning rate grow with the batch, and needed a
# *warm-up* of it, other than that of section 1, because large batches diverged at first.) In a
# recorded experiment, one process and four copies with their own batches train alike otherwise: the
# learning rate warms up for 100 of 150 steps. By what factor do the four copies need fewer steps to
# the same loss?

# %% tags=["predict"]
guess_fewer = predict("steps to the same loss: of one process / of four copies")
### GUESS guess_fewer.commit(4)

# %%
from course_lib.scaling_study.curves import smooth, steps_to

recorded = sample_results("convergence")
unsplit = {(r.run.global_batch, r.run.warmup): r for r in recorded.experiments if r.run.tp == 1}
base = smooth(unsplit[8, 100].losses)  # means of some steps: single batches vary
needs = {}
for batch, warmup in ((32, 100), (8, 4), (32, 4)):
    steps = needs[batch, warmup] = steps_to(base[-1], smooth(unsplit[batch, warmup].losses))
    times = f"{steps * batch / (len(base) * 8):.1f} times the tokens"
    print(f"batch {batch}, warm-up {warmup}: {steps} of {len(base)} steps, {times}")
reveal(guess_fewer, len(base) / needs[32, 100])

# %% tags=["picture"]
show(*pictures.convergence(recorded))

# %% [markdown]
# Four times the batch saves few steps and reads more than three times as many tokens. A warm-up of
# 4 steps instead of 100 saves more, with *either* batch: it has nothing to do with splitting, and a
# comparison that changes both at once would credit the wrong one. The time to a given loss is
# seconds per step times steps.
# Beyond a critical batch size, a larger batch hardly saves steps (McCandlish et al. 2018).
#
# **Efficiency is about one step. Ask also how many steps the training takes.**
#
# ## 7 What a study costs
#
# You pay for every GPU of a job from the job's start until the last rank has finished. How many
# GPU-hours do all runs of the cluster study need, with 200 steps each, predicted for A100s?

# %% tags=["predict"]
guess_hours = predict("the whole cluster study", unit="GPU-hours")
### GUESS guess_hours.commit(20)

# %%
from course_lib.scaling_study.prediction import hours

site = read_profile("slurm")
plan = cost_study(find_study("cluster"), site, Path("runs/study-cluster"))
wall_hours, gpu_hours = hours(plan.predictions)
reveal(guess_hours, gpu_hours)
print(f"{len(plan.predictions)} runs, {wall_hours:.1f} hours one after the other")
print(f"limits: {site.limits.gpu_hours:g} GPU-hours in all, {site.limits.max_jobs} jobs at once")

# %% [markdown]
# ### Exercise 4 (further): the bill
#
# A run has `nodes`, `gpus_per_node`, `start_s` (seconds to start, once per run), `steps` and
# `step_s`. Return the GPU-hours of all runs, and how many runs may be submitted. Submit in the
# given order while the sum is at most `allowed`; stop at the first run that does not fit, even if a
# later one would fit. Do not change `runs`. About 8 lines, 10 minutes.


# %% tags=["exercise"] exercise="scaling_study-4"
def bill(runs, allowed):
    """GPU-hours of all runs, and how many of the first ones fit."""
    ### BEGIN SOLUTION: hours of each; then two sums
    hours_of = [
        run.nodes * run.gpus_per_node * (run.start_s + run.steps * run.step_s) / 3600
        for run in runs
    ]
    fit = 0
    while fit < len(runs) and sum(hours_of[: fit + 1]) <= allowed:
        fit += 1
    return sum(hours_of), fit
    ### END SOLUTION


# %% tags=["check"] exercise="scaling_study-4"
check("scaling_study-4", bill)

# %% [markdown]
# **Compute the GPU-hours of a job before you submit it.**
#
# ## 8 A script that waits for hours and fails in a second
#
# This Slurm script should ask for 2 nodes, 2 GPUs each, for two hours. How many mistakes do you
# see?

# %% tags=["predict"]
for number, line in enumerate(lab.BROKEN_SCRIPT.splitlines(), start=1):
    print(f"{number:2}  {line}")
guess_mistakes = predict("mistakes in it")
### GUESS guess_mistakes.commit(4)

# %%
from course_lib.jobs.lint.check import findings_text, lint_job

found = lint_job(lab.BROKEN_SCRIPT)
reveal(guess_mistakes, len(found))
print(findings_text("study.sbatch", found))

# %% [markdown]
# ### Exercise 5 (further): what does it really ask for?
#
# Return three whole numbers as `sbatch` reads them (its manual, "DESCRIPTION" and "--time"): nodes
# (default 1), GPUs per node (default 0), and seconds (default 0; do not round to minutes).
#
# - A directive is a line that begins with `#SBATCH` and a space. It has one or more options
#   `--name=value`, not only `--nodes`, `--gpus-per-node` and `--time`. In a directive, ` #` begins
#   a comment. If an option is given twice, the later one counts.
# - Reading ends at the first command: a line that is neither empty nor a comment.
# - Times: `minutes`, `minutes:seconds`, `hours:minutes:seconds`, `days-hours`,
#   `days-hours:minutes`, `days-hours:minutes:seconds`.
#
# About 12 lines, 20 minutes.
#
# <details><summary>Hint: six forms of a time</summary>
# <code>days, _, clock = time.rpartition("-")</code>. With days, or with three numbers, the clock
# begins with hours; otherwise with minutes. Missing numbers are zeros.
# </details>


# %% tags=["exercise"] exercise="scaling_study-5"
def asked_for(script):
    """Nodes, GPUs of a node, seconds."""
    ### BEGIN SOLUTION: which lines are read, which words of them, and what is a time?
    said = {"--nodes": "1", "--gpus-per-node": "0", "--time": "0"}
    for line in script.splitlines():
        if line.strip() and not line.strip().startswith("#"):
            break
        if line.startswith("#SBATCH "):
            words = line.split(" #")[0].split()[1:]
            said.update(word.split("=", 1) for word in words if "=" in word)
    days, _, clock = said["--time"].rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    numbers = [*parts, 0, 0] if days or len(parts) == 3 else [0, *parts, 0]
    clock_s = sum(number * unit for number, unit in zip(numbers, (3600, 60, 1), strict=False))
    seconds = int(days or 0) * 86400 + clock_s
    return int(said["--nodes"]), int(said["--gpus-per-node"]), seconds
    ### END SOLUTION


# %% tags=["check"] exercise="scaling_study-5"
check("scaling_study-5", asked_for)

# %% [markdown]
# **Slurm says nothing about a directive that it did not read. Let a program check your script, such
# as `course lint-job FILE`.**
#
# ## 9 Your own study
#
# On your machine, or from a cluster's login node:
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
# The cell prints your results, or the recorded ones:

# %% tags=["measured"]
from rich.console import Console

from course_lib.scaling_study.report import notes, tables
from course_lib.scaling_study.results import own_or_sample

mine, whose = own_or_sample()
print(whose)
console = Console(width=100, force_jupyter=False, force_terminal=False)
for table in tables(mine):
    console.print(table, "")
for note in notes(mine):
    console.print(note, highlight=False)

# %% [markdown]
# ## What to keep
#
# - Take the slowest rank's time, each copy's tokens once, and the fullest rank's peak memory.
# - Leave out the warm-up, count optimizer steps, and synchronize before you read the clock.
# - Efficiency needs a baseline with the same batch. Two runs show how far this batch scales, if the
#   bottleneck stays the same.
# - First compare the losses: a wrong run can be fast.
# - Compute the GPU-hours first, and let a program check your script.
#
# ## Read on
#
# - Amdahl 1967, *Validity of the single processor approach*: the fixed part.
# - Kaplan et al. 2020, *Scaling laws*, section 2.1: $6ND$; Hoffmann et al. 2022, *Training
#   Compute-Optimal Large Language Models*: the same, with embeddings.
# - McCandlish et al. 2018, *Large-batch training*: when a larger batch saves steps.
# - Hoefler and Belli 2015, *Scientific benchmarking*: twelve rules for reporting.
