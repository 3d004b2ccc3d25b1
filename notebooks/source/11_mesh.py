# %% [markdown]
# # 11 The mesh: combine the methods
#
# **Question.** Data parallelism splits the batch, tensor parallelism the matrices, and pipeline
# parallelism the layers. Large models are trained with several of these methods at once, on a grid
# of ranks with named axes, the *mesh*. Which ranks form a group along each axis, what do they send
# each other, and which ranks should be neighbors?
#
# *After this lesson you can*
#
# - compute coordinates and groups of any rank, for any sizes and any order of axes;
# - say which collective runs along which axis, how often, and how many bytes a rank sends;
# - combine three methods so that eight ranks compute what one process does, clipping included;
# - choose the innermost axis, and find a misplaced axis in a trace.
#
# **Prerequisites:** lessons 05, 07 and 08; 09 for ZeRO. **Time:** about 60 minutes of reading and
# running, 75 for four exercises (core: 1, 2, 3; further: 4).
#
# | symbol | in code | meaning |
# |---|---|---|
# | $d$, $p$, $t$ | `mesh.size("dp")`, `"pp"`, `"tp"` | sizes of the axes: the *degrees* |
# | $b$, $s$, $h$ | `batch`, `seq`, `hidden` | sequences per step, tokens in each, hidden size |
# | $L$, $N$ | `num_layers` | layers and parameters of the model |
# | replica | | the ranks that together hold one copy of the model |

# %%
# %load_ext course_lib.ranks
from dataclasses import replace
from functools import partial
from statistics import fmean

import torch
import torch.distributed as dist

from course_lib.checks import check
from course_lib.core import MODELS, Link, TwoLevelLink
from course_lib.ddp import DDP
from course_lib.display import YES_NO, claim, predict, reveal, show
from course_lib.mesh import Mesh, RankMesh, lab, pictures
from course_lib.models import GPT, next_tokens, token_batch
from course_lib.pipeline import Pipeline, one_f_one_b, split_model
from course_lib.ranks import RankError, Ranks
from course_lib.tensor_parallel import parallel_token_loss, parallelize

# %% [markdown]
# ## 1 Ranks on a grid
#
# `Mesh(pp=2, dp=2, tp=2)` numbers eight ranks so that the last axis counts fastest, like the last
# digit of a number. Each rank has a *coordinate* $i$ on every axis:
#
# $$ \text{rank} = (i_{pp} \cdot d + i_{dp}) \cdot t + i_{tp} . $$
#
# Each rank also has a *group* along every axis: itself and the ranks that differ from it only in
# that coordinate. Groups of the last, *innermost* axis are consecutive ranks. Which rank has
# $i_{pp} = 1$, $i_{dp} = 0$, $i_{tp} = 1$? And how many process groups do the three axes have
# together?

# %% tags=["predict"]
guess_rank = predict("the rank at pp = 1, dp = 0, tp = 1")
### GUESS guess_rank.commit(3)
guess_groups = predict("process groups of the three axes together")
### GUESS guess_groups.commit(6)

# %% tags=["picture"]
cube = Mesh(pp=2, dp=2, tp=2)
reveal(guess_rank, cube.rank({"pp": 1, "dp": 0, "tp": 1}))
reveal(guess_groups, sum(len(cube.groups(axis)) for axis in cube.sizes))
show(*pictures.groups_across_nodes(cube, 4))

# %% [markdown]
# The *stride* of an axis is the product of the sizes of the axes after it: 4 for pp, 2 for dp, 1
# for tp. A group over several axes is a *sub-mesh*: the ranks of `cube.group(5, "pp", "tp")` form
# rank 5's replica.
#
# ### Exercise 1 (core): coordinates and groups
#
# Return the group of a rank along one axis: the rank itself and all ranks that differ from it only
# along that axis, in any order. `sizes` is a dict such as `{"pp": 2, "dp": 3, "tp": 4}`, outermost
# axis first; an axis can have any size. About 6 lines, without `Mesh`.
#
# <details><summary>Hint: the wrong distance</summary>
# Neighbors along an axis differ by its stride.
# </details>
# <details><summary>Hint: the group begins at the wrong rank</summary>
# <code>rank // stride % size</code> is the coordinate. In the first rank of the group this
# coordinate is 0, and the other coordinates are unchanged.
# </details>


