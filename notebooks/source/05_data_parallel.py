# %% [markdown]
# # 05 Data parallelism: same model, different data
#
# The oldest way to use many devices: give each a copy of the model and a part of the batch, and see
# to it that the copies stay equal. It fits in five lines, and most mistakes in them go unnoticed:
# the loss falls anyway. You **predict** each number, **run** it on real ranks, and **compare**.
#
# | symbol | in code | meaning |
# |---|---|---|
# | $p$ | `p` | how many ranks (replicas) there are |
# | $n$ | `num_bytes` | bytes of all gradients |
# | $b_r$ | `num_items` | items in the batch of rank $r$ |
# | $w$ | | ranks that compute for a parameter server |
# | $t_r$ | `step_s` | seconds that rank $r$ takes for a step |
# | $s$ | `staleness` | updates made between a worker's pull and its push |
# | $H$ | `every` | local steps between two averages |

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
from course_lib.data_parallel import cost
from course_lib.display import YES_NO, Voices, compare, predict, reveal, show, timelines
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.ranks import Ranks

torch.set_num_threads(1)  # one replica, one core
pools = {p: Ranks(p) for p in (1, 2, 3)} | {4: ranks}

# %% [markdown]
# ## 1 One process, many threads
#
# The first idea (PyTorch's `DataParallel`) needs a single program: a *master* copies its weights to
# every replica, cuts the batch, and starts a thread for each part. The rival is one *process* a
# replica. With two replicas on two cores, how many times as fast as one replica is each?

# %% tags=["predict"]
guess_threads = predict("speed-up by 2 threads in one process")
guess_processes = predict("speed-up by 2 processes")

# %%
from concurrent.futures import ThreadPoolExecutor

from course_lib.data_parallel import DataParallel, replica_of


def threads_forward(model, x, p):
    replicas = [replica_of(model, is_first=r == 0) for r in range(p)]  # p copies, in each step
    parts = x.tensor_split(p)
    with ThreadPoolExecutor(p) as threads:
        outputs = list(threads.map(lambda replica, part: replica(part), replicas, parts))
    return torch.cat(outputs)  # on the master again, so its loss is that of the whole batch


# %% tags=["check"]
x, model = torch.randn(6, 8).double(), nn.Sequential(nn.Linear(8, 8), nn.Tanh()).double()
outputs = [model(x), threads_forward(model, x, 4)]
one, four = (torch.autograd.grad(y.square().mean(), model[0].weight)[0] for y in outputs)
print("four threads give the gradient of one process:", torch.allclose(one, four, rtol=1e-11))

# %%
from course_lib.data_parallel import NaiveDDP, RankSampler, fingerprint, weighted_loss


def step_times(wrap, p=1, rank=0):
    model = wrap(nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))))
    x, moments = torch.ones(1024, 512).tensor_split(p)[rank], []
    for _ in range(6):
        model(x).square().mean().backward()
        getattr(model, "finish", lambda: None)()  # NaiveDDP: the mean gradient, as in section 2
        moments.append(time.perf_counter())
    return [end_s - start_s for start_s, end_s in pairwise(moments)][1:]


# %% tags=["picture"]
p_values = [1, 2, 4]
threads_s = [step_times(lambda model, p=p: DataParallel(model, p)) for p in p_values]
process_s = [pools[p].run(lambda rank, p=p: step_times(NaiveDDP, p, rank))[0] for p in p_values]
alone_s = median(step_times(lambda model: model))
by_threads, by_processes = (alone_s / median(some[1]) for some in (threads_s, process_s))
reveal(guess_threads, by_threads)
reveal(guess_processes, by_processes)
title = f"Two threads: {by_threads:.1f} times as fast as one replica, processes: {by_processes:.1f}"
curves = {"threads": Voices(measurement=threads_s), "processes": Voices(measurement=process_s)}
curves["if nothing else cost time"] = Voices(formula=lambda p: alone_s / p)
figure = compare(p_values, curves, title, x_label="replicas p", y_label="time of a step (s)")
show(figure, alt=f"{title}; past the number of cores nothing is won")

