# %% [markdown]
# # 14 Checkpoint: survive
#
# A job on up to 16,384 GPUs was interrupted every three hours on average (section 8). To continue,
# such a job needs its saved state: a **checkpoint**. **How do many ranks save one state, completely
# or not at all? What belongs to it? How often should they save it?**
#
# *After this lesson you can* save in shards and publish a checkpoint atomically; load it at another
# number of ranks or with another strategy; say which state a resumed run needs to continue bit for
# bit; hide most of a save behind training; compute the best interval for your cluster.
#
# **Prerequisites:** lessons 06 (DDP), 09 (ZeRO) and 10 (FSDP).
# **Time:** 60 minutes of reading and 80 of exercises, with a break after section 5. Exercises 1 to
# 3 are the core; exercise 4 goes further.
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
# In fp32, the parameters and Adam's two moments take 12 bytes per parameter. (Gradients and the
# bf16 copy of the parameters are not saved: each step computes them again.) The obvious way gathers
# all shards on rank 0, which writes one file. But then rank 0 needs room for the whole state, which
# sharding was meant to avoid, and the other ranks wait for one link and one writer. The
# alternative: **every rank writes its own shard**.
#
# Four ranks save 8 MiB in all. A link of 40 MB/s joins them; each writes 40 MB/s to its disk (all
# emulated). What is the time of a save through rank 0, divided by the time with four writers?

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
# Rank 0 first receives three shards, then writes four. The link is as fast as a disk here, so this
# takes seven times as long as writing one shard. More writers save faster until the storage, which
# all of them share, is saturated (`storage_bytes_per_s` in `cost.save_s_sharded`).
#
# **If ranks and state grow by the same factor, a sharded save takes about the same time, until the
# storage is saturated.**
#
# ## 2 Whole or not at all
#
# The more often a run saves, the more likely it is killed during a save. **Break it:** the next
# cell saves in place, over the last checkpoint. What is left if the save is killed after an
# operation, or in the middle of a write?

# %% tags=["predict"]
guess_cut = predict("a kill between the two files leaves", choices=("old", "new", "mix"))
### GUESS guess_cut.commit("old")

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
reveal(guess_cut, "mix")

# %% [markdown]
# Both files can even be complete, but from different steps. The model would load without an error.
# So a save puts new files beside the old ones, and writes a small **manifest**, which names them,
# last. *A checkpoint exists if its manifest does.* Three facts about journaling file
# systems matter:
#
# - A kill can cut a `write` anywhere. Within one file system, `rename(name, to)` happens
#   completely or not at all: it is *atomic*.
# - `sync(name)` (`os.fsync`) waits until the *content* of a file has left the cache and is on the
#   disk. Without it, a power cut may leave the manifest and lose the data.
# - `sync_names()` (`os.fsync` on each changed folder, and on the parent of a new one) waits until
#   changes of *names* (files created, renamed, removed) are on the disk. Until then, a power cut
#   may undo changes, in each folder separately, the latest ones first.
#
# ### Exercise 1 (core): publish
#
# Write the `files` (content by name) into the folder `new`: `disk.write(f"{new}/{name}", content)`.
# Publish them: `manifest` is the content of `{new}/manifest.json`. When the new checkpoint survives
# any cut (a kill or a power cut), remove every file of `old` (`disk.names(old)`,
# `disk.remove(f"{old}/{name}")`); `old` is None at the first save. `new` may contain files of a
# killed save, with any name except `manifest.json`; in the end it contains only `files` and the
# manifest. After a cut at any moment, each folder with a manifest has to be complete, and if there
# was an old checkpoint, the old or the new one has to be there. About 12 lines, 20 minutes.
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
# The course's library adds a hash of each file to the manifest, because disks and networks can
# damage files, too. All ranks together load the newest checkpoint whose hashes match.
#
# **Write beside, sync, then publish with one atomic operation.**
#
# ## 3 Boxes
#
# FSDP trains 10 steps on 4 ranks, and saves a checkpoint after every 5 steps.

