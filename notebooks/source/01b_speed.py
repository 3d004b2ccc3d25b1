# %% [markdown]
# # 01b Speed: what limits a step
#
# **How fast can a training step be, and which part of the machine limits it?** You will count a
# step's operations, compare published runs with the peak of their GPUs, and find out whether
# arithmetic, memory or a link is the limit.
#
# *After this lesson you can*
#
# - count the FLOP of a training step, exactly and by the rule $6ND$;
# - compute an MFU, and say when two published MFUs can be compared;
# - place an operation on a roofline: is it memory-bound or compute-bound?
# - say how many tokens a rank needs so that its messages can hide behind its computation;
# - say what experts change: the bytes of states follow all parameters, the FLOP the active ones.
#
# **Prerequisites:** lesson 01. **Time:** about 40 minutes of reading and running, 25 of exercises.
# Exercise 1 is *core*, exercise 2 goes *further*.
#
# | symbol | in code | meaning |
# |---|---|---|
# | $N$ | `num_params` | parameters |
# | $N_\text{active}$ | `active` | parameters that one token uses |
# | $D$ | `tokens` | tokens in a step, on all ranks |
# | $t$ | | tokens in a step on one rank |
# | $h$ | `hidden` | hidden size: numbers per token between layers |
# | $s$ | `seq` | tokens in a sequence |
# | $m, k, n$ | | sizes of a matrix product: `[m, k]` @ `[k, n]` |
# | $I$ | `intensity` | arithmetic intensity: FLOP per byte of memory traffic |
# | $p$ | `p` | ranks |
#
# FLOP are floating-point operations; FLOP/s is a rate. Rates are in powers of ten: 1 TFLOP/s is
# $10^{12}$ FLOP per second.

# %%
import torch

from course_lib.checks import check
from course_lib.core import MODELS
from course_lib.core.units import format_bytes
from course_lib.cost.hardware import DEVICES
from course_lib.cost.published import rows
from course_lib.display import predict, reveal, show
from course_lib.memory import count_params
from course_lib.speed import forward_flop, mfu, pictures, roof_of, six_n_d, train_step_flop

torch.set_num_threads(1)  # the measured roof is that of one thread
llama = MODELS["llama-8b"]

# %% [markdown]
# ## 1 Counting FLOP
#
# Lesson 01 answers whether a step fits into memory. It says nothing about its time. The first part
# of that question is how much there is to compute.
#
# Nearly all FLOP of a transformer are in its matrix products. A product of `[m, k]` and `[k, n]`
# computes $mn$ numbers, each from $k$ multiplications and $k$ additions: together $2mkn$ FLOP. If
# the second matrix is a weight with $kn$ parameters and $m$ is the number of tokens, that is *2
# FLOP per parameter and token*.
#
# The backward pass has two products of the same size. With $y=xW$, the gradient of $x$ is
# $dy\,W^\top$, and the gradient of $W$ is $x^\top{}dy$. So backward takes 4 FLOP per parameter and
# token, a whole step takes 6, and a step of $D$ tokens takes about
#
# $$ 6ND \text{ FLOP} $$
#
# (Kaplan et al. 2020, section 2.1). The rule is convenient, but it is not exact:
#
# - It leaves out the attention scores. They are products of activations with activations, so no
#   parameter stands for them, and their number grows with the sequence.
# - If $N$ contains the embedding, the rule counts a matrix that multiplies nothing, unless it is
#   tied to the output matrix. Kaplan et al. leave the embedding out of $N$; Hoffmann et al. 2022
#   (appendix F) count it, and so does this lesson.
#
# For sequences of 32,768 tokens, by how many percent is $6ND$ too low for Llama 3 8B?

# %% tags=["predict"]
guess = predict("6ND is too low, at 32,768 tokens, by", unit="%")
### GUESS guess.commit(10)

# %%
longer = train_step_flop(llama, 1, 32768)
reveal(guess, 100 * (1 - six_n_d(count_params(llama), 32768) / longer))
print("           error of 6ND       share of the scores\nseq         all     half      all   half")
for seq in (2048, 8192, 32768, 131072):
    errors, shares = [], []
    for causal in (False, True):
        step = train_step_flop(llama, 1, seq, causal=causal)
        scores = 3 * forward_flop(llama, 1, seq, causal=causal)["attention scores"]
        errors.append(f"{six_n_d(count_params(llama), seq) / step - 1:+.1%}")
        shares.append(f"{scores / step:.0%}")
    print(f"{seq:>7,}  {errors[0]:>7}  {errors[1]:>7}  {shares[0]:>7}  {shares[1]:>5}")

