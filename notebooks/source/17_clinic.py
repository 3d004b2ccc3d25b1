# %% [markdown]
# # 17 The clinic: find the fault that the loss hides
#
# **Question.** A training run is wrong, and its loss falls all the same. How do you find out that
# it is wrong, and where?
#
# *After this lesson you can*
#
# - say why a loss curve cannot tell a right run from a wrong one;
# - find the first step, phase and parameter in which a run differs from a right one;
# - tell from the type of a gradient who forgot to sum it;
# - prove a mend: it computes what one process computes;
# - read who is behind in a job that hangs, and who is late in a job that is slow.
#
# **Prerequisites:** lessons 02, 06, 07, 10. **Time:** about 25 minutes to read and run, 35 for five
# exercises (core: 1, 2, 5).
#
# This lesson is no text to read in one go. It is a ward with 15 patients: training runs with one
# fault each, all of them found in public code. Three are examined in front of you, four are your
# exercises, and the others wait at the end.

# %%
import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

from course_lib.checks import check
from course_lib.clinic import jobs
from course_lib.clinic.cases import CASES, function_at
from course_lib.clinic.pictures import curves_picture
from course_lib.clinic.ward import examine, run_case, run_right
from course_lib.debugging.pictures import where_runs_differ
from course_lib.display import claim, predict, reveal, show
from course_lib.mesh.clip import counted_here, held_grads
from course_lib.models.data import IGNORED
from course_lib.zero.clip import clip_shards

# %% [markdown]
# ## 1 The curve says nothing
#
# A crash is easy: it has a line number. The faults of this lesson do not crash. The first patient
# is a model whose two ranks share every matrix (tensor parallelism, lesson 07). Its team has just
# switched on sequence parallelism.

# %%
case = CASES["norms apart"]
print(case.symptoms)

# %% [markdown]
# We train this run for 50 steps, in float64. The right run is one process with the same weights,
# data and settings. Since every training depends on its seed, we need a scale: two more right runs
# start from other seeds. The distance of two curves is the mean difference of their losses, step by
# step: $d(a, b) = \frac{1}{n} \sum_{i=1}^{n} |a_i - b_i|$. How far from the right run is the case,
# measured in distances between right runs?

# %% tags=["predict"]
guess_far = predict("mean distance of the case / distance of the nearest other seed")
### GUESS guess_far.commit(1)

# %% tags=["picture"]
from course_lib.clinic.pictures import distance


def curves_of(case):
    """Return the losses of one process, of the case, and of right runs with other seeds."""
    return run_right(case), run_case(case), [run_right(case, seed=seed) for seed in (1, 2)]


right, brought_in, others = curves_of(case)
nearest = min(distance(right, other) for other in others)
reveal(guess_far, distance(right, brought_in) / nearest)
show(*curves_picture("norms apart", right, brought_in, others))

# %% [markdown]
# Nobody would stop this run. Gradient descent forgives a lot: a direction that is roughly right
# still goes downhill. But the case is not one more random seed. Fifteen of its gradients are wrong
# in every step, and the model pays for that at the end of a long training, when nobody remembers
# what was switched on.
#
# **A falling loss shows that most of the gradient is roughly right. It does not show that the
# program is.**
#
# ## 2 The first difference
#
# Curves compare one number per step. A program computes millions. So compare all of them, and ask
# *where two runs differ first*: everything later is a consequence. A step has phases, in this
# order:
#
# | phase | recorded | if this is the first to differ, look at |
# |---|---|---|
# | start | weights before the first step | seed, checkpoint, a missing broadcast |
# | gradient | gradients after all reductions | data, forward, backward, reduction |
# | parameter | weights after the update | clipping, learning rate, moments, weight decay |
#
# Two things make this work. First, the reference is a *run that is right*: one process has no
# communication to get wrong. Second, everything is float64. Ranks add in another order than one
# process, so that results differ by rounding: 1e-15 in float64, where a fault is millions of times
# larger. In bfloat16 you could not tell them apart.
#
# `examine` runs the case and one process with the recorder, and compares. In which phase will the
# first patient differ first, and in how many of its 36 gradients?

