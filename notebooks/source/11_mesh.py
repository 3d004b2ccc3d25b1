# %% [markdown]
# # 11 The mesh: combine the methods
#
# **Question.** Data parallelism splits the batch, tensor parallelism splits the matrices, and
# pipeline parallelism splits the layers. Each of them reaches a limit: the batch cannot grow
# forever, tensor parallelism needs the fastest links, and a pipeline has a bubble. Large models
# are therefore trained with several methods at once, on a grid of ranks with named axes, the
# *mesh*. Which ranks form a group along each axis, what do they send each other, and which ranks
# should share a node?
#
# *After this lesson you can*
#
# - compute the coordinates and the groups of any rank, for any sizes and any order of the axes;
# - say which collective runs along which axis, how often, and how many bytes a rank sends;
# - combine three methods so that eight ranks compute what one process does, with gradient clipping;
# - choose the innermost axis, and read from a trace which axis communicates between nodes.
#
# **Prerequisites:** lessons 07, 08, 09 (and what they build on); 10 for FSDP. **Time:** about 75
# minutes of reading and running, 60 for three exercises (core: 1, 2, 3).
#
# | symbol | in code | meaning |
# |---|---|---|
# | $d$, $p$, $t$ | `mesh.size("dp")`, `"pp"`, `"tp"` | sizes of the axes: the *degrees* |
# | $b$, $s$, $h$ | `batch`, `seq`, `hidden` | sequences per step, tokens in each, hidden size |
# | $L$, $N$ | `num_layers` | layers and parameters of the model |
# | replica | | the ranks that together hold one copy of the model |
#
# In lesson 07, $p$ was the TP degree. Here $t$ is the TP degree, and $p$ is the number of
# pipeline stages.

# %%
# %load_ext course_lib.ranks
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from course_lib.checks import check
from course_lib.core import MODELS, Link, TwoLevelLink
from course_lib.ddp import DDP
from course_lib.display import claim, predict, reveal, show
from course_lib.mesh import Mesh, RankMesh, pictures
from course_lib.models import GPT, next_tokens, token_batch
from course_lib.pipeline import Pipeline, one_f_one_b, split_model
from course_lib.ranks import RankError, Ranks
from course_lib.tensor_parallel import parallel_token_loss, parallelize
from course_lib.train import mesh_lab as lab

# %% [markdown]
# ## 1 Ranks on a grid
#
# When a run used one method, one group contained all ranks. With three methods, a rank takes part
# in three different groups. To know which ones, we arrange the ranks in a grid.
#
# `Mesh(pp=2, dp=2, tp=2)` arranges eight ranks along three axes. Each rank has a *coordinate* $i$
# on every axis: its stage along pp, its replica along dp, and its shard along tp. Ranks are
# numbered as a counter counts: the last digit, here the coordinate along the last axis, changes
# fastest. One step along tp changes the rank by 1. One step along dp skips all $t$ ranks of a tp
# group, and one step along pp skips all $d \cdot t$ ranks of a stage. Therefore
#
# $$ \text{rank} = i_{pp} \cdot d\,t + i_{dp} \cdot t + i_{tp} . $$
#
# These distances, here 4, 2 and 1, are the *strides* of the axes: the stride of an axis is the
# product of the sizes of the axes after it. The last axis, with stride 1, is the *innermost* one.
#
# The *group* of a rank along an axis contains the rank itself and the ranks that differ from it
# only in that coordinate. Before you run the cell, try it for rank 5: what are its coordinates, and
# which rank is its partner along pp?

# %% tags=["picture"]
cube = Mesh(pp=2, dp=2, tp=2)
print("coordinates of rank 5:", cube.coordinates(5))
print("groups of rank 5:", {axis: cube.group(5, axis) for axis in cube.sizes})
show(*pictures.mesh_cube(cube))

# %% [markdown]
# The cube shows all twelve groups: four along each of three axes. Parallel edges are groups along
# the same axis, and these groups do not communicate with each other: the four tp groups all-reduce
# at the same time, each with its own activations.
#
# A cluster cuts this cube into nodes. With four ranks in each node, the front face is node 0 and
# the back face is node 1. The next picture has one panel per axis; in each, a row of ranks is a
# node.

# %% tags=["picture"]
show(*pictures.groups_across_nodes(cube, 4))

