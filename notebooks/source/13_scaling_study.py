# %% [markdown]
# # 13 Scaling study: what did splitting buy?
#
# You have split models in many ways. *What did it buy, and which of these numbers may I believe?*
# You will run a small study here, look at a recorded one, and plan a large one.
#
# | symbol | in code | meaning |
# |---|---|---|
# | $N$ | `run.ranks` | ranks of a run |
# | $T_1$, $T_N$ | `step_s` | seconds of a step, on one rank and on $N$ |
# | throughput | `tokens_per_s` | tokens a second, all ranks together |
# | overhead | `overhead_percent` | $(T_N / T_1 - 1) \cdot 100$ |
# | factor | `throughput_factor` | throughput, as a multiple of one rank's |
# | efficiency | `efficiency_percent` | $\text{factor} / N \cdot 100$ |

# %%
# %load_ext course_lib.ranks
import tempfile
from pathlib import Path

from course_lib.checks import check
from course_lib.cluster.profile import read_profile
from course_lib.core.records import read_runs
from course_lib.display import Voices, compare, predict, reveal, show
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
# A study is a list of runs: model × strategy × ranks. Within a model, every run has the *same*
# global batch, so two ranks share what one had alone. This is the smallest part of the laptop
# study: one process, and the same batch on two ranks, which talk once a step. How many times as
# many tokens a second will two ranks have?

# %% tags=["predict"]
folder = Path(tempfile.mkdtemp()) / "study-laptop"
costing = cost_study(find_study("laptop").only(models=["tiny"]), read_profile("laptop"), folder)
for run in costing.study.runs:
    print(f"{run.label}, {run.ranks} rank(s): {run.steps} steps of {run.tokens_a_step} tokens")
guess_two = predict("throughput of two ranks, as a multiple of one rank's")

# %%
on_paper = [one.tokens_per_s for one in costing.predictions]
run_all(costing)  # what `course study run laptop --model tiny` calls
records = read_runs(folder)
two, one = (aggregate([r for r in records if r.world_size == n]) for n in (2, 1))
reveal(guess_two, two.tokens_per_s / one.tokens_per_s)
print(f"the cost model said {on_paper[1] / on_paper[0]:.2f}, before it had seen a run")
print(f"a line of a record: {records[-1].steps[0]}")

# %% [markdown]
# Each rank left one file: the run, its machine, and a line for each step. All of a study's numbers
# come from these.


# %% tags=["picture"]
def step_ms(record):
    return [1e3 * (step["end_s"] - step["start_s"]) for step in record.steps]


