# %% [markdown]
# # 05 Data parallelism: same model, different data
#
# In data parallelism, every device has a copy of the model and computes on its own part of the
# batch. The code fits in five lines, but many mistakes in these lines go unnoticed, because the
# loss still falls. **How do the copies stay equal, which ranks wait for others, and what do we gain
# if they wait less?**
#
# *After this lesson you can*
#
# - write data parallelism in five steps, and test that the replicas are equal;
# - distribute the data and weight uneven batches so that $p$ ranks get the results of one process;
# - say what a straggler costs in synchronous and in asynchronous training;
# - communicate less with local SGD and DiLoCo, and write DiLoCo's outer step.
#
# **Prerequisites:** lessons 02 and 04. **Time:** about 60 minutes to read and run, 75 for the
# exercises (50 for the core ones). Section 4 ends with a break.
#
# | symbol | in code | meaning |
# |---|---|---|
# | $p$ | `p` | number of ranks (replicas) |
# | $n$ | `num_bytes` | bytes of all gradients |
# | $b_r$ | `num_items` | items in the batch of rank $r$ |
# | $w$ | | number of workers: ranks that compute gradients for a parameter server |
# | $t_r$ | `step_s` | seconds that rank $r$ takes for a step |
# | $s$ | `staleness` | updates made between a worker's pull and its push |
# | $H$ | `every` | local steps between two all-reduces |

# %%
# %load_ext course_lib.ranks
import time
from itertools import pairwise
from statistics import mean, median

import torch
import torch.distributed as dist
from torch import nn

from course_lib.checks import check
from course_lib.core.specs import ModelSpec
from course_lib.data_parallel import lab, pictures
from course_lib.display import YES_NO, claim, predict, reveal, show
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.ranks import Ranks

torch.set_num_threads(1)  # one replica, one core
pools = {p: Ranks(p) for p in (1, 2, 3)} | {4: ranks}

# %% [markdown]
# ## 1 One process, many threads
#
# We want several copies of a model, *replicas*, that compute at the same time. One Python process
# can use several GPUs, and PyTorch's old `DataParallel` works this way: in each step, a *master*
# copies its weights to every replica, splits the batch, and starts one thread per part. The
# alternative is one *process* per replica. Does the choice matter for speed?
#
# Start the same loop, in pure Python, in two threads, on a machine with at least two cores. How
# long do both loops take, as a multiple of the time of one loop alone?

# %% tags=["predict"]
guess_threads = predict("two loops in two threads, as a multiple of one loop")
### GUESS guess_threads.commit(1.2)

# %% tags=["check"]
from concurrent.futures import ThreadPoolExecutor

from course_lib.data_parallel import NaiveDDP, fingerprint, replica_of, weighted_loss


def threads_forward(model, x, p):
    replicas = [replica_of(model, is_first=r == 0) for r in range(p)]  # p copies, in each step
    parts = x.tensor_split(p)
    with ThreadPoolExecutor(p) as threads:
        outputs = list(threads.map(lambda replica, part: replica(part), replicas, parts))
    return torch.cat(outputs)  # on the master again, so its loss is that of the whole batch


x, model = torch.randn(6, 8).double(), nn.Sequential(nn.Linear(8, 8), nn.Tanh()).double()
outputs = [model(x), threads_forward(model, x, 4)]
one, four = (torch.autograd.grad(y.square().mean(), model[0].weight)[0] for y in outputs)
print("four threads give the gradient of one process:", torch.allclose(one, four, rtol=1e-11))

# %% tags=["picture", "measured"]
works = {"Python": lambda: sum(i * i for i in range(300_000))}
works["matrices"] = lambda: torch.ones(800, 800) @ torch.ones(800, 800)
times = lab.at_once(works, pools)
two = {name: min(ratios[1]) for name, ratios in times.items()}  # p = 2, least disturbed
reveal(guess_threads, two["Python, threads"])
print(f"in two processes: {two['Python, processes']:.2f} times the time of one loop")
claim("threads run Python one after the other", two["Python, threads"] > 1.5)
claim("threads run matrix products at once", two["matrices, threads"] < 1.7 or lab.num_cores() < 2)
claim("processes run Python at once", two["Python, processes"] < 1.5 or lab.num_cores() < 2)
show(*pictures.at_once(times, list(pools), lab.num_cores()))

