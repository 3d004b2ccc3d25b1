# %% [markdown]
# # 00 Meet four ranks
#
# A large model is trained by many processes that work as one. **How do several processes run one
# program, how do they communicate, and what does it look like when they wait for each other
# forever?** This notebook starts four processes on your machine. You give them work, let them
# communicate, make them hang on purpose, and learn to read the report.
#
# *After this lesson you can*
#
# - run a function on several ranks, and say what `rank` and `local_rank` are for;
# - predict what a message costs from its latency and its bandwidth;
# - use a barrier and an all-reduce, and keep them out of `if rank == 0`;
# - find the cause of a hang: who waits, on which line, for whom.
#
# **Prerequisites:** Python and a little PyTorch; no other lesson. **Time:** about 50 minutes of
# reading and running, 40 of exercises.
#
# | symbol | in code | meaning |
# |---|---|---|
# | $r$ | `rank` | the number of one process in a run, from 0 |
# | $p$ | `world_size` | the number of ranks |
# | | `node` | one machine |
# | | `local_rank` | the number of a process on its node, from 0 |
# | $n$ | `num_bytes` | the size of a message |
# | $\alpha$ | `latency_s` | latency: the seconds that any message takes, however small |
# | $\beta$ | `bytes_per_s` | bandwidth in bytes per second (in many papers: seconds per byte) |
#
# **How it works.** Run the cells from top to bottom with Shift+Enter. Three kinds of cells ask
# something of you:
#
# - *Predict*: write down your guess and press Commit **before** you run the next cell. People tend
#   to remember an answer better after guessing first, even wrongly, if they then see the right one
#   (Kornell et al. 2009).
# - *Exercise*: replace the line `raise NotImplementedError(...)`, run the cell, then its check.
# - *Check*: prints `right`, or what went wrong. It prints `not done yet` until you have written
#   your answer; the rest of the notebook does not depend on it.

# %%
# %load_ext course_lib.ranks
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import course_lib
from course_lib.checks import check
from course_lib.core import Link
from course_lib.core.records import read_runs
from course_lib.display import YES_NO, Voices, compare, predict, reveal, show, timeline, waiting
from course_lib.ranks import RankError, Ranks, span
from course_lib.ranks.machine import describe_machine, doctor_report

# %% [markdown]
# ## 1 One program, many processes
#
# The first line above has started four processes; the variable `ranks` stands for them. A cell that
# begins with `%%ranks` runs on **every** rank. The next one contains one `print`. How many lines
# will you see?

# %% tags=["predict"]
guess_lines = predict("how many lines does the next cell print?")
### GUESS guess_lines.commit(1)

# %%
# %%ranks
print(f"hello from rank {rank} of {world_size}")

# %% [markdown]
# The number in brackets is the rank that printed the line. All ranks run the *same program*, each
# on *its own data*: SPMD, "single program, multiple data". The only difference between them at the
# start is `rank`, which every `%%ranks` cell knows, like `world_size`, `torch` and `dist`
# (torch.distributed).
#
# The next `%%ranks` cell sets an `x` on every rank. Will the notebook itself then have an `x`?

# %% tags=["predict"]
reveal(guess_lines, ranks.world_size)
guess_x = predict("is there then an x in the notebook's own process?", choices=YES_NO)
### GUESS guess_x.commit("yes")

# %% tags=["measured"]
# %%ranks
import os

x = 10**rank
print(f"process {os.getpid()} holds x = {x}")

# %% [markdown]
# There are four processes, each with a memory of its own, and a fifth one, the notebook's. What a
# rank has defined stays there for the next `%%ranks` cell.
#
# To get something *back*, run a function: `ranks.run(fn)` calls `fn(rank)` on every rank and
# returns the list of the results, rank 0 first.


# %%
def fingerprint(rank):
    return 10**rank


reveal(guess_x, "x" in globals())
print(ranks.run(fingerprint))

