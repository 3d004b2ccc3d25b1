# %% [markdown]
# # 14 Checkpoint: survive
#
# The job that trained Llama 3 405B on up to 16,384 GPUs was interrupted every three hours on
# average (section 8). To continue after an interruption, a job needs its saved state: a
# **checkpoint**. **How do many ranks save one state, completely or not at all? What belongs to this
# state? How often should they save it?**
#
# *After this lesson you can*
#
# - save a state in shards, and publish the checkpoint atomically;
# - load it with another number of ranks or another strategy;
# - say which state a resumed run needs to continue bit for bit;
# - hide most of a save behind training;
# - compute the best interval between checkpoints for your cluster.
#
# **Prerequisites:** lessons 06 (DDP), 09 (ZeRO) and 10 (FSDP). **Time:** 55 minutes of reading and
# 80 of exercises, with a break after section 5. Exercises 1 to 3 are the core; exercise 4 goes
# further.
#
# | symbol | in code | meaning |
# |---|---|---|
# | $p$ | `p` | ranks |
# | $\delta$ | `save_s` | seconds for which a save stops the training |
# | $M$ | `mtbf_s` | mean time between failures of the whole job, in seconds |
# | $R$ | `restart_s` | seconds from a failure until training goes on |
# | $t$ | `interval_s` | seconds of work between two checkpoints |

# %%
# %load_ext course_lib.ranks
import shutil
from functools import partial
from tempfile import mkdtemp

import torch

from course_lib.checkpoint import all_checkpoints, cost, explorer, lab, latest, pictures
from course_lib.checkpoint.power_cut import EmulatedDisk, cuts
from course_lib.checkpoint.small_trainer import SmallTrainer, snapshot
from course_lib.checks import check
from course_lib.core import Link
from course_lib.core.units import format_bytes
from course_lib.display import claim, predict, reveal, show
from course_lib.ranks import RankError, Ranks

FOLDER = mkdtemp()

# %% [markdown]
# ## 1 Why not through one rank
#
# How large is the state that has to be saved? In fp32, the parameters and Adam's two moments take
# 12 bytes per parameter. Gradients and the bf16 copy of the parameters are not saved, because each
# step computes them again.
#
# With FSDP, each rank has one shard of this state. The obvious way to save it gathers all shards on
# rank 0, which then writes one file. This has two drawbacks. Rank 0 needs room for the whole state,
# which sharding was meant to avoid. And all other ranks wait for one link and one writer. The
# alternative is that **every rank writes its own shard**.
#
# Suppose that four ranks save 8 MiB in all. They are joined by a link of 40 MB/s, and each rank can
# write 40 MB/s to its disk (link and disks are emulated). Divide the time of a save through rank 0
# by the time with four writers. What is the ratio?

# %% tags=["predict"]
wire = Link(name="slow Ethernet", latency_s=1e-3, bytes_per_s=40e6)
print(f"8 billion parameters: {format_bytes(cost.bytes_of_checkpoint(8 * 10**9))}")
guess_saves = predict("time through rank 0, divided by that of four writers")
### GUESS guess_saves.commit(4)

# %%
MIB_8, DISK = 8 * 2**20, 40e6
one_s = cost.save_s_through_one(MIB_8, 4, wire.bytes_per_s, DISK)
four_s = cost.save_s_sharded(MIB_8, 4, DISK)
print(f"predicted: {1e3 * one_s:.0f} ms through rank 0, {1e3 * four_s:.0f} ms by every rank")
reveal(guess_saves, one_s / four_s)

# %% tags=["picture", "measured"]
with Ranks(4, link=wire) as wired:
    saves = lab.measure_saves(wired, MIB_8, DISK)
through_s, sharded_s = (lab.duration_s(events) for events in saves.values())
claim("a save by every rank takes less time", sharded_s < through_s)
show(*pictures.saves(saves, MIB_8, f"{wire}; emulated disks, 40 MB/s each"))