# %% tags=["measured"]
from pathlib import Path

four, pair = Ranks(4), Ranks(2)
four.run(lab.train, f"{FOLDER}/fsdp on 4", 10)
found = latest(f"{FOLDER}/fsdp on 4")
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
# The manifest is JSON, and a piece is a **box**: where it begins in the *whole* tensor, and its
# sizes. The rows that FSDP keeps on a rank form a box, and so do the columns of tensor parallelism.
# A range of ZeRO's flat parameter becomes a few boxes per tensor. To load, each rank intersects the
# boxes that it needs with the saved boxes, and reads only the rows in which they overlap.
#
# Four ranks saved ten rows (3, 3, 3 and 1), and 2 ranks load 5 rows each. How many intersections do
# they read in all?

# %% tags=["predict"]
guess_reads = predict("intersections that 2 ranks read")
### GUESS guess_reads.commit(4)

# %% tags=["picture"]
from operator import add, lt, sub

from course_lib.core.shards import Box

by_4 = [Box((start, 0), (size, 6)) for start, size in ((0, 3), (3, 3), (6, 3), (9, 1))]
by_2 = [Box((start, 0), (size, 6)) for start, size in ((0, 5), (5, 5))]
reveal(guess_reads, sum(1 for wanted in by_2 for saved in by_4 if wanted.intersect(saved)))
show(*pictures.boxes((10, 6), by_4, by_2))

# %% [markdown]
# ### Exercise 2 (core): reshard
#
# `saved` is a list of boxes, each with its file: `(file, offsets, sizes)`. `wanted` is one box:
# `(offsets, sizes)`. Offsets count from the beginning of the whole tensor, which may have any
# number of dims. Return what to read and where to put it: a list of `(file, begin in the saved box,
# begin in the wanted box, sizes)`, in any order. Read only the overlap. About 8 lines, 20 minutes.
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
# Weights alone are not enough to continue a run. `SmallTrainer` has momentum, a learning-rate
# schedule, a sampler, dropout, and augmentation that draws from Python's random numbers. Its state
# has 8 parts, of which weights and momentum are two. We save only the weights and the optimizer
# after step 5, and load them into a new trainer. How many parts differ from those of the run that
# never stopped?

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
# No error was raised, and either loss curve would look plausible. So the test is stricter: the
# resumed run has to continue **bit for bit**, with exactly the numbers of the run that never
# stopped. (On GPUs, this needs deterministic kernels. With another number of ranks, sums are added
# in another order and random numbers change: compare a few steps without dropout,
# within rounding errors.)
#
# ### Exercise 3 (core): which state is missing
#
# `save(trainer)` returns all state of a `SmallTrainer`. `load(trainer, state)` puts it into
# a new trainer. `load` is called on another `Resume` object, so keep nothing in `self`. The
# trainer's attributes are `model`, `optimizer`, `scheduler`, `epoch`, `position` (in the epoch) and
# `step`. Training after `save` or `load` must not change the saved state. About 13 lines, 20
# minutes.
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
# With many ranks, each draws its own random numbers: the course's library saves one `rng_state()`
# per rank. The sampler needs none if its position counts the samples of *all* ranks.
#
# **State that is not saved starts again from its initial value, often without an error: compare
# bits, not curves.**
#
# ## 5 Kill a rank
#
# Two ranks train 20 steps, and save after every 5 steps. Rank 1 is killed (SIGKILL) while it
# *writes the checkpoint* of step 15. At which step does the training resume?

# %% tags=["predict"]
guess_resume = predict("step of the newest whole checkpoint")
### GUESS guess_resume.commit(15)

# %% tags=["failure", "measured"]
never_stopped = pair.run(lab.train, f"{FOLDER}/whole", 20)[0]
try:
    pair.run(lab.train, f"{FOLDER}/killed", 20, kill=lab.Kill(1, 14, while_saving=True))
except RankError as died:
    print(str(died).splitlines()[0])