# %% [markdown]
# The table has two columns for each number because there are **two conventions** for a causal mask.
# The mask hides half of the scores: no token attends to later ones. Some count *all* scores, as if
# nothing were masked (Narayanan et al. 2021, appendix; Chowdhery et al. 2022, appendix B). Others
# count *half*, which is what a causal kernel computes (Dao 2023, section 4.1). The course counts
# all, unless it says `causal`. Up to which length of a sequence is $6ND$ good enough? In a GPT
# layer, each of the two attention products takes $2sh$ FLOP per token in forward if all scores
# count, so together they take $12sh$ in a step. The matrices take $6\cdot12h^2=72h^2$. The scores
# therefore add a share of $s/(6h)$, or half of it in the other convention. (Where the table has a
# plus sign, $6ND$ is too *high*: it counts the embedding, which multiplies nothing in this untied
# model.)
#
# ### Exercise 1 (core): the FLOP of a step
#
# *Difficulty 3 of 5, importance 4 of 5, about 15 minutes and 5 lines.*
#
# Return the FLOP of forward and backward as an int, by counting every matrix product: q, k, v and
# `out` (k and v have `spec.kv_hidden` columns); the MLP (three matrices if `spec.gated`, else two);
# the logits; and the two products of attention, q · kᵀ and scores · v, which count half each if
# `causal`. Each of the two multiplies every token with all `seq` tokens of its sequence, over all
# heads together $h$ numbers wide. You need this count for any MFU.


# %% tags=["exercise"] exercise="speed-1"
def step_flop(spec, batch, seq, causal):
    """FLOP of forward and backward; causal: half of the attention scores."""
    ### BEGIN SOLUTION: multiply-adds of a token; then all tokens, 2 FLOP, 3 products
    h, tokens = spec.hidden, batch * seq
    attention = 2 * h * h + 2 * h * spec.kv_hidden
    mlp = (3 if spec.gated else 2) * h * spec.ffn_hidden
    scores = 2 * seq * h // (2 if causal else 1)
    return 6 * tokens * (spec.num_layers * (attention + mlp + scores) + h * spec.vocab)
    ### END SOLUTION


# %% tags=["check"] exercise="speed-1"
check("speed-1", step_flop)

# %% [markdown]
# **A step of $D$ tokens takes about $6ND$ FLOP as long as $s$ is far below $6h$. For longer
# sequences, add the attention scores, and say whether you count all of them or half.**
#
# ## 2 How busy is the GPU?
#
# We know the FLOP of a step. Divided by the speed of the GPUs, they give the shortest time that the
# step can take. So which speed does a GPU have? The data sheet of an H100 says 1,979 TFLOP/s in
# bf16, but with the remark "with sparsity". This speed needs matrices in which two of every four
# weights are zero, so that the GPU can skip them. Ordinary training is *dense*, and for dense
# matrices the peak is half of that number.

# %%
h100 = DEVICES["h100"]
print(h100.source.replace(": ", ":\n", 1), end="\n\n")
for device in DEVICES.values():
    dtype = next(one for one in ("bf16", "fp16", "fp32") if one in device.peak_flop_per_s)
    peak, size = device.peak(dtype) / 1e12, format_bytes(device.memory_bytes)
    links = ", ".join(f"{name} {speed / 1e9:g}" for name, speed in device.links.items())
    one_way = f"; GB/s one way: {links}" if links else ""
    print(f"{device.name:<10}{size:>8}{peak:>8,.1f} TFLOP/s dense, {dtype}{one_way}")
step = train_step_flop(MODELS["megatron-175b"], batch=64, seq=2048)
share = mfu(step, 13.75, DEVICES["a100-80"].peak("bf16"), world_size=64)
print(f"\n175B on 64 A100s, 13.75 s for 64 sequences of 2,048 tokens: MFU {share:.1%}")

# %% [markdown]
# *Model FLOP utilization* (MFU, Chowdhery et al. 2022, section 4.1) says which share of this peak a
# run really used:
#
# $$ \text{MFU} = \frac{\text{FLOP of the model}}{\text{step time} \cdot \text{GPUs} \cdot
# \text{dense peak}} $$
#
# Only the FLOP that the model needs are in the numerator. If a run recomputes activations, the GPUs
# do more work, but the recomputed FLOP do not count. (If they are counted, the share is called
# HFU, *hardware* FLOP utilization.) This makes the MFU a fair measure of useful work: recomputing
# lowers it.
#
# The last line above is a run of Korthikanti et al. 2022. Their table 5 reports the same MFU,
# 51.4 %. What do other studies report?