# %% [markdown]
# A group over *several* axes is a *sub-mesh*. For example, `cube.group(5, "pp", "tp")` is a face of
# the cube: the four ranks that together hold one copy of the model, rank 5's replica.
#
# ### Exercise 1 (core): coordinates and groups
#
# *Difficulty 2 of 5, importance 4 of 5, about 15 minutes.*
#
# Return the ranks of the group of `rank` along `axis`, as a list in any order: the rank itself and
# all ranks that differ from it only in that coordinate. `sizes` maps axes to sizes, outermost axis
# first. Example: with `{"pp": 2, "dp": 3, "tp": 4}`, rank 5 has the coordinates 0, 1, 1 (pp, dp,
# tp), and its group along dp is 1, 5, 9. Every launcher that builds process groups does this. About
# 6 lines, without `Mesh`.
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
# The ranks of a group communicate through a *process group*. `dist.new_group` makes one, and *all*
# ranks of the run have to call it, members or not. So every rank calls it for all twelve groups,
# and `RankMesh` keeps the three that contain its rank. PyTorch's `init_device_mesh` does the same.
#
# To test this on real ranks, rank $r$ contributes $10^r$ to an all-reduce along one axis. The
# digits of the sum then show which ranks took part: along dp, rank 5 should get
# $10^5 + 10^7 = 10{,}100{,}000$.


# %%
def sum_along(rank, axis):
    mesh, x = RankMesh(cube), torch.tensor(10**rank)
    dist.all_reduce(x, group=mesh.group(axis))
    theirs = dist.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    return x.item(), dist.get_process_group_ranks(theirs[axis].get_group())


eight = Ranks(8)
sums = {axis: eight.run(sum_along, axis) for axis in cube.sizes}
print(f"rank 5, sum along dp: {sums['dp'][5][0]:,}")
for axis, found in sums.items():
    alike = all(theirs == cube.group(rank, axis) for rank, (_, theirs) in enumerate(found))
    print(f"{axis}: {sorted({total for total, _ in found})}; PyTorch's groups alike: {alike}")

# %% [markdown]
# **A rank is a number whose digits are its coordinates. The ranks of a group differ in one digit.**
#
# ## 2 What travels along which axis
#
# We know who communicates with whom, but not yet how much. Each method's own lesson measured its
# communication alone. On a mesh, every method keeps its own pattern of communication:
#
# | axis | splits | communication | how often in a step |
# |---|---|---|---|
# | tp | each matrix | all-reduce of an activation or its gradient | 4 per layer and micro-batch |
# | pp | the layers | send an activation, then its gradient | per stage boundary and micro-batch |
# | dp: DDP, ZeRO-1 | the batch | all-reduce of gradients (or reduce-scatter, all-gather) | once |
# | dp: FSDP | the batch | gather twice, reduce-scatter once | 3 per layer and micro-batch |
#
# A fourth axis, *cp* (context parallelism), splits the sequence; its ranks exchange keys and values
# during attention. This lesson leaves it out.
#
# <details><summary>Two more names in papers: ep, and sequence parallelism</summary> *ep* (expert
# parallelism) adds no ranks: the experts of a layer are distributed over ranks that already belong
# to dp, cp and tp, and these ranks exchange tokens. *Sequence parallelism* is the name of two
# methods. Megatron's, in lesson 07, splits norms and dropout along the tp axis. DeepSpeed-Ulysses
# (Jacobs et al. 2023) splits the sequence through the whole layer and swaps it for heads with an
# all-to-all around attention, so it is a form of context parallelism.</details>
#
# The methods also change each other's traffic. A rank computes only $b/d$ of the sequences. All
# its micro-batches together have $(b/d)\,s$ tokens, so each of the four all-reduces of a layer
# handles $(b/d)\,s\,h$ numbers in a step. A rank does this in its $L/p$ layers. Along dp it
# all-reduces the gradients of *its own* parameters, about $N/(pt)$ numbers: tp and pp make DDP's
# traffic smaller. In a ring of $k$ ranks, each rank sends $2(k-1)/k$ times the bytes of the
# tensor (lesson 04).
#
# As an example we train Llama 3.1 70B on 64 GPUs, with 256 sequences of 4,096 tokens per step and
# activations and gradients in bf16. This model cannot use data parallelism alone with DDP: with 16
# bytes per parameter (lesson 01), one copy of its training state needs more than a node of eight 80
# GB GPUs. So it has to be split; FSDP (lesson 10) would be the alternative. (On the mesh below, a
# rank's training state fits into 80 GB, but activations do not fit beside it. With ZeRO-1 along dp,
# which sends the same bytes as DDP, both fit.) How many times as many bytes does a rank send along
# tp as along dp?

