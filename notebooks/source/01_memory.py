# %% [markdown]
# # 01 Memory: where the bytes go
#
# **Can you know beforehand how many bytes a training step needs?** **Predict** them from a few
# sizes, **measure** what PyTorch keeps, and **compare**.
#
# *After this lesson you can*
#
# - count the parameters of a transformer, and the bytes of its weights, gradients and optimizer;
# - derive the bytes that a layer of GPT or Llama saves for backward;
# - say when in a step memory is at its peak, and what to change when a model does not fit;
# - count a step's FLOP, read a published MFU, and say whether arithmetic, memory or a link limits
#   speed.
#
# **Prerequisites:** a little PyTorch. **Time:** about 75 minutes of reading and running,
# 70 of exercises. Exercises 1 to 4 are *core*, 5 and 6 go *further*.
#
# | symbol | in code | meaning |
# |---|---|---|
# | $N$ | `num_params` | parameters |
# | $L$ | `num_layers` | layers |
# | $h$ | `hidden` | numbers per token between layers (residual stream) |
# | $f$ | `ffn_hidden` | size of the MLP's inner layer, often $4h$ |
# | $a$ | `num_heads` | attention heads |
# | $V$ | `vocab` | tokens in the vocabulary |
# | $b$ | `batch` | sequences in a micro-batch (one forward pass) |
# | $s$ | `seq` | tokens in a sequence |
# | $D$ | `tokens` | tokens in a step |
#
# Memory is reported in GiB ($2^{30}$ bytes), rates in powers of ten. An "80 GB" GPU has about 80
# GiB. An fp32 number takes 4 bytes, a bf16 or fp16 number 2.

# %%
from dataclasses import replace

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from course_lib.checks import check
from course_lib.core import MODELS
from course_lib.core.recipes import RECIPES
from course_lib.core.units import GIB, format_bytes
from course_lib.cost.hardware import DEVICES
from course_lib.display import YES_NO, predict, reveal, show
from course_lib.memory import count_params, model_states, param_parts, pictures, step_ledger
from course_lib.memory.optimizer_states import state_rows
from course_lib.models import GPT, next_tokens, token_batch, token_loss

torch.set_num_threads(1)  # the models here are small

# %% [markdown]
# ## 1 Counting parameters
#
# The smallest GPT-2 (Radford et al. 2019) has $h=768$, 12 layers, an MLP of $f=4h$, a vocabulary of
# 50,257 tokens and 1,024 positions. How many million parameters does it have?

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
# Attention has four matrices of $h^2$ numbers, the MLP two of $4h^2$: together $12h^2$ per layer.
# The *output matrix* (`head`), which computes the logits, is *tied* in GPT-2: it is the embedding's
# matrix and adds no parameters.
#
# ### Exercise 1 (core): count a GPT
#
# Each matrix of attention and MLP has a bias ($f$ numbers if it goes from $h$ to $f$). There are
# two norms per layer and one at the end, each with a weight and a bias. Each of the `spec.vocab`
# tokens and `spec.max_seq` positions has a vector of $h$ numbers. An untied output matrix
# (`spec.tied` is False) adds its numbers, without a bias. `spec.ffn_hidden` need not be $4h$.
# Return an int. About 5 lines.


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
# **A GPT with an MLP of $4h$, no GQA (section 4) and a tied output matrix has about $12Lh^2+Vh$
# parameters; an untied output matrix adds $Vh$.**
#
# ## 2 What each parameter costs
#
# The *usual recipe* (Rajbhandari et al. 2020, section 3.1) has, for each parameter, a 16-bit weight
# and a 16-bit gradient (2 + 2 bytes), an fp32 *master copy* of the weight, in which small updates
# are not rounded away (4), and Adam's two moments in fp32 (4 + 4). Together these are the *model
# states*. Llama 3 8B (here: Llama-8B) has 8.03 billion parameters. How many GiB do its model states
# take?

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
# A recipe with an *accumulator*, fp32 gradients beside the bf16 ones, takes 20 bytes per parameter.
# Others drop bf16 gradients, or have fp32 or bf16 (*pure*) everywhere.
#
# In the table, *8-bit Adam* stores one byte per moment (Dettmers et al. 2022, section 2.1),
# *Adafactor* stores row and column sums (Shazeer and Stern 2018, section 3), and *Muon* stores one
# momentum per weight of the layers' matrices (Jordan et al. 2024).