# %% [markdown]
# The gradient is right, because a copy by `clone` is a differentiable operation: in the backward
# pass, autograd sums the gradients of all copies in the master's weight. So threads compute
# correctly, but they are slow, for two reasons:
#
# - **One interpreter.** A lock makes standard CPython execute Python in one thread at a time (since
#   3.13, there are also builds without this lock). Matrix products *do* run at the same time in
#   threads, because PyTorch releases the lock while it computes. But each kernel on a GPU is
#   launched by Python code. If one interpreter has to launch the kernels of all GPUs, the GPUs may
#   wait for it.
# - **One master.** In every step, the weights are copied to all replicas, and the outputs are
#   gathered on the master.
#
# PyTorch's documentation of `DataParallel` recommends `DistributedDataParallel` even within one
# node.
#
# **Use one process per device, each with its own interpreter. Such a process is a rank.**
#
# ## 2 Five steps
#
# Separate processes share no memory, so no master can copy the weights in each step. How do the
# replicas get equal weights then? They only have to *start* equal and *step* equally.
#
# Four ranks train a model with one weight, and at first only rank 0 has its initial value, 0.1.
# Each rank computes a gradient from its own data: 0.8, -0.2, -0.7 and 0.4. All ranks compute the
# mean of these gradients, which is 0.075, and take a step with a learning rate of 1. So on all
# ranks, the weight should become $0.1-0.075=0.025$. Read the five steps in the code.


# %%
def five_steps(rank):
    weight = torch.tensor([0.1 if rank == 0 else float("nan")])
    dist.broadcast(weight, src=0)  # 1 everyone starts from rank 0's weights
    gradient = torch.tensor([[0.8], [-0.2], [-0.7], [0.4]])[rank]  # 2 own data, own gradient
    dist.all_reduce(gradient)  # 3 the sum of all gradients, everywhere
    gradient /= dist.get_world_size()  # ... and their mean
    weight -= 1.0 * gradient  # 4 everyone takes the same step
    return weight.item()  # 5 and so on


weights = ranks.run(five_steps)
print("weights on the four ranks:", *(f"{weight:.3f}" for weight in weights))

# %% [markdown]
# After the broadcast, no rank sends weights any more. They stay equal, because an optimizer step is
# a function of weights, gradient and optimizer state. If all three are equal on all ranks, so are
# the new weights. Why do the ranks take the mean of the gradients, and not their sum? The loss of a
# batch is the mean of the losses of its items. If the batch is divided into $p$ equal parts, this
# is also the mean of the losses of the parts, and so its gradient is the mean of their gradients.
#
# ### Exercise 1 (core): an equal start
# *Difficulty 1 of 5, importance 4 of 5, about 10 minutes and 3 lines.*
#
# Give every rank the values of rank 0: if rank 0's weight is 0.1, it becomes 0.1 on all ranks. A
# module has more than trained weights: it has frozen parameters, and buffers such as batch norm's
# statistics (`state_dict()` may omit some). Copy **in place**, into the same tensors, because an
# optimizer may hold them already; frozen parameters stay frozen. DDP begins this way. Budget: one
# `broadcast` per parameter or buffer, and no other call.
#
# <details><summary>Hint: the check says that autograd records it</summary>
# Broadcast <code>tensor.data</code> (or <code>tensor.detach()</code>): the same memory, outside of
# autograd.
# </details>


# %% tags=["exercise"] exercise="data_parallel-1"
def make_equal(module):
    """Give every rank the parameters and buffers of rank 0."""
    ### BEGIN SOLUTION: one broadcast for every parameter and every buffer
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor.data, src=0)
    ### END SOLUTION


# %% tags=["check"] exercise="data_parallel-1"
check("data_parallel-1", make_equal)

# %% [markdown]
# ### Exercise 2 (core): the mean gradient
# *Difficulty 1 of 5, importance 5 of 5, about 10 minutes and 4 lines.*
#
# After `backward`, replace each `param.grad` by its mean over all ranks. Gradients 0.8, -0.2, -0.7
# and 0.4 on four ranks become 0.075 on all. This is the whole communication of data parallelism;
# lesson 06 makes it faster. Some parameters have no gradient on any rank. Budget: one `all_reduce`
# per gradient, and no other call.
#
# <details><summary>Hint: None has no all_reduce</summary>
# A frozen parameter, or one that no rank uses, has no gradient: skip it.
# </details>


# %% tags=["exercise"] exercise="data_parallel-2"
def average_gradients(module):
    """Replace every gradient by its mean over the ranks."""
    ### BEGIN SOLUTION: sum over the ranks, divide by how many there are
    for param in module.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
    ### END SOLUTION


# %% tags=["check"] exercise="data_parallel-2"
check("data_parallel-2", average_gradients)