# %% [markdown]
# These numbers are used again below. When something adds them up, the digits of the sum show which
# ranks are in it: 1111 means each rank once, 1211 means rank 2 twice.
#
# **One program, four processes, four memories: at the start, only `rank` differs.**
#
# ## 2 Who am I?
#
# Real runs use several machines, called nodes. Take two nodes with four GPUs each, and one rank per
# GPU. Nodes and ranks count from 0, and the first node is filled before the second. Which rank has
# local rank 2 on node 1?

# %% tags=["predict"]
guess_rank = predict("the rank with local rank 2 on node 1, four ranks a node")
### GUESS guess_rank.commit(6)

# %%
rank_at = torch.arange(8).reshape(2, 4)  # [node, local_rank]
print(rank_at)
reveal(guess_rank, rank_at[1, 2].item())

# %% [markdown]
# A process usually learns its rank from environment variables. A *launcher* starts the processes
# and sets the variables for each of them. The usual launcher is PyTorch's `torchrun`; `%%ranks`
# sets the same names:
#
# | variable | meaning |
# |---|---|
# | `RANK`, `WORLD_SIZE` | which rank this is, out of how many |
# | `LOCAL_RANK`, `LOCAL_WORLD_SIZE` | the same on this node; the local rank chooses the GPU |
# | `GROUP_RANK` | which node this is (torchrun only) |
# | `MASTER_ADDR`, `MASTER_PORT` | where all ranks meet at the start (torchrun only) |

# %%
# %%ranks
for name in ["RANK", "WORLD_SIZE", "LOCAL_RANK"]:
    print(name, "=", os.environ[name], end="   ")

# %% [markdown]
# Your machine is one node, so `rank` and `local_rank` are equal here, and a program that uses the
# wrong one still works. On a second node it asks for a GPU that does not exist.
#
# A rank is not a permanent name: after a restart a process may get another number. By convention,
# rank 0 writes the logs and, in simple programs, the checkpoints.
#
# ### Exercise 1: from node and local rank to rank
#
# Every node has `ranks_per_node` ranks. One line, 2 minutes.
#
# <details><summary>Hint: two ranks share a number</summary>
# How many ranks live on the nodes before yours?
# </details>


# %% tags=["exercise"] exercise="ranks-1"
def global_rank(node, local_rank, ranks_per_node):
    """The rank of the process with this local rank on this node."""
    ### BEGIN SOLUTION: how many ranks come before you?
    return node * ranks_per_node + local_rank
    ### END SOLUTION


# %% tags=["check"] exercise="ranks-1"
check("ranks-1", global_rank)

# %% [markdown]
# **`rank` is a process's number in the run, `local_rank` its number on its node: it chooses the
# GPU.**
#
# ## 3 In which order do ranks run?
#
# In the next cell every rank sleeps before it prints: rank 0 longest, rank 3 not at all. No rank
# waits for another. Which rank prints first?

# %% tags=["predict"]
guess_first = predict("which rank prints first?")
### GUESS guess_first.commit(3)


# %% tags=["picture", "measured"]
def speak(rank):
    time.sleep(0.1 * (3 - rank))
    with span("compute", f"rank {rank}"):  # gives this stretch of time a name
        print("hello")
        time.sleep(0.05)


ranks.run(speak)
order = [event.rank for event in ranks.events]
reveal(guess_first, order[0])
title = f"Rank {order[0]} prints first, rank {order[-1]} last"
show(timeline(ranks.events, title), alt=f"{title}; the notebook lists them by rank")