# %% [markdown]
# The gradient is right: a copy by `clone` is an operation like any other, and autograd adds up what
# comes back. But threads share one interpreter (its lock lets one thread at a time run Python), one
# thread runs the whole backward on a CPU, and the copies come on top. On GPUs all $p$ copies leave
# through the master's wire, in every step. Processes share nothing but a sum. (Where the cores are
# busy with other things, nobody wins anything.)
#
# **A process a device. From here on, that is a rank.**
#
# ## 2 Five steps
#
# One weight, four ranks, and only rank 0 has the right start, 0.1. Each rank computes a gradient
# from its own data: 0.8, -0.2, -0.7, 0.4. All take the mean, and step with a learning rate of 1.
# What is the weight afterwards?

# %% tags=["predict"]
guess_weight = predict("the weight on every rank")


# %%
def five_steps(rank):
    weight = torch.tensor([0.1 if rank == 0 else float("nan")])
    dist.broadcast(weight, src=0)  # 1 everyone starts from rank 0's weights
    gradient = torch.tensor([[0.8], [-0.2], [-0.7], [0.4]])[rank]  # 2 own data, own gradient
    dist.all_reduce(gradient)  # 3 the sum of all gradients, everywhere
    gradient /= dist.get_world_size()  # ... and their mean
    weight -= 1.0 * gradient  # 4 everyone steps alike
    return weight.item()  # 5 and so on


weights = ranks.run(five_steps)
print("weights on the four ranks:", *(f"{weight:.3f}" for weight in weights))
reveal(guess_weight, round(weights[0], 6))

# %% [markdown]
# Nobody sends a weight after the start: equal weights and equal gradients give equal weights.
#
# ### Exercise 1: an equal start
#
# A module has more than weights: buffers (batch norm's statistics; `state_dict()` may leave some
# out), and frozen parameters, which stay frozen. Give every rank rank 0's, **in place**: the same
# tensors in the same memory. Budget: one `broadcast` a tensor, and no other call.
# `module.parameters()` gives tied ones once. About 3 lines.
#
# <details><summary>Hint: the check says that autograd looks on</summary>
# Broadcast <code>tensor.data</code> (or <code>tensor.detach()</code>): the same memory, without
# autograd looking on.
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
# ### Exercise 2: the mean gradient
#
# After `backward`, replace each `param.grad` by its mean over all ranks. Budget: one `all_reduce`
# a trained parameter, and no other call. Each gradient stays a tensor of its own, not a view into
# a larger one. About 4 lines.
#
# <details><summary>Hint: None has no all_reduce</summary>
# A frozen parameter has no gradient: skip it.
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
# **Broadcast once; then the mean of the gradients, in every step.**
#
# ## 3 The law: the numbers of one process
#
# A GPT, three steps, a batch of 8 cut into $p$ parts. Every rank draws its initial weights from a
# seed of its own. The same function runs on 4 ranks, on 1, and inside PyTorch's own DDP.

# %%
tiny = ModelSpec(hidden=32, num_layers=1, num_heads=2, ffn_hidden=64, vocab=32, max_seq=16)


def loss_of(model, n):
    """The loss of this rank's part of batch n."""
    rank, p = dist.get_rank(), dist.get_world_size()
    x, y = next_tokens(token_batch(n, batch=8, seq=16, vocab=32))  # [8, 16]
    return token_loss(model(x.tensor_split(p)[rank]), y.tensor_split(p)[rank])


# %%
def train(rank, wrap, steps=3):
    torch.manual_seed(rank)
    model, rows = wrap(GPT(tiny).double()), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for n in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, n)
        loss.backward()
        getattr(model, "finish", lambda: None)()  # NaiveDDP: the mean gradient
        optimizer.step()
        getattr(model, "step_done", lambda: None)()  # LocalSGD, in section 7
        rows.append((time.perf_counter(), loss.item(), fingerprint(model)))
    return rows, torch.nn.utils.parameters_to_vector(model.parameters()).detach()


# %% tags=["check"]
_, alone = pools[1].run(train, NaiveDDP)[0]
for wrap in (NaiveDDP, nn.parallel.DistributedDataParallel):
    every = [weights for _, weights in ranks.run(train, wrap)]
    equal = all(torch.equal(every[0], weights) for weights in every)
    near = torch.allclose(every[0], alone, rtol=1e-9)
    print(f"{wrap.__name__}: ranks equal to the last bit {equal}, equal to one process {near}")

