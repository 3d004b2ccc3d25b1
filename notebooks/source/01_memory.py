# %% [markdown]
# # 01 Memory: where the bytes go
#
# "Out of memory" is the first message of every large training run. Here you learn to know it
# beforehand: you **predict** each byte from a few sizes, **measure** what PyTorch truly keeps, and
# **compare**. The two will agree to the last byte.
#
# | symbol | in code | meaning |
# |---|---|---|
# | $N$ | `num_params` | parameters |
# | $L$ | `num_layers` | layers |
# | $h$ | `hidden` | numbers a token has between layers |
# | $a$ | `num_heads` | attention heads |
# | $V$ | `vocab` | tokens in the vocabulary |
# | $b$, $s$ | `batch`, `seq` | sequences in a micro-batch, tokens in a sequence |
#
# Memory is told in GiB ($2^{30}$ bytes), speed in powers of ten. The 80 "GB" of a card are 80 GiB.
# fp32 numbers have 4 bytes; bf16 and fp16 have 2 (lesson 03 says what they lose).

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
from course_lib.models import GPT, next_tokens, token_batch, token_loss

torch.set_num_threads(1)  # the models here are small

# %% [markdown]
# ## 1 Counting parameters
#
# GPT-2, the smallest one: $h = 768$, 12 layers, an MLP of $4h$, 50,257 tokens, 1,024 positions. How
# many million parameters?

# %% tags=["predict"]
guess = predict("parameters of the smallest GPT-2", unit="million")

# %%
gpt2 = MODELS["gpt2"]
reveal(guess, count_params(gpt2) / 1e6)
for part, count in param_parts(gpt2).items():
    print(f"{part:<10} {count:>12,}")

# %% tags=["check"]
with torch.device("meta"):  # shapes without numbers: no memory, no time
    built = {name: GPT(MODELS[name]) for name in ("gpt2", "gpt2-xl", "megatron-175b")}
for name, model in built.items():
    counted = sum(param.numel() for param in model.parameters())
    print(f"{name}: formula {count_params(MODELS[name]):,}, counted {counted:,}")

# %% [markdown]
# Attention has four matrices of $h \times h$, the MLP two of $h \times 4h$: together $12h^2$ a
# layer, two thirds of it in the MLP. The *head*, the last matrix, from $h$ to $V$, is the
# embedding's own here (*tied*), so it adds nothing. Models that were built and counted agree.
#
# ### Exercise 1: count a GPT
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
# **$N \approx 12Lh^2 + Vh$, and a tied embedding counts once.**
#
# ## 2 What each parameter costs
#
# Training keeps more than weights. In the usual recipe a parameter has a bf16 weight and a bf16
# gradient (2 + 2 bytes), an fp32 *master copy*, which takes the optimizer's small steps (4), and
# Adam's two moments in fp32 (4 + 4). These are the *model states*. Llama-8B has 8.03 billion
# parameters. How many GiB before the first token is read?

# %% tags=["predict"]
guess = predict("model states of llama-8b in bf16", unit="GiB")

# %%
llama = MODELS["llama-8b"]
states = model_states(count_params(llama), "bf16")
reveal(guess, sum(states.values()) / GIB)
print({kind: format_bytes(size) for kind, size in states.items()})
for billions in (1, 7, 70, 405):
    sizes = [sum(model_states(billions * 10**9, name).values()) / 1e9 for name in list(RECIPES)[:2]]
    print(f"{billions:>4}B {sizes[0]:>6,.0f}e9 bytes, with an accumulator {sizes[1]:>6,.0f}e9")

# %% [markdown]
# 16 bytes a parameter, three quarters of them the optimizer's. Some recipes keep an fp32 copy of
# the gradients beside the bf16 ones (*accumulator*), to add up micro-batches without rounding: 20
# bytes. Others have fp32 gradients only, or fp32 everywhere, or bf16 everywhere (*pure*).


# %% tags=["picture"]
def bar(num_params, recipe):
    ledger = Ledger()
    ledger.add(0.0, **model_states(num_params, recipe))
    return ledger


bars = {name: bar(count_params(llama), name) for name in RECIPES}
title = "No recipe but pure bf16 puts the states of 8B parameters on one 80 GiB card"
show(
    memory(bars, title, limit_bytes=DEVICES["h100"].memory_bytes),
    alt=f"{title}: the usual one takes {format_bytes(bars['bf16'].peak_bytes())}",
)