# %% tags=["predict"]
guess_phase = predict("the first phase that differs", choices=("start", "gradient", "parameter"))
guess_many = predict("how many of the 36 gradients differ")
### GUESS guess_phase.commit("gradient")
### GUESS guess_many.commit(36)

# %% tags=["picture"]
report = examine(case, steps=3)
reveal(guess_phase, report.first.key[1])
reveal(guess_many, sum(one.key[1] == "gradient" for one in report.of_first_step()))
print(report)
show(*where_runs_differ(report))

# %% [markdown]
# Read the report from the top. The weights at the start are equal, so neither seed nor splitting is
# to blame. Gradients differ, but only some of them, and all their names have something in common:
# norms, and biases that are added after the sum over the ranks. Each rank holds a copy of these,
# and uses it for its own part of the sequence. So each rank has a *part* of their gradient.
#
# ### Four types of gradients
#
# The report calls them "partial over tp". Whether a gradient has to be summed over an axis of the
# mesh depends on how its ranks use the parameter:
#
# | parameter | ranks of the axis | its gradient on a rank | to do |
# |---|---|---|---|
# | *Replicate* | same values, different computations | *Partial*: a term of a sum | sum |
# | *Invariant* | same values, same computation | *Invariant*: the gradient | nothing |
# | *Varying* | a shard each | *Varying*: that of the shard | nothing |
#
# A norm is Replicate over tp with sequence parallelism, and Invariant without it: there a sum would
# count its gradient several times. A column-parallel matrix is Varying.
#
# The names are those of meta-pytorch/spmd_types (2026). In data parallelism a parameter is
# Replicate, too, but we want the gradient of the *mean* loss: the sum is divided by the ranks. Many
# silent faults of parallel training are a confusion of two rows of this table. The two rows on top
# look alike in memory; only the computation tells them apart. That is why switching on sequence
# parallelism, which changes no parameter, changed who has to sum.
#
# The line below the first difference says that activations and their gradients seem to be right. So
# the report has told us what to look for: the function that sums these gradients. Here it is.

# %%
print(case.code)

# %% [markdown]
# It does call `all_reduce`. But then it divides by the number of ranks, as data parallelism does:
# the terms of a sum were averaged. (Megatron-LM #1446 and gpt-neox #1259 did not sum at all, and
# their losses fell, too.) Is that all? The proof of a mend is the same comparison again, with the
# mended function in the fault's place.


# %%
def finish_gradients(model, held=None):
    """Complete the gradients of which each rank of a tp group has a part."""
    from course_lib.tensor_parallel.finish_watch import finishing
    from course_lib.tensor_parallel.state import partial_params

    wanted = partial_params(model)
    with finishing(wanted):
        for one in held:
            if one.param in wanted:
                dist.all_reduce(one.grad)


print(examine(case, finish_gradients, steps=3))

# %% [markdown]
# **Compare with a run that is right, in float64, and look at the first difference only. The set of
# parameters that differ names the suspect. A mend is proven when no difference is left.**
#
# ## 3 A resume
#
# The second patient was preempted at half time. Again we look at the curve first.

# %% tags=["picture"]
resumed = CASES["a resume"]
print(resumed.symptoms)
right, brought_in, others = curves_of(resumed)
show(*curves_picture("a resume", right, brought_in, others))

# %% [markdown]
# Up to step 25 the difference is exactly zero, which is a clue that one sees only below, in the
# difference. What is different in step 25 first: the weights that were loaded, the gradients, or
# the weights after the update?

# %% tags=["predict"]
guess_resumed = predict(
    "the first phase that differs after the resume", choices=("start", "gradient", "parameter")
)
### GUESS guess_resumed.commit("start")

# %%
report = examine(resumed, steps=6)
reveal(guess_resumed, report.first.key[1])
print(report)

# %% [markdown]
# The weights were loaded rightly, so the loss goes on where it was. All gradients are right, too:
# data and weights are. Only the update is wrong. An update with equal weights, equal gradients and
# the same learning rate can differ only by what the optimizer remembers. (This run has 6 steps and
# was preempted after 3.)

# %%
print(resumed.code)
print(examine(resumed, function_at(resumed.place), steps=6))

