# %% [markdown]
# # 01 Memory: where the bytes go
#
# **Can you know how many bytes a training step needs before you run it?** You will *predict* the
# bytes from a few sizes of the model, *measure* what PyTorch really keeps, and *compare*.
#
# *After this lesson you can*
#
# - count the parameters of a transformer, and the bytes of its weights, gradients and optimizer
#   state;
# - derive the bytes that a layer of GPT or Llama saves for the backward pass;
# - say when in a step memory reaches its peak, and what to change when a model does not fit.
#
# **Prerequisites:** a little PyTorch. **Time:** about 60 minutes of reading and running, 65 of
# exercises. Exercises 1, 3 and 4 are *core*, exercise 2 is on paper, exercise 5 and section 8 go
# *further*.
#
# | symbol | in code | meaning |
# |---|---|---|
# | $N$ | `num_params` | parameters |
# | $L$ | `num_layers` | layers |
# | $h$ | `hidden` | hidden size: numbers per token between layers |
# | $f$ | `ffn_hidden` | size of the MLP's inner layer, often $4h$ |
# | $a$ | `num_heads` | attention heads |
# | $V$ | `vocab` | tokens in the vocabulary |
# | $b$ | `batch` | sequences in a micro-batch (one forward pass) |
# | $s$ | `seq` | tokens in a sequence |
#
# The *residual stream* is the tensor of $h$ numbers per token that passes from layer to layer;
# attention and MLP each add their output to it.
#
# Memory is reported in GiB ($2^{30}$ bytes); rates, such as bytes per second, use powers of ten. A
# GPU that is sold with "80 GB" has about 80 GiB. A number in fp32 takes 4 bytes; in bf16 or fp16 it
# takes 2.

# %%
from dataclasses import replace

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from course_lib.checks import check
from course_lib.core import MODELS
from course_lib.core.recipes import RECIPES
from course_lib.core.units import GIB, format_bytes
from course_lib.display import YES_NO, predict, reveal, show
from course_lib.memory import count_params, model_states, param_parts, pictures, step_ledger
from course_lib.memory.optimizer_states import state_rows
from course_lib.models import GPT, next_tokens, token_batch, token_loss

torch.set_num_threads(1)  # the models here are small

# %% [markdown]
# ## 1 Counting parameters
#
# Almost everything in memory is proportional to the number of parameters, or to the number of
# tokens. So the first thing to know about a model is its size. The smallest GPT-2 (Radford et al.
# 2019) has $h=768$, 12 layers, an MLP with $f=4h$, a vocabulary of 50,257 tokens, and a learned
# vector for each of 1,024 positions. How many million parameters does it have? Try to add up its
# matrices before you answer.

# %% tags=["predict"]
guess = predict("parameters of the smallest GPT-2", unit="million")
### GUESS guess.commit(110)

# %% tags=["check"]
gpt2 = MODELS["gpt2"]
reveal(guess, count_params(gpt2) / 1e6)
for part, count in param_parts(gpt2).items():
    print(f"{part:<10} {count:>12,}")
with torch.device("meta"):  # shapes without numbers: no memory, no time
    built = {name: GPT(MODELS[name]) for name in ("gpt2", "gpt2-xl", "megatron-175b")}
for name, model in built.items():
    counted = sum(param.numel() for param in model.parameters())
    print(f"{name}: formula {count_params(MODELS[name]):,}, counted {counted:,}")

# %% [markdown]
# The formula agrees with the models that PyTorch builds, to the last parameter. Here is where the
# numbers come from. In each layer, attention has four matrices of $h\times h$ numbers: one each for
# queries, keys and values, and one for the output. The MLP has two matrices, of $h\times4h$ and
# $4h\times h$ numbers. Together these are $4h^2+8h^2=12h^2$ parameters per layer. The embedding
# adds one vector of $h$ numbers for each of the $V$ tokens.
#
# The *output matrix* (`head` in the code) turns the last layer's vectors into logits, and so it
# also has $V\times h$ numbers. In GPT-2 it is *tied*: the same parameter serves as embedding and as
# output matrix, so it is counted once. In an untied model it is counted again.
#
# ### Exercise 1 (core): count a GPT
#
# *Difficulty 1 of 5, importance 4 of 5, about 10 minutes and 5 lines.*
#
# Return the exact number of parameters of a GPT. Every matrix of attention and MLP has a bias (a
# matrix from $h$ to $f$ has a bias of $f$ numbers). Each layer has two norms, and one more follows
# the last layer; a norm has a weight and a bias. Each of the `spec.vocab` tokens and `spec.max_seq`
# positions has a vector of $h$ numbers. If `spec.tied` is False, add an output matrix without bias.
# Do not assume $f=4h$.