# %% tags=["exercise"] exercise="mesh-1"
def group_of(sizes, rank, axis):
    """The ranks that differ from `rank` along `axis` only."""
    ### BEGIN SOLUTION: what is the axis's stride, and where does this rank's group begin?
    stride = 1
    for inner in reversed(sizes):
        if inner == axis:
            break
        stride *= sizes[inner]
    first = rank - rank // stride % sizes[axis] * stride
    return [first + n * stride for n in range(sizes[axis])]
    ### END SOLUTION


# %% tags=["check"] exercise="mesh-1"
check("mesh-1", group_of)

# %% [markdown]
# Ranks of a group communicate through a process group. Every rank calls `dist.new_group` for all
# twelve groups, and `RankMesh` keeps the three that contain its rank (like PyTorch's
# `init_device_mesh`). Rank $r$ contributes $10^r$ to an all-reduce in its dp group. What does rank
# 5 get?

# %% tags=["predict"]
guess_sum = predict("sum over dp on rank 5, if rank r contributes 10**r")
### GUESS guess_sum.commit(11110000)


# %%
def sum_along(rank, axis):
    mesh, x = RankMesh(cube), torch.tensor(10**rank)
    dist.all_reduce(x, group=mesh.group(axis))
    theirs = dist.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    return x.item(), dist.get_process_group_ranks(theirs[axis].get_group())


eight = Ranks(8)
sums = {axis: eight.run(sum_along, axis) for axis in cube.sizes}
reveal(guess_sum, sums["dp"][5][0])
for axis, found in sums.items():
    alike = all(theirs == cube.group(rank, axis) for rank, (_, theirs) in enumerate(found))
    print(f"{axis}: {sorted({total for total, _ in found})}; PyTorch's groups alike: {alike}")

# %% [markdown]
# **A rank is a number whose digits are its coordinates. The ranks of a group differ in one digit.**
#
# ## 2 What travels along which axis
#
# | axis | splits | communication | how often in a step |
# |---|---|---|---|
# | tp | each matrix | all-reduce of an activation or its gradient | 4 per layer and micro-batch |
# | pp | the layers | send an activation, then its gradient | per boundary and micro-batch |
# | dp: DDP, ZeRO-1 | the batch | all-reduce of gradients (or reduce-scatter, all-gather) | once |
# | dp: FSDP | the batch | gather layers, reduce-scatter gradients | 3 per layer and micro-batch |
#
# *cp* (context parallelism) is one more axis: it splits the sequence, and its ranks exchange keys
# and values. *ep* (expert parallelism) is none: the experts of a layer are split over ranks that
# dp, cp and tp have already, and these exchange tokens.
#
# How many bytes are sent? A rank has $L/p$ layers and computes $b/d$ of the sequences. Along tp it
# all-reduces $bsh/d$ numbers, summed over all micro-batches, four times per layer. Along dp it
# all-reduces the gradients of *its own* parameters, about $N/(pt)$ numbers. So the other two axes
# reduce the traffic of data parallelism (of DDP, here). In a ring of $k$ ranks, each sends
# $2(k-1)/k$ times the bytes of the tensor. We train Llama 2 7B on 64 GPUs with 256 sequences of
# 4,096 tokens per step; activations and gradients are in bf16. How many times as many bytes does a
# rank send along tp as along dp?

# %% tags=["predict"]
from course_lib.mesh.cost import MeshStep, axis_sent_bytes

llama, big = MODELS["llama2-7b"], Mesh(pp=2, dp=4, tp=8)
sizes = {"batch": 256, "seq": 4096, "num_micro_batches": 64, "number_bytes": 2}
print(f"{llama.num_layers} layers, hidden size {llama.hidden}, {big}")
guess_ratio = predict("bytes along tp divided by bytes along dp")
### GUESS guess_ratio.commit(20)

# %% tags=["picture"]
sent = axis_sent_bytes(MeshStep(spec=llama, mesh=big, **sizes))
reveal(guess_ratio, sent["tp"] / sent["dp"])
show(*pictures.axis_bars(sent))
gathered = 64 * 3 / 2 * sent["dp"]  # an all-reduce is as much as a gather and a reduce-scatter
print(f"FSDP along dp, in 64 micro-batches: {gathered / 1e9:.0f} GB instead of", end=" ")
print(f"{sent['dp'] / 1e9:.1f}; tp sends {sent['tp'] / gathered:.1f} times as much")