# %% [markdown]
# Where does the ratio come from? Let the state have $N$ bytes, and let link and disk both move $W$
# bytes per second. Rank 0 first receives three quarters of the state, then writes all of it:
# $\frac{3}{4}N/W + N/W$. With four writers, each rank writes a quarter, all at the same time:
# $\frac{1}{4}N/W$. So the save through rank 0 takes seven times as long.
#
# More writers save faster, but not without limit: all of them share the storage, and at some number
# of writers it is saturated (`storage_bytes_per_s` in `cost.save_s_sharded`).
#
# **If ranks and state grow by the same factor, a sharded save takes about the same time, until the
# storage is saturated.**
#
# ## 2 Whole or not at all
#
# A sharded save is faster, but it consists of many files. What if the job is killed when only some
# of them are written? The more often a run saves, the more likely this is.
#
# **Break it:** the next cell saves in place, that is, it overwrites the files of the last
# checkpoint. Each of two ranks has one file. The cell prints what is left in the two files if the
# save is killed before an operation or in the middle of a write.

# %%
OLD = {"a": b"step 1, rank 0", "b": b"step 1, rank 1"}
NEW = {"a": b"step 2, rank 0", "b": b"step 2, rank 1"}
disk = EmulatedDisk(OLD)
for name, content in NEW.items():
    disk.write(name, content)
    disk.sync(name)
for cut in cuts(OLD, disk.operations):
    if cut.how != "power cut":
        files = " | ".join(file.decode() for file in cut.files.values())
        place = "of" if cut.how.endswith("middle") else "before"
        print(f"{cut.how} {place} operation {cut.done}: {files}")

# %% [markdown]
# The old checkpoint is gone before the new one is complete. The worst case is a kill between the
# two files: each file is complete, but they come from different steps. The model would load without
# an error.
#
# So a save must not overwrite anything. It puts new files beside the old ones, and writes last a
# small **manifest**, a file that names all others. *A checkpoint exists if its manifest does.* Then
# a kill before the last operation leaves only the old checkpoint, and some files that no later run
# reads.
#
# A power cut is harder than a kill, because the operating system keeps recent writes in a cache.
# Three facts about journaling file systems matter:
#
# - A kill can cut a `write` anywhere. Within one file system, `rename(name, to)` happens completely
#   or not at all: it is *atomic*.
# - `sync(name)` (`os.fsync`) waits until the *content* of a file has left the cache and is on the
#   disk. Without it, a power cut may leave the manifest and lose the data.
# - `sync_names()` (`os.fsync` on each changed folder, and on the parent of a new one) waits until
#   changes of *names* (files created, renamed, removed) are on the disk. Until then, a power cut
#   may undo changes, in each folder separately, the latest ones first.
#
# By a *cut* we mean a kill or a power cut. After a cut at any moment, two rules have to hold:
#
# 1. Each folder that contains a manifest is a complete checkpoint.
# 2. If there was an old checkpoint, the old one or the new one is there.
#
# ### Exercise 1 (core): publish
# *Difficulty 4 of 5, importance 5 of 5, about 20 minutes and 12 lines.*
#
# Save a checkpoint that keeps both rules. Write the `files` (content by name) into the folder `new`
# with `disk.write(f"{new}/{name}", content)`. Publish them with `manifest`, the content of
# `{new}/manifest.json`. Only when the new checkpoint survives any cut, remove every file of `old`
# (`disk.names(old)`, `disk.remove(f"{old}/{name}")`); at the first save, `old` is None. A killed
# save may have left files in `new`, of any name except `manifest.json`: in the end, only `files`
# and the manifest are there.
#
# <details><summary>Hint: published, and not whole</summary>
# While you remove files, `old` has to be complete or not to count as a checkpoint. Which file do
# you remove first?
# </details>