# %% tags=["check"]
newest = latest(f"{FOLDER}/killed")
reveal(guess_resume, newest.step)
continued = pair.run(lab.train, f"{FOLDER}/killed", 20)[0]
same = all(never_stopped[step] == loss for step, loss in continued.items())
print(f"resumed at step {min(continued)}; equal bits to the end: {same}")
print("whole checkpoints still there:", [one.step for one in all_checkpoints(f"{FOLDER}/killed")])

# %% [markdown]
# Only the steps since the last checkpoint are lost. A launcher (`Ranks`, `torchrun`) notices a
# killed process at once. If a machine is lost, the ranks on other machines may wait until PyTorch's
# time-out (lesson 00).
#
# Press *Train*, and kill a rank.

# %%
explorer.FailureLab()

# %% [markdown]
# **If the newest checkpoint is undamaged, a failure costs at most one interval, one save and one
# restart.**
#
# *This is a good place for a break.*
#
# ## 6 Another size, another strategy
#
# Now 2 ranks load the checkpoint that FSDP saved on 4 ranks, with three strategies. Names and boxes
# refer to the whole model, so all strategies read the same files. How far are the losses from those
# of section 5's run that never stopped?

# %% tags=["check"]
for strategy in lab.STRATEGIES:
    folder = f"{FOLDER}/{strategy} on 2"
    shutil.copytree(f"{FOLDER}/fsdp on 4", folder)
    continued = pair.run(lab.train, folder, 15, strategy=strategy)[0]
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
# An **asynchronous** save copies the rank's shard to host memory and returns; a thread writes the
# copy while the next steps compute. Here a step takes 20 ms. (It sleeps, like a CPU that waits for
# its GPU.) After the third step each rank saves 32 MiB. Divide the time for which an asynchronous
# save stops training by the same time for a plain save. What is the ratio?

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
# Gray: training waits. Brown: the thread writes to the disk. Training still waits while the ranks
# agree on who writes what, and while each copies its shard. If an asynchronous save takes longer
# than the interval, the next save has to wait for it.
#
# **Break it:** what if the thread reads the parameters themselves, without the copy?

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
# Without a copy, one file contains numbers of four different steps, and its hash may still match.
#
# **An asynchronous save copies first, then returns and writes: it still costs the agreement, the
# copy and its memory.**
#
# ## 8 How often
#
# Without failures, checkpoints add $\delta$ per interval. We run 1000 steps of 1 ms, and save a
# state of 4 MB every 50 to 500 steps. The formula uses the mean time of a save at interval 100, so
# only the other points test it.

# %% tags=["picture", "measured"]
extra = {every: pair.run(lab.extra_time, every)[0] for every in (50, 100, 200, 500)}
extra_s = {every: seconds for every, (seconds, _) in extra.items()}
save_s = extra[100][0] / extra[100][1]  # all seconds, divided by the number of saves
show(*pictures.extra_time(1000, extra_s, save_s))

# %% [markdown]
# With failures, a long interval loses more work: half an interval on average, at each failure. Per
# second of work, saving costs $\delta/t$, and failures cost $t/(2M) + R/M$, if $\delta$, $t$ and
# $R$ are much shorter than $M$. The derivative of the sum, $-\delta/t^2 + 1/(2M)$, is zero at
# Young's (1974) $t = \sqrt{2 \delta M}$. Daly (2006) also counts failures during saves and
# restarts; this matters where $M$ is not much larger than $\delta$, which is 5 minutes in the
# picture.

# %% tags=["picture"]
show(*pictures.best_intervals())