# %% [markdown]
# FSDP that gathers in every micro-batch sends nearly half as much as tp. The bytes along dp are few
# only where they are sent once per step.
#
# If nothing overlaps them (lesson 07), tp's all-reduces are also on the critical path: the next
# matrix multiplication waits for them. But gradients can be sent while backward still computes
# (lesson 06), and a stage can compute one micro-batch while another one is sent (lesson 08).
#
# ### Exercise 2 (core): which collective on which axis
#
# Backward is done. Each rank has the gradients of its parameters for its replica's tokens. The last
# stage has the replica's mean loss in float64, on all its tp ranks; on other stages `loss` is None.
# Average the gradients in place, and return the mean loss of all replicas on every rank. `mesh` is
# a `RankMesh` with pp, dp and tp. All replicas have equally many tokens. About 6 lines.
#
# <details><summary>Hint: it hangs, or fails on a rank without a loss</summary>
# All ranks of a group must make the call. A rank without a loss can contribute 0.
# </details>
# <details><summary>Hint: gradients are too small</summary>
# Average only over ranks that have the same parameters but different tokens.
# </details>


# %% tags=["exercise"] exercise="mesh-2"
def finish_step(mesh, loss, grads):
    """Average gradients in place; return the mean loss, on every rank."""
    ### BEGIN SOLUTION: which axis has different tokens, and which one has ranks without a loss?
    total = torch.zeros((), dtype=torch.float64) if loss is None else loss.clone()
    dist.all_reduce(total, group=mesh.group("pp"))
    for value in (total, *grads):
        dist.all_reduce(value, group=mesh.group("dp"))
        value /= mesh.size("dp")
    return total
    ### END SOLUTION


# %% tags=["check"] exercise="mesh-2"
check("mesh-2", finish_step)

# %% [markdown]
# **Along tp, ranks send activations in every layer. Along pp, they send an activation and its
# gradient per micro-batch. Along dp, they send the gradients of their own parameters once per
# step, or, with FSDP, gather and reduce them in every micro-batch.**
#
# ## 3 Eight ranks, one model
#
# Each method is applied to the part of the model that the method before it has kept. **First**,
# tensor parallelism splits the matrices; then pipeline parallelism keeps the layers of this rank's
# stage. (These two can be swapped.) Data parallelism (DDP, ZeRO or FSDP) comes **last**: its
# buckets, shards and optimizer state must belong to the parameters that the rank keeps. If DDP came
# first, it would put hooks on whole parameters that are replaced afterwards.
#
# The coordinates of a rank determine everything else:
#
# | | along dp | along pp | along tp |
# |---|---|---|---|
# | sequences | **different** | the same | the same |
# | initial weights | the same | its own layers | its shard of the same weights |
# | dropout masks of whole tensors | **different** | **different** | the same |
# | gradients | **averaged** | not combined; a tied embedding's are added | not combined |
# | loss | **averaged** | sent from the last stage to the others | the same |
#
# (With sequence parallelism, gradients of norms are added along tp.) All ranks build the same model
# from one seed. A rank's sequences depend on its *dp coordinate*, not on its rank.


# %%
tiny = MODELS["tiny"]
BATCH = next_tokens(token_batch(0, batch=8, seq=16, vocab=256))  # inputs and targets


def wrap(mesh):
    """This rank's part of the model, and the pipeline that runs it."""
    torch.manual_seed(0)
    model = GPT(tiny).double()
    parallelize(model, mesh.device_mesh("tp"))  # first: a shard of every matrix
    stage = split_model(model, 2, mesh.index("pp"))  # then: half of the layers
    replica = DDP(stage, group=mesh.group("dp"))  # last: averages what this rank holds
    loss_fn = partial(parallel_token_loss, group=mesh.group("tp"))
    return replica, Pipeline(stage, loss_fn, mesh.group("pp"))