# %% tags=["exercise"] exercise="checkpoint-1"
def publish(disk, files, manifest, new, old):
    """Write the checkpoint `new`, whole or not at all; then remove `old`."""
    ### BEGIN SOLUTION: data, manifest beside, rename; then the old one
    for left in [f"{new}/{name}" for name in disk.names(new)]:
        disk.remove(left)
    for name, content in files.items():
        disk.write(f"{new}/{name}", content)
        disk.sync(f"{new}/{name}")
    disk.write(f"{new}/manifest.tmp", manifest)
    disk.sync(f"{new}/manifest.tmp")
    disk.rename(f"{new}/manifest.tmp", f"{new}/manifest.json")
    disk.sync_names()
    if old:
        for name in sorted(disk.names(old), key=lambda name: name != "manifest.json"):
            disk.remove(f"{old}/{name}")
    ### END SOLUTION


# %% tags=["check"] exercise="checkpoint-1"
check("checkpoint-1", publish)

# %% [markdown]
# The course's library follows the same order. It also adds a hash of each file to the manifest,
# because disks and networks can damage files, too. When a run resumes, all ranks together load the
# newest checkpoint whose hashes match.
#
# **Write beside, sync, then publish with one atomic operation.**
#
# ## 3 Boxes
#
# A complete checkpoint can still be useless. Suppose that one of four machines is lost, and the job
# has to go on with fewer ranks: which rank then reads which file? The files have to say which part
# of the model they contain, and not only which rank wrote them.
#
# To see how, FSDP now trains 10 steps on 4 ranks, and saves a checkpoint after every 5 steps. The
# code that trains is the one of `python -m course_lib.train`.

# %% tags=["measured"]
from dataclasses import replace
from pathlib import Path

from course_lib.core import MODELS
from course_lib.train.config import TrainConfig
from course_lib.train.trainer import train

sizes = {"model": MODELS["tiny"], "global_batch": 4, "seq": 8, "steps": 20}
run = TrainConfig(**sizes, strategy="fsdp", save_every=5, every=0, out=FOLDER)
on_4 = replace(run, steps=10, out=f"{FOLDER}/fsdp on 4")
four, pair = Ranks(4), Ranks(2)
four.run(train, on_4)
found = latest(on_4.checkpoints)
for path in sorted(Path(found.path).iterdir()):
    print(f"{path.parent.name}/{path.name}: {format_bytes(path.stat().st_size)}")

# %%
name = "model.blocks.0.mlp.up.weight"
saved = found.manifest.tensors[name]
print(name, saved.dtype, saved.shape)
for piece in saved.pieces:
    print(f"  rank {int(piece.file[-17:-12])} wrote: from {piece.offsets}, {piece.sizes}")
reads = found.manifest.tensors["optimizer.exp_avg.blocks.0.mlp.up.weight"]
print("and of Adam:", reads.shape, "in", len(reads.pieces), "pieces")

# %% [markdown]
# The manifest is JSON. For each tensor, it lists the pieces in which the tensor was saved. A piece
# is a **box**: it says where the piece begins in the *whole* tensor, and its sizes. Most ways of
# sharding give boxes. The rows that FSDP keeps on a rank form a box, and so do the columns of
# tensor parallelism. A range of ZeRO's flat parameter may begin in the middle of a row, so it
# becomes a few boxes per tensor.
#
# To load, each rank knows which boxes it needs. It intersects them with the saved boxes, and reads
# only the rows in which they overlap. No rank has to build the whole tensor.
#
# For example, four ranks saved a tensor of ten rows (3, 3, 3 and 1), and 2 ranks load 5 rows each.
# The picture shows which saved boxes each of the two has to read from.

# %% tags=["picture"]
from operator import add, lt, sub

from course_lib.core.shards import Box

by_4 = [Box((start, 0), (size, 6)) for start, size in ((0, 3), (3, 3), (6, 3), (9, 1))]
by_2 = [Box((start, 0), (size, 6)) for start, size in ((0, 5), (5, 5))]
show(*pictures.boxes((10, 6), by_4, by_2))