# %% tags=["predict"]
from course_lib.cost.params import params_on_rank
from course_lib.mesh.cost import MeshStep, axis_sent_bytes

llama, big = MODELS["llama-70b"], Mesh(pp=2, dp=4, tp=8)
sizes = {"batch": 256, "seq": 4096, "num_micro_batches": 64, "number_bytes": 2}
large = MeshStep(spec=llama, mesh=big, **sizes)
held = 16 * params_on_rank(llama, large.parallelism, 0) / 1e9  # 16 bytes per parameter
print(f"{llama.num_layers} layers, hidden size {llama.hidden}, {big}")
one_copy = big.size("pp") * big.size("tp") * held
print(f"one copy of the training state {one_copy:,.0f} GB; on a rank of this mesh {held:.0f} GB")
guess_ratio = predict("bytes along tp divided by bytes along dp")
### GUESS guess_ratio.commit(20)

# %% tags=["picture"]
sent = axis_sent_bytes(large)
reveal(guess_ratio, sent["tp"] / sent["dp"])
show(*pictures.axis_dots(sent))
gathered = 64 * 3 / 2 * sent["dp"]  # an all-reduce is as much as a gather and a reduce-scatter
print(f"approximation, derived below: {256 * 4096 * 7 / (3 * llama.hidden * 3):.0f}")
print(f"FSDP along dp, in 64 micro-batches: {gathered / 1e9:,.0f} GB instead of", end=" ")
print(f"{sent['dp'] / 1e9:.1f}; tp sends {sent['tp'] / gathered:.2f} times as much")

# %% [markdown]
# (The axis of the picture is logarithmic: each grid line is ten times the one before.)
#
# Where does the ratio come from? We divide the bytes along tp by those along dp, and most symbols
# cancel:
#
# $$ \frac{4\,\frac{L}{p}\cdot\frac{b\,s\,h}{d}\cdot 2\,\frac{t-1}{t}}
# {\frac{N}{p\,t}\cdot 2\,\frac{d-1}{d}}
# = \frac{4\,L\,b\,s\,h\,(t-1)}{N\,(d-1)}
# \approx \frac{b\,s\,(t-1)}{3\,h\,(d-1)} . $$
#
# The last step uses $N \approx 12Lh^2$, which is about right for this model, too. What remains is
# the tokens per step divided by the hidden size. Tokens are counted in millions and hidden sizes in
# thousands, so tp sends far more than DDP. Doubling the batch doubles the bytes along tp and leaves
# those along dp unchanged.
#
# FSDP is a different case, if it gathers layers in every micro-batch. Each of the 4 replicas has 64
# sequences and runs them as 64 micro-batches of one. An all-reduce sends as much as one all-gather
# and one reduce-scatter. In each micro-batch, FSDP makes two all-gathers and one reduce-scatter, so
# it sends 1.5 times the bytes of DDP's all-reduce. But DDP makes its all-reduce once per step, and
# FSDP repeats all this 64 times. Here that is about as much as tp sends. FSDP sends less if a step
# has fewer and larger micro-batches.
#
# Bytes are not everything: it also matters who waits for them. Without overlap (lesson 07), the
# all-reduces of tp are on the critical path, because the next matrix multiplication needs their
# result. Gradients can be sent while backward still computes (lesson 06), and a stage can compute
# one micro-batch while it sends another (lesson 08).
#
# ### Exercise 2 (core): which collective on which axis
#
# *Difficulty 3 of 5, importance 5 of 5, about 20 minutes.*
#
# After backward, each rank has gradients for its replica's tokens: `grads`, a list of tensors. On
# the last stage, `loss` is the replica's mean loss, a float64 tensor without dimensions; on other
# stages it is None. Average the gradients in place, and return on every rank the mean loss of all
# replicas, as a tensor of the same kind. All replicas have equally many tokens. `mesh` is a
# `RankMesh` with pp, dp and tp. Example with dp = 2: losses 2 and 4 become 3 on all ranks;
# gradients 10 and 20 become 15. About 6 lines.
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
# **Along tp, ranks all-reduce activations in every layer. Along pp, they send an activation and its
# gradient per micro-batch. Along dp, they all-reduce the gradients of their own parameters once per
# step, or, with FSDP, gather and reduce layers in every micro-batch.**
#
# ## 3 Eight ranks, one model
#
# Exercise 2 is the end of a step. Now we build the whole step, and the first question is in which
# order the methods are applied. Each method changes the module that it is given, so each one sees
# only what the previous one left on this rank.
#
# 1. Tensor parallelism replaces every matrix by this rank's shard.
# 2. Pipeline parallelism keeps the layers of this rank's stage. (Steps 1 and 2 can be swapped.)
# 3. Data parallelism (DDP, ZeRO or FSDP) comes **last**: its buckets, shards and optimizer state
#    must belong to the parameters that the rank really keeps. If DDP came first, it would put its
#    hooks on whole parameters, and step 1 would then replace these parameters by others that have
#    no hooks.
#
# The second question is what must be equal on which ranks. One question answers every cell of the
# table: *what would one process have done?*
#
# | | along dp | along pp | along tp |
# |---|---|---|---|
# | sequences | **different** | the same | the same |
# | initial weights | the same | its own layers | its shard of the same weights |
# | dropout masks of tensors that tp does not split | **different** | **different** | the same |
# | gradients | **averaged** | not combined; a tied embedding's are added | not combined |
# | loss | **averaged** | sent from the last stage to the others | each rank computes the same |
#
# For example, one process draws one dropout mask for an activation. Ranks along tp all hold a copy
# of this activation, so they have to draw the same mask. Ranks along dp hold other sequences, so
# they draw other masks. For a tensor that tp splits, such as attention by heads, the masks differ
# along tp, too (lesson 07). (With Megatron's sequence parallelism, each tp rank computes the norms
# for a part of the tokens only, so the gradients of the norms are added along tp.)
#
# The row of gradients can be measured: the next cell records one backward pass on eight ranks, in
# which nothing is summed over any axis, and compares each gradient with that of one process.