# %% [markdown]
# Llama 3 405B was trained on up to 16,384 GPUs, with 419 unexpected interruptions in a period of 54
# days (Grattafiori et al. 2024, section 3.3.4). Suppose that a save stopped the training for 30
# seconds and a restart took 10 minutes (our guesses). What is the best interval?

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
# Around the optimum this curve is flat: twice the best interval adds 2 percentage points of
# overhead. Choose numbers close to those of your cluster. (Grattafiori et al. report more than 90 %
# effective training time, so our guesses are probably too high.)
#
# ### Exercise 4 (further): the best interval
#
# You measured the seconds of a save, a step and a restart: `save_s`, `step_s` and `restart_s`. You
# counted `failures` in `seen_s` seconds on `gpus_then` GPUs. For a job on `gpus` GPUs, whose
# failure rate per GPU is the same, return the number of **steps** between checkpoints (Young's
# interval, rounded, at least 1), and the expected overhead at this number of steps, as a fraction:
# $\delta/t + t/(2M) + R/M$ with $t$ = steps times `step_s`. About 4 lines, 20 minutes.
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
# `torch.distributed.checkpoint` (DCP) saves boxes, too: a file per rank, and a `.metadata` file in
# place of our manifest. We save the same state in both formats:

# %% tags=["measured"]
rows = pair.run(lab.beside_dcp, f"{FOLDER}/formats")[0]
for name, one in rows.items():
    words = f"{format_bytes(one.num_bytes)} in {one.num_files} files"
    print(f"{name}: {words}, {1e3 * one.save_s:.0f} ms")

# %% [markdown]
# Our code adds the fourth file (ours: `.lock`; DCP's: `about.json`). DCP has three traps:
#
# - `async_save` communicates in a thread. Give it a process group of its own
#   (`process_group=dist.new_group(backend="gloo")`); otherwise, its messages can mix with those of
#   your training on gloo.
# - `.metadata` and the non-tensor values in the data files are **pickles, and loading a pickle can
#   run any code**. Our `load_dcp` allows only the classes that a checkpoint needs. Safetensors and
#   JSON cannot contain code.
# - DCP checks no hashes (PyTorch 2.13).
#
# **Both formats save boxes; never unpickle a file that you do not trust.**
#
# ## 10 Without you
#
# `torchrun --max-restarts n` restarts all ranks when one dies, up to `n` times, and the training
# script resumes by itself:
#
# `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node 4 --max-restarts 2
# -m course_lib.train --strategy fsdp --save-every 20 --out runs/elastic`
#
# (Without that variable, restarts can fail to connect: PyTorch issue 135712.) With `--nnodes 1:2
# --rdzv-backend c10d --rdzv-endpoint HOST` in place of `--standalone`, the job continues with the
# nodes that are left, if HOST is one of them.
#
# A scheduler that needs its nodes back usually sends a signal first. On SIGTERM or SIGUSR1, all
# ranks of the course's training finish this step or the next, save, and exit with code 75 (try
# later). This has to take less than torchrun's 30 s (`--shutdown-timeout`) and Slurm's `KillWait`.
# `torchrun` passes SIGTERM on to the ranks, but SIGUSR1 only with `--signals-to-handle`. In Slurm,
# `cluster/requeue.sbatch` gets a signal at least 120 seconds before the time limit
# (`--signal=B:USR1@120`) and calls `scontrol requeue`; Slurm then sends SIGTERM. Measure your own
# cluster with `cluster/exercises/14_checkpoint.py`.
#
# **Test that a killed job resumes by itself.**

# %%
shutil.rmtree(FOLDER)

# %% [markdown]
# ## What to keep
#
# - Every rank writes its shard; rank 0 publishes a manifest.
# - Write beside, sync, then rename.
# - Boxes of whole tensors can be loaded by any number of ranks and any strategy.
# - Save optimizer, schedule, sampler and the random numbers of every rank; test for equal bits.
# - An asynchronous save copies first.
# - Young's interval is $t = \sqrt{2 \delta M}$.
#
# **Read on**
#
# - Young 1974, *A first order approximation to the optimum checkpoint interval*.
# - Daly 2006, *A higher order estimate of the optimum checkpoint interval for restart dumps*:
#   short MTBF.
# - Grattafiori et al. 2024, *The Llama 3 Herd of Models*, section 3.3.4: what fails, and how often.
# - PyTorch documentation, `torch.distributed.checkpoint`: planners, async, resharding.
# - Pillai et al. 2014, *All file systems are not created equal*: what a crash leaves of your files.