# %% [markdown]
# ### Exercise 2: states under any recipe
#
# A recipe has `weight_bytes`, `grad_bytes`, `accumulator_bytes`, `master_bytes` and `moment_bytes`,
# each for one number of that kind (0 if there is none), and `num_moments`. Return the bytes of all
# parameters, an int. About 3 lines.


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
# **16 bytes a parameter, 20 with an accumulator. Lesson 09 shares them out over ranks.**
#
# ## 3 What backward needs
#
# To compute gradients, backward needs numbers that forward had in its hands: autograd keeps them.
# `y = gelu(x @ w)`, with `x` of shape `[8, 64]` and `w` of `[64, 256]`, all fp32. `x` and `w` are
# there anyway. How many bytes does autograd keep besides?

# %% tags=["predict"]
guess = predict("kept for backward besides x and w", unit="bytes")

# %%
from course_lib.memory.saved_tensors import measure_saved

x = torch.randn(8, 64)
w = torch.randn(64, 256, requires_grad=True)
kept = measure_saved(lambda: F.gelu(x @ w), given=[x, w])
reveal(guess, sum(one.num_bytes for one in kept))
print("kept:", *kept)

# %% [markdown]
# One tensor: the input of GELU. The product keeps its *inputs*, which were there; GELU's output is
# kept only if somebody further on needs it. Every operation has such a rule: a product keeps what
# goes in, softmax what comes out, dropout its mask.
#
# ### Exercise 3: build the scales
#
# `saved_tensors_hooks(pack, unpack)` calls `pack` with every tensor that autograd keeps. Weigh each
# **storage** once: two views lie in the same memory, and a small view keeps all of it alive. Leave
# `params` out, which may be an iterator: read it once. `tensor.untyped_storage()` has `data_ptr()`,
# its address, and `nbytes()`. What `pack` returns is what autograd keeps: return the tensor. About
# 4 lines.
#
# <details><summary>Hint: I count a tensor twice, or a parameter that should be left out</summary>
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
# **Autograd keeps what backward needs, each storage once.**
#
# ## 4 The bytes of a layer
#
# Now a whole layer, attention written out, with dropout, in bf16. Operation by operation:

# %%
from course_lib.memory.layer_bytes import Pass

small = MODELS["small"]
one = Pass(spec=small, batch=2, seq=128, flash=False, dropout=True)
sbh = 128 * 2 * small.hidden
for row in one.layer():
    print(f"{row.name:<26}{row.num_bytes:>10,} B{row.num_bytes / sbh:>8.3g} sbh")

# %% [markdown]
# Softmax, its mask and what dropout makes of it are *scores*: one number for each pair of tokens,
# in each head, $as^2b$ in all, kept as 2 + 1 + 2 bytes. The others add up to $34\,sbh$, whatever
# the model. In a formula, for one layer:
#
# $$ sbh\left(34 + 5\,\frac{a s}{h}\right) \text{ bytes} $$
#
# Twice the sequence is more than twice the bytes: with $5as/h = 34$ before, three times.
#
# ### Exercise 4: the bytes of a layer
#
# Write it down as whole bytes, from `batch`, `seq`, `hidden` and `num_heads`. About 2 lines.


# %% tags=["exercise"] exercise="memory-4"
def layer_bytes(batch, seq, hidden, num_heads):
    """Bytes one layer keeps in bf16: attention written out, dropout, an MLP of 4 * hidden."""
    ### BEGIN SOLUTION: 34 sbh, and 5 for each score
    sbh, scores = seq * batch * hidden, num_heads * seq * seq * batch
    return 34 * sbh + 5 * scores
    ### END SOLUTION


# %% tags=["check"] exercise="memory-4"
check("memory-4", layer_bytes)

# %% [markdown]
# Fused attention (*flash*) never writes the scores down: it computes them again in backward, tile
# by tile. Formula, simulation on *fake tensors* (shapes without numbers) and measurement, for a
# model of four layers in fp32, without dropout:


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
# `TORCH_CPU` adds what papers leave out: a norm keeps two numbers a token, flash attention one for
# each query. Those small terms are why it comes out even.
#
# **$sbh(34 + 5as/h)$ a layer; flash attention drops the second term.**
#
# ## 5 Four steps, live
#
# A model trains for four steps while we watch every byte. First commit: in which step is the peak
# reached for the first time, 1, 2, 3 or 4?