# %%
from course_lib.debugging.type_tables import type_lines, types_on_mesh

names = ("blocks.0.mlp.up.weight", "blocks.0.mlp.out.bias", "norm.weight", "embedding.weight")
types = types_on_mesh(eight, MODELS["tiny"], cube)
print(*type_lines(names, ["dp", "pp", "tp"], {"": types}), sep="\n")

# %% [markdown]
# *Varying*: a shard each. *Invariant*: copies that compute the same, so each rank has the whole
# gradient. *Replicate*: copies that are used in different computations, so a rank's gradient is
# *Partial*, a term of the sum or of the mean (lesson 07). "-": one stage only has the parameter.
#
# In the code, all ranks build the same model from one seed, and then keep their part. Which
# sequences a rank reads depends on its *dp coordinate*, not on its rank.


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
    mine = [part.chunk(2)[mesh.index(data_axis)] for part in BATCH]  # this replica's sequences
    micro_batches = [part.chunk(2) for part in mine]
    with replica.no_sync():  # a tied embedding's gradient is complete after the last backward
        loss = pipeline.step(one_f_one_b(2, 2), *micro_batches)
    replica.finish()
    return loss


# %% [markdown]
# The course's trainer (`course_lib/train/trainer.py`) does the same for other sizes, with clipping
# and with ZeRO or FSDP along dp. Here is the proof that the order and the table are right: we take
# four steps in float64 on 2 × 2 × 2 ranks and on one process, with SGD, and with AdamW and
# clipping. Losses and weights have to be the same, up to rounding (1e-10).

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

# %% [markdown]
# The numbers are right. Is the traffic what section 2 predicts? We record every call of one step on
# rank 0. Along which axis a call went can be read from its group: two ranks that differ by 1 are a
# tp group. The formula includes the calls of the embedding and the output head. (This batch is
# small, so the share of dp is larger than in the 70B example.)

# %% tags=["picture"]
rank = 0
events = eight.run(lab.events_of_a_step, step)[rank]
counted, formula = lab.bytes_by_axis(cube, rank, events), axis_sent_bytes(step, rank)
print("counted as predicted, to the byte:", counted == formula)
show(*pictures.axis_dots(formula, counted, who=f"Rank {rank}"))