# %% tags=["exercise"] exercise="memory-1"
def count_gpt(spec):
    """Parameters of a GPT-2 of any size, tied or not."""
    h, f = spec.hidden, spec.ffn_hidden
    ### BEGIN SOLUTION: attention, MLP and norms a layer; tables; last norm
    attention = 4 * h * h + 4 * h
    mlp = 2 * h * f + f + h
    tables = (spec.vocab + spec.max_seq) * h + (0 if spec.tied else spec.vocab * h)
    return spec.num_layers * (attention + mlp + 4 * h) + 2 * h + tables
    ### END SOLUTION


# %% tags=["check"] exercise="memory-1"
check("memory-1", count_gpt)

# %% [markdown]
# <details><summary>Hint: my number is a little too small</summary>Print your parts beside those of
# <code>param_parts(gpt2)</code>. Do you count biases and norms?</details>
#
# **A GPT with an MLP of $4h$, with keys and values for every head, and with a tied output matrix
# has about $12Lh^2+Vh$ parameters; biases, norms and positions add little. An untied output matrix
# adds $Vh$.** (In some models several heads share keys and values; section 4.)
#
# ## 2 What each parameter costs
#
# A bf16 parameter takes two bytes, so it is tempting to say that a model of 8 billion parameters
# needs 16 GB. For training, this misses most of the memory, because the optimizer keeps several
# numbers for every parameter.
#
# The classic mixed-precision recipe (Rajbhandari et al. 2020, section 3.1) holds for each
# parameter:
#
# - a 16-bit weight and a 16-bit gradient, which forward and backward compute with (2 + 2 bytes);
# - a *master copy* of the weight in fp32 (4 bytes). A bf16 number has only 8 significant bits, so
#   adding a number that is more than 512 times smaller does not change it. An update is often
#   thousands of times smaller than its weight: without the master copy, it would be rounded away;
# - Adam's two *moments* in fp32, the running means of the gradient and of its square (4 + 4 bytes).
#
# Together these are called the *model states*; the course calls this recipe the *usual* one.
# Frameworks differ in it: Megatron-LM often keeps gradients in fp32, and PyTorch's FSDP can keep
# all weights, gradients and moments in fp32 and compute with a bf16 copy of one part at a time.
# Llama 3 8B (in the code `llama-8b`) has 8.03 billion parameters. How many GiB do its model states
# take with the usual recipe?

# %% tags=["predict"]
guess = predict("model states of llama-8b in bf16", unit="GiB")
### GUESS guess.commit(64)

# %%
llama = MODELS["llama-8b"]
states = model_states(count_params(llama), "bf16")
reveal(guess, sum(states.values()) / GIB)
print({kind: format_bytes(size) for kind, size in states.items()})
for billions in (1, 7, 70, 405):
    sizes = [sum(model_states(billions * 10**9, name).values()) / 1e9 for name in list(RECIPES)[:2]]
    print(f"{billions:>4}B {sizes[0]:>6,.0f}e9 bytes, with an accumulator {sizes[1]:>6,.0f}e9")
print("", state_rows(GPT(MODELS["small"])), sep="\n")

# %% [markdown]
# Three quarters of the model states belong to the optimizer. In the lines for 1B to 405B, the
# number after "with an accumulator" adds 4 bytes per parameter for a gradient *accumulator*: a sum
# of the gradients in fp32 beside the bf16 gradients, so that adding up many micro-batches loses
# little to rounding (lesson 02). Other recipes drop the bf16 gradients, or hold everything in fp32,
# or hold everything in bf16 (*pure* bf16).
#
# The table at the end of this output shows optimizers that save memory. *8-bit Adam* stores each
# moment in one byte (Dettmers et al. 2022, section 2.1). *Adafactor* keeps no first moment, and
# replaces the second moment of a matrix by the sums of its rows and columns (Shazeer and Stern
# 2018). *Muon* keeps one momentum instead of two moments for the matrices of the layers (Jordan et
# al. 2024); here the other parameters use AdamW.