# %% tags=["predict"]
guess = predict("the peak is first reached in step")

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

# %% tags=["picture"]
totals = live.ledger.totals()
moments_a_step = (len(totals) - 1) // 4
reveal(guess, 1 + totals.index(max(totals)) // moments_a_step)
title = "Adam's moments appear at the end of step 1 and stay: step 2 is the first full one"
peak = format_bytes(live.ledger.peak_bytes())
show(memory(live.ledger, title), alt=f"{title}; the peak is {peak}")

# %% [markdown]
# Blue climbs in forward and falls in backward, while gradients rise. The peak is where backward
# begins: all activations, no gradients yet. The formula plays the same four steps.

# %% tags=["check"]
played = step_ledger(untied, 2, 128, recipe="fp32", kernels=TORCH_CPU)
for kind, held in played.bytes_by_kind.items():
    same = held == live.ledger.bytes_by_kind[kind]
    print(f"{kind:<12} most {max(held):>11,} B, equal at all {len(held)} moments: {same}")

# %% [markdown]
# ### Break it: a loss that is never let go
#
# Somebody wants a loss curve and collects `loss` instead of `loss.item()`. A loss holds its whole
# graph; here nobody calls backward, as in a validation loop without `no_grad`. What happens to the
# activations from step to step: do they stay the same?

# %% tags=["predict"]
guess = predict("activations stay the same from step to step", choices=YES_NO)

# %% tags=["failure"]
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
# **The peak is where backward begins, from the second step on. What climbs and never falls is a
# graph that somebody holds.**
#
# ## 6 What fits, and models that do not
#
# ### Exercise 5: the largest batch
#
# A card of `card_gib` GiB, model states of `states` bytes, and `each` bytes of activations for one
# sequence: how many sequences fit? 0 when not even one does. All are whole numbers. About 1 line.


# %% tags=["exercise"] exercise="memory-5"
def largest_batch(states, each, card_gib):
    """Sequences that fit beside the states on a card of card_gib GiB."""
    ### BEGIN SOLUTION: what is left, divided, rounded down
    return max(0, (card_gib * 2**30 - states) // each)
    ### END SOLUTION


# %% tags=["check"] exercise="memory-5"
check("memory-5", largest_batch)

# %% [markdown]
# Llama-70B does not fit here, nor on any card. But autograd keeps fake tensors like real ones: so
# the real model can be weighed on this machine.

# %% tags=["check"]
from course_lib.memory.saved_tensors import tensors_of

big = replace(MODELS["llama-70b"], max_seq=2048)
with fake_tensors(torch.bfloat16):
    model = GPT(big)
    tokens = torch.zeros(1, 2048, dtype=torch.long)
    given = [*tensors_of(model), tokens]
    kept = measure_saved(lambda: token_loss(model(tokens), tokens), given=given)
weighed = sum(one.num_bytes for one in kept)
formula = sum(activations(big, 1, 2048, kernels=TORCH_CPU).values())
print(f"{count_params(big):,} parameters; one sequence keeps {format_bytes(weighed)}")
print(f"formula minus measurement: {formula - weighed} bytes")

# %% [markdown]
# Llama-8B on 80 GiB cards, each bar at its fullest moment. *Recompute* forgets activations and
# computes them again (lesson 03); then the end of backward is fullest, when all gradients are
# there. *ZeRO* shares states out over ranks: 1 the optimizer's, 2 gradients too, 3 all (lesson 09).
# *Tensors split*: each rank has a part of every matrix (lesson 07).
#
# Below that, play. `dp` ranks share the batch, `tp` the matrices, `pp` the layers, `cp` the
# sequence. The line under the choices is what `course memory` reads in a terminal; a pasted line
# moves the choices. *Find two more ways to make llama-8b fit. Then: the fewest H200s for
# llama-405b?*

# %% tags=["picture"]
from course_lib.memory.calculator import read_setup

lines = {
    "as it is": "--model llama-8b",
    "full recompute": "--model llama-8b --recompute full",
    "8 ranks, ZeRO-1": "--model llama-8b --dp 8 --zero 1",
    "8 ranks, ZeRO-3": "--model llama-8b --dp 8 --zero 3",
    "8 ranks, tensors split": "--model llama-8b --tp 8 --sequence-parallel",
}
ledgers = {name: read_setup(line).fullest for name, line in lines.items()}
title = "Recomputing is not enough for 8B on 80 GiB: the states have to be shared"
peak = format_bytes(ledgers["8 ranks, ZeRO-3"].peak_bytes())
show(memory(ledgers, title, limit_bytes=80 * GIB), alt=f"{title}; ZeRO-3 on 8 ranks takes {peak}")

# %% tags=["picture"]
from course_lib.memory.explorer import calculator

calculator("--model llama-8b --gpu h100 --seq 4096")

# %% [markdown]
# **States shrink with ranks, activations with recompute, batch and sequence.**
#
# ## 7 How busy is the card?
#
# A parameter takes part in one multiply-add a token in forward (2 FLOP, floating-point operations)
# and two in backward (4): $6ND$ for $D$ tokens. Exact counts go through every product:

# %%
from course_lib.cost.flops import forward_flop, mfu, six_n_d, train_step_flop

for seq in (2048, 8192, 32768, 131072):
    exact, rule = train_step_flop(llama, 1, seq), six_n_d(count_params(llama), seq)
    scores = 3 * forward_flop(llama, 1, seq)["attention scores"] / exact
    print(f"seq {seq:>7,}: 6ND is off by {rule / exact - 1:+.1%}; scores are {scores:.0%} of it")

# %% [markdown]
# The rule counts the embedding, which multiplies nothing, and forgets the scores. At 2,048 tokens
# the two errors nearly cancel.
#
# An H100's data sheet says 1,979 TFLOP/s in bf16, and in small print "with sparsity": half of the
# weights are zero, in a fixed pattern, and skipped. What is the most that training can reach?

# %% tags=["predict"]
guess = predict("the most that training can reach", unit="TFLOP/s")

# %%
h100 = DEVICES["h100"]
reveal(guess, h100.peak("bf16") / 1e12)
print(h100.source.replace(": ", ":\n"))
flop = train_step_flop(MODELS["megatron-175b"], batch=64, seq=2048)
share = mfu(flop, 13.75, DEVICES["a100-80"].peak("bf16"), world_size=64)
print(f"175B on 64 A100s, 13.75 s for 64 sequences of 2,048 tokens: MFU {share:.1%}")

# %% [markdown]
# Training is *dense*: no weight is skipped, so it gets half. *Model FLOP utilisation* (MFU) is the
# share of the **dense** peak that the model's own FLOP use; what is recomputed does not count. The
# last line is a published run (Korthikanti et al. 2022, table 5), whose authors report 51.4 %.
#
# ### Exercise 6: MFU from the data sheet
#
# `sheet_flop_per_s` is the first-page number, with sparsity, of one rank's card; `tokens_per_s` is
# of all ranks together. Use $6ND$; return a share from 0 to 1. About 1 line.


# %% tags=["exercise"] exercise="memory-6"
def mfu_of(num_params, tokens_per_s, sheet_flop_per_s, world_size):
    """The share of the dense peak that training uses."""
    ### BEGIN SOLUTION: FLOP/s of the model over the dense peak of all ranks
    return 6 * num_params * tokens_per_s / (world_size * sheet_flop_per_s / 2)
    ### END SOLUTION


# %% tags=["check"] exercise="memory-6"
check("memory-6", mfu_of)

# %% [markdown]
# **6ND over the dense peak; the first number on a data sheet is twice too high.**
#
# ## 8 What other tools say
#
# Accelerate and DeepSpeed have estimators, PyTorch a tracker that follows every tensor. The same
# small model, two sequences of 256 tokens. A tool that is not installed says so.

# %%
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
# Who counts what: Accelerate prints the **largest** of weights, gradients, optimizer and step, not
# their sum (16 bytes a parameter in fp32, 8 in bf16); DeepSpeed adds fp32 gradients (20 bytes);
# neither counts activations. PyTorch's tracker agrees with the formula on states and activations to
# the byte, and counts temporaries too: the gradients of the logits, which large vocabularies make
# large.
#
# ## What you can do now
#
# - $N \approx 12Lh^2 + Vh$; 16 bytes a parameter; $sbh(34 + 5as/h)$ a layer.
# - The peak is where backward begins, from the second step on.
# - `course memory --model ... --gpu ...` answers the rest in a terminal, also for a `config.json`.