# %% [markdown]
# ### Break it
#
# `backward` selects a rank's sequences by its coordinate along dp. Suppose that a data loader
# selects them by the coordinate along **tp** instead. Then the two ranks of a tp group read
# different sequences. What do you notice in training?

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
# The loss even falls *lower* than in the correct run. All shapes fit, so nothing fails. But each
# all-reduce along tp now adds partial results that belong to *different* sequences, and each rank
# compares its part of the logits with the targets of its own sequences. So the plotted value is not
# the loss of any text, and that it is low means nothing.
#
# **A falling loss does not prove that a mesh is right. Compare losses and gradients with one
# process.**
#
# *This is a good place for a break.*
#
# ## 4 The norm of the whole gradient, and the loss
#
# The trainer of section 3 also clipped gradients, and still equaled one process. That is not
# obvious. Clipping (lesson 02) multiplies all gradients by one factor, which is computed from the
# norm of the *whole* gradient. A rank holds only a part of this gradient, and some numbers are held
# by several ranks.
#
# The squared norm is a sum of squares, so each rank can add up the squares of its own numbers, and
# an all-reduce can add these sums. The difficulty is that **each number must count exactly
# once**. In the table, "add" means that these ranks hold different numbers, so their squares are
# added; "once" means that they hold copies, and only one of them counts. With DDP along dp:
#
# | gradient of | over tp | over pp | over dp |
# |---|---|---|---|
# | a split matrix | add | add | once: all have the same average |
# | a parameter that is whole along tp (norms, some biases) | once | add | once |
# | a tied embedding, on the first and the last stage | add | once | once |
#
# Suppose that we forget this: every rank squares all numbers that it holds, and the squares are
# added over all eight ranks. How many times too large is the norm?

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
# If every number were counted on all 8 ranks, the norm would be $\sqrt 8 \approx 2.8$ times too
# large. But split matrices were counted twice only (along dp). Parameters that are whole along tp
# were counted four times, and so was the tied embedding, which is on two stages. The sum of squares
# is therefore between 2 and 4 times too large, and the norm between $\sqrt 2$ and $\sqrt 4 = 2$
# times.
#
# Nothing reports this mistake. With a norm that is too large, clipping reduces the gradient too
# much, and SGD takes steps that are too small.
#
# ### Exercise 3 (core): clip across axes
#
# *Difficulty 4 of 5, importance 4 of 5, about 25 minutes.*
#
# `parts` lists this rank's gradients, averaged along dp, as `(grad, split, first)`. `split` is
# True if `grad` is this rank's shard along tp, and False if all ranks along tp hold the same
# `grad`. `first` is False for a tied parameter's second copy. Scale in place, so that the whole
# gradient's norm is at most `max_norm`; return the norm before. Convert fp16 to fp32 before you
# square: squares can overflow. Example with tp = 2: a split weight has the gradients 3 and 4, a
# whole one 12 on both ranks. The norm is 13. About 9 lines.
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
# The loss needs the same care. It is a mean over *all* tokens, and each replica's last stage has
# the mean over its own tokens. If all replicas have equally many tokens, the mean of these means
# over dp is the loss. (Otherwise, add sums and token counts, as in lesson 02.) The gradients are
# averaged **once**. Some code bases divide the loss by $d$ before backward; then the gradients must
# be added, not averaged.
#
# **Sum the squares over ranks that hold different numbers; where ranks hold copies, count one of
# them. Then all ranks scale by one factor.**
#
# ## 5 Which axis innermost?
#
# So far, nothing depended on the order of the axes. It does not change the result (up to rounding).
# But it decides which messages cross from one node to another, and so it decides the time.
#
# Take two nodes of four ranks. The link between the nodes is ten times slower than the links
# inside: ten times the latency, a tenth of the bandwidth. With tp innermost, a tp group is two
# neighbors in a node. With tp outermost, rank 0's partner is rank 4, on the other node, so every
# all-reduce along tp is ten times slower. For one step of section 3's small model, divide the
# busiest rank's total communication time with tp outermost by that with tp innermost. What do you
# get?

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
show(*pictures.groups_across_nodes(outermost, 4))

# %% [markdown]
# Now eight real ranks on emulated links train with each of the six orders in turn. A measured step
# is longer than its communication: it also includes computation and waiting for the other stage.

# %% tags=["picture", "measured"]
wired = Ranks(8, link=two_nodes)
measured = lab.time_orders(wired, steps)
claim("tp outermost is slower", measured[outermost] > measured[cube])
show(*pictures.order_bars(predicted, measured, cube, outermost))