# %% tags=["picture"]
show(*pictures.states_by_recipe(count_params(llama)))

# %% [markdown]
# ### Exercise 2 (core): states under any recipe
#
# A recipe has `weight_bytes`, `grad_bytes`, `accumulator_bytes`, `master_bytes` and `moment_bytes`,
# each the size of one number of that kind (0 if there is none), and `num_moments`. Return the bytes
# of all model states, an int. About 3 lines.


# %% tags=["exercise"] exercise="memory-2"
def states_bytes(num_params, recipe):
    """Bytes of parameters, gradients and optimizer state."""
    ### BEGIN SOLUTION: add up what one parameter costs
    weights_and_grads = recipe.weight_bytes + recipe.grad_bytes + recipe.accumulator_bytes
    adam = recipe.master_bytes + recipe.num_moments * recipe.moment_bytes
    return num_params * (weights_and_grads + adam)
    ### END SOLUTION


# %% tags=["check"] exercise="memory-2"
check("memory-2", states_bytes)

# %% [markdown]
# **With the usual recipe (bf16, an fp32 master copy, Adam), model states take 16 bytes per
# parameter; with an accumulator they take 20.**
#
# ## 3 What backward needs
#
# To compute gradients, backward needs intermediate results of the forward pass, and autograd keeps
# them: the *activations*. Take `y = gelu(x @ w)`, with `x` of shape `[8, 64]` and `w` of `[64,
# 256]`, all fp32. How many bytes does autograd keep in addition to `x` and `w`?

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
# Autograd keeps one more tensor: the input of GELU. The product keeps `x`, which existed already.
# The output of GELU is kept only if a later operation needs it.
#
# ### Exercise 3 (core): weigh what is saved
#
# `saved_tensors_hooks(pack, unpack)` calls `pack` with every tensor that an operation saves.
# Autograd keeps what `pack` returns: return the tensor. Count each **storage** once: views of a
# tensor share it, and a small view keeps all of it alive. Leave out the storages of `params`, whose
# addresses are in `skip`. (Do not read `params` again: it may be an iterator.)
# `tensor.untyped_storage()` has an address, `data_ptr()`, and a size, `nbytes()`. About 4 lines.
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
# **Autograd keeps what operations save for backward; a storage that several tensors share counts
# once.**
#
# ## 4 The bytes of a layer
#
# A GPT layer computes:
#
# 1. norm; three matrix products of its output: q, k, v;
# 2. attention, *written out* as separate operations: *scores* q · kᵀ, one number for each pair of
#    tokens in each head; softmax; dropout; product with v;
# 3. matrix product (`out`); dropout; sum with the residual stream;
# 4. norm; product $h \to f$; GELU; product $f \to h$; dropout; sum with the residual stream.
#
# A product saves both of its inputs (a weight exists anyway), a norm and GELU save their input,
# softmax saves its output, and dropout saves a mask of one byte per number. A sum saves nothing.
#
# ### Exercise 4 (core): the bytes of a layer
#
# Return the bytes that one such layer saves, as a dict of ints: `norms` (their inputs), `attention`
# (what the products of steps 1 to 3 save, without scores), `scores` (what step 2 saves with one
# number per pair of tokens), `mlp` (step 4 from its first product to its last) and `masks` (of
# steps 3 and 4). A number takes `number_bytes` bytes, except in masks. With *grouped-query
# attention* (GQA, Ainslie et al. 2023), several heads share their keys and values: k and v have
# `spec.kv_hidden` numbers per token. Nothing else changes. Leave out the norms' statistics. About 8
# lines, 20 minutes.
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
# In bf16, with an MLP of $4h$ and no GQA, `norms`, `attention`, `mlp` and `masks` have
# $4+10+18+2=34$ times $sbh$ bytes, and each of the $as^2b$ scores takes $2+1+2=5$ bytes
# (Korthikanti et al. 2022, section 4.1):
#
# $$ sbh\left(34 + 5\,\frac{a s}{h}\right) \text{ bytes per layer} $$
#
# **The 34 is the count of that layer.** A Llama 3 layer has GQA, no dropout, and a *SwiGLU* MLP
# (Shazeer 2020) of three matrices, $(\text{silu}(xW_g)\cdot{}xW_u)W_d$, which, written out, saves
# four tensors of $f$ numbers per token. With flash attention (below), and norms that save only a
# bf16 input, $sbh(12+4\,\frac{\text{kv\,hidden}}{h}+8\,\frac{f}{h})$ bytes are saved: $41\,sbh$
# for Llama-8B. (RMSNorm can save more; we measure LayerNorm.)