# %% [markdown]
# `{"model": state["model"]}`: the optimizer's moments were saved, but never loaded. AdamW then
# starts again with empty moments, and its first steps have about the size of the learning rate,
# whatever the gradient is. This happens wherever a checkpoint is loaded into a fresh optimizer
# without a word. The right function, which loads all of the state, leaves no difference.
#
# Two of 36 parameters do not differ. They are the biases of the keys. A bias that is added to all
# keys adds the same number to all scores of a query, and softmax ignores it: its gradient is zero,
# and so is its update.
#
# **Equal gradients and unequal parameters: the fault is between them, in clipping, learning rate,
# moments or weight decay.**
#
# ## 4 A norm of norms
#
# The curve of the third patient differs too little to see. It trains with tensor parallelism,
# AdamW, and gradients that are clipped to a norm of 0.5.

# %% tags=["picture"]
clipped = CASES["norm of norms"]
print(clipped.symptoms)
right, brought_in, others = curves_of(clipped)
show(*curves_picture("norm of norms", right, brought_in, others))

# %% [markdown]
# The gradients in the record are those before clipping. Clipping multiplies all of them by one
# number, 0.5 divided by the norm. Suppose that this number is wrong by some percent. How much do
# the parameters differ after the first step, relative to their size?

# %% tags=["predict"]
guess_apart = predict("relative difference of embedding.weight after the first step (like 0.01)")
### GUESS guess_apart.commit(0.01)

# %%
report = examine(clipped, steps=3)
reveal(guess_apart, float(f"{report.first.relative:.1e}"))
print(report)
print(clipped.code)

# %% [markdown]
# All gradients are equal, so again the fault comes after them. AdamW divides each gradient by the
# root of its mean square. If all gradients of a run are multiplied by one number, the number
# cancels, except for the small epsilon. So AdamW hides most of a fault of clipping. Only what
# changes from step to step is left. With SGD, each update would be wrong by the whole factor.
#
# The function answers which squares *this rank* adds to the sum over the ranks. A norm of a layer
# is on all tp ranks. Its square may count once; here it counts on each of them. (torchtitan #596
# and torchtune #2420 are of this kind.) The norm is too large, and so clipping sets in too early.

# %%
mended = examine(clipped, function_at(clipped.place), steps=3)
claim("with the right function the run is that of one process", mended.first is None)

# %% [markdown]
# **A wrong constant hides behind AdamW, which divides it away. Examine with SGD as well.**
#
# ## 5 Your patients
#
# Now it is your turn. For each patient,
#
# 1. read its symptoms and its code, in the cell above the exercise;
# 2. guess the first difference;
# 3. run `print(examine(CASES["..."], steps=3))` in a cell of your own;
# 4. return the diagnosis `(step, phase, parameter, kind)`, and a function that ends the fault;
# 5. before you run the check, run `examine(CASES["..."], your_function, steps=3)`.
#
# `kind` says what is wrong with the gradient that differs first: `"not summed"`, `"not averaged"`,
# `"a multiple"` of the right one, `"another gradient"`, or `"right"`, if gradients are right and
# only the parameters differ. The checks run the same instruments. They also try your function on a
# twin of the patient with four ranks, so do not write down its number of ranks.

# %%
patient = CASES["unequal micro-batches"]
print(patient.symptoms, patient.code, sep="\n\n")

# %% [markdown]
# ### Exercise 1 (core): unequal micro-batches
#
# *Difficulty 2 of 5, importance 5 of 5, about 7 minutes.*
#
# Documents of unequal lengths are padded. Targets of padding are `IGNORED`, and the loss of a
# micro-batch is the mean over its other targets. `share(part, whole)` is the weight of this mean:
# `part` are the targets of the micro-batch, `whole` those of the whole batch of all ranks, both
# `[documents, seq]`. Example: a micro-batch has 6 of 20 targets that are not padding; its weight is
# 0.3. Return the diagnosis, and the mended function. About 3 lines.