# %% tags=["picture"]
show(*pictures.states_by_recipe(count_params(llama)))

# %% [markdown]
# ### Exercise 2 (on paper): which recipe fits?
#
# *Difficulty 2 of 5, importance 4 of 5, about 5 minutes, no code.*
#
# The picture shows that of these recipes only pure bf16 fits an 8B model into 80 GiB. You want to
# keep Adam, and to change the usual recipe as little as possible. You can drop the master copy, or
# you can keep it and store the two moments in 8 bits each. How many bytes does a parameter take in
# each case? Which of the two recipes fits, and which one would you choose?
#
# <details><summary>Answer</summary>
# Divide the memory by the parameters: 80 GiB are 85.9e9 bytes, and for 8.03 billion parameters this
# makes 10.7 bytes per parameter. Without the master copy, a parameter takes 2 + 2 + 4 + 4 = 12
# bytes, which is too much. With 8-bit moments it takes 2 + 2 + 4 + 1 + 1 = 10 bytes, which fits.
# (The scales of the moments add less than 0.01 bytes.) So choose 8-bit moments: they save more, and
# the master copy still collects the small updates that bf16 would round away. But only about 5 GiB
# are left for everything else that a step needs. The next section begins to count it.
# </details>
#
# **With the usual recipe (bf16 with an fp32 master copy, and Adam), model states take 16 bytes per
# parameter; with an fp32 accumulator they take 20.**
#
# ## 3 What backward needs
#
# The model states of a small model fit easily, and yet it can run out of memory, because a step
# also needs memory for each *token*. To compute gradients, the backward pass needs intermediate
# results of the forward pass: the gradient of $w$ in $y=xw$ is $x^\top dy$, where $dy$ is the
# gradient of the loss with respect to $y$. So $x$ must still be there. Autograd therefore keeps
# such tensors from forward until backward has used them. They are called *saved tensors*, or
# *activations*.
#
# How much is that for one small operation? Take `y = gelu(x @ w)`, with `x` of shape `[8, 64]` and
# `w` of shape `[64, 256]`, both in fp32. `x` and `w` exist anyway. How many bytes does autograd
# keep in addition?

# %% tags=["predict"]
guess = predict("kept for backward besides x and w", unit="bytes")
### GUESS guess.commit(16384)

# %%
from course_lib.memory.saved_tensors import measure_saved

x = torch.randn(8, 64)
w = torch.randn(64, 256, requires_grad=True)
kept = measure_saved(lambda: F.gelu(x @ w), given=[x, w])
reveal(guess, sum(one.num_bytes for one in kept))
print("kept:", *kept)

# %% [markdown]
# Autograd keeps one additional tensor of $8\cdot256$ numbers: the *input* of GELU, from which the
# derivative of GELU is computed. The matrix product keeps `x`, which costs nothing here because `x`
# existed already. The *output* of GELU is not kept; it would be, if a later operation needed it.
#
# ### Exercise 3 (core): measure what is saved
#
# *Difficulty 3 of 5, importance 4 of 5, about 15 minutes and 4 lines.*
#
# Measure the bytes that autograd keeps. It calls `pack(tensor)` for each tensor that an operation
# saves, and keeps what `pack` returns. Views share the **storage** of their tensor, and even a
# small view keeps it alive: count each storage once, in full. `tensor.untyped_storage()` has an
# address, `data_ptr()`, and a size, `nbytes()`. Write `pack`: it notes each storage's bytes in
# `kept`, under the storage's address, and returns the tensor unchanged. Omit storages of `params`:
# `skip` has their addresses. For `gelu(x @ w)` with `params` `[x, w]`, the result is 8,192.
#
# <details><summary>Hint: I count a tensor twice, or a parameter</summary>
# A view may start at another address. Which address do all views of one tensor share?</details>


