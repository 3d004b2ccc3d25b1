# %% [markdown]
# # 14 Checkpoint: survive
#
# A job on 16,000 GPUs failed every three hours (section 8). Such a job must not start again from
# step 0, so it saves its state at intervals: a **checkpoint**. **How do many ranks save one state,
# whole or not at all; what belongs to this state; and how often should they save it?**
#
# *After this lesson you can* save in shards and publish atomically (wholly or not at all); load at
# another number of ranks or with another strategy; say which state makes a resumed run continue bit
# for bit; hide most of a save behind training; compute the best interval for your cluster.
#
# **Prerequisites:** lessons 06 (DDP), 09 (ZeRO) and 10 (FSDP).
# **Time:** 60 minutes of reading, 80 of exercises, with a break after section 5. Exercises 1 to 3
# are the core, 4 goes further.
#
# | symbol | in code | meaning |
# |---|---|---|
# | $p$ | `p` | ranks |
# | $N$ | `num_params` | parameters of the model |
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
from course_lib.display import Voices, claim, compare, predict, reveal, show, timelines
from course_lib.ranks import RankError, Ranks

FOLDER = mkdtemp()

# %% [markdown]
# ## 1 Why not through one rank
#
# Parameters and Adam's two moments in fp32 are 12 bytes per parameter. (The bf16 copy used in
# computing is made from the fp32 one, and gradients are needed for one step only: neither is
# saved.) The obvious way gathers all shards on rank 0 at once, and rank 0 writes one file. But then
# rank 0 needs room for the whole state, which sharding was meant to avoid; and one link and one
# writer carry all of it while the other ranks wait. The alternative: **every rank writes its
# shard**.
#
# Four ranks, 8 MiB, an emulated link of 40 MB/s, and emulated disks that take 40 MB/s from each
# writer. How many times as fast are four writers?

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
through, sharded = (1e3 * lab.duration_s(events) for events in saves.values())
title = f"A save of 8 MiB: {through:.0f} ms through rank 0, {sharded:.0f} ms by every rank"
claim("every rank is faster", sharded < through)
show(timelines(saves, title, link=f"{wire}; emulated disks, 40 MB/s each"), alt=title)

# %% [markdown]
# Rank 0 alone writes four times as long as four writers do, and the gather before takes three times
# as long: seven times in all, as link and disk are equally fast here. This holds until the storage,
# which all of them share, is saturated (`storage_bytes_per_s` in `cost.save_s_sharded`).
#
# **With sharded saving, memory and time per rank stay constant as ranks and state grow together, as
# long as the storage is fast enough.**
#
# ## 2 Whole or not at all
#
# The more often a run saves, the more likely it is killed during a save. **Break it:** the next
# cell saves in place, over the last checkpoint. The save is stopped ("cut") after every operation
# and in the middle of each write. What is left? (Power cuts, which also undo what was not *synced*,
# that is, forced to the disk, come in exercise 1.)

# %% tags=["predict"]
guess_cut = predict("a kill in the middle of the second file leaves", choices=("old", "new", "mix"))
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
        print(f"{cut.how} at operation {cut.done}: {files}")
reveal(guess_cut, "mix")

# %% [markdown]
# Both files can even be complete, but from two different steps: the model would load, and nobody
# would notice. So new files go beside the old ones, and a small **manifest**, which names them,
# comes last. *A checkpoint exists if its manifest does.* On a disk, three things are needed:
#
# - `write` can be cut anywhere. `rename`, within one journaling file system, happens wholly or not
#   at all: it is *atomic*.
# - What was written is at first in a cache: `sync(name)` (`os.fsync`) waits until the *content* is
#   on the disk. Without it, a power cut may leave the manifest and lose the data.
# - `sync_names()` (`os.fsync` on every folder that changed, also the parent of a new one) waits
#   until the changes of *names* (made, renamed, removed) are on the disk. Until then, a power cut
#   may undo the latest changes in one folder and keep those in another (btrfs may also
#   reorder them).
#
# ### Exercise 1 (core): publish
#
# Write the `files` (content by name) into the folder `new`: `disk.write(f"{new}/{name}", content)`.
# Publish them with the content `manifest`, which has to become the file `{new}/manifest.json`. When
# the new checkpoint survives any cut, remove every file of `old` (`disk.names(old)`,
# `disk.remove(...)`), which is None the first time. `new` may hold files of a killed save, of any
# name but `manifest.json`; in the end it holds only `files` and the manifest. After a cut at any
# moment, each folder with a manifest has to be whole, and old or new has to be there. About 12
# lines, 20 minutes.
#
# <details><summary>Hint: published, and not whole</summary>
# The rule holds while you remove files, too: which file must go first, so that its checkpoint no
# longer counts?
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
# The course's library adds a hash of each file to the manifest: disks and networks damage files,
# too. Loading takes the newest checkpoint whose hashes match; all ranks agree on it.
#
# **Write beside, sync, then publish with one atomic operation.**
#
# ## 3 Boxes
#
# Now a real checkpoint: FSDP on 4 ranks trains 10 steps, and saves after every 5.

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
# sizes. FSDP's rows on a rank form a box, so do tensor parallelism's columns, and a range of ZeRO's
# flat parameter is a few boxes. No box says "rank 2 of 4". To load, the ranks check the hashes;
# then each intersects the boxes that it wants with those saved, and reads only the rows in which
# they overlap.
#
# Four ranks saved ten rows (3, 3, 3, 1), and 2 ranks load 5 each. How many intersections do they
# read in all?