# %% [markdown]
# **Broadcast once; then take the mean of the gradients in every step.**
#
# ## 3 The law: the results of one process
#
# How do you know that your five steps are right, in a model with more than one weight? The loss
# alone does not tell you. But there is a law that you can test: after any number of steps, $p$
# ranks have the weights of *one* process that trains on the whole batches, up to rounding.
#
# We test it with a GPT, three steps, and batches of 8 sequences, split into $p$ equal parts. Every
# rank draws its initial weights from a seed of its own, so the broadcast is tested, too. `NaiveDDP`
# makes the five steps, on 4 ranks and on 1. PyTorch's DDP runs on 4 ranks. (A `fingerprint` is a
# short number computed from all weights.)

# %%
tiny = ModelSpec(hidden=32, num_layers=1, num_heads=2, ffn_hidden=64, vocab=32, max_seq=16)


def train(rank, wrap, steps=3):
    torch.manual_seed(rank)
    model, rows, p = wrap(GPT(tiny).double()), [], dist.get_world_size()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for n in range(steps):
        x, y = next_tokens(token_batch(n, batch=8, seq=16, vocab=32))  # [8, 16]
        optimizer.zero_grad()
        loss = token_loss(model(x.tensor_split(p)[rank]), y.tensor_split(p)[rank])
        loss.backward()
        getattr(model, "finish", lambda: None)()  # NaiveDDP: the mean gradient
        optimizer.step()
        getattr(model, "step_done", lambda: None)()  # LocalSGD, DiLoCo: section 8
        rows.append((loss.item(), fingerprint(model)))
    return rows, nn.utils.parameters_to_vector(model.parameters()).detach()


# %% tags=["check"]
_, alone = pools[1].run(train, NaiveDDP)[0]
for wrap in (NaiveDDP, nn.parallel.DistributedDataParallel):
    every = [weights for _, weights in ranks.run(train, wrap)]
    equal = all(torch.equal(every[0], weights) for weights in every)
    near = torch.allclose(every[0], alone, rtol=1e-9)
    print(f"{wrap.__name__}: ranks equal to the last bit {equal}, equal to one process {near}")
    calls = [e for e in ranks.events if (e.rank, e.kind) == (0, "all_reduce")]
    print(f"    {len(calls)} calls in 3 steps, {sum(e.num_bytes for e in calls)} bytes")

# %% [markdown]
# Both implementations obey the law. PyTorch sends the same bytes in fewer messages, because it puts
# several gradients into one *bucket* (lesson 06).
#
# The law has limits. It holds if the loss of a batch is the mean of the losses of its items, and
# each item's loss depends on this item only. Batch norm violates this: it computes statistics over
# a batch, and here each rank sees only its own part. With dropout, the law fails, too, because each
# rank draws masks of its own.
#
# **Break it.** Suppose that somebody forgets the broadcast. Every rank keeps its own initial
# weights, but the gradients are averaged in each step. So each model steps along gradients that
# mostly belong to other models. Does the loss still fall?

# %% tags=["predict"]
guess_falls = predict("does the loss fall without the broadcast?", choices=YES_NO)
### GUESS guess_falls.commit("no")


# %% tags=["failure", "measured"]
def forgetful(module):  # use `NaiveDDP` instead, and the fingerprints are equal
    own = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    model = NaiveDDP(module)
    module.load_state_dict(own)  # as if nothing had been received
    return model


by_rank = [rows for rows, _ in ranks.run(train, forgetful, 40)]
for step in (1, 20, 40):
    now = [rows[step - 1] for rows in by_rank]
    row = (f"rank {r}: {loss:.2f} {state}" for r, (loss, state) in enumerate(now))
    print(f"step {step:2}   ", "   ".join(row))
reveal(guess_falls, "yes" if by_rank[0][-1][0] < by_rank[0][0][0] else "no")

# %% [markdown]
# The table shows loss and fingerprint of each rank. The fingerprints differ: these are four
# different models. Nevertheless, all four losses have fallen by step 40. One likely reason is that
# a quarter of the mean gradient is the model's own gradient.
#
# **To test replicas, compare their fingerprints. A falling loss does not show that they are
# equal.**
#
# ## 4 Every rank reads something else
#
# Equal replicas are of little use if they all compute on the same items. So each rank needs its own
# part of the data. How do the ranks agree on who reads what, without messages?
#
# One difficulty is a remainder. Four ranks read ten items, one item per rank and step. If two ranks
# read three items and the others two, the first two would call an all-reduce for the third item,
# and wait forever for the others. So every rank needs equally many items. With three each, the
# ranks read twelve items. Two items are therefore read twice in this epoch.
#
# ### Exercise 3 (core): the sampler
# *Difficulty 2 of 5, importance 4 of 5, about 15 minutes and 3 lines.*
#
# Return the items (numbers below `n`) that a rank reads. Shuffle all items in an order that depends
# on the epoch, **not** on the rank. Give every rank equally many, in turn or in blocks; if items
# are missing at the end, repeat the order from its beginning, as often as needed. If the order of 5
# items is 3 0 4 1 2, rank 0 of 2 reads 3 4 2 and rank 1 reads 0 1 3.
# `torch.randperm(n, generator=...)` shuffles; seed the generator, not the global random state.
#
# <details><summary>Hint: some items are never read</summary>
# If each rank shuffles in its own way, the ranks do not share one order.
# </details>