# %% [markdown]
# The notebook *shows* rank 0 first: it collects what the ranks print and sorts it, so that it can
# be read. (The notebook shortens very long output; `ranks.output(2)` returns all that rank
# 2 printed.) The picture shows what really *happened*. It is drawn from `ranks.events`: the calls
# and named spans of the last run, on one clock.
#
# Ranks have no order unless they *wait* for each other. The simplest way to wait is a barrier:
# `dist.barrier()` returns when **all** ranks have called it.
#
# ### Exercise 2: one after another
#
# Call `say()` on rank 0, then on rank 1, and so on. A rank may begin only when the one before it
# has finished. It must also work when it is called a second time. At most `world_size` barriers;
# about 4 lines, 10 minutes.
#
# <details><summary>Hint: all speak at once</summary>
# If the barrier stands inside your <code>if</code>, each rank calls it once, and these calls meet.
# Think in turns: in turn t rank t speaks, and <em>every rank</em> calls the barrier that ends the
# turn.
# </details>
# <details><summary>Hint: ranks wait for a rank that has returned</summary>
# Every rank has to call the barrier equally often, also one that has spoken already.
# </details>


# %% tags=["exercise"] exercise="ranks-2"
def take_turns(rank, world_size, say):
    """Call say() on rank 0, then on rank 1, and so on, each when the one before has ended."""
    ### BEGIN SOLUTION: a barrier after each turn
    for turn in range(world_size):
        if turn == rank:
            say()
        dist.barrier()
    ### END SOLUTION


# %% tags=["check"] exercise="ranks-2"
check("ranks-2", take_turns)

# %% [markdown]
# **Each rank runs at its own speed; only waiting for each other makes an order.**
#
# ## 4 A message takes time
#
# What do your ranks run on? (`course doctor` prints the same in a terminal.)

# %% tags=["measured"]
print(doctor_report(describe_machine()))

# %% [markdown]
# Your ranks exchange messages inside one machine, without a network, so their times say little
# about a cluster. The course can therefore *emulate* links: real ranks and real messages, but each
# message takes as long as it would on the `Link` you give (if that is slower than your machine).
# The one below is slow, so that you can see it: 20 ms for any message, and then 50 MB/s. How long
# does a message of 4 MB take?

# %% tags=["predict"]
guess_message = predict("one message of 4 MB, 20 ms latency, 50 MB/s", unit="ms")
### GUESS guess_message.commit(80)

# %% tags=["measured"]
wire = Link(name="slow wire", latency_s=0.02, bytes_per_s=50e6)
pair = Ranks(2, link=wire)


def send_one(rank, num_bytes):
    message = torch.zeros(num_bytes, dtype=torch.uint8)
    if rank == 0:
        dist.send(message, 1)  # to rank 1; returns when it has arrived
    else:
        dist.recv(message, 0)  # from rank 0, into this tensor


pair.run(send_one, 4_000_000)
reveal(guess_message, 1000 * pair.events[0].duration_s)

# %% [markdown]
# *Both* sides have to make a call: rank 0 says what it sends and to which rank, rank 1 gives the
# tensor that the bytes go into. A message of $n$ bytes costs a fixed time and a time per byte:
#
# $$ t = \alpha + \frac{n}{\beta} $$


# %% tags=["picture", "measured"]
from course_lib.display import claim


def formula_s(mb):
    return wire.latency_s + mb * 1e6 / wire.bytes_per_s


def measured_s(mb):
    pair.run(send_one, mb * 1_000_000)
    return pair.events[0].duration_s


sizes_mb = [0, 1, 2, 3, 4]
times_s = [[measured_s(mb) for _ in range(3)] for mb in sizes_mb]
voices = Voices(formula=formula_s, measurement=times_s)
median_s = sorted(times_s[-1])[1]
title = f"4 MB take {median_s:.3f} s; the formula says {formula_s(4):.3f} s"
claim("the formula gives the time within 10 %", 0.9 < median_s / formula_s(4) < 1.1)
labels = {"x_label": "message (MB)", "y_label": "time (s)", "note": f"emulated {wire}"}
show(compare(sizes_mb, voices, title, **labels), alt=title)

