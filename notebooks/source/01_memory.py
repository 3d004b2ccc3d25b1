# %% [markdown]
# # 01 Memory: where the bytes go
#
# **Can you know beforehand, to the byte, what a training step needs?** **Predict** every
# byte from a few sizes, **measure** what PyTorch keeps, **compare**.
#
# *After this lesson you can*
#
# - count the parameters of a transformer, and the bytes of its weights, gradients and optimizer;
# - derive the bytes that a layer saves for backward, for a GPT and for a Llama;
# - say when in a step memory is at its peak, and what to change when a model does not fit;
# - count a step's FLOP, read a published MFU, and say whether arithmetic, memory or a link limits
#   speed.
#
# **Prerequisites:** Python and a little PyTorch. **Time:** about 75 minutes of
# reading and running, 70 of exercises. The break is after section 4. Exercises 1 to 4 are *core*, 5
# and 6 go *further*.
#
# | symbol | in code | meaning |
# |---|---|---|
# | $N$ | `num_params` | parameters |
# | $L$ | `num_layers` | layers |
# | $h$ | `hidden` | size of the residual stream: numbers per token between layers |
# | $f$ | `ffn_hidden` | size of the MLP's inner layer, often $4h$ |
# | $a$ | `num_heads` | attention heads |
# | $V$ | `vocab` | tokens in the vocabulary |
# | $b$ | `batch` | sequences in a micro-batch (what runs through the model at once) |
# | $s$ | `seq` | tokens in a sequence |
# | $D$ | `tokens` | tokens in a step |
#
# Memory is reported in GiB ($2^{30}$ bytes), rates in powers of ten. The 80 "GB" of a GPU are
# 80 GiB. An fp32 number takes 4 bytes, a bf16 or fp16 number 2 (lesson 03 says what they lose).

# %%
from dataclasses import replace

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from course_lib.checks import check
from course_lib.core import MODELS, Ledger
from course_lib.core.recipes import RECIPES
from course_lib.core.units import GIB, format_bytes
from course_lib.cost.hardware import DEVICES
from course_lib.display import YES_NO, Voices, compare, memory, predict, reveal, show
from course_lib.memory import activations, count_params, model_states, param_parts, step_ledger
from course_lib.memory.optimizer_states import state_rows
from course_lib.models import GPT, next_tokens, token_batch, token_loss

torch.set_num_threads(1)  # the models here are small

# %% [markdown]
# ## 1 Counting parameters
#
# The smallest GPT-2 (Radford et al. 2019) has $h = 768$, 12 layers, an MLP of $4h$, 50,257 tokens
# and 1,024 positions. How many million parameters does it have?

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
# Attention has four matrices of $h \times h$, the MLP two of $h \times 4h$: together $12h^2$ per
# layer. The last matrix (*output matrix* or *head*) maps $h$ to $V$. In GPT-2 it is the
# embedding's own matrix (*tied*), so it adds no parameters.
#
# ### Exercise 1 (core): count a GPT
#
# Each matrix of attention and MLP has a bias ($f$ numbers if it goes from $h$ to $f$). Norms have a
# weight and a bias: two norms a layer, one at the end. There is a vector for each of `spec.vocab`
# tokens and `spec.max_seq` positions. An untied head (`spec.tied` is False) adds its matrix,
# without a bias. `spec.ffn_hidden` need not be $4h$. Return an int. About 5 lines.


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
# <code>param_parts(gpt2)</code>. Vectors are easy to forget: biases, norms.</details>
#
# **A GPT with an MLP of $4h$, no GQA (section 4) and a tied output matrix has about $12Lh^2 + Vh$
# parameters; an untied one adds $Vh$.**
#
# ## 2 What each parameter costs
#
# The usual recipe (Rajbhandari et al. 2020, section 3.1) has, for each parameter, a 16-bit
# weight and a 16-bit gradient (2 + 2 bytes), an fp32 *master copy*, in which the optimizer's small
# steps are not rounded away (4), and Adam's two moments in fp32 (4 + 4). Together these are the
# *model states*. Llama-8B has 8.03 billion parameters. How many GiB do its model states take,
# without any activations?

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
# The usual recipe has 16 bytes per parameter, 12 for the optimizer. Some have fp32 gradients
# beside the bf16 ones (an *accumulator*: adding up micro-batches hardly rounds): 20 bytes. Others
# have fp32 gradients only, or fp32 everywhere, or bf16 everywhere (*pure*).
#
# In the table, *8-bit Adam* stores a byte per moment (Dettmers et al. 2022, section 2.1),
# *Adafactor* row and column sums (Shazeer and Stern 2018, section 3), *Muon* one momentum for
# layers' matrices (Jordan et al. 2024).