# %%
def backward(mesh, replica, pipeline, data_axis="dp"):
    """Leave averaged gradients; return this copy's loss on its last stage, None on the first."""
    half = [part.chunk(2)[mesh.index(data_axis)] for part in BATCH]
    with replica.no_sync():  # a tied embedding's gradient is complete after the last backward
        loss = pipeline.step(one_f_one_b(2, 2), *(part.chunk(2) for part in half))
    replica.finish()
    return loss


# %% [markdown]
# `MeshTrainer` (`course_lib/mesh/training.py`) does the same for other sizes, with clipping and
# ZeRO-1. We take four steps in float64 on 2 × 2 × 2 ranks and on one. Are losses and weights the
# same, except for rounding?

# %% tags=["predict"]
guess_same = predict("eight ranks as one process, within 1e-10", choices=YES_NO)
### GUESS guess_same.commit("yes")

# %% tags=["check"]
step = MeshStep(spec=tiny, mesh=cube, batch=16, seq=32, num_micro_batches=2, number_bytes=8)
ways = {
    torch.optim.SGD: {"lr": 0.1, "momentum": 0.9},
    torch.optim.AdamW: {"lr": 1e-3, "max_norm": 0.5},
}
for optimizer, how in ways.items():
    alone = lab.train_alone(step, optimizer, 4, **how)
    ours = eight.run(partial(lab.train_on_mesh, **how), step, optimizer, 4)[7]
    same = lab.furthest_apart(ours, alone) < 1e-10
    print(f"{optimizer.__name__} {how}: the losses and weights of one process: {same}")
    reveal(guess_same, "yes" if same else "no")

# %% [markdown]
# Did each axis send the bytes of section 2, and those of the embedding and head? The group of a
# recorded call tells its axis. Batches are small here, so dp's share is larger.

# %% tags=["picture"]
rank = 0
events = eight.run(lab.events_of_a_step, step)[rank]
counted, formula = lab.bytes_by_axis(cube, rank, events), axis_sent_bytes(step, rank)
print("counted as predicted, to the byte:", counted == formula)
show(*pictures.axis_bars(formula, counted, who=f"Rank {rank}"))

# %% [markdown]
# ### Break it
#
# `backward` selects a rank's sequences by its coordinate along dp. Suppose that a data loader
# selects them by the coordinate along **tp**. What do you notice in training?

# %% tags=["predict"]
choices = ("an error", "a hang", "the loss stays high", "the loss falls")
guess_data = predict("sequences by tp coordinate", choices=choices)
### GUESS guess_data.commit("an error")


# %%
def train(rank, data_axis):
    mesh = RankMesh(cube)
    replica, pipeline = wrap(mesh)
    sgd, losses = torch.optim.SGD(replica.parameters(), lr=0.1, momentum=0.9), []
    for _ in range(10):
        sgd.zero_grad()
        losses.append(backward(mesh, replica, pipeline, data_axis))
        sgd.step()
    return losses


# %% tags=["picture", "failure"]
losses = {}
for axis in ("dp", "tp"):
    by_rank = eight.run(train, axis)
    pairs = zip(by_rank[4], by_rank[6], strict=True)  # the last stage of both replicas
    losses[axis] = [(a + b).item() / 2 for a, b in pairs]
claim("the loss falls with sequences by tp", losses["tp"][-1] < losses["tp"][0])
reveal(guess_data, "the loss falls")
show(*pictures.losses_by_data_axis(losses))

# %% [markdown]
# All shapes fit, so nothing fails. But each tensor group adds up partial results of *different*
# sequences, and the targets are mixed, too. So this number is not the loss of any real text, and
# its lower value means nothing. **A falling loss does not prove that a mesh is right. Compare
# losses and gradients with one process.**
#
# *This is a good place for a break.*
#
# ## 4 One norm, one loss
#
# Clipping (lesson 02) needs the norm of the *whole* gradient, and a rank holds only a part of it.
# The squared norm is a sum over all numbers, and **each number counts once**. With DDP along dp:
#
# | gradient of | over tp | over pp | over dp |
# |---|---|---|---|
# | a split matrix | add | add | once: all have the same average |
# | a parameter that is whole along tp (norms, some biases) | once | add | once |
# | a tied embedding, on the first and the last stage | add | once | once |
#
# Suppose that every rank squares all numbers that it holds, and the squares are added over all
# ranks. How many times too large is the norm, on 2 × 2 × 2 ranks?