# %% tags=["check"]
from course_lib.memory import layer_coefficients
from course_lib.memory.saved_tensors import measure_layer

small = MODELS["small"]
like_llama = replace(small, gated=True, num_kv_heads=2, ffn_hidden=7 * small.hidden // 2)
layers = {
    "GPT, written out, dropout": (small, {"flash": False, "dropout": True}),
    "GPT, flash": (small, {"flash": True}),
    "SwiGLU, GQA, flash": (like_llama, {"flash": True}),
}
for name, (spec, how) in layers.items():
    c, d = layer_coefficients(spec, **how)
    formula = 2 * 128 * (c * spec.hidden + d * spec.num_heads * 128)
    kept = measure_layer(spec, batch=2, seq=128, **how)
    print(f"{name:<26}{c:>3g} sbh + {d:g} as²b = {formula:>9,.0f} B; autograd {kept:>9,} B")

# %% [markdown]
# The small differences are statistics of norms and flash attention (counted by `TORCH_CPU` below).
#
# *Flash attention* (Dao et al. 2022) does not store the scores: it computes them tile by tile, and
# again in backward. Compare formula, simulation on *fake tensors* (shapes without numbers) and
# measurement, in fp32, without dropout:


# %%
from course_lib.memory import TORCH_CPU, activations
from course_lib.memory.saved_tensors import fake_tensors


def measured_bytes(seq, flash):
    model, tokens = GPT(small, flash=flash), torch.zeros(2, seq, dtype=torch.long)
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
seqs, ways = [32, 64, 128, 192, 256], {"written out": False, "flash": True}
voices = {"formula": formula_bytes, "simulation": simulated_bytes, "measurement": measured_bytes}
saved = {
    name: {voice: [of(seq, flash) for seq in seqs] for voice, of in voices.items()}
    for name, flash in ways.items()
}
show(*pictures.saved_by_sequence(seqs, saved))

# %% [markdown]
# **Without recompute, a GPT or Llama layer saves $sbh(c+d\,as/h)$ bytes: $c$ and $d$ depend on its
# operations and their precision; with flash attention $d$ is zero.**
#
# *A good place for a break.*
#
# ## 5 Four steps, live
#
# A model trains for four steps, one micro-batch each. In which step is the peak first reached?

# %% tags=["predict"]
guess = predict("the peak is first reached in step")
### GUESS guess.commit(1)

# %%
from course_lib.memory.saved_tensors import LiveLedger

tokens, targets = next_tokens(token_batch(0, batch=2, seq=128, vocab=small.vocab))
untied = replace(small, tied=False)
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

# %% tags=["check"]
played = step_ledger(untied, 2, 128, recipe="fp32", kernels=TORCH_CPU)
for kind, held in played.bytes_by_kind.items():
    same = held == live.ledger.bytes_by_kind[kind]
    print(f"{kind:<12} most {max(held):>11,} B, equal at all {len(held)} times: {same}")

# %% [markdown]
# Activations (blue) grow in forward. In backward they shrink, and gradients grow. Here the peak is
# at the start of backward: all activations are there, and no gradients yet. **The peak can be
# later.** If a layer's gradients are larger than its activations, memory still grows *in* backward.
# With gradient accumulation (lesson 02), the second micro-batch runs beside the gradients of the
# first.
#
# ### Exercise 5 (further): where the peak is
#
# `acts[i]` and `grads[i]` are the bytes of layer `i`'s activations and gradients. A step runs
# forward and backward for equal micro-batches, one after another. Gradients stay until the
# optimizer's step, and later micro-batches add to them in place. Return the most bytes held at
# once, including `states`, which always stay. Count at the end of each forward and of each layer's
# backward. Leave the lists unchanged. About 8 lines, 15 minutes.


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
# A validation loop without `no_grad` collects `loss` instead of `loss.item()`. A loss keeps its
# graph alive. Is the same memory held at the end of every step?

# %% tags=["predict"]
guess = predict("the same memory is held after every step", choices=YES_NO)
### GUESS guess.commit("yes")

# %% tags=["failure", "measured"]
losses = []
with LiveLedger(model, optimizer, given=[tokens, targets]) as leaking:
    for _ in range(4):
        loss = token_loss(model(tokens), targets)
        losses.append(loss)  # should be loss.item(), under no_grad
reveal(guess, max(leaking.ledger.totals()) <= 1.5 * leaking.ledger.totals()[5])
show(*pictures.graphs_kept(leaking.ledger, len(losses)))
losses.clear()

# %% [markdown]
# **From step 2 on, without recompute and temporaries, a step of one micro-batch peaks at the start
# of backward, or later only if a layer's gradients outweigh its activations. If memory grows in
# every step, look for graphs that something keeps alive.**
#
# ## 6 What fits, and models that do not
#
# The picture shows Llama-8B's peak on one rank, for one sequence of 4,096 tokens, without
# temporaries. *Recompute* drops activations and computes them again (lesson 03). *ZeRO* divides
# (*shards*) states over GPUs (*ranks*): stage 1 the optimizer's, stage 2 also gradients, stage 3
# also parameters (lesson 09). *Tensor parallelism* gives each rank a part of every matrix;
# *sequence parallelism* also divides activations of norms and dropout (lesson 07).
#
# In the calculator, each `dp` rank runs `batch` sequences; `tp` divides matrices, `pp` layers, `cp`
# the sequence. In a terminal, `course memory` takes the same options. *Find two more ways to
# make llama-8b fit.*

# %% tags=["picture"]
from course_lib.memory.explorer import calculator

show(*pictures.ways_to_fit())
calculator("--model llama-8b --gpu h100 --seq 4096")

# %% [markdown]
# **ZeRO divides states; recompute, a smaller micro-batch and a shorter sequence shrink activations;
# tensor parallelism with sequence parallelism divides both.**
#
# ## 7 How busy is the GPU?
#
# A matrix product of `[m, k]` and `[k, n]` has $mkn$ multiply-adds, or $2mkn$ FLOP: 2 for each
# weight and each of the $m$ tokens. Backward has two products of the same size: with $y=xW$, the
# gradient of $x$ is $dy\,W^\top$, and that of $W$ is $x^\top{}dy$. So a weight costs $2+4$ FLOP per
# token, and a step of $D$ tokens costs $6ND$ (Kaplan et al. 2020, section 2.1).
#
# If $N$ is all parameters, the rule counts the embedding, which multiplies nothing unless it is
# tied (Kaplan et al. leave it out; Hoffmann et al. 2022, appendix F, count it). The rule leaves out
# the scores, which multiply no weight. A causal mask hides half of the scores. **Two conventions
# are in use**: count *all* scores (Narayanan et al. 2021, appendix; Chowdhery et al. 2022, appendix
# B), or *half*, as a causal kernel computes (Dao 2023, section 4.1). The course counts all, unless
# it says `causal`.

# %%
from course_lib.cost.flops import forward_flop, mfu, six_n_d, train_step_flop

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
# ### Exercise 6 (further): the FLOP of a step
#
# Count the FLOP of every product in forward and backward: q, k, v and `out` (k and v with
# `spec.kv_hidden` columns); the scores and the product with v (exactly half of both if `causal`);
# the MLP (three matrices if `spec.gated`, else two); the logits. Return an int. About 5 lines, 15
# minutes.


# %% tags=["exercise"] exercise="memory-6"
def step_flop(spec, batch, seq, causal):
    """FLOP of forward and backward; causal: half of the attention scores."""
    ### BEGIN SOLUTION: multiply-adds of a token; then all tokens, 2 FLOP, 3 products
    h, tokens = spec.hidden, batch * seq
    attention = 2 * h * h + 2 * h * spec.kv_hidden
    mlp = (3 if spec.gated else 2) * h * spec.ffn_hidden
    scores = 2 * seq * h // (2 if causal else 1)
    return 6 * tokens * (spec.num_layers * (attention + mlp + scores) + h * spec.vocab)
    ### END SOLUTION


# %% tags=["check"] exercise="memory-6"
check("memory-6", step_flop)

# %% [markdown]
# An H100's data sheet says 1,979 TFLOP/s in bf16 "with sparsity": two of every four weights are
# zero and are skipped. Ordinary training is *dense*: it reaches at most half of that.

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
# *Model FLOP utilization* (MFU, Chowdhery et al. 2022, section 4.1) is the share of the **dense**
# peak that the model's own FLOP use. Recomputed FLOP do not count (with them, the share is called
# HFU). For the run in the last line, Korthikanti et al. 2022, table 5, report 51.4 %. What do
# others report?

# %% tags=["picture"]
show(*pictures.mfu_of_real_runs())

# %% [markdown]
# **MFU is a step's model FLOP, divided by its time and the dense peak of its GPUs. Compare MFUs
# only if the FLOP are counted in the same way.**
#
# ## 8 What limits the speed?
#
# An operation's *arithmetic intensity* $I$ is its FLOP per byte read or written: in bf16, 1/6 for
# an add, and about $m$ for a product of $m$ tokens with a much larger matrix (in fp32, half of
# that). Its speed is at most $\min(\text{peak},I\cdot\text{bandwidth})$, the *roofline* (Williams
# et al. 2009, section 3). At the *ridge point*, the two bounds are equal; below it an operation is
# memory-bound, above it compute-bound. How many tokens bring a bf16 product to the ridge point of
# an H100?

# %% tags=["predict"]
guess = predict("tokens that make a large product compute-bound", unit="tokens")
### GUESS guess.commit(32)

# %% tags=["picture", "measured"]
from course_lib.cost.roofline import roof_of
from course_lib.memory.lab import measure_roof

reveal(guess, roof_of(h100).ridge)
show(*pictures.measured_roof(*measure_roof()))
show(*pictures.gpu_roofs())
print(pictures.roof_rows())

# %% [markdown]
# The roof is an upper bound; the fastest product defines its peak. Norms, dropout and the
# optimizer's step are memory-bound on these GPUs. Links have the same algebra. For $t$ tokens in
# bf16 on each of $p$ ranks:
#
# - **data parallelism**: backward computes $4Nt$ FLOP and sends $4N\frac{p-1}{p}$ bytes;
# - **FSDP** (lesson 10): forward computes $2Nt$ FLOP and receives $2N\frac{p-1}{p}$ bytes; both
#   double in backward;
# - **tensor parallelism** (lesson 07): over forward and backward, a GPT layer has about
#   $\frac92\frac{h}{p-1}$ FLOP per byte sent, for any $t$.
#
# For large $p$, the first two have about $t$ FLOP per byte. So a rank needs as many tokens as its
# peak divided by the bandwidth of its link: with fewer, messages take longer than computing. But
# which bandwidth does a ring have that leaves its node? In a node of eight H100, each GPU has a
# network adapter of its own. NCCL makes one ring through each of them, and they share the work.

# %%
from course_lib.cost.hardware import nodes_of

nodes = nodes_of(h100)
groups = {"one node": range(8), "whole nodes": range(64), "one GPU per node": range(0, 64, 8)}
for name, ranks in groups.items():
    rate = nodes.ring(ranks).bytes_per_s
    print(f"{name:17} {rate / 1e9:3.0f} GB/s, {h100.peak() / rate:7,.0f} tokens per rank")

# %% [markdown]
# A ring over whole nodes is nearly as fast as one over NVLink. Slow are the groups that have one
# GPU per node: all eight of a node are in different groups, and each group has one adapter.
#
# **An operation is memory-bound below the ridge point; a method is communication-bound where its
# FLOP per byte sent are fewer than peak divided by link bandwidth.**
#
# ## 9 What other tools say
#
# Accelerate and DeepSpeed have estimators, PyTorch a tracker. For two sequences of 256 tokens they
# say:

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
# Accelerate prints the **largest** of its `model`, `gradients`, `optimizer` and `step`, not their
# sum. DeepSpeed adds fp32 gradients (20 bytes per parameter). Neither counts activations. PyTorch's
# tracker also counts temporaries, batch and loss; otherwise it agrees with the formula to the byte.
#
# A GPU also holds the CUDA context, libraries' workspaces, NCCL's buffers, and free memory of
# PyTorch's *caching allocator* (simulated below). The allocator takes *segments* from the driver
# (*reserved*), hands out blocks of them (*allocated*), and keeps what is freed.

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
# Most of the reserved memory is free, but in small pieces (*fragmentation*); growing a tensor also
# leaves unused memory. If PyTorch reports much memory *reserved but unallocated*, try
# `PYTORCH_ALLOC_CONF=expandable_segments:True`.
#
# ## Read on
#
# - Korthikanti et al. 2022, *Reducing Activation Recomputation in Large Transformer Models*,
#   section 4: the 34.
# - Chowdhery et al. 2022, *PaLM*, section 4.1: MFU.
# - Dao et al. 2022, *FlashAttention*: no scores in memory.
# - Austin et al. 2025, *How to Scale Your Model*, chapters 1 and 5: rooflines of training.