# %% [markdown]
# The boxes do not match: rows 3 to 5 are one saved box, but both loading ranks need a part of it.
# So each of them reads its part.
#
# ### Exercise 2 (core): reshard
# *Difficulty 3 of 5, importance 5 of 5, about 20 minutes and 8 lines.*
#
# Return what one rank has to read, so that any number of ranks can load. `saved` is a list of boxes
# with their files: `(file, offsets, sizes)`. `wanted` is one box: `(offsets, sizes)`. Offsets count
# from the beginning of the whole tensor, which may have any number of dims. Return a list of
# `(file, begin in the saved box, begin in the wanted box, sizes)`, in any order, of the overlaps
# only. For `saved = [("a", [3], [3])]` and `wanted = ([5], [5])`, return `[("a", [2], [0], [1])]`.
#
# <details><summary>Hint: one dim</summary>
# The saved box has 3 rows and begins at row 3; the wanted box has 5 rows and begins at row 5. The
# overlap begins at row 5 and ends before row 6.
# </details>


# %% tags=["exercise"] exercise="checkpoint-2"
def pieces_to_read(saved, wanted):
    """Return what to read: (file, begin in the saved box, begin in the wanted one, sizes)."""
    ### BEGIN SOLUTION: the later beginning, the earlier end, in each dim
    found = []
    for file, offsets, sizes in saved:
        start = list(map(max, offsets, wanted[0]))
        stop = list(map(min, map(add, offsets, sizes), map(add, *wanted)))
        if all(map(lt, start, stop)):
            in_file, in_rank = map(sub, start, offsets), map(sub, start, wanted[0])
            found.append((file, list(in_file), list(in_rank), list(map(sub, stop, start))))
    return found
    ### END SOLUTION


# %% tags=["check"] exercise="checkpoint-2"
check("checkpoint-2", pieces_to_read)

# %% [markdown]
# **Save pieces as boxes of the whole tensor: then any number of ranks can load them.**
#
# ## 4 All of the state
#
# We can now save tensors completely, and load them on any number of ranks. But which values belong
# to the state of a training run? The weights alone are not enough: the optimizer has momentum, for
# example.
#
# `SmallTrainer` has what real training programs have: momentum, a learning-rate schedule, a sampler
# that shuffles, dropout, and data augmentation that draws from Python's random numbers. Its state
# has 8 parts, of which weights and momentum are two. We save only these two after step 5, and load
# them into a new trainer. How many parts of the state then differ from those of the run that never
# stopped?

# %% tags=["predict"]
guess_state = predict("parts of the state that differ, of 8")
### GUESS guess_state.commit(2)

# %%
import copy
import random

whole = SmallTrainer(seed=0)
losses = [whole.train_step() for _ in range(5)]
kept = copy.deepcopy((whole.model.state_dict(), whole.optimizer.state_dict()))
right, goes_on = snapshot(whole), [whole.train_step() for _ in range(3)]
resumed = SmallTrainer(seed=1)
resumed.model.load_state_dict(kept[0])
resumed.optimizer.load_state_dict(kept[1])
other = [part for part, now in snapshot(resumed).items() if now != right[part]]
print("never stopped:", *(f"{loss:.4f}" for loss in goes_on))
print("resumed:      ", *(f"{resumed.train_step():.4f}" for _ in range(3)))
print("differ:", ", ".join(other))
reveal(guess_state, len(other))

# %% [markdown]
# No error was raised. Had you seen only the second line of losses, it would have looked plausible.
# So it is not enough to look at the loss curve of a resumed run. The test has to be stricter: the
# resumed run continues **bit for bit**, with exactly the numbers of the run that never stopped.
#
# This test has two limits. On GPUs, it needs deterministic kernels. And with another number of
# ranks, sums are added in another order and random numbers change; then compare a few steps without
# dropout, within rounding errors.
#
# ### Exercise 3 (core): which state is missing
# *Difficulty 3 of 5, importance 5 of 5, about 20 minutes and 13 lines.*
#
# Make a run resume bit for bit. `save(trainer)` returns all state of a `SmallTrainer`;
# `load(trainer, state)` puts it into a new trainer. `load` is called on another `Resume` object, so
# keep nothing in `self`. The trainer's attributes are `model`, `optimizer`, `scheduler`, `epoch`,
# `position` (samples used of the epoch) and `step`. Training after `save` or `load` must not change
# the saved state. For example, a state saved after step 5 must resume at step 5, even if the first
# trainer has trained on.
#
# <details><summary>Hint: a later step came back</summary>
# <code>state_dict()</code> refers to live tensors, and an optimizer keeps those it loads: use
# <code>copy.deepcopy</code> twice.
# </details>