curves = {
    f"rank {record.rank} of {record.world_size}": Voices(measurement=step_ms(record))
    for record in records
}
alone_ms = step_ms(records[-1])
typical_ms = sorted(alone_ms)[len(alone_ms) // 2]
title = f"One rank: the first step takes {alone_ms[0] / typical_ms:.1f} times as long as most"
axes = {"x_label": "step", "y_label": "time of a step (ms)"}
show(compare(range(1, len(alone_ms) + 1), curves, title, **axes), alt=f"{title}; later ones vary")

# %% [markdown]
# The first steps are slow: memory is asked for, threads start, caches are cold. So the study leaves
# out the first quarter as **warm-up**. The others are not equal either, and on a busy machine one
# of them may be the slowest of all: never believe one step.
#
# ### Exercise 1: from ranks to a run
#
# You get the records of all ranks, in order, and make one line of them; they stay as they are:
#
# - `time_s`: what the steps of a rank took, added up; of the rank where that is most.
# - `num_tokens`: those of each copy of the model, once. The ranks of a copy are neighbours, tp
#   innermost, then pp. Only what reached the last *stage* counts, and some of the tp ranks there
#   may count nothing: take the largest number.
# - `mean_bytes`, `sum_bytes`, `peak_bytes`: the mean over ranks of each one's mean, the sum of
#   these means, and the most that any rank ever held.
#
# A step has `start_s`, `end_s`, `num_tokens`, `memory_bytes`; the peak is in
# `record.run["memory"]["peak"]`. Ranks may differ in steps. 9 lines,
# 15 minutes.
#
# <details><summary>Hint: DP is right, TP is twice too much</summary>
# One copy has <code>tp * pp</code> ranks. For each copy: its last <code>tp</code> numbers, of them
# the largest; then the sum over copies.
# </details>
# <details><summary>Hint: the mean differs in the third digit</summary>
# Leave the warm-up out of the bytes, too.
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

# %%
everything_s = sum(step_ms(records[-1])) / 1e3
with_warmup = sum(step["num_tokens"] for step in records[-1].steps) / everything_s
print(f"one rank, warm-up left out: {one.tokens_per_s:,.0f} tokens/s")
print(f"one rank, warm-up kept:     {with_warmup:,.0f} tokens/s")

# %% [markdown]
# **Ranks are no repetitions: time is the slowest one's, tokens are each copy's once, memory is the
# fullest one's.**
#
# ## 2 Beside one rank
#
# A split is judged beside one rank, with the *same batch*. Suppose that two ranks need exactly as
# long for a step as one. What is their efficiency?

# %% tags=["predict"]
guess_same = predict("efficiency of two ranks that take as long as one", unit="%")

# %% [markdown]
# ### Exercise 2: three numbers
#
# `experiment` and each of `alone` have `.step_s`, `.tokens_per_s`, `.time_s`, `.num_steps`,
# `.run.ranks` and `.run.work`, which is what runs must have in common to be compared: model, batch,
# how it is cut. All of `alone` had one rank. About 6 lines.
#
# <details><summary>Hint: need ..., got something that looks sensible</summary>
# Beside which run? <code>next(one for one in alone if one.run.work == ...)</code>
# </details>


# %% tags=["exercise"] exercise="scaling_study-2"
def beside_one(experiment, alone):
    """A dictionary with overhead_percent, throughput_factor, efficiency_percent."""
    ### BEGIN SOLUTION: the run of one rank with the same work; then three lines
    one = next(found for found in alone if found.run.work == experiment.run.work)
    factor = experiment.tokens_per_s / one.tokens_per_s
    return {
        "overhead_percent": (experiment.step_s / one.step_s - 1) * 100,
        "throughput_factor": factor,
        "efficiency_percent": factor / experiment.run.ranks * 100,
    }
    ### END SOLUTION


# %% tags=["check"] exercise="scaling_study-2"
check("scaling_study-2", beside_one)

# %%
reveal(guess_same, 100 / 2)
found = against(two, one)
words = f"overhead {found.overhead_percent:+.0f} %, factor {found.throughput_factor:.2f}"
print(f"your two ranks: {words}, efficiency {found.efficiency_percent:.0f} %")

# %% [markdown]
# A published study calls about 80 % good, less than 70 % poor. With the batch fixed, this is
# **strong scaling**: each rank computes less, and messages stay as large. If it grows with the
# ranks (weak scaling), every method looks better, and the training is another one (section 6).
#
# **No efficiency without its baseline: same model, same batch, cut alike.**
#
# ## 3 What is a step, and when is it over?
#
# With 4 micro-batches a step, the first version of a published study ran 800 steps where 200 were
# meant. Count in one place. And a clock has its own trap: a GPU takes orders, and works on them
# later. `lab.EmulatedDevice` does so too, with a clock that is not real. A backward takes it 30 ms.
# After 100 of them, what does the clock say?

# %% tags=["predict"]
guess_clock = predict("the clock after 100 times backward", unit="s")

# %%
device = lab.EmulatedDevice(backward_s=0.03)
for _ in range(100):
    device.backward(num_tokens=512)
reveal(guess_clock, device.now_s())
device.synchronize()
print(f"after synchronize(): {device.now_s():.2f} s")

# %% [markdown]
# ### Exercise 3: a loop that may be timed
#
# A step is `accumulated` micro-batches, each `device.backward(next(micro_batches))`, where a
# micro-batch here is just its number of tokens; then `device.step()`. Run `steps` of them, of which
# the first `warmup` (0 or more) do not count, and draw no more micro-batches than that. Return
# seconds and tokens of the other steps, not rounded. The device may be busy at first. About 10
# lines.
#
# <details><summary>Hint: a few thousandths of the right time</summary>
# That is how long giving orders takes. <code>device.synchronize()</code> waits, twice: before the
# clock starts, and before it is read.
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
# **Count optimizer steps, in one place; wait for the device before you look at the clock.**
#
# ## 4 A recorded study
#
# Here is a recorded laptop study (a new one takes some minutes). It had so few cores
# that four ranks shared them. If messages cost nothing at all, how efficient can four ranks be at
# most? And which split is the best one on two ranks?

# %% tags=["predict"]
results = sample_results()
print(results.made)
sets = results.sets()
for name, found in sets.items():
    print(f"{name}: {len(found)} runs")
guess_four = predict("the best efficiency of four ranks on these cores", unit="%")
guess_best = predict("the most efficient on two ranks", choices=("ddp", "tp", "pp"))

# %% tags=["picture"]
small, small_name = next((found, name) for name, found in sets.items() if "small" in name)
cores = results.experiments[0].machine["usable_cores"]
reveal(guess_four, 100 * min(1, cores / 4))
pairs = [r for r in in_order(small) if r.experiment.run.ranks == 2 and r.comparison]
best = max(pairs, key=lambda result: result.comparison.efficiency_percent)
reveal(guess_best, best.experiment.run.label.removeprefix("torch-"))
figure, alt = pictures.efficiency(small, small_name)
show(figure, alt=alt)

# %% [markdown]
# Solid bars are measured, hollow ones the cost model's. It was told two things of that machine: the
# speed of one rank, and its link (lesson 04). *1 MiB* is the size of a bucket (06), *m* the number
# of micro-batches (08). What the two tell together:
#
# - *Where they agree*, you have understood the machine: `ddp` sends one message a step.
# - *Where the hollow bar is longer*, something is not in the formula. Here the wire is a program
#   (gloo), which takes cores away from computing. On paper, buckets of 1 MiB hide behind backward;
#   here they take its cores. TP, which waits for each of its messages, keeps least.
# - *Four ranks* share the cores of two. A bar can be right and mean nothing.
#
# ZeRO cuts its batch into micro-batches, so it has a baseline of its own. Which stage takes the
# longest step?

# %% tags=["predict"]
guess_stage = predict("the slowest", choices=("zero1", "zero2", "zero3"))

# %% tags=["picture"]
zero, zero_name = next((found, name) for name, found in sets.items() if "parts" in name)
zero = [result for result in zero if result.experiment.run.ranks <= 2]  # a core for each
slowest = max(zero, key=lambda result: result.experiment.step_s)
reveal(guess_stage, slowest.experiment.run.label)
figure, alt = pictures.overhead(zero, zero_name)
show(figure, alt=alt)

# %% [markdown]
# Each stage talks more often: stage 1 once a step, stage 2 with every micro-batch, stage 3 for
# every module and micro-batch. On a wire whose *latency* is long, messages count, not bytes. And
# what did it buy? A rank's parameters, gradients and optimizer state, beside the formula. Then the
# peaks of the other splits.

# %% tags=["picture"]
figure, alt = pictures.states(zero, zero_name)
show(figure, alt=alt)
plain = [result for result in small if result.experiment.run.ranks <= 2]
figure, alt = pictures.peak_memory(plain, small_name)
show(figure, alt=alt)

# %% [markdown]
# Stage 1 is right to the byte. From stage 2 on, a rank was asked at the end of its last backward,
# when whole gradients still wait to be sent: *when* is part of the question. And a peak on a CPU is
# all that a process has grown by, its libraries too, so read it as: which one is smaller? TP
# even holds more than one rank, likely buffers of its messages, gloo's too: not on paper.
#
# Before any speed is believed: did these runs compute *the same*? Their losses, on one another:

# %% tags=["picture"]
figure, alt = pictures.loss_curves(small, small_name)
show(figure, alt=alt)

# %% [markdown]
# **Break it.** A bug that many have had: all copies read the *first* part of the batch. It is as
# fast as the right one. Two ranks train so, here, now. Will you see it in its loss curve?

# %% tags=["predict"]
guess_seen = predict("the first and the last loss: more than 5 % off?", choices=("yes", "no"))


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

# %% tags=["picture"]
import math


def digits(losses):  # how many of them agree with one process; float32 has about 7
    pairs = zip(losses, one.losses, strict=True)
    return [min(8.0, -math.log10(abs(a / b - 1) + 1e-9)) for a, b in pairs]


agree = {"ddp": Voices(measurement=digits(two.losses)), "wrong": Voices(measurement=digits(wrong))}
least, most = min(digits(two.losses)), max(digits(wrong))
title = f"DDP agrees with one process to {least:.1f} digits, the wrong run to {most:.1f} at best"
axes = {"x_label": "step", "y_label": "digits of the loss that agree"}
show(compare(range(1, len(wrong) + 1), agree, title, **axes), alt=f"{title}; far apart from step 1")

# %% [markdown]
# A curve that comes down looks right. Digits do not lie (8: the same to the last one): the same
# batch, the same start, the same numbers, or the run is left out.
#
# **First the losses, then the bytes, then the speed; and each beside a prediction.**
#
# ## 5 The cluster, on paper
#
# The cluster study has five models, from 10 million parameters to a billion. Before anybody waits
# in a queue: what will it show? A published study found, on two GPUs, what the first lines below
# say. On four, over several PCIe bridges, all of it collapsed; ZeRO kept most. Small models gained
# nothing, pipelines were poor, ZeRO-2 was slower than stages 1 and 3, and peak memory fell most
# with stage 1. Move the sliders: what can formulas tell, and what can they not?

# %% tags=["picture"]
from course_lib.scaling_study.explorer import study_explorer

for strategy, percent in lab.PUBLISHED.items():
    print(f"published: {strategy}, about {percent:.0f} % efficiency")
study_explorer()

# %% [markdown]
# TP and ZeRO-1 come near, DP is too good. On four GPUs over bridges, all but the pipeline collapse
# on paper, too. But paper lets pipelines shine, and tiny models gain: to start a kernel costs
# nothing there. And it lets no message of ZeRO hide, so stage 3 looks worse than it is.
#
# What the slider calls link is a *matrix* on a real machine (`nvidia-smi topo -m`). Yours, if it
# has GPUs; else an example that is made up. PIX is one PCIe bridge, PXB several, SYS the way across
# CPU sockets. Two ranks share a weight (TP): on which pair of the example?

# %% tags=["predict"]
for number, row in enumerate(lab.EXAMPLE_LINKS):
    print(f"GPU{number}  " + "".join(f"{kind:5}" for kind in row))
guess_pair = predict("GPUs for TP = 2", choices=("0 and 1", "1 and 2", "2 and 3"))

# %% tags=["picture"]
from course_lib.display.gpu_links import links
from course_lib.ranks.machine import describe_machine

reveal(guess_pair, "0 and 1")
mine = describe_machine()["gpu_links"]
whose = "This machine" if len(mine) > 1 else "An example"
matrix = mine if len(mine) > 1 else lab.EXAMPLE_LINKS
title = f"{whose}: {len(matrix)} GPUs, and some are nearer than others"
show(links(matrix, title), alt=f"{title}; rows: {' | '.join(' '.join(row) for row in matrix)}")

# %% [markdown]
# **Formulas tell the order of things; the matrix tells which GPUs to ask for.**
#
# ## 6 Fast is not soon
#
# The same batch, however it is split, learns the same. Give each copy a batch of its *own*, and
# the global batch grows: more tokens a second, a steadier gradient, *another training*, which may
# do with a shorter warm-up (this one is the learning rate's). A published study, with 32 copies,
# reached its baseline's loss in about a fifth of the steps. In small, recorded: one process warms
# up for 100 of 150 steps; four copies with batches of their own for 4. How many times fewer steps?

# %% tags=["predict"]
guess_fewer = predict("steps to the same loss, how many times fewer")

# %% tags=["picture"]
from course_lib.scaling_study.curves import smooth, steps_to

recorded = sample_results("convergence")
unsplit = [found for found in recorded.experiments if found.run.tp == 1]
soon = {(one.run.global_batch, one.run.warmup): smooth(one.losses) for one in unsplit}
base = soon[8, 100]  # means of some steps: one batch is luck
needs = {key: steps_to(base[-1], losses) for key, losses in soon.items()}
reveal(guess_fewer, len(base) / needs[32, 4])
for batch, warmup in ((32, 100), (8, 4), (32, 4)):
    steps = needs[batch, warmup]
    times = steps * batch / (len(base) * 8)
    words = f"batch {batch}, warm-up {warmup}: {steps} of {len(base)} steps"
    print(f"{words}, {times:.1f} times the tokens")
figure, alt = pictures.convergence(recorded)
show(figure, alt=alt)

# %% [markdown]
# The larger batch and the shorter warm-up each help a little, both together most. But that run has
# read more than twice as many tokens: it is sooner only because four ranks read them at once. So
# "how soon is it trained?" has two factors: seconds of a step, and steps that are needed.
#
# **Efficiency is about a step. Ask also how many steps it takes.**
#
# ## 7 The bill before the job
#
# Every GPU of a job is paid for until the last rank is done, and while it starts. All runs of the
# cluster study, 200 steps each, on paper, on A100s: how many GPU-hours?

# %% tags=["predict"]
guess_hours = predict("the whole cluster study", unit="GPU-hours")

# %%
from course_lib.scaling_study.prediction import hours

site = read_profile("slurm")
plan = cost_study(find_study("cluster"), site, Path("runs/study-cluster"))
wall_hours, gpu_hours = hours(plan.predictions)
reveal(guess_hours, gpu_hours)
print(f"{len(plan.predictions)} runs, {wall_hours:.1f} hours one after the other")
print(f"a learner may have {site.limits.gpu_hours:g} GPU-hours, {site.limits.max_jobs} jobs")

# %% [markdown]
# The limits in the site's profile count what is *asked for* until a job has ended, then what it
# used.
#
# ### Exercise 4: the bill
#
# A run has `nodes`, `gpus_per_node`, `start_s` (once), `steps` and `step_s`. Return the GPU-hours
# of all runs, and how many of them may be handed in: in their order, until one goes over `allowed`;
# there it ends, even if a smaller one comes later. Exactly `allowed` still fits. `runs` stays as it
# is. About 8 lines.


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
# **Know the bill before the queue does.**
#
# ## 8 A script that waits for hours and fails in a second
#
# What Slurm does not understand as a directive is a comment. This script is for 2 nodes with 2 GPUs
# each, two hours. How many mistakes do you see?

# %% tags=["predict"]
for number, line in enumerate(lab.BROKEN_SCRIPT.splitlines(), start=1):
    print(f"{number:2}  {line}")
guess_mistakes = predict("mistakes in it")

# %%
from course_lib.cluster.lint.check import findings_text, lint_job

found = lint_job(lab.BROKEN_SCRIPT)
reveal(guess_mistakes, len(found))
print(findings_text("study.sbatch", found[:1]))

# %% [markdown]
# ### Exercise 5: mend it
#
# Return the script without its mistakes; it has to do the same work on the same nodes and GPUs, and
# stay away from node7. The check names one mistake after the other, as `course lint-job FILE` does
# with any script of yours.
#
# <details><summary>Hint: where do the ranks of two nodes meet?</summary>
# On the first node. <code>scontrol show hostnames "$SLURM_JOB_NODELIST"</code> prints all names;
# <code>read -r head &lt; &lt;(...)</code> takes the first; then <code>$head:29500</code>.
# </details>


# %% tags=["exercise"] exercise="scaling_study-5"
def mended(script):
    """The script, with each mistake replaced."""
    ### BEGIN SOLUTION: for each mistake, script = script.replace(wrong, right)
    first = 'read -r head < <(scontrol show hostnames "$SLURM_JOB_NODELIST")'
    script = script.replace("# SBATCH", "#SBATCH")
    script = script.replace("--time=2:00 ", "--time=2:00:00 ")
    script = script.replace("study-$SLURM_JOB_ID", "study-%j")
    script = script.replace("#SBATCH --exclude=node7\n", "")
    script = script.replace("#SBATCH --time", "#SBATCH --exclude=node7\n#SBATCH --time")
    script = script.replace("\ntorchrun", f"\n{first}\nsrun torchrun")
    return script.replace("localhost:29500", '"$head:29500"')
    ### END SOLUTION


# %% tags=["check"] exercise="scaling_study-5"
check("scaling_study-5", mended)

# %% [markdown]
# **Nothing tells you of a directive that was not read. Let a program look before you hand in.**
#
# ## 9 Your own study
#
# On your machine, some minutes; on a cluster, from its login node:
#
# ```sh
# course study run laptop                       # what is done already is left out
# course report runs/study-laptop --html report.html
#
# course cluster init                           # once: a few questions about your site
# course study plan cluster --profile site      # what it runs, and what it costs
# course study run cluster --profile site       # hands in job arrays; again: what failed
# course status                                 # how far they are
# course report runs/study-cluster
# ```
#
# This cell shows what is there already:

# %%
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
# - A record a rank. Time: the slowest. Tokens: each copy once. Memory: the fullest.
# - Warm-up is left out, steps are optimizer steps, and the device has finished when the clock is
#   read.
# - Efficiency needs a baseline with the same batch.
# - Equal losses first: a wrong run can be fast.
# - A prediction beside each bar: where they part, something can be learned.
# - Know the bill, and let a program read your script first.
#
# You can now plan, price, run and judge a study.