# %% tags=["predict"]
guess_norm = predict("norm with all squares of all ranks, divided by the correct norm")
### GUESS guess_norm.commit(2)


# %% tags=["failure"]
from course_lib.mesh.clip import clip_grad_norm_across


def norms(rank):
    mesh = RankMesh(cube)
    replica, pipeline = wrap(mesh)
    backward(mesh, replica, pipeline)
    squares = sum(param.grad.pow(2).sum() for param in replica.parameters())
    dist.all_reduce(squares)  # over the world
    return squares.sqrt().item(), float(clip_grad_norm_across(pipeline.stage, mesh, max_norm=1.0))


naive, right = eight.run(norms)[0]
reveal(guess_norm, naive / right)
print(f"all squares of all ranks: {naive:.2f}; each number once: {right:.2f}")

# %% [markdown]
# Split matrices were counted twice (along dp). Parameters that are whole along tp were counted four
# times, and so was the tied embedding, which is on two stages. With a norm that is too large,
# clipping can reduce the gradient too much. There is no error, but SGD makes steps that are too
# small.
#
# ### Exercise 3 (core): clip across axes
#
# `parts` lists this rank's gradients, averaged along dp, as tuples `(grad, split, first)`. `split`
# says whether `grad` is a shard along tp; otherwise all ranks along tp have the same `grad`.
# `first` is False for the second copy of a tied parameter, on a later stage, otherwise True.
# Scale all gradients in place, so that the norm of the whole gradient is at most `max_norm`; return
# the norm before scaling. `grad` may be fp16: square it in fp32. About 9 lines.
#
# <details><summary>Hint: the norm is too large</summary>
# Which ranks hold the same numbers? Only one of them contributes their squares, the others 0.
# </details>
# <details><summary>Hint: ranks scale by different factors</summary>
# Add squares over the ranks; take the square root once, after the last sum.
# </details>


# %% tags=["exercise"] exercise="mesh-3"
def clip(mesh, parts, max_norm):
    """Clip by the norm of the whole gradient; return it, on every rank."""
    ### BEGIN SOLUTION: which numbers does this rank count, and along which axes are sums added?
    squares = torch.zeros((), dtype=torch.float64)
    for grad, split, first in parts:
        if first and (split or mesh.index("tp") == 0):
            squares += (grad.double() ** 2).sum()
    for axis in ("tp", "pp"):
        dist.all_reduce(squares, group=mesh.group(axis))
    norm = squares.sqrt()
    for grad, *_ in parts:
        grad *= min(1.0, max_norm / norm)
    return norm
    ### END SOLUTION


# %% tags=["check"] exercise="mesh-3"
check("mesh-3", clip)

# %% [markdown]
# The loss is a mean over *all* tokens. Each replica's last stage has the mean over its own tokens.
# If all replicas have equally many tokens, the loss is the mean of these over dp. Average the
# gradients **once**: if the loss is divided by $d$ before backward, the gradients must be added,
# not averaged.
#
# **Add the squares of shards, and count copies once. Then all ranks scale by one factor.**
#
# ## 5 Which axis innermost?
#
# The order of the axes does not change the result (up to rounding). It changes which messages cross
# nodes. Take two nodes of four ranks, and a link between them that is ten times slower than those
# inside. With tp innermost, a tensor group is two neighbors in a node. With tp outermost, rank 0's
# partner is rank 4, on the other node. How many times as long does the busiest rank communicate
# with tp outermost as with tp innermost?

# %% tags=["predict"]
from course_lib.mesh.cost import all_orders, axis_seconds, mesh_step_s

fast = Link(name="fast", latency_s=1e-3, bytes_per_s=100e6)
slow = Link(name="slow", latency_s=10e-3, bytes_per_s=10e6)
two_nodes = TwoLevelLink(inside=fast, outside=slow, ranks_per_node=4)
steps = [replace(step, mesh=mesh, number_bytes=4) for mesh in all_orders(cube)]
outermost = Mesh(tp=2, dp=2, pp=2)
guess_order = predict("time to communicate with tp outermost, divided by that with tp innermost")
### GUESS guess_order.commit(10)