# %% tags=["exercise"] exercise="checkpoint-3"
class Resume:
    """All the state of a SmallTrainer."""

    def save(self, trainer):
        ### BEGIN SOLUTION: what is not here starts again
        state = {
            "model": trainer.model.state_dict(),
            "optimizer": trainer.optimizer.state_dict(),
            "scheduler": trainer.scheduler.state_dict(),
            "counts": (trainer.epoch, trainer.position, trainer.step),
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
        }
        return copy.deepcopy(state)
        ### END SOLUTION

    def load(self, trainer, state):
        ### BEGIN SOLUTION: a copy, and the random numbers last
        state = copy.deepcopy(state)
        trainer.model.load_state_dict(state["model"])
        trainer.optimizer.load_state_dict(state["optimizer"])
        trainer.scheduler.load_state_dict(state["scheduler"])
        trainer.epoch, trainer.position, trainer.step = state["counts"]
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        ### END SOLUTION


# %% tags=["check"] exercise="checkpoint-3"
check("checkpoint-3", Resume)

# %% [markdown]
# With many ranks, each rank draws its own random numbers, so the course's library saves one
# `rng_state()` per rank. The sampler is simpler: if its position counts the samples of *all* ranks,
# the epoch and this position are enough, also for another number of ranks.
#
# **State that is not saved starts again from its initial value, often without an error: compare
# bits, not curves.**
#
# ## 5 Kill a rank
#
# The parts are ready: sharded files, a manifest, boxes, and the whole state. Do they survive a real
# kill? Two ranks train 20 steps, and save after every 5 steps. Rank 1 is killed (SIGKILL) while it
# *writes the checkpoint* of step 15. At which step does the training resume?

# %% tags=["predict"]
guess_resume = predict("step of the newest whole checkpoint")
### GUESS guess_resume.commit(15)


# %% tags=["failure", "measured"]
def losses_of(config):
    return {step["step"]: step["loss"] for step in pair.run(train, config)[0].steps}


never_stopped = losses_of(replace(run, out=f"{FOLDER}/whole"))
killed = replace(run, out=f"{FOLDER}/killed")
try:
    pair.run(lab.die_in_save, 1, 3, train, killed)  # rank 1, in its third save
except RankError as died:
    print(str(died).splitlines()[0])

# %% tags=["check"]
reveal(guess_resume, latest(killed.checkpoints).step)
continued = losses_of(replace(killed, resume=True))
same = all(never_stopped[step] == loss for step, loss in continued.items())
print(f"resumed at step {min(continued)}; equal bits to the end: {same}")
print("whole checkpoints still there:", [one.step for one in all_checkpoints(killed.checkpoints)])

# %% [markdown]
# The checkpoint of step 15 has no manifest, so it does not exist for the resumed run. Only the
# steps since the last whole checkpoint are lost, and the losses after the resume equal those of the
# run that never stopped, to the last bit.
#
# How does a job find out that a rank is gone? A launcher (`Ranks`, `torchrun`) notices at once when
# a process of its own machine is killed. If a whole machine is lost, the ranks on other machines
# may wait in a collective until PyTorch's time-out (lesson 00).
#
# Press *Train*, and kill a rank.

# %%
explorer.FailureLab(train, replace(run, steps=1000, save_every=20))

# %% [markdown]
# **If the newest checkpoint is undamaged, a failure costs at most one interval, one save and one
# restart.**
#
# *This is a good place for a break.*
#
# ## 6 Another size, another strategy
#
# The killed run resumed with the same number of ranks and the same strategy. After a failure, fewer
# GPUs may be left, and another strategy may suit them better. Does a checkpoint bind you to the old
# choice?
#
# Here 2 ranks load the checkpoint that FSDP saved on 4 ranks, with three strategies in turn. Names
# and boxes refer to the whole model, so all strategies read the same files. How far are the losses
# from those of section 5's run that never stopped?