# %% tags=["picture"]
show(*pictures.mfu_of_real_runs())
top = max(rows("llm_foundry"), key=lambda run: float(run["MFU"] or 0))
print(f"LLM Foundry's highest MFU: {top['MFU']} %, {top['Model']} on {top['# GPUs']} {top['GPU']}")

# %% [markdown]
# None of these stars reaches 60 % of the peak, and the best run in all tables of LLM Foundry is
# only a little above it. But be careful when you compare the stars. The next picture shows
# published runs of one 7B model on 8 H100s. Each throughput was measured once; only the count of
# FLOP differs between the three curves.

# %% tags=["picture"]
show(*pictures.mfu_by_convention())

# %% [markdown]
# At 1,024 tokens the three counts nearly agree. At 65,536 tokens, most of the FLOP are scores, and
# the same run can be reported with one MFU or with less than a third of it.
#
# **MFU is a step's model FLOP divided by its time and by the dense peak of its GPUs. Two MFUs can
# be compared if their FLOP are counted in the same way.**
#
# ## 3 What limits the speed?
#
# Why does no run come near the peak? One reason is that not every operation can. Before a GPU
# computes with a number, it has to read it from memory, and this takes time as well. At best,
# reading and computing overlap, and the slower of the two decides.
#
# An operation's *arithmetic intensity* $I$ is its FLOP divided by the bytes that it reads or
# writes. Memory that delivers $\beta$ bytes per second feeds at most $I\beta$ FLOP per second. So
# the speed of an operation is at most
#
# $$ \min(\text{peak},\; I \cdot \text{memory bandwidth}), $$
#
# which is called the *roofline* (Williams et al. 2009, section 3). Below the *ridge point*, where
# the two bounds are equal, an operation is *memory-bound*; above it, it is *compute-bound*.
#
# Two examples in bf16. An add computes 1 FLOP per number, for which it reads two numbers and writes
# one: $I=1/6$. A product of $m$ tokens with a $k\times n$ weight computes $2mkn$ FLOP and moves
# $2(mk+kn+mn)$ bytes. If there are few tokens, the weight's $2kn$ bytes are nearly all of these,
# and so $I\approx m$: every weight is read once and used for $m$ tokens. How many tokens does a
# large bf16 product need to reach the ridge point of an H100?

# %% tags=["predict"]
guess = predict("tokens that make a large product compute-bound", unit="tokens")
### GUESS guess.commit(32)

# %%
roof = roof_of(h100)
reveal(guess, roof.ridge)
print(f"{roof.flop_per_s / 1e12:.1f} TFLOP/s / {roof.bytes_per_s / 1e12:.2f} TB/s")

# %% [markdown]
# An H100 computes about 300 FLOP in the time in which it reads one byte. This is why training uses
# batches of thousands of tokens, and why generating text token by token is slow: there, $m$ is the
# number of sequences.
#
# The same law holds for the processor under this notebook, and here we can measure it. The flat
# part of the roof is the speed of our fastest product, and the slope is the bandwidth of an add.
# The dots are products of 1 to 256 tokens, in fp32, where $I\approx m/2$. The fastest dot lies on
# the flat part by construction. What the picture tests is the slope, which comes from another
# operation.

# %% tags=["picture", "measured"]
from course_lib.speed.lab import measure_roof

show(*pictures.measured_roof(*measure_roof()))

# %% [markdown]
# Where do the operations of a training step stand on the roof of a GPU? Take the step of AdamW. For
# each parameter of the usual recipe it computes 14 FLOP, and it reads or writes 28 bytes: the
# gradient, and three fp32 numbers that are read and written, and the new bf16 weight. Which share
# of an H100's peak can it reach?

# %% tags=["predict"]
guess = predict("AdamW's step reaches at most this share of the peak", unit="%")
### GUESS guess.commit(20)

# %% tags=["picture"]
reveal(guess, 100 * roof.attainable(14 / 28) / roof.flop_per_s)
show(*pictures.operations_on_roof())
print(pictures.roof_rows())