# %% tags=["exercise"] exercise="memory-3"
def weigh(fn, params):
    """Bytes that autograd keeps when fn() runs; params are there anyway."""
    skip = {param.untyped_storage().data_ptr() for param in params}
    kept = {}

    def pack(tensor):
        ### BEGIN SOLUTION: note the storage's bytes under its address
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in skip:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor
        ### END SOLUTION

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        fn()
    return sum(kept.values())


# %% tags=["check"] exercise="memory-3"
check("memory-3", weigh)

# %% [markdown]
# **Autograd keeps what each operation saves for its backward; a storage that several saved tensors
# share takes memory only once.**
#
# ## 4 The bytes of a layer
#
# Now we can measure any model. But a measurement does not say what would change with twice the
# heads or twice the tokens; for this we need a formula. The rules of the last section give one, if
# we go through a layer operation by operation. A GPT layer computes:
#
# 1. a norm, and three matrix products of its output: q, k and v;
# 2. attention, here *unfused*, that is, written out as separate operations: the *scores* q · kᵀ
#    (one number for each pair of tokens in each head), their softmax, dropout, and the product with
#    v;
# 3. a matrix product (`out`), dropout, and the sum with the residual stream;
# 4. a norm, a product $h \to f$, GELU, a product $f \to h$, dropout, and the sum with the residual
#    stream.
#
# What each operation saves follows from its derivative:
#
# | operation | saves | because its gradient is computed from |
# |---|---|---|
# | matrix product | both inputs (a weight is there anyway) | the other input |
# | norm, GELU | its input | its input |
# | softmax | its output | its output |
# | dropout | a mask, one byte per number | which numbers were dropped |
# | sum | nothing | nothing: its gradient is passed on |
#
# (A norm also saves one or two numbers per token, such as the mean and the scale. Ignore them.)
# In *grouped-query attention* (GQA, Ainslie et al. 2023), several heads share keys and values: k
# and v have only `spec.kv_hidden` numbers per token.
#
# ### Exercise 4 (core): the bytes of a layer
#
# *Difficulty 4 of 5, importance 5 of 5, about 20 minutes and 8 lines.*
#
# Return the bytes that this layer saves, as a dict of ints. `norms`: their inputs. `attention`:
# inputs of products in steps 1 to 3 with one vector per token, each once. `scores`: tensors with
# one number per head and pair of tokens, mask included. `mlp`: what step 4 saves from its first to
# its last product. `masks`: the two others. A number takes `number_bytes`, in a mask 1 byte.
# Example in bf16: one token, one head, $h=2$, $f=8$ gives norms 8, attention 20, scores 5, mlp 36,
# masks 4.
#
# <details><summary>Hint: attention is too large</summary>
# q, k and v are three products, but of how many different tensors? Softmax's output is part of the
# scores.</details>
# <details><summary>Hint: scores are too small</summary>
# Three tensors: softmax's output, a mask, and an input of the product with v.</details>


# %% tags=["exercise"] exercise="memory-4"
def layer_bytes(spec, batch, seq, number_bytes):
    """Bytes that one layer saves for backward, by part: attention written out, with dropout."""
    ### BEGIN SOLUTION: the bytes of a tensor of hidden, of keys, of ffn_hidden
    tokens = batch * seq
    hidden = tokens * spec.hidden * number_bytes
    keys = tokens * spec.kv_hidden * number_bytes
    wide = tokens * spec.ffn_hidden * number_bytes
    return {
        "norms": 2 * hidden,
        "attention": 3 * hidden + 2 * keys,  # input of q, k, v; q; input of out; k and v
        "scores": batch * spec.num_heads * seq * seq * (2 * number_bytes + 1),
        "mlp": hidden + 2 * wide,
        "masks": 2 * tokens * spec.hidden,
    }
    ### END SOLUTION


# %% tags=["check"] exercise="memory-4"
check("memory-4", layer_bytes)

# %% [markdown]
# The picture draws the layer of GPT-2 with all its saved tensors. On the left are the operations,
# from top to bottom as forward computes them. Beside each one is the tensor that it saves, with its
# size as a bar.