# %% tags=["check"]
for strategy in ("ddp", "fsdp", "zero3"):
    on_2 = replace(on_4, strategy=strategy, steps=15, resume=True, out=f"{FOLDER}/{strategy} on 2")
    shutil.copytree(on_4.out, on_2.out)
    continued = losses_of(on_2)
    apart = max(abs(loss - never_stopped[step]) for step, loss in continued.items())
    print(f"{strategy} on 2 ranks, from step {min(continued)}: within 1e-4: {apart < 1e-4}")

# %% [markdown]
# The losses agree within 1e-4. They need not agree bit for bit, because the gradients of 4 ranks
# are added in another order than those of 2.
#
# **The tensors of a checkpoint describe the model, not the ranks that wrote it.**
#
# ## 7 Save while training goes on
#
# A save of this kind is safe, but training stops until it is written. Most of this time is spent on
# the disk, which the GPUs do not need. An **asynchronous** save uses this: it copies the rank's
# shard to host memory and returns; a thread then writes the copy while the next steps compute.
#
# In this experiment, a step takes 20 ms. (It sleeps, like a CPU that waits for its GPU.) After the
# third step, each rank saves 32 MiB. Measure for how long a save stops the training, and divide the
# time of an asynchronous save by that of a plain one. What is the ratio?

# %% tags=["predict"]
guess_hidden = predict("time stopped by an async save, divided by that of a plain one")
### GUESS guess_hidden.commit(0.1)

# %% tags=["picture", "measured"]
measure = partial(pair.run, lab.measure_overlap, 64 * 2**20)
ways = {"save": measure(asynchronous=False)[0], "save_async": measure(asynchronous=True)[0]}
plain_s, async_s = (way.blocked_s for way in ways.values())
reveal(guess_hidden, async_s / plain_s)
claim("an asynchronous save stops training for less time", async_s < plain_s)
show(*pictures.overlap({name: way.events for name, way in ways.items()}))

# %% [markdown]
# In the picture, training waits in the gray spans, and the thread writes to the disk in the brown
# ones. Even the asynchronous save stops training for a while: the ranks agree on who writes what,
# and each copies its shard. There is also a limit. If writing takes longer than the interval, the
# next save has to wait for it.
#
# Can we avoid the copy? **Break it:** the next cell writes one number per step while training goes
# on, once from the parameters themselves and once from a copy.

# %%
live = torch.zeros(4)
referred, copied = live, live.clone()  # what a careless and a careful thread hold
written = []
for step in range(4):  # the thread writes a number per step, training adds 1
    written.append((referred[step].item(), copied[step].item()))
    live += 1
print("without a copy:", [int(one) for one, _ in written])
print("with a copy:   ", [int(one) for _, one in written])

# %% [markdown]
# Without a copy, training changes the parameters while the thread writes them. So one file contains
# numbers of four different steps. A hash does not help: it is computed from what was written, so it
# may still match.
#
# **An asynchronous save copies first, then returns and writes: it still costs the agreement, the
# copy and its memory.**
#
# ## 8 How often
#
# A save stops training for a short time, but not for none. If you save too often, these times add
# up. If you save too rarely, a failure destroys much work. Which interval is best?
#
# Begin with a run without failures. Each interval of $t$ seconds of work costs one save, $\delta$.
# To test this, we run 1000 steps of 1 ms, and save a state of 4 MB every 50 to 500 steps. The
# formula takes $\delta$ from the run with interval 100, so only the other points test it.

# %% tags=["picture", "measured"]
extra = {every: pair.run(lab.extra_time, every)[0] for every in (50, 100, 200, 500)}
extra_s = {every: seconds for every, (seconds, _) in extra.items()}
save_s = extra[100][0] / extra[100][1]  # all seconds, divided by the number of saves
show(*pictures.extra_time(1000, extra_s, save_s))