# %% [markdown]
# The dots are upper bounds: an operation can stand on the roof or below it. The table below the
# picture has the same shares of the peak for four GPUs. Read it with three remarks:
#
# - Norms, adds, dropout and the optimizer's step are memory-bound on all of these GPUs. They have
#   few FLOP, but they take time in which the peak is not used. *Fusing* such operations, so that
#   intermediate results do not go through memory, makes them faster.
# - The scores of one head (here 4,096 tokens and 128 numbers per head) are memory-bound, too, if
#   they are written to memory: $4096^2$ numbers are written after 128 multiply-adds each. Flash
#   attention does not write them, and so the same FLOP become compute-bound.
# - Norms and optimizer run on the GPU's ordinary cores, whose peak is lower than that of the
#   tensor cores for matrix products. For memory-bound operations this changes nothing.
#
# **Below the ridge point, an operation is memory-bound: a faster processor does not help it, but
# moving fewer bytes does. Matrix products of some hundred tokens or more can be compute-bound.**
#
# ## 4 When a method waits for its link
#
# With several GPUs there is a third limit. A rank also sends bytes to others over a *link*, and the
# same division tells whether the link is too slow: compare the FLOP that the method computes per
# byte sent with the peak divided by the link's bandwidth.
#
# Take FSDP (lesson 10) with $p$ ranks and $t$ tokens on each of them. No rank keeps the whole
# model, so forward gathers the parameters from the other ranks. In bf16, forward
#
# - computes $2N$ FLOP per token, $2Nt$ in all;
# - receives the $\frac{p-1}{p}$ of the parameters that are elsewhere: $2N\frac{p-1}{p}$ bytes.
#
# The number of FLOP per byte is $t\,\frac{p}{p-1}$, which is about $t$ if there are many ranks.
# The size of the model cancels. Only the tokens per rank decide. Backward computes twice as much
# and sends two messages, so the ratio is the same if gradients are reduced in bf16. If they are
# reduced in fp32, backward needs one and a half times as many tokens.
#
# So a rank needs about as many tokens as its peak divided by the bandwidth of its link. Inside a
# node of eight H100s, NVLink sends 450 GB/s. Between nodes, each GPU has a network adapter of its
# own, with 50 GB/s. How many tokens per rank does a group need that has one GPU in each node?

# %% tags=["predict"]
guess = predict("tokens per rank, for one GPU per node", unit="tokens")
### GUESS guess.commit(2000)

# %%
from course_lib.cost.hardware import nodes_of

nodes = nodes_of(h100)
groups = {"one node": range(8), "whole nodes": range(64), "one GPU per node": range(0, 64, 8)}
for name, ranks in groups.items():
    rate = nodes.ring(ranks).bytes_per_s
    print(f"{name:17} {rate / 1e9:3.0f} GB/s, {h100.peak() / rate:7,.0f} tokens per rank")
reveal(guess, h100.peak() / nodes.ring(groups["one GPU per node"]).bytes_per_s)

# %% [markdown]
# A ring over whole nodes is nearly as fast as NVLink for large messages: NCCL builds one ring
# through each of the eight adapters of a node, and the rings share the data. Groups with one GPU
# per node are slow. They appear when tensor parallelism takes the GPUs inside each node: then the
# eight GPUs of a node are in eight different groups, and each group has only one adapter per
# node. But the eight ranks of a tensor group work on the same tokens. So 19,790 tokens per tensor
# group are 2,474 per GPU, as many as for a group of whole nodes.
#
# These numbers assume that computation reaches the peak and the link its full bandwidth. At an MFU
# of 50 %, half of the tokens are enough; a link that reaches half of its bandwidth needs twice as
# many.
#
# Tensor parallelism (lesson 07) behaves differently. Per token, a GPT layer computes
# $6\cdot12h^2/p$ FLOP on each rank, in forward and backward together. It has four all-reduces of
# $h$ numbers, and each of them sends $2\frac{p-1}{p}\cdot2h$ bytes. The ratio is
#
# $$ \frac{72\,h^2/p}{16\,h\,(p-1)/p} = \frac92\,\frac{h}{p-1} \text{ FLOP per byte} $$
#
# for any number of tokens: here more tokens do not help, but a wider model does. The ratio says
# only what *could* be hidden. In the simple version of tensor parallelism, the next product needs
# the sum, so its all-reduces are exposed however wide the model is (lesson 07).
#
# ### Exercise 2 (further): tokens that hide a link
#
# *Difficulty 2 of 5, importance 4 of 5, about 10 minutes and 3 lines.*
#
# In data parallelism, each of `p` ranks computes the gradients of the whole model from its own
# tokens. A ring all-reduce then adds them up: every rank sends $\frac{p-1}{p}$ of all gradients
# *twice*. In the best case this happens while backward computes. Return the number of tokens per
# rank (a float) at which backward and the all-reduce take equally long. A gradient has `grad_bytes`
# bytes. For example, with 8 ranks at $10^{15}$ FLOP/s, a link of $5\cdot10^{10}$ bytes/s and 2
# bytes, the answer is 17,500.


