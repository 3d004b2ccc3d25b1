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
# **Prerequisites:** Python and a little PyTorch; no other lesson. **Time:** about 35 minutes of
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
#   to remember an answer better if they first guess it, even wrongly, and then see the right one
#   (Kornell et al. 2009).
# - *Exercise*: replace the line `raise NotImplementedError(...)`, run the cell, then its check.
# - *Check*: prints `right`, or what went wrong. It prints `not done yet` until you have written
#   your answer. The rest of the notebook does not depend on your answers.

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
from course_lib.display import YES_NO, claim, pictures, predict, reveal, show
from course_lib.ranks import RankError, Ranks, span
from course_lib.ranks.machine import describe_machine, doctor_report

# %% [markdown]
# ## 1 One program, many processes
#
# Training on four GPUs usually means that four processes run the same program. How can one notebook
# control them? The first line of the cell above has started four processes; the variable `ranks`
# stands for them. A cell that begins with `%%ranks` runs on **every** rank. If one runs for too
# long, press Stop (■) above the notebook: a report says on which line each rank is, and the ranks
# are restarted.
#
# The next such cell contains one `print`. Count the lines of its output.

# %%
# %%ranks
print(f"hello from rank {rank} of {world_size}")

# %% [markdown]
# One `print` gave four lines, because every rank ran it. The number in brackets is the rank that
# printed the line. All ranks run the *same program*, each on *its own data*. This is called SPMD,
# "single program, multiple data". The value of `rank` tells the ranks apart. Every `%%ranks` cell
# knows `rank`, `world_size`, `torch` and `dist` (torch.distributed).
#
# The next `%%ranks` cell sets a variable `x` on every rank. Will the notebook itself then have an
# `x`?

# %% tags=["predict"]
guess_x = predict("is there then an x in the notebook's own process?", choices=YES_NO)
### GUESS guess_x.commit("yes")

# %% tags=["measured"]
# %%ranks
import os

x = 10**rank
print(f"process {os.getpid()} holds x = {x}")

# %% [markdown]
# There are four ranks, each a process with a memory of its own, and a fifth process, the
# notebook's. What a `%%ranks` cell defines on a rank stays in the memory of this rank, for the next
# `%%ranks` cell. The notebook does not see it.
#
# To get results *back*, run a function: `ranks.run(fn)` calls `fn(rank)` on every rank and returns
# a list of the results, rank 0 first.


# %%
def fingerprint(rank):
    return 10**rank


reveal(guess_x, "x" in globals())
print(ranks.run(fingerprint))

# %% [markdown]
# We use the numbers $10^r$ again below, because a sum of them shows which ranks are in it. Each
# rank has a digit of its own: 1111 means that each rank was added once, and 1211 that rank 2 was
# added twice.
#
# **One program, four processes, four memories: `rank` tells the processes apart.**
#
# ## 2 Who am I?
#
# So far, the rank is all that a process knows about itself. This is enough on one machine. But
# large runs use several machines, called nodes, and each process has to choose a GPU of *its* node.
# Is the rank enough for this choice?
#
# Take two nodes with four GPUs each, and one rank per GPU. Nodes and ranks are counted from 0, and
# node 0 has the lower ranks. The next cell prints the ranks of each node as a row.

# %%
rank_at = torch.arange(8).reshape(2, 4)  # [node, local_rank]
print(rank_at)
print("local rank 2 on node 1 is rank", rank_at[1, 2].item())

# %% [markdown]
# The rank is not enough: rank 6 needs GPU 2 of its node, because each node counts its own GPUs from
# 0. So each process also has a **local rank**: its number on its node, again from 0. In the output
# above, this is the column.
#
# How does a process learn its rank? Usually from environment variables. A *launcher* starts the
# processes and sets the variables for each of them. PyTorch's launcher is `torchrun`. It sets all
# variables of this table; the ranks of this notebook have those of the first two rows.
#
# | variable | meaning |
# |---|---|
# | `RANK`, `WORLD_SIZE` | which rank this is, out of how many |
# | `LOCAL_RANK`, `LOCAL_WORLD_SIZE` | the same on this node; the local rank chooses the GPU |
# | `GROUP_RANK` | which node this is |
# | `MASTER_ADDR`, `MASTER_PORT` | the address and port at which all ranks meet at the start |

# %%
# %%ranks
for name in ["RANK", "WORLD_SIZE", "LOCAL_RANK"]:
    print(name, "=", os.environ[name], end="   ")