# %%
for wrap in (NaiveDDP, nn.parallel.DistributedDataParallel):
    rows, _ = pools[2].run(train, wrap, 12)[0]
    calls = [e for e in pools[2].events if (e.rank, e.kind) == (0, "all_reduce")]
    ms = median(end[0] - start[0] for start, end in pairwise(rows[2:])) * 1e3
    sent = sum(e.num_bytes for e in calls) / 12
    print(f"{wrap.__name__:23} a step: {ms:.1f} ms, {len(calls) / 12:.0f} calls, {sent:.0f} bytes")

# %% [markdown]
# The same bytes in fewer messages: PyTorch puts gradients into *buckets*. The next lesson builds
# them.
#
# **Break it.** Forget the broadcast: every rank keeps its own start, and the gradients are averaged
# in each step. Does the loss fall all the same?

# %% tags=["predict"]
guess_falls = predict("does the loss fall without the broadcast?", choices=YES_NO)


# %% tags=["failure"]
def forgetful(module):  # `NaiveDDP` in its place mends it
    own = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    model = NaiveDDP(module)
    module.load_state_dict(own)  # as if nothing had come
    return model


by_rank = [rows for rows, _ in ranks.run(train, forgetful, 40)]
for step in (1, 20, 40):
    row = (
        f"rank {r}: {rows[step - 1][1]:.2f} {rows[step - 1][2]}" for r, rows in enumerate(by_rank)
    )
    print(f"step {step:2}   ", "   ".join(row))
reveal(guess_falls, "yes" if by_rank[0][-1][1] < by_rank[0][0][1] else "no")

# %% [markdown]
# Loss and fingerprint of the parameters, rank by rank: four models, each led by the gradients of
# the others too, and each learns. **Equal fingerprints are the test; a falling loss is none.**
#
# ## 4 Everyone reads something else
#
# Ten items, four ranks, one item a step. Every rank has to make as many steps as the others, or
# their last all-reduce waits for ever. How many items are read twice in an epoch?

# %% tags=["predict"]
guess_twice = predict("items read twice, 10 items on 4 ranks")

# %% [markdown]
# ### Exercise 3: the sampler
#
# Shuffle all items in an order that depends on the epoch and **not** on the rank, then deal them
# out, in turn or in blocks, as many to each rank. If cards are missing at the end, go on with the
# first ones of the order, again and again if they are few. `torch.randperm(n, generator=...)`
# shuffles; seed the generator, and leave the global random state alone. The same call gives the
# same numbers in every process, in a new list. About 3 lines.
#
# <details><summary>Hint: some items are never read</summary>
# If each rank shuffles in its own way, they do not deal out the same pack.
# </details>