# %%
predicted = {one.mesh: mesh_step_s(one, two_nodes) for one in steps}
reveal(guess_order, predicted[outermost] / predicted[cube])
for mesh in (cube, outermost):
    seconds = axis_seconds(replace(step, mesh=mesh, number_bytes=4), two_nodes)
    words = ", ".join(f"{axis} {1e3 * one:.0f} ms" for axis, one in seconds.items())
    print(f"{mesh}, rank 0: {words}")
show(*pictures.groups_across_nodes(outermost, 4))

# %% [markdown]
# Eight real ranks on emulated links train with each of the six orders in turn. (A measured step
# also includes computation and waiting for the other stage.)

# %% tags=["picture", "measured"]
wired = Ranks(8, link=two_nodes)
measured = lab.time_orders(wired, steps)
claim("tp outermost is slower", measured[outermost] > measured[cube])
show(*pictures.order_bars(predicted, measured, cube, outermost))

# %% [markdown]
# Here only the outermost place is bad for tp: a node has four ranks, so both inner axes fit into
# it. On larger meshes, perhaps only the innermost axis fits, and only if its size is at most the
# number of ranks per node.
#
# What does a misplaced axis look like in the trace of one step on rank 0?

# %% tags=["picture", "measured"]
traces, tp_s = {}, {}
for mesh in (cube, outermost):
    traces[mesh] = wired.run(lab.events_of_a_step, replace(step, mesh=mesh, number_bytes=4))[0]
    tp_s[mesh] = lab.median_call_s(mesh, "tp", traces[mesh])
claim("an all-reduce between nodes takes longer", tp_s[outermost] > tp_s[cube])
show(*pictures.axis_traces(traces, "tp", two_nodes))

# %% [markdown]
# Forward and backward look slow, because the tp calls inside them wait for the link. In the gaps,
# rank 0 waits for the other stage (receives are not drawn).
#
# ### Exercise 4 (further): find the axis that communicates longest between nodes
#
# You get a mesh and the events of one step on all ranks (`event.rank`, `.group`, `.duration_s`,
# `.num_bytes`). For each axis, add up the seconds of rank 0's calls *across nodes*. Return the name
# of the axis with the most seconds, or None if there is no such call. Rank r is on node
# `r // ranks_per_node`. `group` lists the ranks of a collective, or sender and receiver of
# a message. `mesh.axis_of(group)` is the axis of a group, or None. About 7 lines.
#
# <details><summary>Hint: not the axis that sends most</summary>
# Add up seconds, not bytes, and only those of groups that are on several nodes.
# </details>