# %% tags=["exercise"] exercise="data_parallel-3"
def indices(n, rank, p, epoch):
    """The items that this rank reads in this epoch, as a list."""
    random = torch.Generator()
    ### BEGIN SOLUTION: one order for all ranks, given in turn, repeated at the end
    order = torch.randperm(n, generator=random.manual_seed(epoch)).tolist()
    each = -(-n // p)
    return [order[i % n] for i in range(rank, each * p, p)]
    ### END SOLUTION


# %% tags=["check"] exercise="data_parallel-3"
check("data_parallel-3", indices)

# %% tags=["failure"]
from torch.utils.data import DistributedSampler

from course_lib.data_parallel import RankSampler

print("items read twice, 10 items on 4 ranks:", 4 * len(RankSampler(10, 0, 4)) - 10)
for rank in range(4):
    both = RankSampler(10, rank, 4), DistributedSampler(range(10), 4, rank)
    for sampler in both:
        sampler.set_epoch(1)
    ours, theirs = map(list, both)
    print(f"rank {rank} reads {ours} in epoch 1, as PyTorch's sampler: {ours == theirs}")
forgotten = RankSampler(10, 0, 4)
print("rank 0 without set_epoch: epochs", *(list(forgotten) for epoch in range(3)))

# %% [markdown]
# The last line shows a common mistake. A sampler does not know when an epoch begins, unless the
# training loop calls `set_epoch`. Without this call, each epoch repeats the order of the first one,
# so each rank reads the same items in every epoch. There is no error.
#
# **Use one order for all ranks, a new one in each epoch, and equally many steps on every rank.**
#
# *A good place for a break.*
#
# ## 5 The last batch is uneven
#
# The sampler repeats items to make all batches equal. In an evaluation, we may not want this: each
# item should count exactly once. Then some batches are smaller. If we average tokens, batches are
# unequal even with the sampler, because sequences differ in length. Is the mean over ranks still
# the mean over all items?
#
# Lesson 02 had the same problem on one process, with parts of unequal size. Now four ranks have
# batches of 3, 3, 3 and 1 items. Each rank computes the mean loss of its own items, and we take the
# mean over ranks. An item of the first rank has the weight $\frac14\cdot\frac13$, but the single
# item of the last rank has the weight $\frac14\cdot1$, which is three times as much.
#
# In general, each of the $b_r$ items of rank $r$ has the weight $\frac{1}{b_r}$ in the rank's mean,
# and the mean over ranks multiplies this by $\frac1p$. So its weight is $\frac{1}{p\,b_r}$: the
# smaller the batch, the larger the weight. In the mean over all items, each item should have the
# weight $\frac{1}{\sum_k b_k}$. The right weight divided by the wrong one is
# $\frac{p\,b_r}{\sum_k b_k}$. If each rank multiplies its loss by this factor before `backward`,
# its gradients are multiplied by it, too, and their mean over ranks is right.
#
# ### Exercise 4 (core): the weight
# *Difficulty 3 of 5, importance 4 of 5, about 15 minutes and 4 lines.*
#
# Scale a rank's mean loss so that the *mean over ranks* is the mean over all items. With 3 items on
# one rank and 1 on the other, the losses are multiplied by 1.5 and 0.5. A rank without items has
# the loss `nan`: return 0, as a tensor that keeps its graph, so that this rank can still call
# `backward`. A `nan` that comes from real items has to stay visible. You need this for token losses
# with padding. Budget: one `all_reduce` of one number (8 bytes).
#
# <details><summary>Hint: nan times 0 is nan</summary>
# <code>loss.nan_to_num()</code> is finite, and 0 times it is a zero that keeps the graph. Use it
# only if there are no items, so that a nan from real items stays visible.
# </details>
#
# <details><summary>Hint: the others never return</summary>
# A rank without items has to call all_reduce, too. Return early only after it.
# </details>


# %% tags=["exercise"] exercise="data_parallel-4"
def weigh(loss, num_items):
    """Scale this rank's mean loss by its share of all items, for a mean over ranks."""
    total = torch.tensor(num_items)
    ### BEGIN SOLUTION: count all items; undo the later division by p
    dist.all_reduce(total)
    if num_items == 0:
        return loss.nan_to_num() * 0
    return loss * (num_items * dist.get_world_size() / total.item())
    ### END SOLUTION


# %% tags=["check"] exercise="data_parallel-4"
check("data_parallel-4", weigh)


# %%
def mean_of_items(rank, weighs):
    items = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0], [1000.0]][rank])
    mean = weighted_loss(items.mean(), len(items)) if weighs else items.mean()
    dist.all_reduce(mean)
    return mean.item() / 4