# %% [markdown]
# **In this model, a message costs its latency, and its bytes divided by the bandwidth.** The model
# leaves out what happens when several messages share a link. Lesson 04 derives the cost of
# collectives from it.
#
# ## 5 Everybody at once: a collective
#
# A *collective* is one call that **all** ranks of a *process group* (here: all four) make together.
# The one that plain data parallelism needs is `dist.all_reduce(x)`: it adds up the `x` of all ranks
# and leaves the sum in `x`, on every rank.
#
# Rank $r$ has $10^r$ and makes the call $0.1\,r$ seconds late. What does rank 2 hold afterwards?
# And how long does rank 0 stay in its call?

# %% tags=["predict"]
guess_sum = predict("x on rank 2 after the all_reduce")
guess_time = predict("rank 0 is in all_reduce for", unit="ms")
### GUESS guess_sum.commit(1111)
### GUESS guess_time.commit(100)


# %% tags=["picture", "measured"]
def late_sum(rank):
    time.sleep(0.1 * rank)
    x = torch.tensor([10.0**rank])
    dist.all_reduce(x)
    return x.item()


sums = ranks.run(late_sum)
calls = {event.rank: event for event in ranks.events if event.kind == "all_reduce"}
reveal(guess_sum, sums[2])
reveal(guess_time, 1000 * calls[0].duration_s)
claim("rank 0 waits until the last rank makes the call", calls[0].duration_s > 0.25)
title = f"Rank 0 waits {calls[0].duration_s:.2f} s in all_reduce, until the last rank calls it"
show(timeline(ranks.events, title), alt=f"{title}; all {len(calls)} calls return together")

# %% [markdown]
# No rank can have the sum before the last one makes the call: the slowest rank, the *straggler*,
# determines the time of all.
#
# **Break it.** `all_reduce` works *in place*: the old `x` is overwritten. What happens if a program
# sums the same `x` twice, for example in two different functions?

# %% tags=["failure"]
# %%ranks
x = torch.tensor([10.0**rank])
dist.all_reduce(x)
dist.all_reduce(x)
print(x)

# %% [markdown]
# There is no error, only a sum that is `world_size` times too large. Each digit of the sum says how
# often the value of its rank was added.
#
# ### Exercise 3: the mean of all ranks
#
# Give every rank the mean of all `x`, in a new tensor at each call, and leave `x` as it is. Budget:
# one call, of the size of `x`, and a result that keeps no more memory than `x`. It has to work on
# any number of ranks: `dist.get_world_size()` returns how many. About 3 lines, 5 minutes.
#
# <details><summary>Hint: x has changed</summary>
# <code>x.clone()</code> is a tensor of its own.
# </details>


# %% tags=["exercise"] exercise="ranks-3"
def mean_over_ranks(x):
    """The mean of x over all ranks, on every rank; x stays as it is."""
    ### BEGIN SOLUTION: sum a copy, then divide
    mean = x.clone()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()
    ### END SOLUTION


# %% tags=["check"] exercise="ranks-3"
check("ranks-3", mean_over_ranks)

# %% [markdown]
# **A collective is one call by all ranks of a group; an all-reduce or a barrier cannot end before
# the last rank has called it.** (On GPUs the call may return earlier; the wait then shows at a
# later line.)
#
# ## 6 The first hang
#
# The ranks form a ring. Each rank sends its number to its right neighbour, then receives from its
# left neighbour. No line of the code looks wrong. Does every rank get its neighbour's number?

# %% tags=["predict"]
guess_ring = predict("does every rank get its neighbour's number?", choices=YES_NO)
### GUESS guess_ring.commit("yes")


# %%
def failure_of(fn):
    """Run fn on the ranks; where they fail, print the report, and do not stop the notebook."""
    try:
        ranks.run(fn)
    except RankError as error:
        print(error)
        return error