# %% tags=["picture"]
def bar(num_params, recipe):
    ledger = Ledger()
    ledger.add(0.0, **model_states(num_params, recipe))
    return ledger


bars = {name: bar(count_params(llama), name) for name in RECIPES}
title = "Of these recipes, only pure bf16 puts the states of 8B parameters on one 80 GiB GPU"
show(
    memory(bars, title, limit_bytes=DEVICES["h100"].memory_bytes),
    alt=f"{title}: the usual one takes {format_bytes(bars['bf16'].peak_bytes())}",
)

# %% [markdown]
# ### Exercise 2 (core): states under any recipe
#
# A recipe has `weight_bytes`, `grad_bytes`, `accumulator_bytes`, `master_bytes` and `moment_bytes`,
# each for one number of that kind (0 if there is none), and `num_moments`. Return the bytes of all
# model states, an int. About 3 lines.


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
# parameter; with an accumulator 20. Lesson 09 divides them over GPUs (*ranks*).**
#
# ## 3 What backward needs
#
# To compute gradients, backward needs intermediate results of the forward pass, and autograd keeps
# them: the *activations*. Take `y = gelu(x @ w)`, with `x` of shape `[8, 64]` and `w` of
# `[64, 256]`, all fp32. `x` and `w` exist anyway. How many bytes does autograd keep besides?

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
# Autograd keeps one tensor: the input of GELU. The product keeps `x`, which existed already; the
# output of GELU is kept only if a later operation needs it. Each rule follows from a derivative.
#
# ### Exercise 3 (core): weigh what is saved
#
# `saved_tensors_hooks(pack, unpack)` calls `pack` with every tensor that an operation saves. Weigh
# each **storage** once: two views lie in the same memory, and a small view keeps all of it alive.
# Leave out `params`: `skip`, given below, has their addresses (`params` can be read once).
# `tensor.untyped_storage()` has `data_ptr()`, its address, and `nbytes()`. What `pack` returns is
# what autograd keeps: return the tensor. About 4 lines.
#
# <details><summary>Hint: I count a tensor twice, or a parameter</summary>
# A view has an address of its own. Which address do all views of one tensor share?</details>


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
# **Autograd keeps what operations save for backward; a storage that several share counts once.**
#
# ## 4 The bytes of a layer
#
# A GPT layer:
#
# 1. norm; three products of its output: q, k, v;
# 2. *scores* q · kᵀ, one number for each pair of tokens in each head; softmax; dropout; times v
#    (*written out*: one by one);
# 3. product (`out`); dropout; added to the residual stream;
# 4. norm; product $h \to f$; GELU; product $f \to h$; dropout; added to the residual stream.
#
# A product saves both of its inputs (a weight exists anyway), a norm and GELU save their input,
# softmax saves its output, and dropout saves a mask of one byte per number. Adding saves nothing.
#
# ### Exercise 4 (core): the bytes of a layer
#
# Return the bytes that one such layer saves, as a dict of ints: `norms` (their inputs), `attention`
# (without scores), `scores` (what step 2 saves with one number per pair of tokens), `mlp` (step 4
# from its first product to its last) and `masks` (those of steps 3 and 4). All numbers except masks
# have `number_bytes` bytes. With *grouped-query attention* (GQA, Ainslie et al. 2023), several
# heads share their keys and values: k and v have `spec.kv_hidden` numbers per token, all else is as
# before. A norm's few statistics are left out. About 8 lines, 20 minutes.
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
# For bf16, an MLP of $4h$ and no GQA, the parts are $4 + 10 + 18 + 2 = 34$ times
# $sbh$, and $2 + 1 + 2 = 5$ bytes for each of the $as^2b$ scores (Korthikanti et al. 2022, section
# 4.1):
#
# $$ sbh\left(34 + 5\,\frac{a s}{h}\right) \text{ bytes per layer} $$
#
# **The 34 belongs to that layer.** A layer of Llama has no dropout, a *SwiGLU* MLP (Shazeer 2020:
# three matrices, $\text{silu}(xW_g) \cdot xW_u$, which saves four tensors of $f$ numbers a token)
# and GQA. With flash attention, below, it saves
# $sbh(12 + 4\,\frac{\text{kv hidden}}{h} + 8\,\frac{f}{h})$ bytes: $41\,sbh$ for Llama-8B. Count,
# and let autograd count:

# %% tags=["check"]
from course_lib.memory import layer_coefficients
from course_lib.memory.saved_tensors import measure_layer

small = MODELS["small"]
like_llama = replace(small, gated=True, num_kv_heads=2, ffn_hidden=7 * small.hidden // 2)
layers = {
    "GPT, written out, dropout": (small, {"flash": False, "dropout": True}),
    "GPT, flash": (small, {"flash": True}),
    "SwiGLU and GQA, flash": (like_llama, {"flash": True}),
}
for name, (spec, how) in layers.items():
    c, d = layer_coefficients(spec, **how)
    formula = 2 * 128 * (c * spec.hidden + d * spec.num_heads * 128)
    kept = measure_layer(spec, batch=2, seq=128, **how)
    print(f"{name:<26}{c:>3g} sbh + {d:g} as²b = {formula:>9,.0f} B; autograd {kept:>9,} B")

# %% [markdown]
# The small differences are statistics of norms and flash attention. `TORCH_CPU`, below, counts
# them.
#
# *Flash attention* (Dao et al. 2022) never writes the scores to memory: it computes them again in
# backward, tile by tile. Here are formula, simulation on *fake tensors* (shapes without numbers)
# and measurement, in fp32, without dropout:


# %%
from course_lib.memory import TORCH_CPU
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


def curve(of, name):
    return [of(seq, ways[name]) / 2**20 for seq in seqs]


curves = {
    name: Voices(
        formula=curve(formula_bytes, name),
        simulation=curve(simulated_bytes, name),
        measurement=curve(measured_bytes, name),
    )
    for name in ways
}
off = sum(abs(formula_bytes(s, f) - measured_bytes(s, f)) for s in seqs for f in ways.values())
title = f"Formula and autograd differ by {off} bytes; flash is linear in the sequence"
figure = compare(seqs, curves, title, x_label="tokens in a sequence", y_label="kept (MiB)")
show(figure, alt=f"{title}: {curves['flash'].measurement[-1]:.3g} MiB at 256 tokens")

# %% [markdown]
# **Without recompute, a GPT or Llama layer saves $sbh(c + d\,as/h)$ bytes: $c$ and
# $d$ depend on its operations and their precision; with flash attention $d$ is zero.**
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
title = "Adam's moments appear at the end of step 1 and stay: step 2 is the first full one"
peak = format_bytes(live.ledger.peak_bytes())
show(memory(live.ledger, title), alt=f"{title}; the peak is {peak}")

# %% tags=["check"]
played = step_ledger(untied, 2, 128, recipe="fp32", kernels=TORCH_CPU)
for kind, held in played.bytes_by_kind.items():
    same = held == live.ledger.bytes_by_kind[kind]
    print(f"{kind:<12} most {max(held):>11,} B, equal at all {len(held)} times: {same}")

# %% [markdown]
# Activations (blue) grow in forward and shrink in backward, while gradients grow; the formula gives
# the same four steps. Here the peak is where backward begins: all activations, no gradients yet.
# **That is not always so.** Where a layer's gradients are larger than its activations, memory still
# grows *in* backward; with gradient accumulation (lesson 02) the second micro-batch runs beside the
# gradients of the first.
#
# ### Exercise 5 (further): where the peak is
#
# `acts[i]` and `grads[i]` are the bytes of layer `i`'s activations and gradients. A step runs
# forward and backward for each micro-batch, one after the other; all are alike. Gradients stay
# until the optimizer's step, and later micro-batches add to them in place. Return the most bytes
# held at once, including `states`, which always stay: measure at the end of each forward and of
# each layer's backward. Leave the lists as they are. About 8 lines, 15 minutes.


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
# Someone collects `loss` instead of `loss.item()` in a validation loop without `no_grad`. A loss
# keeps its whole graph alive. Do the activations stay the same from step to step?

# %% tags=["predict"]
guess = predict("activations stay the same from step to step", choices=YES_NO)
### GUESS guess.commit("yes")

# %% tags=["failure", "measured"]
losses = []
with LiveLedger(model, optimizer, given=[tokens, targets]) as leaking:
    for _ in range(4):
        loss = token_loss(model(tokens), targets)
        losses.append(loss)  # should be loss.item(), under no_grad
reveal(guess, max(leaking.ledger.totals()) <= 1.5 * leaking.ledger.totals()[5])
title = "Four losses in a list keep four graphs alive"
peak = format_bytes(leaking.ledger.peak_bytes())
show(memory(leaking.ledger, title), alt=f"{title}: {peak} at the end")
losses.clear()

# %% [markdown]
# **Without recompute, the peak of a step with one micro-batch is where backward begins, or later
# where gradients outweigh activations. If memory grows in every step, look first for graphs that
# something keeps alive.**
#
# ## 6 What fits, and models that do not
#
# Llama-8B on 80 GiB GPUs, at the peak. *Recompute* drops activations and computes them again
# (lesson 03). *ZeRO* divides (*shards*) states over ranks: stage 1 the optimizer's, stage 2
# gradients too, stage 3 all (lesson 09). *Tensors split*: each rank has a part of every matrix
# (lesson 07).
#
# Below the picture is a calculator: `dp` ranks share the batch, `tp` the matrices, `pp` the layers,
# `cp` the sequence. Its last line is what `course memory` reads in a terminal. *Find two more ways
# to make llama-8b fit, and the fewest H200s for llama-405b.*

# %% tags=["picture"]
from course_lib.memory.calculator import read_setup
from course_lib.memory.explorer import calculator

lines = {
    "as it is": "--model llama-8b",
    "full recompute": "--model llama-8b --recompute full",
    "8 ranks, ZeRO-1": "--model llama-8b --dp 8 --zero 1",
    "8 ranks, ZeRO-3": "--model llama-8b --dp 8 --zero 3",
    "8 ranks, tensor and\nsequence parallel": "--model llama-8b --tp 8 --sequence-parallel",
}
ledgers = {name: read_setup(line).fullest for name, line in lines.items()}
title = "With the usual recipe, recomputing is not enough for 8B on 80 GiB: shard the states"
peak = format_bytes(ledgers["8 ranks, ZeRO-3"].peak_bytes())
show(memory(ledgers, title, limit_bytes=80 * GIB), alt=f"{title}; ZeRO-3 on 8 ranks takes {peak}")
calculator("--model llama-8b --gpu h100 --seq 4096")

# %% [markdown]
# **ZeRO divides states; recompute, a smaller micro-batch and a shorter sequence shrink activations;
# tensor with sequence parallelism divides both.**
#
# ## 7 How busy is the GPU?
#
# A matrix product of `[m, k]` and `[k, n]` has $mkn$
# multiply-adds, $2mkn$ FLOP: 2 for each weight and each of the $m$ tokens. Backward has two
# products of the same size: with $y = xW$, the gradient of $x$ is $dy\,W^\top$, and that of $W$ is
# $x^\top dy$. So a weight costs $2 + 4$ FLOP per token, and a step of $D$ tokens $6ND$ (Kaplan et
# al. 2020, section 2.1).
#
# With all parameters as $N$, the rule counts the embedding, which multiplies nothing unless it is
# tied (Kaplan et al. leave it out, Hoffmann et al. 2022 count it), and leaves out the scores, which
# multiply no weight. A causal mask hides half of them. **Two conventions are in use**: count *all*
# scores (Narayanan et al. 2021, appendix; PaLM: Chowdhery et al. 2022, appendix B), or *half*, as a
# causal kernel computes (FlashAttention-2: Dao 2023, section 4.1). The course counts all, unless it
# says `causal`.

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
# Count every product of forward and backward, under either convention: q, k, v and `out` (k and v
# with `spec.kv_hidden` columns); the scores and their product with v, all or, if `causal`, exactly
# half of them; the MLP (three matrices if `spec.gated`, else two); the logits. Return an int. About
# 5 lines, 15 minutes.


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
# An H100's data sheet says 1,979 TFLOP/s in bf16, and in small print "with sparsity": two of every
# four weights are zero and are skipped. Ordinary training is *dense*: it reaches half at most.

# %%
h100 = DEVICES["h100"]
print(h100.source.replace(": ", ":\n", 1), end="\n\n")
for device in DEVICES.values():
    peak, size = device.peak("bf16") / 1e12, format_bytes(device.memory_bytes)
    links = ", ".join(f"{name} {speed / 1e9:g}" for name, speed in device.links.items())
    one_way = f"; GB/s one way: {links}" if links else ""
    print(f"{device.name:<10}{size:>8}{peak:>8,.1f} TFLOP/s dense{one_way}")
step = train_step_flop(MODELS["megatron-175b"], batch=64, seq=2048)
share = mfu(step, 13.75, DEVICES["a100-80"].peak("bf16"), world_size=64)
print(f"\n175B on 64 A100s, 13.75 s for 64 sequences of 2,048 tokens: MFU {share:.1%}")

# %% [markdown]
# *Model FLOP utilization* (MFU, Chowdhery et al. 2022, section 4.1) is the share of the **dense**
# peak that the model's own FLOP use; recomputation does not count (with it, the share is called
# HFU). The run in the last line reports 51.4 % (Korthikanti et al. 2022, table 5). What do
# others reach?

# %% tags=["picture"]
from course_lib.memory.pictures import mfu_of_real_runs

show(*mfu_of_real_runs())

# %% [markdown]
# **MFU is a step's model FLOP, divided by its time and the dense peak. Compare MFUs only where the
# FLOP are counted alike.**
#
# ## 8 What limits the speed?
#
# An operation also moves bytes. Its *arithmetic intensity* $I$ is FLOP per byte read or written:
# 1/6 for an add in bf16, about $m$ for a product of $m$ tokens with a large matrix (in fp32 half of
# that). At most, speed is $\min(\text{peak}, I\cdot\text{bandwidth})$, the *roofline* (Williams et
# al. 2009, section 3). Below the *ridge point*, where the two are equal, an operation is
# memory-bound, above it compute-bound. Where is it for bf16 products on an H100?

# %% tags=["predict"]
guess = predict("tokens that make a large product compute-bound", unit="tokens")
### GUESS guess.commit(32)

# %% tags=["picture", "measured"]
from course_lib.cost.roofline import roof_of
from course_lib.memory.lab import measure_roof
from course_lib.memory.pictures import gpu_roofs, measured_roof, roof_rows

reveal(guess, roof_of(h100).ridge)
roof, rates = measure_roof()
show(*measured_roof(roof, rates))
show(*gpu_roofs())
print(roof_rows())

# %% [markdown]
# Dots lie below: a roof is a bound. Norms, dropout and the optimizer's step are memory-bound on
# all of these GPUs. Links have the same algebra. For $t$ bf16 tokens on each of $p$ ranks:
#
# - **data parallelism**: backward computes $4Nt$ FLOP and sends $4N\frac{p-1}{p}$ bytes;
# - **FSDP** (lesson 10): forward computes $2Nt$, receives $2N\frac{p-1}{p}$; backward doubles both;
# - **tensor parallelism** (lesson 07): about $\frac92\frac{h}{p-1}$ FLOP per byte, for any $t$.
#
# The first two approach $t$ FLOP per byte. On an H100, peak divided by bandwidth is 2,199 over
# NVLink, 19,790 over InfiniBand: with fewer tokens per rank, many ranks wait for messages.
#
# **An operation is memory-bound below the ridge point; a method is communication-bound where its
# FLOP per byte sent are fewer than peak divided by link bandwidth.**
#
# ## 9 What other tools say
#
# Accelerate and DeepSpeed have estimators, PyTorch a tracker. Two sequences of 256 tokens:

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
# Accelerate prints the **largest** of its `model`, `gradients`, `optimizer`, `step`, no sum.
# DeepSpeed adds fp32 gradients (20 bytes). Neither counts activations. PyTorch's tracker agrees
# with the formula to the byte, and counts temporaries too.
#
# On a GPU come the CUDA context, libraries' workspaces, NCCL's buffers, and what PyTorch's *caching
# allocator* holds: it takes *segments* from the driver (*reserved*), hands out blocks of them
# (*allocated*), and keeps what is freed. A simulation of its rules:

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
# Most is free, but in pieces (*fragmentation*). Where PyTorch reports much memory *reserved but
# unallocated*, try `PYTORCH_ALLOC_CONF=expandable_segments:True`;
# `torch.cuda.memory_snapshot()` lists every block. Leave a margin.
#
# ## Read on
#
# - Korthikanti et al. 2022, *Reducing Activation Recomputation in Large Transformer Models*: the
#   34, sections 4 and 5.
# - Chowdhery et al. 2022, *PaLM*, section 4.1: MFU, and why recomputation does not count.
# - Dao et al. 2022, *FlashAttention*: attention without scores in memory.
# - Austin et al. 2025, *How to Scale Your Model*, chapters 1 and 5: rooflines of training.
# - Tazi et al. 2025, *The Ultra-Scale Playbook*: memory of Llama models, profiled over steps.