# %% [markdown]
# Your machine is one node, so `rank` and `local_rank` are equal here. This hides a common mistake.
# A program that chooses its GPU by `rank` works on one node, but on the second node it asks for a
# GPU that does not exist.
#
# A rank is not a permanent name: after a restart a process may get another number. By convention,
# rank 0 writes the logs and, in simple programs, the checkpoints.
#
# ### Exercise 1: from node and local rank to rank
# *Difficulty 1 of 5, importance 3 of 5, about 2 minutes and 1 line.*
#
# A launcher has to number all processes of a run. Return the rank of the process with local rank
# `local_rank` on node `node`; every node has `ranks_per_node` ranks. With four ranks per node,
# local rank 2 on node 1 is rank 6, as above.
#
# <details><summary>Hint: your function returns a rank twice</summary>
# How many ranks are on the nodes before yours?
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
# **`rank` is the number of a process in the run. `local_rank` is its number on its node, and
# chooses the GPU.**
#
# ## 3 In which order do ranks run?
#
# We know now how ranks are numbered. But does the number also say when a rank runs? The output of
# all cells so far began with rank 0, as if the ranks ran one after another. In the next cell, rank
# 0 sleeps longest before it prints, and rank 3 does not sleep at all. If the ranks run at the same
# time, rank 3 prints first. Compare the order of the output with that of the picture.


# %% tags=["picture", "measured"]
def speak(rank):
    time.sleep(0.1 * (3 - rank))
    with span("compute", f"rank {rank}"):  # gives this stretch of time a name
        print("hello")
        time.sleep(0.05)


ranks.run(speak)
show(*pictures.order_of_ranks(ranks.events))

# %% [markdown]
# The notebook *shows* rank 0 first, because it sorts the output by rank. The picture shows what
# really *happened*: rank 3 was first. The picture is drawn from `ranks.events`. For the last run,
# this list has the times of all communication calls, of the waits inside them, and of the parts
# that the code has named with `span`.
#
# So ranks run in no fixed order, unless they *wait* for each other. The simplest way to wait is a
# barrier: `dist.barrier()` returns only when **all** ranks have called it.
#
# ### Exercise 2: one after another
# *Difficulty 3 of 5, importance 4 of 5, about 10 minutes and 4 lines.*
#
# Programs sometimes need an order, for example when ranks append to one file. Call `say()` on rank
# 0, then on rank 1, and so on. A rank may begin only when the rank before it has finished: on 3
# ranks, rank 2 speaks last, even if it is the fastest. Your function must also work when it is
# called a second time. Budget: at most `world_size` barriers.
#
# <details><summary>Hint: all speak at once</summary>
# If the barrier is inside your <code>if</code>, each rank calls it once, after it has spoken. Think
# in turns: in turn t, rank t speaks, and <em>every rank</em> calls the barrier that ends the turn.
# </details>
# <details><summary>Hint: ranks wait for a rank that has returned</summary>
# All ranks have to call the barrier equally often, even those that have already spoken.
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
# A barrier only makes ranks wait. To work together, they also have to exchange data, and this takes
# time. How much depends on what connects them. What do your ranks run on? (`course doctor` prints
# the same in a terminal.)

# %% tags=["measured"]
print(doctor_report(describe_machine()))

# %% [markdown]
# Your ranks exchange messages inside one machine, without a network, so their times say little
# about a cluster. The course can therefore *emulate* a link. Real ranks still exchange real
# messages, but each message arrives only after the time that it would take on the given `Link`.
# (The emulated link has to be slower than your machine.)
#
# A link is described by two numbers. Its *latency* is the time that any message takes, however
# small. Its *bandwidth* is the number of bytes that it moves per second. The link below is slow on
# purpose, with a latency of 20 ms and a bandwidth of 50 MB/s. At this bandwidth, 4 MB take 80 ms,
# and the latency comes on top. So we expect 100 ms for one message of 4 MB.

# %% tags=["measured"]
wire = Link(name="slow wire", latency_s=0.02, bytes_per_s=50e6)
pair = Ranks(2, link=wire)


def send_one(rank, num_bytes):
    message = torch.zeros(num_bytes, dtype=torch.uint8)
    start_s = time.perf_counter()
    if rank == 0:
        dist.send(message, 1)  # to rank 1; returns when it has arrived
    else:
        dist.recv(message, 0)  # from rank 0, into this tensor
    return time.perf_counter() - start_s


def measured_s(num_bytes):
    return pair.run(send_one, num_bytes)[0]


print(f"one message of 4 MB takes {1000 * measured_s(4_000_000):.1f} ms")

# %% [markdown]
# *Both* sides have to make a call. Rank 0 says what it sends and to which rank; rank 1 says from
# which rank it receives, and into which tensor. The latency is paid once per message, and each of
# the $n$ bytes takes $1/\beta$ seconds more:
#
# $$ t = \alpha + \frac{n}{\beta} $$
#
# If this is right, the times of messages of different sizes lie on a straight line. The next cell
# measures five sizes.