# %% tags=["failure"]
def send_then_receive(rank):
    left, right = (rank - 1) % 4, (rank + 1) % 4
    x, received = torch.tensor([10.0**rank]), torch.empty(1)
    dist.send(x, right)
    dist.recv(received, left)


hang = failure_of(send_then_receive)
reveal(guess_ring, hang is None)
alt = f"{len(hang.waits)} ranks in a circle: each waits in send for the next one"
show(waiting(hang.waits, 4), alt=alt)

# %% [markdown]
# This is a **deadlock**: nothing can ever happen again. In a real run there is only silence until
# PyTorch's time-out ends the processes, by default after 10 minutes with NCCL (GPUs) and 30 with
# gloo (CPUs); here the notebook notices within seconds. Three questions find the cause:
#
# 1. *Who waits, in which call?* Every rank, in `send`.
# 2. *On which line?* That of the `send`; no rank has reached the `recv` below it.
# 3. *For whom?* Follow the arrows.
#
# This `send` ends when its receiver takes the message, and every receiver is itself sending. No
# single rank makes a mistake; the circular waiting is the mistake. (MPI implementations may buffer
# messages, says the standard, section 3.4: such a program can work until the messages grow.)
#
# After a failure the ranks are restarted, so the next cell works. If your own code runs forever,
# press Stop (■): the report says on which line each rank is.
#
# ### Exercise 4: break the circle
#
# Do the same without a deadlock. Send `x` to the rank `right`, receive a tensor from the rank
# `left` (name it as the source), and return that tensor unchanged, as a new tensor in each call.
# `rank` is your own number. The order of the ranks in the circle is arbitrary and may differ
# between calls, so use `left` and `right` and do not compute them. The check runs 2, 3 and 4 ranks.
# Budget: one message per rank, finished before you return (if you use the non-blocking `isend` or
# `irecv`, call `wait()` on what they return). About 6 lines, 15 minutes.
#
# <details><summary>Hint: it hangs in send, or in recv</summary>
# If all ranks send first, none receives. Let <code>rank</code> decide: for example, what do the
# even ranks do first, and what the odd ones?
# </details>
# <details><summary>Hint: it works on 2 ranks and not on 3</summary>
# With 3 ranks your right and left neighbours are two different ranks.
# </details>


# %% tags=["exercise"] exercise="ranks-4"
def pass_right(x, rank, left, right):
    """Send x to the rank on the right; return what the rank on the left sent."""
    ### BEGIN SOLUTION: some ranks receive first
    received = torch.empty_like(x)
    if rank % 2 == 0:
        dist.send(x, right)
        dist.recv(received, left)
    else:
        dist.recv(received, left)
        dist.send(x, right)
    return received
    ### END SOLUTION


# %% tags=["check"] exercise="ranks-4"
check("ranks-4", pass_right)

# %% [markdown]
# **In a hang, ask who waits, on which line, for whom.**
#
# ## 7 More ways to fail
#
# Calls that do not fit together are a **mismatch**. The report names both sides:


# %% tags=["failure"]
def different_sizes(rank):
    x = torch.ones(4 if rank == 0 else 3)
    dist.all_reduce(x)


mismatch = failure_of(different_sizes)

# %% [markdown]
# The course compares the calls before they start. Plain PyTorch does not, unless
# `TORCH_DISTRIBUTED_DEBUG=DETAIL` is set: there a mismatch can hang, crash, or return wrong
# numbers.
#
# A rank can also **raise** an error, or its process can **die**. Read both reports: which rank is
# the cause, and which ranks only wait for it?


# %% tags=["failure"]
def one_raises(rank):
    if rank == 2:
        raise ValueError("sample 17 is empty")
    dist.barrier()


def one_dies(rank):
    if rank == 1:
        os._exit(1)
    dist.barrier()


raised, died = failure_of(one_raises), failure_of(one_dies)