# %% tags=["exercise"] exercise="data_parallel-3"
def indices(n, rank, p, epoch):
    """The items that this rank reads in this epoch, as a list."""
    random = torch.Generator()
    ### BEGIN SOLUTION: one order for all ranks, dealt out like cards, round and round
    order = torch.randperm(n, generator=random.manual_seed(epoch)).tolist()
    each = -(-n // p)
    return [order[i % n] for i in range(rank, each * p, p)]
    ### END SOLUTION


# %% tags=["check"] exercise="data_parallel-3"
check("data_parallel-3", indices)

# %% tags=["check"]
from torch.utils.data import DistributedSampler

reveal(guess_twice, 4 * len(RankSampler(10, 0, 4)) - 10)
for rank in range(4):
    both = RankSampler(10, rank, 4), DistributedSampler(range(10), 4, rank)
    for sampler in both:
        sampler.set_epoch(1)
    ours, theirs = map(list, both)
    print(f"rank {rank} reads {ours} in epoch 1, as PyTorch's sampler: {ours == theirs}")

# %% tags=["failure"]
forgotten = RankSampler(10, 0, 4)
print("set_epoch forgotten: epochs", *(list(forgotten) for epoch in range(3)))

# %% [markdown]
# Without `set_epoch` each epoch repeats the first one's order, and each rank sees the same part of
# the data for ever. Nothing fails.
#
# **One order for all, another one each epoch, as many steps on every rank.**
#
# ## 5 The last batch is uneven
#
# Four ranks have batches of 3, 3, 3 and 1 items. Each takes the mean loss of its own, and the mean
# over ranks follows. How many times as much as the others does the item on the last rank count?

# %% tags=["predict"]
guess_counts = predict("weight of the lonely item, as a multiple of the others'")

# %% [markdown]
# The gradients' mean gives each rank $\frac1p$; right is $\frac{b_r}{\sum_r b_r}$. So scale the
# loss before `backward`.
#
# ### Exercise 4: the weight
#
# Scale a rank's mean loss so that the *mean over ranks* is the mean over all items. A rank may have
# no items at all: its loss is `nan`, and it has to count zero (as a tensor that keeps its graph). A
# `nan` of real items stays one. Leave `loss` itself as it is, and `backward` to the caller.
# Budget: one `all_reduce` of one number (8 bytes), and no other call. About 4 lines.
#
# <details><summary>Hint: nan times 0 is nan</summary>
# <code>loss.nan_to_num()</code> is a number, and 0 times it is a zero that backward can follow. Use
# it only where there are no items: a nan of real items is an error that everybody should see.
# </details>
#
# <details><summary>Hint: the others wait for ever</summary>
# Also a rank without items has to call all_reduce. Return early only after it.
# </details>


# %% tags=["exercise"] exercise="data_parallel-4"
def weigh(loss, num_items):
    """This rank's mean loss, scaled by what its items are of all."""
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
reveal(guess_counts, (1 / 1) / (1 / 3))

# %% [markdown]
# **Ranks count by their items, not by heads.**
#
# ## 6 The slowest sets the pace
#
# Waiting for everybody at the end of each step is called *bulk-synchronous* (BSP). Three workers
# take 20 ms a step; one of them becomes a straggler, 8 times as slow. How long is a round?
#
# The other extreme: rank 0 becomes a **parameter server**. It holds the weights; a worker pulls
# them, computes, and pushes its gradient, which is applied *as it comes*. Nobody waits. But a
# gradient may belong to weights that others have changed meanwhile; the number of those updates is
# its **staleness** $s$. If all are equally fast, what is the mean staleness with 3 workers?

# %% tags=["predict"]
guess_round = predict("a round of three workers, one of them 8 times as slow", unit="ms")
guess_stale = predict("mean staleness with 3 equal workers")

# %%
from course_lib.data_parallel import ParameterServer, loss_at, smoothed


def serve(rank, method, count, slowdown=1, step_s=0.02, build=lambda: nn.Embedding(32, 32)):
    """Rank 0 serves, the others sleep, then compute; rank 3 is `slowdown` times as slow."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD((model := build()).parameters(), lr=0.3)
    server = ParameterServer(model, optimizer, straggler=3, straggler_s=(slowdown - 1) * step_s)

    def loss_of_worker(module, step):
        time.sleep(step_s)
        x, y = next_tokens(token_batch(step, batch=8, seq=16, vocab=32, seed=rank))
        return token_loss(module(x), y)

    return getattr(server, method)(loss_of_worker, count)


# %% tags=["picture"]
runs = {}
for name, method, count in (("BSP", "synchronous", 2), ("asynchronous", "asynchronous", 12)):
    ranks.run(serve, method, count, slowdown=8)
    runs[name] = [e for e in ranks.events if e.kind in ("compute", "optimizer", "wait")]
title = f"Waiting for rank 3: two rounds take {max(e.end_s for e in runs['BSP']) * 1e3:.0f} ms"
show(timelines(runs, title), alt=f"{title}; asynchronous workers never wait for one another")

# %% [markdown]
# ### Exercise 5: how stale?
#
# The server knows the worker of every update, such as `[1, 2, 1, 1, 2]`; there may be more workers.
# A worker pulls right after its own update, and all have pulled before the first one. Leave the
# list as it is. About 5 lines.
#
# <details><summary>Hint: everything is one too large</summary>
# Its own update is in what it pulls. Count those that came after it.
# </details>


# %% tags=["exercise"] exercise="data_parallel-5"
def staleness_of(order):
    """For each update, how many others were made since its worker pulled."""
    ### BEGIN SOLUTION FROM course_lib.data_parallel.cost:staleness_of: remember when each pulled
    ### END SOLUTION


# %% tags=["check"] exercise="data_parallel-5"
check("data_parallel-5", staleness_of)

# %% [markdown]
# Now all three voices. Formula: a round takes $\max_r t_r$; asynchronous, worker $r$ misses
# $\sum_{k \ne r} t_r / t_k$ updates. Simulation: who arrives when, on paper. Measurement: the real
# server, which counts. Only $t$ itself, a step without a straggler, is measured for all three. (The
# straggler *sleeps* $k$ times as long, but computes as fast as the others.)

# %%
slowdowns = [1, 2, 4, 8]
rounds = [ranks.run(serve, "synchronous", 5, slowdown=k)[0] for k in slowdowns]
frees = [ranks.run(serve, "asynchronous", 60, slowdown=k)[0] for k in slowdowns]
free_s = [updates[-1].time_s / 60 * 3 for updates in frees]  # three gradients
reveal(guess_stale, mean(u.staleness for u in frees[0]))


def steps_s(k):
    return [free_s[0], free_s[0], free_s[0] + 0.02 * (k - 1)]


# %% tags=["picture"]
bsp_s = [[b.time_s - a.time_s for a, b in pairwise(updates)] for updates in rounds]
reveal(guess_round, median(bsp_s[-1]) * 1e3)
expected = [3 / sum(1 / t for t in steps_s(k)) for k in slowdowns]
curves = {
    "BSP": Voices(formula=lambda k: max(steps_s(k)), measurement=bsp_s),
    "asynchronous": Voices(formula=expected, measurement=free_s),
}
ratios = median(bsp_s[-1]) / median(bsp_s[0]), free_s[-1] / free_s[0]
title = "A straggler: BSP {:.1f} times as slow, asynchronous training {:.1f}".format(*ratios)
axes = {"x_label": "rank 3 sleeps so many times as long", "y_label": "time of three gradients (s)"}
show(compare(slowdowns, curves, title, **axes), alt=f"{title}; rounds are as long as the slowest")

# %% tags=["picture"]
counted = [[(u.workers[0], u.staleness) for u in updates] for updates in frees]
orders = [cost.arrival_order(steps_s(k), 60) for k in slowdowns]
played = [zip(order, cost.staleness_of(order), strict=True) for order in orders]
aged, on_paper = (
    [mean(age for who, age in ages if who == 3) for ages in voice] for voice in (counted, played)
)
expected = [cost.mean_staleness(steps_s(k), worker=3) for k in slowdowns]
age = Voices(formula=expected, simulation=on_paper, measurement=aged)
title = f"{slowdowns[-1]} times the sleep: the straggler's gradients are {aged[-1]:.0f} updates old"
axes["y_label"] = "mean staleness of rank 3 (updates)"
show(compare(slowdowns, age, title, **axes), alt=f"{title}; formula and simulation say the same")

# %% [markdown]
# Over *all* updates the mean staleness is $w - 1$ whatever the speeds (a little less in a short
# run, whose first gradients are fresh): the fast ones get fresher by as much as the straggler ages.
#
# Does it hurt? The same GPT, data of its own for each worker, rank 3 a straggler, one learning
# rate. A BSP update is the mean of three fresh gradients, an asynchronous one a single stale
# gradient. Who has the lower loss after 40 updates, and who after two seconds?

# %% tags=["predict"]
sides = ("BSP", "asynchronous")
guess_updates = predict("the lower loss after 40 updates", choices=sides)
guess_seconds = predict("the lower loss after 2 seconds", choices=sides)

# %% tags=["picture"]
learn = {"slowdown": 8, "step_s": 0.01, "build": lambda: GPT(tiny)}
bsp = ranks.run(serve, "synchronous", 40, **learn)[0]
free = ranks.run(serve, "asynchronous", 240, **learn)[0]
losses = {"BSP": smoothed(bsp), "asynchronous": smoothed(free)[:40]}
reveal(guess_updates, min(losses, key=lambda name: losses[name][-1]))
title = f"After 40 updates: BSP {losses['BSP'][-1]:.2f}, asynchronous {losses[sides[1]][-1]:.2f}"
curves = {name: Voices(measurement=values) for name, values in losses.items()}
figure = compare(range(1, 41), curves, title, x_label="updates", y_label="loss")
show(figure, alt=f"{title}; by update, means of fresh gradients learn faster")

# %% tags=["picture"]
times_s = [0.1 * k for k in range(1, 21)]
losses = {"BSP": loss_at(bsp, times_s), "asynchronous": loss_at(free, times_s)}
reveal(guess_seconds, min(losses, key=lambda name: losses[name][-1]))
title = f"After 2 s: BSP {losses['BSP'][-1]:.2f}, asynchronous {losses[sides[1]][-1]:.2f}"
curves = {name: Voices(measurement=values) for name, values in losses.items()}
figure = compare(times_s, curves, title, x_label="time (s)", y_label="loss")
show(figure, alt=f"{title}; with a straggler, waiting costs more than staleness")

# %% [markdown]
# The server has a price of its own: all gradients come through *its* wire, and all weights leave
# through it. What does the busiest rank send in a step?

# %% tags=["picture"]
from course_lib.collectives import ring_all_reduce


def sent_by_rank_0(p, *call):
    pools[p].run(*call)
    return sum(e.num_bytes for e in pools[p].events if (e.rank, e.kind) == (0, "send")) / 4096


p_values = [2, 3, 4]
ring = [sent_by_rank_0(p, lambda rank: ring_all_reduce(torch.ones(32, 32))) for p in p_values]
server = [sent_by_rank_0(p, serve, "synchronous", 1) for p in p_values]
curves = {"ring": Voices(formula=lambda p: 2 * (p - 1) / p, measurement=ring)}
curves["server"] = Voices(formula=lambda p: p - 1, measurement=server)
title = f"On 4 ranks the server sends {server[-1]:.1f} n a step, a rank of a ring {ring[-1]:.1f} n"
figure = compare(p_values, curves, title, x_label="ranks p", y_label="bytes sent a step, in n")
show(figure, alt=f"{title}: one grows with p, the other stays below 2 n")

# %% [markdown]
# **BSP waits for the slowest; asynchronous training uses old weights instead, takes all bytes
# through one wire, and no run can be repeated.**
#
# ## 7 The middle: local SGD
#
# Talk less often. Every rank steps alone, and every $H$ steps all take the mean of their *weights*
# (`LocalSGD.step_done()`, behind `optimizer.step()` in `train`).
# With $H = 1$ and plain SGD this is data parallelism up to rounding. What part of its bytes is left
# with $H = 8$?

# %% tags=["predict"]
guess_local = predict("part of the bytes that is left with H = 8 (like 1/2)")

# %% tags=["picture"]
from course_lib.data_parallel import LocalSGD

periods, last, left = [1, 4, 8, 16], [], []
num_bytes = sum(param.nbytes for param in GPT(tiny).double().parameters())
for every in periods:
    runs = ranks.run(train, lambda module, every=every: LocalSGD(module, every), 32)
    last.append(mean(row[1] for rows, _ in runs for row in rows[-8:]))
    calls = [e.num_bytes for e in ranks.events if (e.rank, e.kind) == (0, "all_reduce")]
    left.append(sum(calls) / 32 / num_bytes)
reveal(guess_local, left[2])
title = f"H = 16 sends {left[-1]:.3f} of the bytes; loss {last[-1]:.2f}, with H = 1 {last[0]:.2f}"
print("loss by H:", *(f"{loss:.2f}" for loss in last))
voices = Voices(formula=lambda every: 1 / every, measurement=left)
axes = {"x_label": "steps between two means, H", "y_label": "bytes reduced a step, in n"}
show(compare(periods, voices, title, **axes), alt=f"{title}: one part in H is left")

# %% [markdown]
# ## What to keep
#
# - A process a device: threads share one interpreter, one backward, one master.
# - Broadcast once (buffers, too); then the mean gradient, in every step. Averaging gradients keeps
#   equal what is equal; it makes nothing equal.
# - One shuffled order for all, another one each epoch; uneven batches weigh by their items.
# - BSP is as fast as its slowest rank, and exact. Asynchronous, the mean staleness is $w - 1$.
# - Local SGD sends one part in $H$, and its replicas drift in between.
#
# What is left to win: the gradients wait until backward has ended. They need not.