# %% tags=["picture", "measured"]
sizes_mb = [0, 1, 2, 3, 4]
formula_s = [wire.latency_s + mb * 1e6 / wire.bytes_per_s for mb in sizes_mb]
times_s = [[measured_s(mb * 1_000_000) for _ in range(3)] for mb in sizes_mb]
ratio = sorted(times_s[-1])[1] / formula_s[-1]  # at 4 MB, the median
claim("the formula gives the time of 4 MB within 10 %", 0.9 < ratio < 1.1)
show(*pictures.message_times(wire, sizes_mb, formula_s, times_s))

# %% [markdown]
# The line begins at the latency, because even an empty message takes this time. So many small
# messages, sent one after another, take longer than one large message with the same bytes. The
# model leaves out what happens when several messages share a link. Lesson 04 derives the cost of
# collectives from it.
#
# **In this model, a message takes the latency plus its bytes divided by the bandwidth.**
#
# ## 5 Everybody at once: a collective
#
# A message connects two ranks. In training, all ranks often need the same result, such as the sum
# of their gradients. For this there are collectives. A *collective* is one call that **all** ranks
# of a *process group* (here: all four) make together. Plain data parallelism uses
# `dist.all_reduce(x)`: it adds up the `x` of all ranks and leaves the sum in `x`, on every rank.
#
# In the next cell, rank $r$ has $x = 10^r$ and makes the call after $0.1\,r$ seconds. The numbers
# are tiny, so the addition itself takes almost no time. How long does rank 0 stay in its call?

# %% tags=["predict"]
guess_time = predict("rank 0 is in all_reduce for", unit="ms")
### GUESS guess_time.commit(100)


# %%
def late_sum(rank):
    time.sleep(0.1 * rank)
    x = torch.tensor([10.0**rank])
    dist.all_reduce(x)
    return x.item()


print("x on ranks 0 to 3:", ranks.run(late_sum))

# %% tags=["picture", "measured"]
duration_s = {one.rank: one.duration_s for one in ranks.events if one.kind == "all_reduce"}
reveal(guess_time, 1000 * duration_s[0])
claim("rank 0 waits until the last rank makes the call", duration_s[0] > 0.25)
show(*pictures.late_all_reduce(ranks.events))

# %% [markdown]
# The sum contains the number of rank 3, which makes the call last. No rank can have the sum before
# that, so rank 0 waits 0.3 s. The slowest rank is called the *straggler*: it determines how long
# all others wait. (On GPUs, `all_reduce` may return before the sum is there. The program then waits
# at a later line, which uses the sum.)
#
# **Break it.** `all_reduce` works *in place*: the old `x` is overwritten. Suppose that a program
# sums the same `x` twice by mistake, for example in two different functions. The right sum is 1111.
# What do the ranks have?

# %% tags=["predict"]
guess_twice = predict("x on rank 2 after two all_reduce calls")
### GUESS guess_twice.commit(2222)


# %% tags=["failure"]
def sum_twice(rank):
    x = torch.tensor([10.0**rank])
    dist.all_reduce(x)
    dist.all_reduce(x)
    return x.item()


reveal(guess_twice, ranks.run(sum_twice)[2])

# %% [markdown]
# There is no error, only a sum that is `world_size` times too large. After the first call, all four
# ranks have the sum 1111, and the second call adds up these four copies. Each digit of 4444 says
# how often the value of its rank was added.
#
# ### Exercise 3: the mean of all ranks
# *Difficulty 2 of 5, importance 5 of 5, about 5 minutes and 3 lines.*
#
# Data parallelism averages gradients. On every rank, return the mean of the `x` of all ranks as a
# new tensor, and leave `x` unchanged. Four ranks with $x = 10^r$ all get 277.75. Your function has
# to work on any number of ranks, which `dist.get_world_size()` returns. Budget: one collective on a
# tensor of the size of `x`, and a result that takes no more memory than `x`.
#
# <details><summary>Hint: x has changed</summary>
# <code>x.clone()</code> returns a new tensor with the same numbers.
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
# **A collective is one call by all ranks of a group; an all-reduce or a barrier cannot complete
# before the last rank has called it.**
#
# ## 6 The first hang
#
# A straggler makes the others wait for some time. Can ranks also wait forever? Let them form a
# ring: each rank sends its number to its right neighbor, then receives from its left neighbor. No
# line of the code looks wrong. Does every rank get its left neighbor's number?

# %% tags=["predict"]
guess_ring = predict("does every rank get its left neighbor's number?", choices=YES_NO)
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
show(*pictures.who_waits(hang.waits, 4))