# %% tags=["picture"]
show(*pictures.layer_tensors(gpt2, batch=8, seq=1024))

# %% [markdown]
# Add up the bars. In bf16, all tensors except the scores take $34\,sbh$ bytes together: 4 for the
# norms, 10 for attention, 18 for the MLP and 2 for the masks. The scores have $as^2b$ entries, and
# each of them takes 2 bytes after softmax, 1 byte in the mask and 2 bytes after dropout: $5\,as^2b$
# bytes. Factoring out $sbh$ gives the formula of Korthikanti et al. 2022 (section 4.1):
#
# $$ 34\,sbh + 5\,as^2b = sbh\left(34 + 5\,\frac{a s}{h}\right) \text{ bytes per layer} $$
#
# **The 34 is not universal: it counts this layer. If you change an operation, count again.**
#
# A Llama 3 layer is such a change. It has GQA and no dropout, and its MLP is a *SwiGLU* (Shazeer
# 2020), which has three matrices: $(\text{silu}(xW_g)\cdot{}xW_u)W_d$, where silu is an
# activation function like GELU. Computed as separate operations, it saves four tensors of $f$
# numbers per token: $xW_g$, its silu, $xW_u$ and their product. With flash attention (explained
# below) no scores are saved. If the norms save only their bf16 input, the layer saves
#
# $$ sbh\left(12 + 4\,\frac{\text{kv hidden}}{h} + 8\,\frac{f}{h}\right) \text{ bytes,} $$
#
# which is $41\,sbh$ for Llama 3 8B. Here *kv hidden* is the number of values per token in k (or in
# v). The 12 stands for six tensors of $h$ numbers per token, 2 bytes each: the inputs of the two
# norms, the common input of q, k and v, the input of `out`, the input of the MLP, and q itself. The
# 4 stands for k and v, and the 8 for the four tensors of the MLP. (PyTorch's RMSNorm can save more
# than its input; we measure with LayerNorm.)
#
# In general a layer saves $sbh(c+d\,as/h)$ bytes; the GPT layer above has $c=34$ and $d=5$.

# %% tags=["check"]
from course_lib.memory import layer_coefficients
from course_lib.memory.saved_tensors import measure_layer