# %% tags=["predict"]
guess_reads = predict("intersections that 2 ranks read")
### GUESS guess_reads.commit(4)

# %% tags=["picture"]
from operator import add, lt, sub

from course_lib.core.shards import Box

rows = {
    "saved by 4": [Box((start, 0), (size, 6)) for start, size in ((0, 3), (3, 3), (6, 3), (9, 1))],
    "loaded by 2": [Box((0, 0), (5, 6)), Box((5, 0), (5, 6))],
}
figure, alt = pictures.boxes((10, 6), rows)
wanted, written = rows["loaded by 2"], rows["saved by 4"]
reveal(guess_reads, sum(1 for a in wanted for b in written if a.intersect(b)))
show(figure, alt=alt)

# %% [markdown]
# ### Exercise 2 (core): reshard
#
# `saved` is a list of `(file, offsets, sizes)`, a box each; `wanted` is one box, `(offsets,
# sizes)`; both give positions in the whole tensor, which may have any number of dims. Return a list
# of `(file, begin in the saved box, begin in the wanted box, sizes)`, in any order: what to read,
# and where to put it. Only what overlaps is read. About 8 lines, 20 minutes.
#
# <details><summary>Hint: one dim</summary>
# Three rows from row 3 on, five rows from row 5 on: the overlap begins at 5 and ends before 6.
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
# **Save what a tensor is, not who had it: boxes of the whole tensor let any number of ranks load
# it.**
#
# ## 4 All of the state
#
# Weights alone are not enough to continue a run. `SmallTrainer` has momentum, a learning-rate
# schedule, a sampler, dropout, and augmentation that draws from Python's random numbers. We save it
# after step 5, but only its weights and optimizer, and resume. Its state has 8 parts (weights and
# momentum are two). How many differ from those of the run that never stopped?

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
# No error was raised, and in a plot both would look normal. So the loss curve is no test: a resumed
# run has to continue **bit for bit** (with exactly equal numbers) as the run that never stopped.
# (On GPUs, first make a repeated run equal: switch on deterministic kernels. With another number of
# ranks, sums have another order, and random numbers per rank differ: compare a few steps without
# dropout, within rounding.)
#
# ### Exercise 3 (core): which state is missing
#
# `save(trainer)` returns all of the state of a `SmallTrainer`; `load(trainer, state)` puts it into
# a new trainer, and is called on another `Resume` object (so keep nothing in `self`). The trainer's
# attributes are `model`, `optimizer`, `scheduler`, `epoch`, `position` (in the epoch) and `step`.
# Training goes on after `save`, before the state is loaded, and must not change the saved state.
# About 12 lines, 20 minutes.
#
# <details><summary>Hint: a later step came back</summary>
# <code>state_dict()</code> refers to the live tensors: <code>copy.deepcopy</code>.
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
        ### BEGIN SOLUTION: the random numbers last
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
# With many ranks, each has random numbers of its own: the course's library saves an `rng_state()`
# per rank. The sampler needs no state per rank if the position counts samples of *all* ranks.
#
# **What is not saved starts again from its first value, and no error is raised: compare bits, not
# curves.**
#
# ## 5 Kill a rank
#
# Two ranks train 20 steps, and save after every 5. Rank 1 is killed (SIGKILL: no handler runs;
# unlike with a lost machine, its peers notice at once) while it *writes the checkpoint* of step 15.
# At which step does the training resume?

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
# Only the steps since the last checkpoint are lost, here one interval. Now do it yourself: press
# *Train*, and kill a rank when you like.

# %%
explorer.FailureLab()

# %% [markdown]
# **A failure costs at most one interval, one save and a restart, if the newest checkpoint is
# undamaged.**
#
# *This is a good place for a break.*
#
# ## 6 Another size, another strategy
#
# Now 2 ranks load the checkpoint that FSDP saved on 4 ranks, with three strategies. Names and boxes
# are of the whole model, so all strategies read the same files. How far are the losses from those
# of section 5's run that never stopped?