# %% tags=["exercise"] exercise="clinic-1"
def unequal_micro_batches():
    """Return (step, phase, parameter, kind), and the function that ends the fault."""

    ### BEGIN SOLUTION: what does each mean count, and what should it?
    def share(part, whole):
        return int((part != IGNORED).sum()) / int((whole != IGNORED).sum())

    return (0, "gradient", "embedding.weight", "another gradient"), share
    ### END SOLUTION


# %% tags=["check"] exercise="clinic-1"
check("clinic-1", unequal_micro_batches)

# %% [markdown]
# A mean of means is the mean only if all have the same number of terms. The libraries that had this
# fault for years trained well with it. It showed when somebody compared accumulation with one large
# batch (transformers #34191, 2024).

# %%
patient = CASES["the first and the last"]
print(patient.symptoms, patient.code, sep="\n\n")

# %% [markdown]
# ### Exercise 2 (core): the first and the last
#
# *Difficulty 2 of 5, importance 5 of 5, about 7 minutes.*
#
# `one_by_one` accumulates the gradients of a step's micro-batches on PyTorch's DDP, which reduces
# gradients in backward, except within `wrapped.no_sync()` (lesson 06). `wrapped.model(inputs)`
# returns logits, and `wrapped.backward(loss)` is backward. Copy the function from above, find the
# fault, and mend it. A step may have any number of micro-batches. Return the diagnosis, and the
# mended function. About 9 lines, of which one changes.
#
# <details><summary>Hint: what is the remainder?</summary>
# Write down <code>index % len(shares)</code> for each micro-batch. In which of them does DDP
# reduce, and what has accumulated by then?
# </details>


# %% tags=["exercise"] exercise="clinic-2"
def the_first_and_the_last():
    """Return (step, phase, parameter, kind), and the function that ends the fault."""

    ### BEGIN SOLUTION: in which backward should DDP reduce?
    def one_by_one(wrapped, loss_fn, masked, micro_batches, shares):
        total = torch.zeros(3, dtype=torch.float64)
        for index, ((inputs, targets), share) in enumerate(zip(micro_batches, shares, strict=True)):
            with nullcontext() if index == len(shares) - 1 else wrapped.no_sync():
                loss = loss_fn(wrapped.model(inputs), targets) * share
                wrapped.backward(loss)
            total[0] += loss.detach()
        return total

    return (0, "gradient", "embedding.weight", "not averaged"), one_by_one
    ### END SOLUTION


# %% tags=["check"] exercise="clinic-2"
check("clinic-2", the_first_and_the_last)

# %% [markdown]
# Here the copies on the ranks drift apart, since each rank adds a gradient of its own. That can be
# seen without any reference: `course diff RUN`, with one run only, compares the copies of the same
# tensor on several ranks.

# %%
patient = CASES["its own ruler"]
print(patient.symptoms, patient.code, sep="\n\n")

# %% [markdown]
# ### Exercise 3: its own ruler
#
# *Difficulty 3 of 5, importance 4 of 5, about 8 minutes.*
#
# With FSDP (lesson 10), each rank holds a shard of every gradient. `clip` scales this rank's
# gradients so that the norm of the *whole* gradient is at most `max_norm`. `clip_shards` adds the
# squares of its first argument over each process group in `groups`. `mesh.group(axis)` is the group
# of an axis; `mesh.copies` is the group of the data-parallel ranks, over which FSDP shards. (The
# faulty code's `counted_once_here` is `counted_here`.) Return the diagnosis, and the mended
# function. About 10 lines, of which one changes.


# %% tags=["exercise"] exercise="clinic-3"
def its_own_ruler():
    """Return (step, phase, parameter, kind), and the function that ends the fault."""

    ### BEGIN SOLUTION: over which ranks are squares added?
    def clip(module, mesh, max_norm, held=None, *, scaled=None):
        grads = held_grads(module) if held is None else held
        counted = counted_here(module, mesh)
        groups = [mesh.group(axis) for axis in ("tp", "pp") if mesh.size(axis) > 1]
        return clip_shards(
            [one.grad for one in grads if one.param in counted],
            max_norm,
            [*groups, mesh.copies],
            scaled=[one.grad for one in grads] if scaled is None else scaled,
        )

    return (0, "parameter", "embedding.weight", "right"), clip
    ### END SOLUTION