# %% [markdown]
# Here only the outermost place is bad for tp: a node has four ranks, so both inner axes fit into
# it. On larger meshes, often only the innermost axis fits into a node, and only if its size is at
# most the number of ranks per node.
#
# But why is the ratio not 10? Something else must be slow in the good order. The next cell prints
# what rank 0 sends along each axis. With tp innermost, along which axis does it communicate
# longest?

# %% tags=["predict"]
float32 = replace(step, number_bytes=4)
print({axis: f"{size / 2**10:.0f} KiB" for axis, size in axis_sent_bytes(float32).items()})
guess_longest = predict("tp innermost: longest communication along", choices=("pp", "dp", "tp"))
### GUESS guess_longest.commit("tp")

# %%
for mesh in (cube, outermost):
    seconds = axis_seconds(replace(float32, mesh=mesh), two_nodes)
    words = ", ".join(f"{axis} {1e3 * one:.0f} ms" for axis, one in seconds.items())
    print(f"{mesh}, rank 0 by formula: {words}")
    if mesh == cube:
        reveal(guess_longest, max(seconds, key=seconds.get))

# %% [markdown]
# Along pp rank 0 sends the fewest bytes and spends the most time, because these are the messages
# that cross the nodes: each pays the high latency. Some axis has to cross the nodes. Choose the
# axis whose messages cost least on the slow link. This also answers why the ratio is not 10: the
# good order has a slow axis, too. (The busiest ranks are those of the last stage, which also
# all-reduce along tp for the loss. Rank 0's seconds therefore give a smaller ratio.)
#
# On a real cluster you find this in a trace: add up the seconds of the calls whose group has ranks
# on more than one node, by axis. (Receives are left out, because they mostly wait for the other
# stage's computation.)

# %% tags=["picture", "measured"]
from course_lib.mesh.mesh import spans_nodes

traces, tp_s = {}, {}
for mesh in (cube, outermost):
    traces[mesh] = wired.run(lab.events_of_a_step, replace(float32, mesh=mesh))[0]
    tp_s[mesh] = pictures.median_call_s(mesh, "tp", traces[mesh])
    between_s = dict.fromkeys(mesh.sizes, 0.0)
    for event in traces[mesh]:
        if event.kind != "recv" and spans_nodes(event.group, 4) and mesh.axis_of(event.group):
            between_s[mesh.axis_of(event.group)] += event.duration_s
    print(mesh, {axis: f"{1e3 * one:.0f} ms between nodes" for axis, one in between_s.items()})
claim("an all-reduce between nodes takes longer", tp_s[outermost] > tp_s[cube])
show(*pictures.axis_traces(traces, "tp", two_nodes))

# %% [markdown]
# In the lower trace, forward and backward look slow. They do not compute more: the tp calls inside
# them wait for the link. In the gaps, rank 0 waits for the other stage.
#
# ### All orders of a cluster
#
# The explorer computes the communication of 64 H100 on 8 nodes. Each node has eight network
# adapters of 50 GB/s. A group with n GPUs in each of its nodes uses n adapters; the others serve
# the groups beside it. Move an axis outward (to the left), and look at which groups cross nodes.
# What happens at tp = 16? And what happens to the 7B model at tp = 1 and pp = 2? It fits without
# tensor parallelism, and then it communicates far less.

# %% tags=["picture"]
from course_lib.cost.flops import train_step_flop
from course_lib.cost.hardware import H100
from course_lib.mesh.explorer import mesh_explorer
from course_lib.mesh.live import communication_s

mesh_explorer()

# %% [markdown]
# ### What others measured
#
# Tazi et al. (2025) timed an 8B model in many configurations on nodes of 8 H100. We consider those
# with 256 sequences per step, and take the fastest one for each TP degree. (The fastest runs of two
# degrees also differ in dp, pp, ZeRO stage and micro-batch, so the picture does not isolate the
# effect of tp.) On 8 nodes, what part of the speed is left if tp groups have 16 ranks instead of 8?

# %% tags=["predict"]
guess_left = predict("tokens/s per GPU with tp = 16, divided by those with tp = 8 (like 3/4)")
### GUESS guess_left.commit(3 / 4)