# %% [markdown]
# Here the cause stands first. Real logs are not sorted like that: the first rank that complains can
# be one that only waited.
#
# Last, a common mistake. Rank 0 should report the sum of all losses, so the program does everything
# for the report under `if rank == 0`. How many of the four ranks will hang?

# %% tags=["predict"]
guess_stuck = predict("how many ranks hang?")
### GUESS guess_stuck.commit(4)


# %% tags=["failure"]
def report(rank):
    loss = torch.tensor(10.0**rank)
    if rank == 0:
        dist.all_reduce(loss)
        print(f"loss {loss.item():.0f}")


hang = failure_of(report)
reveal(guess_stuck, len(hang.waits))
alt = f"{len(hang.waits)} of 4 ranks waits: rank 0, for ranks that have returned"
show(waiting(hang.waits, 4), alt=alt)

# %% [markdown]
# There is no circle this time: rank 0 waits for ranks that have already returned.
#
# ### Exercise 5: a report that does not hang
#
# Each rank has its own `loss`. Call `log(total)` **once, on rank 0**, with the sum of the losses of
# all ranks: the number itself (a tensor of one number will do), not rounded and no text, also when
# it is 0, inf or nan. About 3 lines, 5 minutes.
#
# <details><summary>Hint: it hangs, or the ranks make different calls</summary>
# Which lines have to run on every rank, and which on rank 0 only?
# </details>


# %% tags=["exercise"] exercise="ranks-5"
def report_loss(rank, loss, log):
    """Call log(total) once, on rank 0, with the sum of the losses of all ranks."""
    ### BEGIN SOLUTION: all sum, rank 0 logs
    dist.all_reduce(loss)
    if rank == 0:
        log(loss.item())
    ### END SOLUTION


# %% tags=["check"] exercise="ranks-5"
check("ranks-5", report_loss)

# %% [markdown]
# **A collective that all ranks must call does not belong inside `if rank == 0`.**
#
# ## 8 Outside of the notebook
#
# Real jobs are scripts that `torchrun` starts, on one node or on a hundred. At the end of the
# course's scripts stands `if __name__ == "__main__": launch(fn)`, with the same `fn(rank)` as here.
# In this one, four ranks print their names one after another, then sum $10^r$. (It takes some
# seconds, since every process starts Python and imports PyTorch.)

# %% tags=["picture", "measured"]
script = Path(course_lib.__file__).parents[1] / "cluster/exercises/00_hello_ranks.py"
torchrun = [sys.executable, "-m", "torch.distributed.run"]  # `torchrun` for short
here = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "4"]
command = [*torchrun, *here, script, "--record-to", "runs/00_hello_ranks"]
done = subprocess.run(command, capture_output=True, text=True)
print(done.stdout or done.stderr)

records = read_runs("runs/00_hello_ranks")
events = [event for record in records for event in record.events]
title = f"{len(records)} ranks started by torchrun, drawn from their run records"
show(timeline(events, title), alt=f"{title}: they print one after another")

# %% [markdown]
# Each rank has left a *run record*, a small file of what it did. The course reads them in the same
# way from your laptop and from a cluster.
#
# **The same function runs in a notebook, under `torchrun` and on a cluster.**
#
# ## Where you are
#
# In a terminal, `course check 00` judges this notebook as you saved it, and `course progress` shows
# all lessons. Next: `01_memory`, where the bytes go, or `04_collectives`, which builds `all_reduce`
# out of `send` and `recv`.
#
# ## Read on
#
# - Li et al. 2020, *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*,
#   sections 2 and 3: what process groups and collectives are for.
# - PyTorch's documentation, *Distributed communication package*: all collectives, time-outs, and
#   the variables for debugging.
# - PyTorch's documentation, *torchrun*: how processes start, restart, and learn their ranks.
# - Thakur, Rabenseifner and Gropp 2005, *Optimization of Collective Communication Operations in
#   MPICH*, section 3: the cost model $\alpha + n\beta$ (there $\beta$ is seconds per byte).