# %% [markdown]
# Without failures, the longest interval would be the best. Now let the job fail every $M$ seconds
# on average. Per second of work:
#
# - there are $1/t$ saves, and each costs $\delta$: together $\delta/t$;
# - there are about $1/M$ failures, if $\delta$, $t$ and $R$ are much shorter than $M$. Each comes,
#   on average, in the middle of an interval, so it destroys $t/2$ of work, and it costs a restart
#   $R$: together $t/(2M) + R/M$.
#
# So the overhead is $\delta/t + t/(2M) + R/M$. The first term falls with $t$, and the second one
# grows. Their sum is smallest where its derivative is zero:
#
# $$-\frac{\delta}{t^2} + \frac{1}{2M} = 0 \quad\Rightarrow\quad t = \sqrt{2 \delta M}$$
#
# This is Young's (1974) interval. Daly (2006) also counts failures during saves and restarts. This
# matters where $M$ is not much larger than $\delta$, which is 5 minutes in the picture.

# %% tags=["picture"]
show(*pictures.best_intervals())

# %% [markdown]
# Now take a real job. Llama 3 405B was trained on up to 16,384 GPUs, with 419 unexpected
# interruptions in a period of 54 days (Grattafiori et al. 2024, section 3.3.4). Suppose that a save
# stopped the training for 30 seconds and that a restart took 10 minutes (both are our guesses).
# What is the best interval?

# %% tags=["predict"]
guess_interval = predict("best interval of work between checkpoints", unit="min")
### GUESS guess_interval.commit(60)

# %%
from math import sqrt

mtbf_s = cost.LLAMA3_S / cost.LLAMA3_FAILURES
print(f"an interruption every {mtbf_s / 3600:.1f} h")
years = mtbf_s * cost.LLAMA3_GPUS / cost.DAY_S / 365
print(f"an interruption per GPU every {years:.1f} years, whatever its cause")
reveal(guess_interval, cost.best_interval_daly(30, mtbf_s) / 60)

# %% tags=["picture"]
explorer.interval_explorer()

# %% [markdown]
# You need not hit the optimum exactly, because the curve is flat around it. In Young's formula, the
# two terms that depend on $t$ are equal at the best interval. At twice this interval, one of them
# is halved and the other one doubled: their sum grows by a quarter only. Choose numbers close to
# those of your cluster. (Grattafiori et al. report more than 90 % effective training time, so our
# guesses are probably too high.)
#
# ### Exercise 4 (further): the best interval
# *Difficulty 2 of 5, importance 4 of 5, about 20 minutes and 4 lines.*
#
# You measured the seconds of a save, a step and a restart, and counted `failures` in `seen_s`
# seconds on `gpus_then` GPUs. Plan a job on `gpus` GPUs, with the same failure rate per GPU. Return
# the number of **steps** between checkpoints (Young's interval, rounded, at least 1), and the
# overhead $\delta/t + t/(2M) + R/M$ at this number of steps, as a fraction. With `save_s` = 2,
# `step_s` = 1, `restart_s` = 10, and 1 failure in 100 s on 4 GPUs, 16 GPUs need `(10, 0.8)`.
#
# <details><summary>Hint: the overhead</summary>
# Per second of work, add the cost of saves, and the failures times the cost of one failure.
# </details>


# %% tags=["exercise"] exercise="checkpoint-4"
def best_interval(save_s, step_s, restart_s, failures, seen_s, gpus_then, gpus):
    """Return the steps between checkpoints, and the expected overhead."""
    ### BEGIN SOLUTION: the time between failures, Young's interval, and its price
    mtbf_s = seen_s / failures * gpus_then / gpus
    steps = max(1, round(sqrt(2 * save_s * mtbf_s) / step_s))
    interval_s = steps * step_s
    return steps, save_s / interval_s + (interval_s / 2 + restart_s) / mtbf_s
    ### END SOLUTION


# %% tags=["check"] exercise="checkpoint-4"
check("checkpoint-4", best_interval)