right, wrong = (ranks.run(mean_of_items, weighs)[0] for weighs in (True, False))
print(f"of 1 ... 9 and 1000: weighted mean {right:g}, mean of the ranks' means {wrong:g}")

# %% [markdown]
# **Weight each rank by its number of items. The mean of means is right only if these numbers are
# equal.**
#
# ## 6 The slowest rank sets the pace
#
# Now the results are right. What about the time? An all-reduce completes only when every rank has
# called it, so all ranks wait for the slowest one in every step. Training of this kind is called
# *bulk-synchronous parallel* (BSP; Valiant 1990). Suppose that three workers take 20 ms each for a
# step. Then one of them becomes a *straggler*, 8 times as slow, and a round (one step of each
# worker) takes $8\cdot20=160$ ms. The two fast workers wait for 140 ms of it. Can training go on
# without this wait?
#
# In **asynchronous** training, no worker waits for another. Rank 0 is a **parameter server** (Li et
# al. 2014) and holds the weights. Each of the $w$ other ranks is a worker that repeats three
# actions:
#
# 1. It *pulls* the current weights from the server.
# 2. It computes a gradient with them.
# 3. It *pushes* this gradient to the server, which applies it at once.
#
# Between a worker's pull and its push, other workers may have updated the weights. Then its
# gradient was computed with old weights. The number of these updates is the gradient's
# **staleness** $s$. If 3 workers are equally fast, what is the mean staleness?

# %% tags=["predict"]
guess_stale = predict("mean staleness with 3 equal workers")
### GUESS guess_stale.commit(1)

# %%
from course_lib.data_parallel import ParameterServer, loss_at, smoothed