# %% [markdown]
# This is a **deadlock**: none of these ranks can ever go on. In a real run, usually nothing is
# printed until PyTorch's time-out stops the program, by default after 10 minutes with NCCL (for
# GPUs) and after 30 minutes with gloo (for CPUs). Here the notebook reports the deadlock within
# seconds. Three questions find the cause:
#
# 1. *Who waits, in which call?* Every rank, in `send`.
# 2. *On which line?* On the line of the `send`; no rank has reached the `recv` below it.
# 3. *For whom?* Follow the arrows: each rank waits for its right neighbor, and so on around the
#    circle.
#
# With gloo, a `send` ends only when its receiver takes the message, and here every receiver is
# itself in a `send`. No single rank makes a mistake; the circular waiting is the mistake. (With
# MPI, the same program may work while its messages are small: `MPI_Send` may buffer a message and
# return; MPI standard, section 3.4.)
#
# After a hang the ranks are restarted, so the next cell works.
#
# ### Exercise 4: break the circle
# *Difficulty 3 of 5, importance 5 of 5, about 15 minutes and 6 lines.*
#
# Pass `x` around a circle without a deadlock; lesson 04 builds on this step. Send `x` to the rank
# `right`, receive the `x` of the rank `left` (same shape and dtype; give `left` as the source), and
# return it as a new tensor. In the circle 0, 1, 2 with $x = 10^r$, rank 0 returns 100. Use the
# given `left` and `right`: the check has circles of 2 to 4 ranks, in any order. Budget: one message
# per rank. If you use `isend` or `irecv`, call `wait()` on what they return.
#
# <details><summary>Hint: it hangs in send, or in recv</summary>
# If all ranks send first, none receives. Let <code>rank</code> decide: what could the even ranks do
# first, and what could the odd ranks do first?
# </details>
# <details><summary>Hint: it works on 2 ranks and not on 3</summary>
# With 3 ranks your right and left neighbors are two different ranks.
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
# In the deadlock, each `send` had a `recv` that fits; the calls only came in a bad order. But ranks
# can also make calls that do not fit together at all. What does such a failure look like? The first
# kind is a **mismatch**. Here the ranks add tensors of different sizes, and the report names both
# sides:


# %% tags=["failure"]
def different_sizes(rank):
    x = torch.ones(4 if rank == 0 else 3)
    dist.all_reduce(x)


mismatch = failure_of(different_sizes)

# %% [markdown]
# How did the course notice this? A rank compares its call with those of the ranks that called
# earlier. Plain PyTorch compares calls only if `TORCH_DISTRIBUTED_DEBUG=DETAIL` is set. Without it,
# a mismatch can hang, crash, or return wrong numbers.
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
# Here the report puts the cause first. Real logs are not sorted by cause: the first rank that
# prints an error can be one that only waited.
#
# The last failure is a common mistake. Only rank 0 should print the sum of all losses. So the
# program puts everything that belongs to the report under `if rank == 0`, also the `all_reduce`.
# How many of the four ranks will hang?

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
show(*pictures.who_waits(hang.waits, 4))

# %% [markdown]
# Only rank 0 hangs, and there is no circle: rank 0 waits for ranks that have already returned. The
# line that hangs is right. The mistake is the `if` above it, which keeps the other ranks from
# making the same call.
#
# ### Exercise 5: a report that does not hang
# *Difficulty 2 of 5, importance 5 of 5, about 5 minutes and 3 lines.*
#
# Most training programs log a loss like this. Each rank has its own `loss`. Call `log(total)`
# **once, on rank 0**, with the sum of the losses of all ranks. `total` is a number or a tensor of
# one number, not rounded and not a text. With losses $10^r$ on four ranks, rank 0 logs 1111. Log
# the sum whatever its value is, also 0 or inf.
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
# So far, the notebook has started the ranks, and it has restarted them after each failure. Real
# jobs are usually scripts, and a launcher such as `torchrun` starts them, on one node or on many.
# Do you have to write your functions in another way then? The course's scripts end with
# `launch(fn)`, where `fn(rank)` is a function like those above. In the next script, four ranks
# print their numbers one after another, then sum $10^r$.

# %% tags=["picture", "measured"]
script = Path(course_lib.__file__).parents[1] / "cluster/exercises/00_hello_ranks.py"
torchrun = [sys.executable, "-m", "torch.distributed.run"]  # `torchrun` for short
here = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "4"]
command = [*torchrun, *here, script, "--record-to", "runs/00_hello_ranks"]
done = subprocess.run(command, capture_output=True, text=True)
print(done.stdout or done.stderr)
show(*pictures.recorded_run(read_runs("runs/00_hello_ranks")))

# %% [markdown]
# The launcher has told each rank its number, with the variables of section 2. Each rank has also
# written a *run record*, a small file that lists what it did and when. The picture is drawn from
# these files.
#
# **The same function runs in a notebook, under `torchrun` and on a cluster.**
#
# ## Where you are
#
# In a terminal, `course check 00` checks your saved copy of this notebook, and `course progress`
# shows your state in all lessons. Next: `01_memory`, where the bytes go, or `04_collectives`, which
# builds `all_reduce` out of `send` and `recv`.
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