small = MODELS["small"]
like_llama = replace(small, gated=True, num_kv_heads=2, ffn_hidden=7 * small.hidden // 2)
layers = {
    "GPT, unfused, dropout": (small, {"flash": False, "dropout": True}),
    "GPT, flash": (small, {"flash": True}),
    "SwiGLU, GQA, flash": (like_llama, {"flash": True}),
}
for name, (spec, how) in layers.items():
    c, d = layer_coefficients(spec, **how)
    formula = 2 * 128 * (c * spec.hidden + d * spec.num_heads * 128)
    kept = measure_layer(spec, batch=2, seq=128, **how)
    print(f"{name:<26}{c:>3g} sbh + {d:g} as²b = {formula:>9,.0f} B; autograd {kept:>9,} B")

# %% [markdown]
# The small differences are statistics that the norms and flash attention save, a few numbers per
# token. In the next cells the formula is called with `kernels=TORCH_CPU`, which counts them, too.
#
# The term $5\,as/h$ has the sequence length in it, so the memory of the scores grows with its
# *square*. *Flash attention* (Dao et al. 2022) avoids this: it computes the scores tile by tile,
# uses each tile at once, and never stores all of them; in the backward pass it computes them again.
#
# To see the difference, we compute the saved bytes in three ways, in fp32 and without dropout: by
# the formula, by a *simulation*, and by a measurement. The formula and the simulation go up to
# 4,096 tokens. The simulation runs the real model on *fake tensors*, which have a shape but no
# numbers, so that it needs no memory. We measure real tensors up to 512 tokens.


# %%
from course_lib.memory import TORCH_CPU, activations
from course_lib.memory.saved_tensors import fake_tensors


def measured_bytes(seq, flash):
    model = GPT(replace(small, max_seq=seq), flash=flash)
    tokens = torch.zeros(2, seq, dtype=torch.long)
    given = [*model.parameters(), tokens]
    kept = measure_saved(lambda: token_loss(model(tokens), tokens), given=given)
    return sum(one.num_bytes for one in kept)


def simulated_bytes(seq, flash):
    with fake_tensors():
        return measured_bytes(seq, flash)


def formula_bytes(seq, flash):
    how = {"flash": flash, "number_bytes": 4, "kernels": TORCH_CPU}
    return sum(activations(small, 2, seq, **how).values())


# %% tags=["picture"]
seqs, ways = [128, 256, 512, 1024, 1536, 2048, 3072, 4096], {"unfused": False, "flash": True}
saved = {
    name: {
        "formula": [formula_bytes(seq, flash) for seq in seqs],
        "simulation": [simulated_bytes(seq, flash) for seq in seqs],
        "measurement": [measured_bytes(seq, flash) for seq in seqs[:3]],
    }
    for name, flash in ways.items()
}
show(*pictures.saved_by_sequence(seqs, saved))

# %% [markdown]
# **If no layer is computed a second time (lesson 03), a GPT or Llama layer saves $sbh(c+d\,as/h)$
# bytes. The constants $c$ and $d$ depend on the layer's operations and their precision; with
# flash attention, $d$ is zero.**
#
# *A good place for a break.*
#
# ## 5 Four steps, live
#
# We know now how large each kind of memory is. But the kinds are not all there at the same time,
# and a step runs out of memory at its fullest moment. So we have to know when memory is at its
# peak. A model trains for four steps with AdamW, one micro-batch per step. `LiveLedger` notes how
# many bytes of each kind are held: when forward starts, after each layer's forward, during
# backward, and before and after the optimizer's step. In which step is the peak first reached?

# %% tags=["predict"]
guess = predict("the peak is first reached in step")
### GUESS guess.commit(1)

# %%
from course_lib.memory.saved_tensors import LiveLedger

tokens, targets = next_tokens(token_batch(0, batch=2, seq=128, vocab=small.vocab))
untied = replace(small, tied=False)  # so each parameter is used once
torch.manual_seed(0)
model = GPT(untied)
optimizer = torch.optim.AdamW(model.parameters())
with LiveLedger(model, optimizer, given=[tokens, targets]) as live:
    for _ in range(4):
        token_loss(model(tokens), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

# %% tags=["picture", "measured"]
totals = live.ledger.totals()
entries_a_step = (len(totals) - 1) // 4
reveal(guess, 1 + totals.index(max(totals)) // entries_a_step)
show(*pictures.first_steps(live.ledger))

# %% [markdown]
# AdamW creates its moments in its first update, which is at the end of step 1. The first forward
# pass runs without them, so step 2 is the first in which moments and all activations are there
# together. This is why a job can survive its first step and fail in the second.
#
# The formula can predict the same four steps. It agrees with the measurement at every recorded
# time:

# %% tags=["check"]
played = step_ledger(untied, 2, 128, recipe="fp32", kernels=TORCH_CPU)
for kind, held in played.bytes_by_kind.items():
    same = held == live.ledger.bytes_by_kind[kind]
    print(f"{kind:<12} peak {max(held):>11,} B, equal at all {len(held)} times: {same}")

# %% [markdown]
# Look at one step in the picture. Activations (blue) grow during forward. During backward they
# shrink, layer by layer, while gradients grow. Here the peak is at the start of backward: all
# activations are there, and no gradients yet. (Picture and formula leave out *temporary tensors*,
# which exist only while one operation runs, for example a gradient that is passed on at once.)
#
# **The peak can also be later.** If a layer has larger gradients than activations, as with few
# tokens, each layer's backward adds more than it frees, and memory still grows *during* backward.
# With gradient accumulation (lesson 02), the second micro-batch runs while the gradients of the
# first one are held.
#
# ### Exercise 5 (further): where the peak is
#
# *Difficulty 3 of 5, importance 3 of 5, about 15 minutes and 8 lines.*
#
# Layer `i` has `acts[i]` bytes of activations and `grads[i]` of gradients. A step runs forward and
# backward for several equal micro-batches. Forward keeps all activations; backward goes from the
# last layer to the first, frees each layer's activations and adds its gradients. Gradients stay;
# later micro-batches add to them in place. Return the most bytes held at the end of any forward or
# any layer's backward, including `states`. Example: `step_peak(100, [5, 5], [8, 8], 1)` is 116.


# %% tags=["exercise"] exercise="memory-5"
def step_peak(states, acts, grads, num_micro_batches):
    """The most bytes that are held during a step: states, activations and gradients."""
    ### BEGIN SOLUTION: follow the step, layer by layer, and note the most
    held = most = 0  # bytes of gradients; the most of gradients and activations together
    for micro_batch in range(num_micro_batches):
        kept = sum(acts)
        most = max(most, kept + held)
        for act, new in zip(reversed(acts), reversed(grads), strict=True):
            kept -= act
            held += new if micro_batch == 0 else 0
            most = max(most, kept + held)
    return states + most
    ### END SOLUTION


# %% tags=["check"] exercise="memory-5"
check("memory-5", step_peak)

# %% [markdown]
# ### Break it: a loss that is never let go
#
# Memory that is constant from step to step is a sign of health. A common mistake breaks it: a
# validation loop without `no_grad` collects `loss` in a list, instead of the number `loss.item()`.
# Each loss refers to its graph, and the graph refers to the saved tensors. Is the same memory held
# after every step?

# %% tags=["predict"]
guess = predict("the same memory is held after every step", choices=YES_NO)
### GUESS guess.commit("yes")

# %% tags=["failure", "measured"]
losses = []
with LiveLedger(model, optimizer, given=[tokens, targets]) as leaking:
    for _ in range(4):
        loss = token_loss(model(tokens), targets)
        losses.append(loss)  # should be loss.item(), under no_grad
one_graph = leaking.ledger.totals()[5]  # step 2 begins, and the graph of step 1 is there
reveal(guess, max(leaking.ledger.totals()) <= 1.5 * one_graph)
show(*pictures.graphs_kept(leaking.ledger, len(losses)))
losses.clear()

# %% [markdown]
# **From step 2 on, without recompute and temporary tensors, a step of one micro-batch peaks at
# the start of backward; it can peak later only if some layers have more gradients than
# activations. If memory grows in every step, look for graphs that something keeps alive.**
#
# ## 6 What fits, and models that do not
#
# Section 2 left a problem: the model states of an 8B model alone are larger than an 80 GiB GPU.
# Here are three methods of this course that reduce memory; you will build each of them later. Only
# the last two make model states smaller. (So does pipeline parallelism, lesson 08, which divides
# the layers.)
#
# - *Recompute* (lesson 03) drops activations in forward and computes them again in backward.
# - *ZeRO* (lesson 09) divides the model states over several GPUs (*ranks*), which would otherwise
#   all hold the same. Stage 1 divides the optimizer state, stage 2 also the gradients, and stage 3
#   also the parameters.
# - *Tensor parallelism* (lesson 07) gives each rank a part of every matrix, and so a part of its
#   states and of its activations. With *sequence parallelism*, the activations of norms and dropout
#   are divided, too.
#
# The picture shows the peak of Llama 3 8B on one rank, for one sequence of 4,096 tokens, without
# temporary tensors. The calculator below it lets you combine the methods: `dp` is the number of
# copies of the model, and each copy runs `batch` sequences; `tp` is the number of ranks that
# share each matrix, `pp` the number that share the layers, `cp` the number that share each
# sequence. In a terminal, `course memory` takes the same options. *Find two ways to make llama-8b
# fit that are not in the picture.*

# %% tags=["picture"]
from course_lib.memory.explorer import calculator

show(*pictures.ways_to_fit())
calculator("--model llama-8b --gpu h100 --seq 4096")

# %% [markdown]
# **ZeRO divides model states. Recompute, a smaller micro-batch and a shorter sequence reduce
# activations. Tensor parallelism with sequence parallelism divides both.**
#
# ## 7 What other tools say
#
# Our formula predicts the bytes of a rank; others have built tools for the same question.
# Accelerate and DeepSpeed have estimators, and PyTorch has a tracker, `MemTracker`, that follows
# every tensor of real steps. Before you trust one of them, find out what it counts. For two
# sequences of 256 tokens they say:

# %% tags=["measured"]
from course_lib.memory.estimators import all_estimates, estimates_text, tracker_gap

found, missing = all_estimates(MODELS["small"], 2, 256)
print(estimates_text(found), *missing, sep="\n")
mine, tracker = found[:2]
gap = tracker_gap(MODELS["small"], 2, 256)
more = tracker.total_bytes - mine.total_bytes
print(f"\nthe tracker says {more:,} bytes more than the formula:")
for name, size in (gap | {"unexplained": more - sum(gap.values())}).items():
    print(f"    {name:<26}{size:>10,} B")

# %% [markdown]
# Accelerate prints the *largest* of its entries `model`, `gradients`, `optimizer` and `step`. In
# float32 that is `step`, 16 bytes per parameter; in bfloat16 it is `optimizer`, 8 bytes, half of
# what the usual recipe needs. DeepSpeed assumes fp32 gradients beside the bf16 ones, and so 20
# bytes per parameter. Neither of the two counts activations. PyTorch's tracker counts everything:
# also temporary tensors, the batch and the loss. Apart from these it agrees with our formula to the
# byte.
#
# **Memory estimators answer different questions: before you compare two of them, list the kinds of
# memory that each one counts.**
#
# ## 8 Further: memory that is reserved but not used
#
# On a real GPU, `nvidia-smi` shows more than all these sums. The CUDA context (the driver's own
# data for each process), the work space of libraries such as cuBLAS, and the buffers of NCCL,
# NVIDIA's library for communication between GPUs, take memory. So does PyTorch's *caching
# allocator*. Requests to the driver are slow, so the allocator takes large *segments* from it once
# (memory that is *reserved*), hands out blocks of them to tensors (memory that is *allocated*), and
# keeps blocks that are freed for later requests.
#
# This is fast, but it can fail although enough memory is free. The cell below simulates an
# allocator on a GPU of 80 MiB. It allocates eight blocks of 8 MiB, frees every second one, and then
# asks for one block of 16 MiB:

# %% tags=["failure", "raises-exception"]
from course_lib.memory.allocator import MIB, CachingAllocator, growing_lists

gpu = CachingAllocator(limit_bytes=80 * MIB)
blocks = [gpu.allocate(8 * MIB) for _ in range(8)]
for block in blocks[::2]:
    gpu.free(block)
print(f"allocated {gpu.allocated_bytes // MIB}, reserved {gpu.reserved_bytes // MIB} MiB")
grown = growing_lists(CachingAllocator(limit_bytes=80 * GIB), [k * 12 * MIB for k in range(1, 9)])
print("growing tensor, allocated/reserved:", *(f"{a // MIB}/{r // MIB}" for a, r in grown), "MiB")
gpu.allocate(16 * MIB)

# %% [markdown]
# More than half of the reserved memory is free, but in pieces that are each too small. This is
# *fragmentation*. The second line shows that much reserved memory is not yet fragmentation. A
# tensor that grows by `torch.cat`, as a cache of keys and values does, is copied into a larger
# block each time, and the old block is too small for the next copy. So reserved memory grows faster
# than the tensor. But here whole segments are free, and the allocator returns such segments to the
# driver before it reports an error.
#
# **If an out-of-memory error reports at least as much memory "reserved but unallocated" as the
# request needs, the likely cause is fragmentation.** Try the environment variable
# `PYTORCH_ALLOC_CONF=expandable_segments:True` (older versions of PyTorch:
# `PYTORCH_CUDA_ALLOC_CONF`).
#
# Memory decides whether a step can run at all. Lesson `01b_speed` asks how fast it can run.
#
# ## Read on
#
# - Korthikanti et al. 2022, *Reducing Activation Recomputation in Large Transformer Models*,
#   section 4: the derivation of the 34.
# - Rajbhandari et al. 2020, *ZeRO*, section 3: where the memory of training goes.
# - Dao et al. 2022, *FlashAttention*: attention without scores in memory.
# - Tazi et al. 2025, *The Ultra-Scale Playbook*, the chapter on training on one GPU: the same
#   counts, with pictures of a profiler.