# %% tags=["check"] exercise="clinic-3"
check("clinic-3", its_own_ruler)

# %%
patient = CASES["the experts' share"]
print(patient.symptoms, patient.code, sep="\n\n")

# %% [markdown]
# ### Exercise 4: the experts' share
#
# *Difficulty 3 of 5, importance 4 of 5, about 8 minutes.*
#
# Each expert is on one of two ranks, and gets tokens of both (lesson 16). The layer calls
# `scale_grad(x, factor)` twice: on the inputs of the experts, and on their outputs with
# 1/factor. It has to return the values of `x` as they are, and in backward multiply the gradient by
# `factor`. Example: for `x = 3` and `factor = 2` the result is 3, and the gradient of `x` is 2.
# Return the diagnosis, and the mended function. About 2 lines.
#
# <details><summary>Hint: one line without a class</summary>
# <code>x.detach()</code> has the values of <code>x</code> and no gradient, and
# <code>x - x.detach()</code> is zero, with the gradient of <code>x</code>.
# </details>


# %% tags=["exercise"] exercise="clinic-4"
def the_experts_share():
    """Return (step, phase, parameter, kind), and the function that ends the fault."""

    ### BEGIN SOLUTION: values stay, gradients are multiplied
    def scale_grad(x, factor):
        return x.detach() + factor * (x - x.detach())

    return (0, "gradient", "blocks.0.mlp.experts.0.up.weight", "a multiple"), scale_grad
    ### END SOLUTION


# %% tags=["check"] exercise="clinic-4"
check("clinic-4", the_experts_share)

# %% [markdown]
# **The first difference that you see is evidence, not yet the cause: it says which function to
# read. Then the mend has to leave no difference at all, also on another number of ranks.**
#
# ## 6 A job that stands still
#
# Some faults do show: nothing moves any more. On a laptop the course reports within seconds which
# rank waits for which (lesson 00). On a cluster, NCCL gives up after ten minutes and says only that
# a collective has timed out. PyTorch's *flight recorder* knows more. It keeps the last calls of
# each rank, and writes them to a file per rank on a timeout, if you asked for it before the job
# started (docs/debugging.md has the three lines).
#
# Each process group counts its calls. The n-th call of a group is the same call on all its members,
# so a member that has made fewer calls is *behind*, and the others wait for it. This job ran on
# four ranks: all of them are in the group default_pg, and ranks 0, 1 and ranks 2, 3 are tp groups.
# Three ranks wait. `course hang dumps` prints:

# %%
from course_lib.debugging.flight_recorder import read_dumps
from course_lib.debugging.hang_report import hang_report

dumps = Path(tempfile.mkdtemp())
print(hang_report(read_dumps(jobs.write_dumps(dumps))))

# %% [markdown]
# Ranks 0 and 1 time out first, and their logs will name the call at line 88. But they only wait for
# ranks 2 and 3; rank 2 is stuck itself, at line 91, and waits for rank 3. Rank 3 waits for nobody:
# look at its log, its node, its data. (The dump is written by hand for this page, in the format of
# real ones.)
#
# ### Exercise 5 (core): who is behind
#
# *Difficulty 3 of 5, importance 5 of 5, about 8 minutes.*
#
# Return a dict: for each rank that is behind, the sorted list of `(group, number)` of calls in
# which others wait for it. `calls[rank]` lists a rank's calls, oldest first, as `(group, number,
# kind, is_done)`; a rank without a dump is not in it. `members[group]` lists ranks. A rank waits in
# its oldest open call, for members whose numbers are all smaller. A rank that waits is not behind.
# The job above gives `{3: [("default_pg", 42), ("tp (2)", 1205)]}`. About 12 lines.