# %% tags=["picture"]
best = pictures.best_tokens(8)
reveal(guess_left, best[16] / best[8])
flop = train_step_flop(MODELS["llama2-7b"], 256, 4096)
compute_s = flop / 64 / (0.4 * H100.peak())  # at 40 % of the peak
step_s = {tp: compute_s + communication_s(tp) for tp in (8, 16)}
print(f"by formula, for the explorer's 7B model: {step_s[8] / step_s[16]:.2f}")
show(*pictures.best_by_tensor_degree())
for nodes in (2, 8, 32):
    for tp, run in pictures.best_runs(nodes).items():
        if tp in (1, 8):
            split = f"tp {tp}, dp {run['dp']}, pp {run['pp']}, ZeRO-{run['zero']}"
            print(f"{nodes} nodes: {split}, {run['grad_acc']} micro-batches of {run['mbs']}")

# %% [markdown]
# The link is not the only cause. With twice the TP degree on the same GPUs, $d\,p$ is half as
# large. So each rank all-reduces twice as many numbers, $\frac Lp\cdot\frac{b\,s\,h}{d}$ (section
# 2), in rings of twice as many ranks. And each rank's matrices become smaller, which a GPU computes
# less efficiently.
#
# Look at the left end, too, and at the lines below the picture. The training state of an 8B model
# does not fit on one GPU, so the runs with tp = 1 divide it in another way: its layers along pp,
# and its optimizer state by ZeRO-1. On 2 and 8 nodes, no degree beats these runs. On 32 nodes it is
# the opposite: tp = 1 is slower than 2, 4 and
# 8. There, 256 GPUs share 256 sequences. The two runs with 256 replicas failed, and the fastest run
# with tp = 1 has 16 stages and only 16 micro-batches: by lesson 08, its bubble is almost as long as
# its computation. With tp = 8 no pipeline is needed. **Use tensor parallelism when you need it (for
# memory, or because the batch cannot be split further), and keep its groups inside a node.**
#
# Which axis is outermost in practice? Megatron-LM's default order is pp, dp, cp, tp, from outermost
# to innermost; torchtitan's is the same. Llama 3 405B used dp, pp, cp, tp (Grattafiori et al. 2024,
# section 3.3.2): FSDP prefetches parameters and reduces gradients during computation, so it
# tolerates a higher latency. These orders differ in the outer axes, but in all of them tp is
# innermost.
#
# **Put the axis that communicates most and overlaps least innermost, inside a node: usually tp.**
#
# ## 6 Megatron-Core's mesh, PyTorch's, and your cluster
#
# Is our mesh the same as that of the real frameworks? Megatron-Core has the same axes, but its own
# layers, schedule and data parallelism. Below, it trains our model on our mesh, from the same
# weights, in float32. (On a CPU, small functions replace its CUDA calls.) If both implement the
# same methods, the loss and the bytes along each axis have to agree.

# %% tags=["measured"]
from math import isnan

from course_lib.train import beside_frameworks as beside

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
    loss, ms = sum(known) / len(known), runs[7].median_ms
    print(f"{name:13} loss {loss:.5f}, {ms:.0f} ms per step; sent {kib}")

# %% [markdown]
# The loss is the same. The bytes along every axis are also the same, except for a few bytes: our
# trainer also sends the loss to every rank.
#
# In PyTorch, the same composition is:
#
# ```python
# mesh = init_device_mesh("cuda", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
# stage = ...                                       # the layers of mesh["pp"]
# parallelize_module(stage, mesh["tp"], plan)       # lesson 07
# for block in stage.blocks:                        # lesson 10: each block is a unit
#     fully_shard(block, mesh=mesh["dp"])
# fully_shard(stage, mesh=mesh["dp"])               # last: what is left, the root
# ```
#
# FSDP comes last and shards each `DTensor`, which is already split along tp. A `DTensor` knows
# along which axes it is split and along which it is copied. So within a stage, `clip_grad_norm_`
# and checkpoints need no list like `parts` in exercise 3. But the plan must cover all parameters
# (for norms, use for example `SequenceParallel`); otherwise `clip_grad_norm_` fails (PyTorch 2.13).
#
# On your cluster, one command times all orders of a mesh:
#
# `torchrun --nproc-per-node 8 cluster/exercises/11_mesh.py --mesh pp=2,dp=2,tp=2`
#
# ## What to keep
#
# - Coordinates are the digits of a rank, innermost last. Every rank has one group per axis.
# - Apply TP and PP first, data parallelism last. Select sequences by dp coordinate.
# - Count each number of the gradient once in its norm.
# - Put the axis that communicates most and overlaps least inside a node.
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