def serve(rank, method, count, slowdown=1, step_s=0.02, build=lambda: nn.Embedding(32, 32)):
    """Rank 0 serves, the others sleep, then compute; rank 3 sleeps `slowdown` times as long."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD((model := build()).parameters(), lr=0.3)
    server = ParameterServer(model, optimizer, straggler=3, straggler_s=(slowdown - 1) * step_s)

    def loss_of_worker(module, step):
        time.sleep(step_s)
        x, y = next_tokens(token_batch(step, batch=8, seq=16, vocab=32, seed=rank))
        return token_loss(module(x), y)

    return getattr(server, method)(loss_of_worker, count)


# %% tags=["picture", "measured"]
runs = {}
for name, method, count in (("BSP", "synchronous", 2), ("asynchronous", "asynchronous", 12)):
    ranks.run(serve, method, count, slowdown=8)
    runs[name] = ranks.events
show(*pictures.rounds(runs))

# %% [markdown]
# ### Exercise 5 (further): how stale?
# *Difficulty 2 of 5, importance 3 of 5, about 10 minutes and 5 lines.*
#
# Return the staleness of every update. `order` names the worker of each update, from first to last.
# All workers pull before the first update, and each pulls again right after its own. For
# `[1, 2, 1, 1, 2]` the answer is `[0, 1, 1, 0, 2]`: worker 2 pushes last, and worker 1 has made two
# updates since worker 2 pulled. From such a log, you see in a real system how old its gradients
# are.
#
# <details><summary>Hint: everything is one too large</summary>
# When a worker pulls, its own update is already in the weights. Count only those after it.
# </details>


# %% tags=["exercise"] exercise="data_parallel-5"
def staleness_of(order):
    """For each update, how many others were made since its worker pulled."""
    ### BEGIN SOLUTION FROM course_lib.data_parallel.cost:staleness_of: remember when each pulled
    ### END SOLUTION


# %% tags=["check"] exercise="data_parallel-5"
check("data_parallel-5", staleness_of)

# %% [markdown]
# We can predict both times and staleness from the workers' step times $t_r$.
#
# - *BSP:* a round ends with its slowest worker, so it takes $\max_r t_r$.
# - *Asynchronous:* worker $k$ makes $1/t_k$ updates per second. During one step of worker $r$,
#   which takes $t_r$ seconds, worker $k$ makes $t_r/t_k$ updates. The sum over the others,
#   $\sum_{k \ne r} t_r / t_k$, is the mean staleness of worker $r$.
#
# Two pictures compare these formulas with a simulation, which computes the order of the updates,
# and with the real server, which counts them. Formula and simulation need one measured number: the
# time of a step without a straggler. (The straggler *sleeps* longer, but computes as fast as the
# others.)

# %% tags=["picture", "measured"]
slowdowns = [1, 2, 4, 8]
rounds = [ranks.run(serve, "synchronous", 5, slowdown=k)[0] for k in slowdowns]
frees = [ranks.run(serve, "asynchronous", 60, slowdown=k)[0] for k in slowdowns]
free_s = [updates[-1].time_s / 60 * 3 for updates in frees]  # three gradients
bsp_s = [[b.time_s - a.time_s for a, b in pairwise(updates)] for updates in rounds]
print(f"a round with a straggler that sleeps 8 times as long: {median(bsp_s[-1]) * 1e3:.0f} ms")
slower = median(bsp_s[-1]) / median(bsp_s[0]), free_s[-1] / free_s[0]
claim("a straggler slows rounds more than asynchronous updates", slower[0] > 2 * slower[1])
show(*pictures.pace(slowdowns, free_s[0], bsp_s, free_s))

# %% tags=["picture", "measured"]
reveal(guess_stale, mean(u.staleness for u in frees[0]))
show(*pictures.staleness(slowdowns, free_s[0], frees))

# %% [markdown]
# With a straggler, its own gradients are very stale, and those of the others are fresher than
# before. Over *all* updates, however, the mean staleness is $w - 1$, whatever the speeds. To see
# this, count. At each update, each of the $w - 1$ other workers is computing one gradient, and the
# update makes each of these gradients older by one. So each update adds $w-1$ to the sum of all
# stalenesses. (A run that ends has a lower mean, because unfinished gradients are not counted.)
#
# Does staleness hurt? We train the GPT of section 3. Each worker has its own data, rank 3 is a
# straggler, and both runs have learning rate 0.3. A BSP update uses the mean of three fresh
# gradients. An asynchronous update uses one gradient, mostly a stale one, so we expect it to be
# worth less. But there are more of them per second. Which run has the lower loss after two seconds?

# %% tags=["predict"]
sides = ("BSP", "asynchronous")
guess_seconds = predict("the lower loss after 2 seconds", choices=sides)
### GUESS guess_seconds.commit("BSP")

# %% tags=["picture", "measured"]
learn = {"slowdown": 8, "step_s": 0.01, "build": lambda: GPT(tiny)}
bsp = ranks.run(serve, "synchronous", 40, **learn)[0]
free = ranks.run(serve, "asynchronous", 400, **learn)[0]  # more than 2 s
last = smoothed(bsp)[-1], smoothed(free)[39]
claim("per update, BSP learns more", last[0] < last[1])
show(*pictures.losses_by_update(bsp, free))

# %% tags=["picture", "measured"]
times_s = [0.1 * k for k in range(1, 21)]
last = loss_at(bsp, times_s)[-1], loss_at(free, times_s)[-1]
reveal(guess_seconds, sides[last[0] > last[1]])
claim("with this straggler, asynchronous training learns more per second", last[1] < last[0])
show(*pictures.losses_by_time(bsp, free, times_s))

# %% [markdown]
# After equally many updates, BSP has the lower loss. After equally many seconds, asynchronous
# training has, because it made many more updates. But this is a small model, with one straggler
# that sleeps 8 times as long. On equally fast machines, BSP loses little time, has no stale
# gradients, and its updates do not depend on the ranks' speeds. Llama 3 was trained synchronously,
# on up to 16,384 GPUs (Grattafiori et al. 2024, section 3.3).
#
# A server has another cost: all gradients enter through *its* link, and all weights leave through
# it. In each step, the server sends the weights to each of the $p-1$ workers. Weights have as many
# bytes as gradients, so these are $(p-1)\,n$ bytes. A rank of a ring all-reduce sends
# $2\frac{p-1}{p}n$ bytes (lesson 04), which is less than $2n$ for any $p$. The next cell counts the
# bytes of both.

# %% tags=["picture"]
from course_lib.collectives import ring_all_reduce


def sent_by_rank_0(p, *call):
    pools[p].run(*call)
    return sum(e.num_bytes for e in pools[p].events if (e.rank, e.kind) == (0, "send")) / 4096


p_values = [2, 3, 4]
ring = [sent_by_rank_0(p, lambda rank: ring_all_reduce(torch.ones(32, 32))) for p in p_values]
server = [sent_by_rank_0(p, serve, "synchronous", 1) for p in p_values]
show(*pictures.busiest_link(p_values, ring, server))

# %% [markdown]
# A real parameter server divides the weights among several server ranks, so that they share this
# load (Li et al. 2014).
#
# **BSP waits for the slowest rank. Asynchronous training does not, but with more than one worker,
# its gradients are stale.**
#
# ## 7 On real GPUs
#
# In section 6, a synchronous step was slow because of one slow rank. Now suppose that all GPUs are
# equally fast. Then nobody waits for a straggler, but the all-reduce itself takes time. How much
# does it cost on hundreds of GPUs?
#
# Tazi et al. (2025, *The Ultra-Scale Playbook*) trained a model of 1.3 billion parameters by data
# parallelism on 8 to 256 H100. On 256 GPUs, how many tokens/s does one GPU process, in percent of
# its tokens/s on 8?

# %% tags=["predict"]
guess_kept = predict("tokens/s per GPU on 256 GPUs / on 8 GPUs", unit="%")
### GUESS guess_kept.commit(80)

# %% tags=["picture"]
gpus, kept, bandwidth = pictures.published_scaling()  # both in % of the value on 8 GPUs
reveal(guess_kept, kept[-1])
show(*pictures.scaling_on_gpus())

# %% [markdown]
# All runs have the same global batch of 256 sequences per step: 32 per GPU on 8 GPUs, one per GPU
# on 256. So with more GPUs, each computes less per step. But the gradients are as large as before,
# so the all-reduce does not get shorter in the same way. Worse, it now crosses the network between
# nodes. The bandwidth of the all-reduce falls even further than the tokens/s per GPU. The tokens/s
# fall less, because the all-reduce is only a part of a step and can overlap with backward. (The
# runs on 8 and 128 GPUs have micro-batches of two. With micro-batches of one, as in the other runs,
# 8 GPUs are 2 % slower, and 128 GPUs 7 %.)
#
# **With overlap (lesson 06), data parallelism scales well as long as backward takes longer than the
# all-reduce of the gradients.**
#
# ## 8 Communicate every H steps
#
# What if the network is so slow that the all-reduce takes longer than backward, for example between
# data centers? Then one can communicate less often. What does this do to the training?
#
# In *local SGD* (Stich 2019), every rank steps alone, and after every $H$ steps all ranks take the
# mean of their *weights* (`LocalSGD.step_done()`, after `optimizer.step()` in `train`). With
# $H = 1$ and plain SGD, this is data parallelism. To see this, let $g_r$ be rank $r$'s gradient and
# $\gamma$ the learning rate. All ranks start from the same $\theta$, and the mean of their weights
# after the step is $\frac1p\sum_r(\theta-\gamma g_r)=\theta-\gamma\,\frac1p\sum_r g_r$: one step
# with the mean gradient. With a larger $H$, local SGD sends $\frac1H$ of the bytes, but between two
# means the replicas drift apart.
#
# *DiLoCo* (Douillard et al. 2023, algorithm 1) adds a second optimizer, but sends no more bytes. It
# regards a whole round of $H$ inner steps as if it were one step:
#
# 1. All ranks begin the round with the same weights $\theta$. After $H$ steps with its inner
#    optimizer, rank $r$ has arrived at $\theta_r$.
# 2. A second optimizer needs a gradient. An optimizer moves *against* the gradient, so to move from
#    $\theta$ towards $\theta_r$, the gradient has to point from $\theta_r$ back to $\theta$: it is
#    $\theta-\theta_r$. The mean over the ranks is the **outer gradient**
#    $\Delta = \theta - \frac1p \sum_r \theta_r$.
# 3. The **outer optimizer** steps from $\theta$ with this gradient. It is SGD with learning rate
#    $\eta$ and Nesterov momentum $\mu$: $v \leftarrow \mu v + \Delta$, then
#    $\theta \leftarrow \theta - \eta (\Delta + \mu v)$. All ranks begin the next round there.
#
# With $\mu = 0$ and $\eta = 1$, the new $\theta$ is $\theta-\Delta=\frac1p\sum_r\theta_r$: local
# SGD. With $\mu > 0$, the momentum adds up the directions of earlier rounds, so directions that
# repeat are followed further. The paper's inner optimizer is AdamW, and $H = 500$. After the
# exercise, we compare both methods for $H=1$, 4 and 16.
#
# ### Exercise 6 (further): the outer step
# *Difficulty 3 of 5, importance 3 of 5, about 15 minutes and 7 lines.*
#
# `starts` are the parameters at the beginning of the round, equal on all ranks; `params` are this
# rank's parameters at its end; `outer` is an optimizer of `starts`. Put the outer gradient in each
# `start.grad`, let `outer` step, and copy the new `starts` into `params`, in place, under
# `torch.no_grad()`. Example: a start of 5 and params of 3 and 1 on two ranks give the gradient 3.
# With plain SGD and learning rate 1, all continue from 2. Budget: one `all_reduce` per tensor.
#
# <details><summary>Hint: the loss rises</summary>
# An optimizer subtracts <code>grad</code>. Which difference points back to the start?
# </details>


# %% tags=["exercise"] exercise="data_parallel-6"
def outer_step(starts, params, outer):
    """Apply the outer gradient to starts, and let params begin the next round there."""
    ### BEGIN SOLUTION: the mean way back as a gradient, one step, and a common start
    with torch.no_grad():
        for start, param in zip(starts, params, strict=True):
            start.grad = start - param
            dist.all_reduce(start.grad)
            start.grad /= dist.get_world_size()
        outer.step()
        for start, param in zip(starts, params, strict=True):
            param.copy_(start)
    ### END SOLUTION


# %% tags=["check"] exercise="data_parallel-6"
check("data_parallel-6", outer_step)

# %%
from course_lib.data_parallel import DiLoCo, LocalSGD


def last_loss(method, every):
    got = ranks.run(train, lambda module: method(module, every), 64)
    loss = mean(row[0] for rows, _ in got for row in rows[-16:])
    sent = sum(e.num_bytes for e in ranks.events if (e.rank, e.kind) == (0, "all_reduce"))
    print(f"{method.__name__:8} H = {every:2}: loss {loss:.3f}, {sent / 64:,.0f} bytes per step")
    return loss


# %% tags=["picture", "measured"]
periods = [1, 4, 16]
losses = {"local SGD": [last_loss(LocalSGD, every) for every in periods]}
losses["DiLoCo"] = [last_loss(DiLoCo, every) for every in periods]
claim("at H = 16, DiLoCo reaches a lower loss", losses["DiLoCo"][-1] < losses["local SGD"][-1])
show(*pictures.local_sgd(periods, losses))

# %% [markdown]
# Here local SGD's loss grows with $H$, because the replicas drift further apart between two means.
# DiLoCo at $H = 16$ comes close to data parallelism (local SGD at $H = 1$), and sends only
# $\frac1{16}$ of its bytes.
#
# There are two reasons for caution. First, our inner optimizer is plain SGD, so DiLoCo may gain
# simply because it has momentum: Kallusky et al. (2025) find gains even with a single worker, where
# no replicas can drift apart. Second, 64 steps of a tiny model show nothing about a large one. For
# larger models, Douillard et al. (abstract) report that 8 workers on the data set C4 do as well as
# synchronous training and communicate 500 times less.
#
# **If ranks all-reduce only every $H$ steps, they send $\frac1H$ of the bytes, but the training is
# no longer that of one process.**
#
# ## What to keep
#
# - Use one process per device: threads share one interpreter, and `DataParallel` copies the model
#   in every step.
# - Broadcast parameters and buffers at the start; take the mean gradient in every step. The mean
#   keeps equal weights equal, but does not make different ones equal.
# - Use one shuffled order for all ranks, a new one in each epoch; weight uneven batches by their
#   items.
# - BSP is as fast as its slowest rank, and gives the results of one process. Asynchronous training
#   has a mean staleness of $w - 1$.
# - Local SGD and DiLoCo send $\frac1H$ of the bytes, but the replicas drift apart.
#
# ## Read on
#
# - Li et al. 2020, *PyTorch Distributed*: the design of DDP, measured on up to 256 GPUs.
# - Li et al. 2014, *Scaling Distributed Machine Learning with the Parameter Server*.
# - Goyal et al. 2017, *Accurate, Large Minibatch SGD*: how to change the learning rate when ranks
#   are added.
# - Stich 2019, *Local SGD Converges Fast and Communicates Little*: when it converges.
# - Douillard et al. 2023, *DiLoCo* (arXiv 2311.08105); Kallusky et al. 2025, *SNOO: Step-K Nesterov
#   Outer Optimizer*: the outer momentum with one worker.