# %% tags=["exercise"] exercise="speed-2"
def tokens_needed(p, flop_per_s, bytes_per_s, grad_bytes):
    """Tokens per rank at which backward takes as long as the all-reduce of gradients."""
    ### BEGIN SOLUTION: seconds of one parameter: sent, and computed for one token
    send_s = 2 * (p - 1) / p * grad_bytes / bytes_per_s
    compute_s = 4 / flop_per_s
    return send_s / compute_s
    ### END SOLUTION


# %% tags=["check"] exercise="speed-2"
check("speed-2", tokens_needed)

# %% [markdown]
# <details><summary>Hint: the size of the model is not given</summary>
# Write down both times for a model of one parameter.</details>
#
# **A method is communication-bound where its FLOP per byte sent are fewer than peak divided by
# link bandwidth. For data parallelism and FSDP, FLOP per byte grow with the tokens per rank, and
# are fewer if gradients are reduced in fp32; for tensor parallelism, they grow with the width of
# the model.**
#
# ## 5 Experts: bytes without FLOP
#
# So far, $N$ has cancelled: a dense model computes 6 FLOP per token for each parameter that it
# stores and sends. Many models of today break this rule on purpose. In place of one MLP, a layer
# has many small ones, its *experts*, and a *router* that sends each token to a few of them.
# We say that a model has $N$ parameters, of which a token uses $N_\text{active}$. Here
# are two models that cost about as many FLOP per token:

# %%
from course_lib.cost.params import active_params

for name in ("llama2-13b", "mixtral-8x7b"):
    spec = MODELS[name]
    num_params, active = count_params(spec), active_params(spec)
    sizes = f"{num_params / 1e9:4.1f} billion parameters, {active / 1e9:.1f} active"
    cost = f"{6 * active / 1e9:.0f} GFLOP per token, {16 * num_params / 1e9:.0f} GB of states"
    print(f"{name:12} {sizes}: {cost}")

# %% [markdown]
# Now train Mixtral with FSDP on the eight H100s of one node. A dense model needed 2,199 tokens per
# rank to hide its messages. FSDP gathers *all* experts of a layer, whichever of them are used. How
# many tokens per rank does Mixtral need?

# %% tags=["predict"]
guess = predict("tokens per rank for Mixtral, in one node", unit="tokens")
### GUESS guess.commit(2000)

# %% tags=["picture"]
dense = h100.peak() / nodes.ring(range(8)).bytes_per_s
mixtral = MODELS["mixtral-8x7b"]
reveal(guess, dense * count_params(mixtral) / active_params(mixtral))
show(*pictures.bytes_against_flop())

# %% [markdown]
# A rank receives $2N$ bytes but computes only $2N_\text{active}$ FLOP per token, so it needs
# $N/N_\text{active}$ times as many tokens. Whatever stores or carries parameters follows $N$:
# states, checkpoints, the messages of data parallelism and FSDP. The FLOP follow $N_\text{active}$,
# except for the attention scores. This is why models with experts are divided differently: in
# *expert parallelism* each rank keeps some experts, and the tokens travel to them.
#
# Models of today differ from GPT-2 in three smaller ways, and `course memory --model config.json`
# counts them all:
#
# - **Heads have a size of their own** (`head_dim`). In Qwen3-0.6B, 16 heads of 128 numbers make
#   2,048, twice the hidden size: its attention has twice the weights and twice the FLOP for scores
#   that heads of $h/16$ numbers would have.
# - **Queries and keys are normed** (QK norm): 256 weights per layer, but the norms save their
#   inputs for backward, as every norm does.
# - **Some layers have a sliding window**: a token attends to the last 4,096 tokens, say. Scores and
#   the keys and values that generation keeps stop growing with the sequence in these layers.
#
# **What stores or carries parameters follows all of them, the FLOP follow the active ones. So a
# model with experts has $N/N_\text{active}$ times the bytes of states, and of messages with
# parameters or gradients, per FLOP.**
#
# ## Read on
#
# - Chowdhery et al. 2022, *PaLM*, section 4.1 and appendix B: the definition of MFU.
# - Williams et al. 2009, *Roofline*, sections 3 and 4: the model, with measurements.
# - Dao 2023, *FlashAttention-2*, section 4: FLOP of causal attention, and speeds.
# - Austin et al. 2025, *How to Scale Your Model*, chapters 1 and 5: rooflines of training, and of
#   each way to split it.
# - Korthikanti et al. 2022, *Reducing Activation Recomputation*, section 6: MFU and HFU of one run.