# %% tags=["exercise"] exercise="clinic-5"
def who_is_behind(calls, members):
    """Return for each rank that is behind the calls that others wait in: {rank: [(group, n)]}."""
    ### BEGIN SOLUTION: who lacks each oldest open call, and waits for nobody?
    waits = {}
    for rank, made in calls.items():
        for group, number, _, _ in [call for call in made if not call[3]][:1]:
            missing = [
                other
                for other in members[group]
                if not any(g == group and n >= number for g, n, _, _ in calls.get(other, ()))
            ]
            if missing:
                waits[rank] = (group, number), missing
    behind = {}
    for call, missing in waits.values():
        for other in missing:
            if other not in waits:
                behind.setdefault(other, set()).add(call)
    return {rank: sorted(found) for rank, found in behind.items()}
    ### END SOLUTION


# %% tags=["check"] exercise="clinic-5"
check("clinic-5", who_is_behind)

# %% [markdown]
# **Whoever times out first is rarely the cause. Follow the waits to the rank that waits for
# nobody.**
#
# ## 7 A job that is slow
#
# The last patient computes the right numbers, and too few of them per second. Its four ranks train
# with data parallelism. One of them is the straggler. A profiler shows long all-reduces on three
# ranks, and short ones on the fourth. Is the straggler among the three?

# %% tags=["predict"]
guess_straggler = predict(
    "the straggler's all-reduce is", choices=("longer than the others'", "shorter")
)
### GUESS guess_straggler.commit("longer than the others'")

# %%
from course_lib.debugging.time_report import time_report

records = Path(tempfile.mkdtemp())
times = time_report(jobs.write_records(records))
late, _ = times.straggler()
waits = [one.wait_s for one in times.ranks]
reveal(guess_straggler, "shorter" if waits[late] == min(waits) else "longer than the others'")
print(*times.lines(), sep="\n")

# %% [markdown]
# A collective begins when its last rank calls it. Until then all others wait inside it, so their
# all-reduces look long. The straggler calls last, waits for nobody, and has the shortest
# all-reduce. `course why RUN` prints this table for a recorded run (these records are made up), and
# whether the rank computes longer or begins later: a slow GPU or a slow data loader. "The run does
# not scale: why?" in docs/debugging.md is a list of questions to ask in this order.
#
# **Long collectives are a symptom of somebody else's delay. Look at who calls last.**
#
# ## 8 The ward
#
# All patients, with what their owners know: the symptoms, the ranks, and the settings. Those that
# you have not met are exercises without a check. Ten minutes are enough for each:
#
# 1. Read symptoms and settings. Which methods are at work? Write down a guess.
# 2. Run `print(examine(CASES["..."], steps=3))`, and read the first difference and the line below
#    it. Activations cannot be compared one by one with those of one process, as each method divides
#    them in its own way. But their mean square over all ranks does not depend on that. So the line
#    says whether the ranks read other data, at which module the forward pass parts, or that all
#    before the gradient seems to be right.
# 3. Name the place and the fault in your own words ("the moments are not loaded") before you open
#    anything.
# 4. Now `print(CASES["..."].place, CASES["..."].code)`: were you right? Mend the function, and
#    examine again with it. `CASES["..."].source` says where the fault was found.

# %%
for name, one in CASES.items():
    print(f"{name}: {one.symptoms}\n    {one.ranks} ranks, {dict(one.settings)}")

# %% [markdown]
# ## What to keep
#
# - A loss that falls proves little. Before a long run, train a few steps in float64, beside one
#   process, and compare everything.
# - Look at the first difference: start, gradient or parameter. Then at which parameters differ.
# - Replicate, Invariant, Varying: how a parameter is used decides whether its gradient is summed.
# - AdamW hides wrong constants. Compare with SGD, too.
# - A mend is proven by equality, on more than one number of ranks.
# - In a hang, follow the waits to the rank that waits for nobody; in a slow job, look at who calls
#   last.
#
# In your own code, `record_run` records any module and any loop, and `course diff RUN_A RUN_B`
# prints the report of this lesson.
#
# **Read on**
#
# - docs/debugging.md: the same instruments for your own runs, and NCCL's log line by line.
# - meta-pytorch/spmd_types 2026, *Types*: where the four names come from.
# - transformers #34191; Megatron-LM #1446 and #844; torchtitan #596; FunASR #3472; accelerate #4233
#   and #963: the faults of this lesson, as they were found.
# - Zhang et al. 2022, *OPT*, section 2.5: what went wrong in a run of two months.