# %% tags=["check"]
for strategy in lab.STRATEGIES:
    folder = f"{FOLDER}/{strategy} on 2"
    shutil.copytree(f"{FOLDER}/fsdp on 4", folder)
    continued = pair.run(lab.train, folder, 15, strategy=strategy)[0]
    apart = max(abs(loss - never_stopped[step]) for step, loss in continued.items())
    print(f"{strategy} on 2 ranks, from step {min(continued)}: within 1e-4: {apart < 1e-4}")

# %% [markdown]
# The losses are equal except for the order of sums: 4 parts of a batch are added in another order
# than 2.
#
# **A checkpoint belongs to the model, not to the ranks that wrote it.**
#
# ## 7 Save while training goes on
#
# An **asynchronous** save copies its shard to host memory, and returns; a thread writes while the
# next steps compute. Here a step takes 20 ms (it sleeps, like a CPU that waits for its GPU), and
# after the third step each rank saves 32 MiB. How long does an asynchronous save stop training, as
# a fraction of a plain one?

# %% tags=["predict"]
guess_hidden = predict("time stopped by an async save, divided by that of a plain one")
### GUESS guess_hidden.commit(0.1)

# %% tags=["picture", "measured"]
measure = partial(pair.run, lab.measure_overlap, 64 * 2**20)
ways = {"save": measure(asynchronous=False)[0], "save_async": measure(asynchronous=True)[0]}
plain_ms, async_ms = (1e3 * way.blocked_s for way in ways.values())
reveal(guess_hidden, async_ms / plain_ms)
hidden_ms = 1e3 * ways["save_async"].hidden_s
title = (
    f"A save stops training for {plain_ms:.0f} ms; async for {async_ms:.0f}, {hidden_ms:.0f} hidden"
)
claim("async stops it for less time", async_ms < plain_ms)
show(timelines({name: way.events for name, way in ways.items()}, title), alt=title)

# %% [markdown]
# Gray: training waits. Brown: the thread writes to the disk. Training still waits while the ranks
# agree who writes what, and for the copy, which needs host memory. If a save takes longer than the
# interval, the next one has to wait.
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
# This is one file with numbers of four different steps, and its hash may match. The check of
# exercise 3 finds the same mistake.
#
# **Copy, return, write: an asynchronous save still costs the agreement, the copy and its memory.**
#
# ## 8 How often
#
# Without failures, checkpoints add $\delta$ per interval. We run 1000 steps of 1 ms and save a
# state of 4 MB every 50 to 500 steps. The mean time of a save at interval 100 predicts the extra
# time for every interval.

# %% tags=["picture", "measured"]
every = [50, 100, 200, 500]
extra = {n: pair.run(lab.extra_time, n)[0] for n in every}
save_s = extra[100][0] / extra[100][1]
title = f"A save at interval 100 takes {1e3 * save_s:.0f} ms: "
title += "from it the formula predicts the other intervals"
curve = Voices(
    formula=[cost.extra_s(1000, n, save_s) for n in every],
    measurement=[seconds for seconds, _ in extra.values()],
)
axes = {"x_label": "steps between checkpoints", "y_label": "extra time (s)"}
show(compare(every, curve, title, log_x=True, **axes), alt=title)

# %% [markdown]
# With failures, a long interval loses more work: half an interval on average, at each failure. Per
# second of work, saving costs $\delta/t$ and failures cost $t/(2M) + R/M$ (for $t$ much shorter
# than $M$). The derivative of the sum is zero at Young's (1974) $t = \sqrt{2 \delta M}$. Daly
# (2006) counts failures during saves and restarts, too; his estimate differs where $M$ is not much
# larger than $\delta$.

# %% tags=["picture"]
figure, alt = pictures.best_intervals()
show(figure, alt=alt)

# %% [markdown]
# Llama 3 405B was trained on up to 16,384 GPUs. In 54 days, 419 interruptions were unexpected
# (Grattafiori et al. 2024, section 3.3.4). Suppose that a save stopped the training for 30 seconds
# (our guess). What is the best interval?

# %% tags=["predict"]
guess_interval = predict("best interval of work between checkpoints", unit="min")
### GUESS guess_interval.commit(60)

# %%
from math import sqrt

mtbf_s = cost.LLAMA3_S / cost.LLAMA3_FAILURES
print(f"a failure every {mtbf_s / 3600:.1f} h")
years = mtbf_s * cost.LLAMA3_GPUS / cost.DAY_S / 365
print(f"per GPU of the job, all causes counted: every {years:.1f} years")
reveal(guess_interval, cost.best_interval_daly(30, mtbf_s) / 60)