# %% tags=["exercise"] exercise="mesh-4"
def misplaced(mesh, events, ranks_per_node):
    """The axis that communicates longest between nodes; None if none does."""
    ### BEGIN SOLUTION: which axes cross nodes, and how long are rank 0's calls?
    seconds = {}
    for event in events:
        axis = mesh.axis_of(event.group)
        nodes = {rank // ranks_per_node for rank in event.group}
        if event.rank == 0 and axis and len(nodes) > 1:
            seconds[axis] = seconds.get(axis, 0.0) + event.duration_s
    return max(seconds, key=seconds.get, default=None)
    ### END SOLUTION


# %% tags=["check"] exercise="mesh-4"
check("mesh-4", misplaced)

# %% [markdown]
# ### All orders of a cluster
#
# The explorer computes the communication of 64 H100 on 8 nodes, each with eight adapters of
# 50 GB/s. A group with n GPUs in each of its nodes uses n adapters; the others serve the groups
# beside it. Move an axis outward, and look at which groups cross nodes. What happens at tp = 16?

# %% tags=["picture"]
from course_lib.cost.flops import train_step_flop
from course_lib.cost.hardware import H100
from course_lib.mesh.explorer import communication_s, mesh_explorer

mesh_explorer()

# %% [markdown]
# ### What others measured
#
# Tazi et al. (2025) timed an 8B model in many configurations on nodes of 8 H100. We consider those
# with 256 sequences per step, and take the fastest for each tensor-parallel degree. On 8 nodes,
# what part of the speed is left if tensor groups have 16 ranks instead of 8?

# %% tags=["predict"]
guess_left = predict("tokens/s per GPU with tp = 16, divided by those with tp = 8 (like 3/4)")
### GUESS guess_left.commit(3 / 4)

# %% tags=["picture"]
best = pictures.best_tokens(8)
reveal(guess_left, best[16] / best[8])
compute_s = train_step_flop(llama, 256, 4096) / 64 / (0.4 * H100.peak())  # at 40 % of the peak
step_s = {tp: compute_s + communication_s(tp) for tp in (8, 16)}
print(f"by formula, for our 7B model: {step_s[8] / step_s[16]:.2f}")
show(*pictures.best_by_tensor_degree())

# %% [markdown]
# (The slower link is not the only cause: each rank's matrices also become smaller. On each of these
# clusters, no run in the picture is faster than the one with tp = 1.)
#
# Which axis is outermost in practice? Megatron-LM's default order is pp, dp, cp, tp, from outermost
# to innermost; torchtitan's is the same. Llama 3 405B used dp, pp, cp, tp (Grattafiori et al. 2024,
# section 3.3.2): FSDP prefetches parameters and reduces gradients during computation, so it
# tolerates a higher latency.

# %% [markdown]
# **Put the axis that communicates most and overlaps least innermost, inside a node: usually tp.**
#
# ## 6 Megatron-Core's mesh, PyTorch's, and your cluster
#
# Megatron-Core has the same axes, but its own layers, schedule and data parallelism. Below, it
# trains our model on our mesh, from the same weights, in float32. (On a CPU, small functions
# replace its CUDA calls.) Does it send more bytes?

# %% tags=["predict"]
guess_bytes = predict("Megatron-Core's bytes along tp, divided by ours")
### GUESS guess_bytes.commit(1)

# %% tags=["measured"]
from math import isnan

from course_lib.mesh import beside_frameworks as beside

sent, single = {}, replace(step, number_bytes=4)
for name in ("ours", "Megatron-Core"):
    try:
        runs = eight.run(beside.run_mesh, single, 4, name == "ours")
    except RankError as missing:
        print(next(line for line in str(missing).splitlines() if "need " in line).strip())
        continue
    sent[name] = lab.bytes_by_axis(cube, 7, runs[7].last_events)
    known = [run.losses[-1] for run in runs if not isnan(run.losses[-1])]
    kib = ", ".join(f"{axis} {size / 2**10:.2f} KiB" for axis, size in sent[name].items())
    print(f"{name:13} loss {fmean(known):.5f}, {runs[7].median_ms:.0f} ms per step; sent {kib}")
if len(sent) == 2:
    reveal(guess_bytes, sent["Megatron-Core"]["tp"] / sent["ours"]["tp"])

# %% [markdown]
# The loss is the same. The bytes along every axis are also the same, except for the messages with
# the loss and the number of tokens.
#
# In PyTorch, the same composition is:
#
# ```python
# mesh = init_device_mesh("cuda", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
# stage = ...                                       # the layers of mesh["pp"]
# parallelize_module(stage, mesh["tp"], plan)       # lesson 07
# fully_shard(stage, mesh=mesh["dp"])               # lesson 10: last
# ```
#
# FSDP comes last and shards each `DTensor`, which is already split along tp. A `DTensor` knows its
# axes. So within a stage, `clip_grad_norm_` and checkpoints need no list like `parts`. But the
# plan must cover all parameters (for norms, use for example `SequenceParallel`); otherwise
# `clip_grad_norm_` fails (PyTorch 2.13).
#
# On your cluster, one command times all orders of a mesh:
#
# `torchrun --nproc-per-node 8 cluster/exercises/11_mesh.py --mesh pp=2,dp=2,tp=2`
#
# ## What to keep
#
# - Coordinates are the digits of a rank, innermost last.
# - Apply TP and PP first, data parallelism last. Select sequences by dp coordinate.
#
# **Read on**
#
# - Narayanan et al. 2021, *Efficient Large-Scale Language Model Training*, section 3: how the three
#   methods interact, with formulas.
# - Grattafiori et al. 2024, *The Llama 3 Herd of Models*, section 3.3.2: four axes in order.
# - Liang et al. 2024, *TorchTitan*, section 2: the same composition with DeviceMesh and DTensor.
# - Tazi et al. 2025, *The Ultra-Scale Playbook*, "5D Parallelism in a Nutshell".
# - PyTorch, *Getting Started with DeviceMesh*.
# - NVIDIA Megatron-LM, `megatron/core/parallel_state.py`: `RankGenerator` and its `order`.