# %% [markdown]
# **Young's best interval is proportional to $\sqrt{\delta M}$: with 4 times the GPUs and the same
# save time, it is half as long.**
#
# ## 9 The real thing
#
# You would rarely write all of this yourself. PyTorch has `torch.distributed.checkpoint` (DCP),
# which also saves boxes: a data file per rank, and a `.metadata` file in place of our manifest. We
# save the same state in both formats:

# %% tags=["measured"]
rows = pair.run(lab.beside_dcp, f"{FOLDER}/formats")[0]
for name, one in rows.items():
    words = f"{format_bytes(one.num_bytes)} in {one.num_files} files"
    print(f"{name}: {words}, {1e3 * one.save_s:.0f} ms")

# %% [markdown]
# Each format needs two data files and a file that describes them. Our code adds the fourth file
# (`.lock` to our format, `about.json` to DCP's). DCP has three traps:
#
# - `async_save` communicates in a thread. Give it a process group of its own
#   (`process_group=dist.new_group(backend="gloo")`); otherwise, its messages can mix with those of
#   your training on gloo.
# - `.metadata` and the non-tensor values in the data files are **pickles, and loading a pickle can
#   run any code**. Our `load_dcp` allows only the classes that a checkpoint needs. Safetensors and
#   JSON cannot contain code.
# - DCP checks no hashes (PyTorch 2.13), so it does not notice a damaged file.
#
# **Both formats save boxes; never unpickle a file that you do not trust.**
#
# ## 10 Without you
#
# A job may die at night, when you are not there to start it again. It has to resume by itself. What
# this needs depends on what has failed.
#
# **A process dies.** `torchrun --max-restarts n` restarts all ranks when one dies, up to `n` times,
# and the training script resumes from its newest checkpoint:
#
# `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node 4 --max-restarts 2 -m
# course_lib.train --strategy fsdp --save-every 20 --out runs/elastic`
#
# (Without that variable, restarts can fail to connect: PyTorch issue 135712.)
#
# **A node dies.** With `--nnodes 1:2 --rdzv-backend c10d --rdzv-endpoint HOST` in place of
# `--standalone`, the job continues with the nodes that are left, if HOST is one of them.
#
# **The scheduler needs its nodes back.** It usually sends a signal first. On SIGTERM or SIGUSR1,
# all ranks of the course's training finish this step or the next, save, and exit with code 75 (try
# later). This has to take less than torchrun's 30 s (`--shutdown-timeout`) and Slurm's `KillWait`.
# `torchrun` passes SIGTERM on to the ranks, but SIGUSR1 only with `--signals-to-handle`.
#
# **The time limit comes.** In Slurm, `cluster/requeue.sbatch` gets a signal at least 120 seconds
# before the time limit (`--signal=B:USR1@120`) and calls `scontrol requeue`; Slurm then sends
# SIGTERM. Measure your own cluster with `cluster/exercises/14_checkpoint.py`.
#
# **Test that a killed job resumes by itself.**

# %%
shutil.rmtree(FOLDER)

# %% [markdown]
# ## What to keep
#
# - Every rank writes its shard, and rank 0 publishes a manifest.
# - Write beside, sync, then rename: a checkpoint is there completely or not at all.
# - Boxes of whole tensors can be loaded by any number of ranks and any strategy.
# - Save optimizer, schedule, sampler and the random numbers of every rank; test for equal bits.
# - An asynchronous save copies first.
# - Young's interval is $t = \sqrt{2 \delta M}$, if saves and restarts are much shorter than $M$.
#
# **Read on**
#
# - Young 1974, *A first order approximation to the optimum checkpoint interval*: the formula of
#   section 8, on two pages.
# - Daly 2006, *A higher order estimate of the optimum checkpoint interval for restart dumps*: for
#   jobs that fail often.
# - Grattafiori et al. 2024, *The Llama 3 Herd of Models*, section 3.3.4: what fails, and how often.
# - PyTorch documentation, `torch.distributed.checkpoint`: planners, async, resharding.
# - Pillai et al. 2014, *All file systems are not created equal*: what a crash leaves of your files.