# %% tags=["picture"]
explorer.interval_explorer()

# %% [markdown]
# Enter the numbers of your own cluster. Around the optimum the curve is flat: twice the best
# interval costs 2 percentage points more here. (Grattafiori et al. report over 90 % effective
# training time, more than here: by Daly's formula, their saves take less than 30 s or their
# restarts less than 10 min.)
#
# ### Exercise 4 (further): the best interval
#
# You measured: `save_s`, `step_s` and `restart_s`; `failures` in `seen_s` seconds on `gpus_then`
# GPUs. For a job on `gpus`, return the number of **steps** between checkpoints (Young's interval,
# rounded, at least 1), and the expected overhead at that number of steps, as a fraction, by the sum
# before Young's formula, with $t$ = steps times `step_s`. All GPUs, then and now, fail at the same
# rate. About 4 lines, 20 minutes.
#
# <details><summary>Hint: the overhead</summary>
# Per second of work: saves, and failures times what one costs.
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
# **The best interval grows with the square root of both save time and time between failures: 4
# times the GPUs at the same save time, half the interval.**
#
# ## 9 The real thing
#
# `torch.distributed.checkpoint` (DCP) saves boxes, too: a file per rank, and a `.metadata` file in
# place of our manifest. The same state of FSDP, both ways:

# %% tags=["measured"]
rows = pair.run(lab.beside_dcp, f"{FOLDER}/formats")[0]
for name, one in rows.items():
    words = f"{format_bytes(one.num_bytes)} in {one.num_files} files"
    print(f"{name}: {words}, {1e3 * one.save_s:.0f} ms")

# %% [markdown]
# Our code adds one small file to each: to ours an empty `.lock`, to DCP's `about.json`.
# Three traps. First, DCP's `async_save` communicates in a thread: give it a process group of its
# own (`process_group=dist.new_group(backend="gloo")`), or its messages can mix with your training's
# own gloo messages; our `save_async` makes one. Second, `.metadata` and the non-tensor values in
# the data files, like all that `torch.load(weights_only=False)` reads, are **pickles, and loading
# one can run any code**: our `load_dcp` allows only the classes of a checkpoint, and safetensors
# and JSON hold no code at all. Third, DCP has no hashes.
#
# **Same idea, two formats; never unpickle what you did not write.**
#
# ## 10 Without you
#
# Nobody watches a job at night. `torchrun --max-restarts n` restarts all ranks when one dies, up to
# `n` times, and the training script resumes by itself:
#
# `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node 4 --max-restarts 2
# -m course_lib.train --strategy fsdp --save-every 20 --out runs/elastic`
#
# (Without that variable, restarts can fail to connect: PyTorch issue 135712.) With `--nnodes 1:2
# --rdzv-backend c10d --rdzv-endpoint HOST`, it goes on with the nodes that are left, if HOST is one
# of them: resharding makes that possible.
#
# A scheduler that needs its nodes back usually sends a signal first. On SIGTERM or SIGUSR1 all
# ranks finish at most the next step, save, and exit with 75 (try later), if that takes less than
# torchrun's 30 s (`--shutdown-timeout`) and Slurm's `KillWait`. `torchrun` passes SIGTERM on,
# SIGUSR1 only with `--signals-to-handle`. In Slurm, `cluster/requeue.sbatch` (`#SBATCH --requeue`
# and `--signal=B:USR1@120`) gets a signal 120 seconds before the time limit and calls `scontrol
# requeue`; Slurm then sends SIGTERM. To measure your cluster's numbers:
# `cluster/exercises/14_checkpoint.py`.
#
# **What a person has to do at night will not be done: test that a killed job resumes by itself.**

# %%
shutil.rmtree(FOLDER)

# %% [markdown]
# ## What to keep
#
# - Every rank writes its shard; rank 0 publishes a manifest.
# - Write beside, sync, rename: whole or not at all.
# - Boxes of whole tensors: any number of ranks, any strategy loads them.
# - Save optimizer, schedule, sampler, random numbers of every rank; test for equal bits.
# - Asynchronous: copy first.
# - $t = \sqrt{2 \delta M}$.
#
# **Read on**
#
# - Young 1974, *A first order approximation to the optimum checkpoint interval*: two pages.
# - Daly 2006, *A higher order estimate of the optimum checkpoint interval*: restarts, short MTBF.
# - Grattafiori et al. 2024, *The Llama 3 Herd of Models*, section 3.3.4: what fails, and how often.
# - PyTorch documentation, `torch.distributed.checkpoint`: planners, async, resharding.
# - Pillai et al. 2014, *All file systems are not created equal*: what a crash leaves of your files.
