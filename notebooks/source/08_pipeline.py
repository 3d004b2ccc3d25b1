# %% [markdown]
# # 08 Pipeline parallelism: split the layers
#
# **Question.** A model that is too large for one device can be cut between its layers. What do the
# other ranks do while one rank computes, and how short can their waiting be?
#
# Each rank holds a *stage*: some consecutive layers.
#
# *After this lesson you can*
#
# - write the 1F1B schedule, simulate it, and run it on real ranks;
# - predict idle time and memory of GPipe, 1F1B and newer schedules;
# - recognize a deadlock of sends, and a loss that was not divided by $m$;
# - choose the number of micro-batches, and balance the stages.
#
# **Prerequisites:** lessons 01, 02 and 04. **Time:** 75 minutes of reading, 125 of exercises.
# Section 6 ends with a break.
#
# | symbol | in code | meaning |
# |---|---|---|
# | $p$ | `p` | ranks; rank $r$ holds stage $r$ |
# | $m$ | `m` | micro-batches of one batch |
# | $v$ | `num_model_chunks` | model chunks on each rank |
# | $F$, $B$ | `forward_s`, `backward_s` | seconds per micro-batch (in `BatchCost`: per batch) |
# | $I$, $W$ | `backward_input`, `backward_weight` | halves of a backward (section 10); $B=I+W$ |

# %%
# %load_ext course_lib.ranks
from itertools import combinations, count, pairwise, product

import torch
import torch.distributed as dist

from course_lib.checks import check
from course_lib.core.presets import MODELS
from course_lib.display import claim, predict, reveal, show, waiting
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.pipeline import Action, PipelineTimes, balance, cost, lab, pictures, schedules
from course_lib.pipeline.actions import as_text, placement_of, source_of, target_of
from course_lib.pipeline.cost import BatchCost
from course_lib.pipeline.simulation import simulate
from course_lib.ranks import RankError, Ranks

# %% [markdown]
# ## 1 One rank computes, the others wait
#
# A batch goes forward through four stages, then backward. For what percentage of the time does each
# rank compute?

# %% tags=["predict"]
guess_busy = predict("a rank computes", unit="% of the time")
### GUESS guess_busy.commit(50)

# %% tags=["picture"]
played = simulate(schedules.naive(4, 1))
reveal(guess_busy, 100 * (1 - played.bubble_fraction))
show(*pictures.one_batch(played))

# %% [markdown]
# In synchronous training, the next batch cannot fill the gaps: it needs this step's new weights.
#
# **With an undivided batch, only one rank computes at a time.**
#
# ## 2 Micro-batches
#
# So split the batch: while rank 1 computes micro-batch 0, rank 0 continues with micro-batch 1.
# **GPipe** (Huang et al. 2019) runs all $m$ forwards, then all $m$ backwards. Each rank computes
# for $m(F+B)$. The last rank starts $(p-1)F$ after the first rank, and the first rank ends $(p-1)B$
# after the last rank. So a step takes $(m+p-1)(F+B)$, and each rank is idle for $(p-1)(F+B)$. This
# idle time is the *bubble*. Divided by the computing time, it is $\frac{p-1}{m}$.
#
# We measure it on four ranks with emulated layers: the gradients are real, but a layer sleeps for
# its computing time. How large is the bubble with 8 micro-batches?

# %% tags=["predict"]
guess_bubble = predict("bubble for p = 4, m = 8", unit="% of the computing time")
### GUESS guess_bubble.commit(50)
batch = BatchCost(forward_s=160e-3, backward_s=320e-3)  # a stage's seconds for the whole batch
ranks, numbers = Ranks(4), [1, 2, 4, 8]


# %% tags=["picture", "measured"]
runs = {m: lab.emulated(schedules.gpipe(4, m), batch.times(m)) for m in numbers}
made, whole_s = lab.measure(ranks, runs, turns=2), batch.forward_s + batch.backward_s
reveal(guess_bubble, 100 * cost.bubble_overhead(4, 8))
measured = [[100 * (s / whole_s - 1) for s in made[m].seconds] for m in numbers]
show(*pictures.gpipe_bubble(4, numbers, measured))

# %% [markdown]
# Messages and the engine add time, so the dots may lie above the line. Huang et al. (2019, section
# 2.3) found the bubble negligible for $m\ge4p$, partly because their ranks recompute activations
# while they wait. But smaller micro-batches may use a GPU less efficiently, and more micro-batches
# need more messages (section 7).
#
# **GPipe's bubble is $(p-1)/m$ of the computing time, if all stages take equally long and messages
# take no time.**
#
# ## 3 1F1B: backward as soon as possible
#
# GPipe's price is memory: without recomputation, each rank keeps the activations of all $m$
# micro-batches. But the last rank can begin backward after its *first* forward. **1F1B** (one
# forward, one backward; Narayanan et al. 2021, section 2.2.1) does that. In the **warm-up**, each
# rank runs as many forwards as there are ranks after it. Then it alternates one forward and one
# backward (**steady phase**), and finally runs the remaining backwards (**cool-down**).
#
# A **schedule** is a list of actions for each rank, without times. An action starts when its rank
# is free and its input has arrived. The next cell prints GPipe's schedule.
#
# A micro-batch is *in flight* on a rank from the start of its forward to the end of its backward.
# With 1F1B, $p=4$ and $m=32$, how many micro-batches are in flight on rank 0 at most?

# %% tags=["predict"]
print(as_text(schedules.gpipe(4, 4)))
print(schedules.gpipe(4, 4)[1][0])
guess_held = predict("micro-batches in flight on rank 0 with 1F1B")
### GUESS guess_held.commit(8)

# %% [markdown]
# ### Exercise 1 (core): the order of 1F1B
#
# Return one list per rank of `Action(kind, stage, micro_batch)`; `kind` is `"forward"` or
# `"backward"`. Your function also has to work for $m<p$. About 5 lines, 10 minutes.


# %% tags=["exercise"] exercise="pipeline-1"
def one_f_one_b(p, m):
    """For each rank the list of its actions, in the order of 1F1B."""
    schedule = []
    for rank in range(p):
        ### BEGIN SOLUTION: warm-up, one forward and one backward in turn, cool-down
        warmup = min(p - 1 - rank, m)
        kinds = ["forward"] * warmup + ["forward", "backward"] * (m - warmup)
        next_of = {"forward": count(), "backward": count()}
        kinds += ["backward"] * warmup
        schedule.append([Action(kind, rank, next(next_of[kind])) for kind in kinds])
        ### END SOLUTION
    return schedule


# %% tags=["check"] exercise="pipeline-1"
check("pipeline-1", one_f_one_b)

# %% tags=["picture", "measured"]
reveal(guess_held, simulate(schedules.one_f_one_b(4, 32)).peak_in_flight()[0])
plans, three = {"GPipe": schedules.gpipe(3, 4), "1F1B": schedules.one_f_one_b(3, 4)}, Ranks(3)
runs = {name: lab.emulated(plan, batch.times(4)) for name, plan in plans.items()}
made = lab.measure(three, runs, turns=2)
for name, real in made.items():
    step_s = simulate(plans[name], batch.times(4)).step_s
    print(f"{name:5}: predicted {1e3 * step_s:.0f} ms, measured {1e3 * real.step_s:.0f} ms")
show(*pictures.fewer_in_flight({name: real.events for name, real in made.items()}))

# %% [markdown]
# Rank $r$ holds at most $\min(p-r,m)$ micro-batches in flight. The bubble is the same as GPipe's,
# because the pipeline still has to fill and to empty.
#
# ### Exercise 2 (core): when does each action end?
#
# Write the simulator. `source_of(action, p)` is the stage that sends an action's input, or None if
# the action needs no message. About 9 lines, 20 minutes.
#
# <details><summary>Hint: the action that produces the input</summary>
# It is <code>action._replace(stage=source)</code>: same kind, same micro-batch.
# </details>
# <details><summary>Hint: which rank comes next?</summary>
# Loop over the ranks. Each rank goes on in its list until an input is missing.
# </details>


# %% tags=["exercise"] exercise="pipeline-2"
def finish_times(schedule, seconds, message_s):
    """{action: when it ends}; `seconds` has the time of each kind, a message takes message_s."""
    p, ends, free_s = len(schedule), {}, [0.0] * len(schedule)
    left = [list(actions) for actions in schedule]
    while any(left):
        ### BEGIN SOLUTION: run every action whose input has arrived
        for rank, actions in enumerate(left):
            while actions:
                source = source_of(actions[0], p)
                sent = actions[0]._replace(stage=source)
                if source is not None and sent not in ends:
                    break
                input_s = 0.0 if source is None else ends[sent] + message_s
                free_s[rank] = max(free_s[rank], input_s) + seconds[actions[0].kind]
                ends[actions.pop(0)] = free_s[rank]
        ### END SOLUTION
    return ends


# %% tags=["check"] exercise="pipeline-2"
check("pipeline-2", finish_times)

# %% tags=["picture"]
from course_lib.pipeline.explorer import schedule_explorer

schedule_explorer()

# %% [markdown]
# The course's `simulate` does this for every schedule. Move the sliders: which schedule suffers
# most from slow messages?
#
# **A schedule, with the durations of its actions and messages, determines the times of a step.**
#
# ## 4 An engine that runs any schedule
#
# ### Exercise 3 (core): run a schedule
#
# Run one rank's actions. Backwards may come in any order. Only the first rank has the real `x` (it
# may be integer tokens), and only the last rank has the real target. On all ranks but the first,
# `x` only has the shape and dtype of the message that the rank receives. The last micro-batch may
# be smaller. `isend` returns a handle at once; its tensor must not change before `handle.wait()`
# returns.
#
# Add to `param.grad` the gradients of the *mean* of the $m$ losses; a nan stays nan. Do not change
# lists, batch, stage (modes, hooks, frozen parameters) or random state. Budget: one message per
# micro-batch and direction; with 1F1B, memory does not grow with $m$. About 17 lines, 25 minutes.
#
# <details><summary>Hint: x.grad is None</summary>
# By default, a received tensor gets no gradient. Call <code>x.requires_grad_()</code> before the
# stage computes.
# </details>
# <details><summary>Hint: gradients are too large</summary>
# <code>loss_fn</code> is a mean over one micro-batch. Divide it by $m$ once, on the last rank.
# </details>
# <details><summary>Hint: memory grows</summary>
# <code>kept.pop(i)</code> removes an entry. Send <code>y.detach()</code>, which has no graph. A
# handle holds its message: put it only into <code>sent</code>.
# </details>


# %% tags=["exercise"] exercise="pipeline-3"
def run_actions(actions, stage, micro_batches, loss_fn):
    """Run this rank's actions; micro_batches is a list of (x, target)."""
    rank, p, m = dist.get_rank(), dist.get_world_size(), len(micro_batches)
    kept, sent = {}, []
    for kind, _, i, _ in actions:
        x, target = micro_batches[i]
        if kind == "forward":
            ### BEGIN SOLUTION: receive, compute, send, keep
            if rank > 0:
                x = torch.empty_like(x)
                dist.recv(x, rank - 1)
                x.requires_grad_()
            y = stage(x)
            if rank < p - 1:
                sent.append(dist.isend(y.detach(), rank + 1))
            kept[i] = x, y
            ### END SOLUTION
        else:
            ### BEGIN SOLUTION: take out, receive (or start at the loss), backward, send
            x, y = kept.pop(i)
            if rank == p - 1:
                (loss_fn(y, target) / m).backward()
            else:
                grad = torch.empty_like(y)
                dist.recv(grad, rank + 1)
                y.backward(grad)
            if rank > 0:
                sent.append(dist.isend(x.grad, rank - 1))
            ### END SOLUTION
        if len(sent) > 2 * p:  # a handle holds its message; wait for the oldest one
            sent.pop(0).wait()
    for work in sent:
        work.wait()


# %% tags=["check"] exercise="pipeline-3"
check("pipeline-3", run_actions)

# %% [markdown]
# The course's engine, `Pipeline`, runs all schedules of this lesson; the short file
# `course_lib/pipeline/whole.py` has 1F1B alone. After 3 steps, do all parameters equal those of one
# process?

# %%
from course_lib.pipeline import Pipeline, split_model


def train(rank, schedule, m):
    torch.manual_seed(0)
    stage = split_model(GPT(MODELS["tiny"]).double(), len(schedule), rank)
    pipeline = Pipeline(stage, token_loss)
    sgd = torch.optim.SGD(stage.parameters(), lr=0.1, momentum=0.9)
    for n in range(3):
        inputs, targets = next_tokens(token_batch(n, batch=8, seq=16, vocab=256))
        sgd.zero_grad()
        pipeline.step(schedule, inputs.chunk(m), targets.chunk(m))
        sgd.step()
    return dict(stage.chunks[0].named_parameters(remove_duplicate=False)), pipeline.peak_in_flight


# %% tags=["check"]
whole = Ranks(1).run(train, schedules.naive(1, 1), 1)[0][0]
for name, make in {"GPipe": schedules.gpipe, "1F1B": schedules.one_f_one_b}.items():
    found = ranks.run(train, make(4, 8), 8)
    near = [(whole[key] - x).abs().max() < 1e-12 for named, _ in found for key, x in named.items()]
    print(f"{name:5} as one process: {all(near)}; held at most {[peak for _, peak in found]}")

# %% [markdown]
# If you forget to remove `x` and `y` from `kept`, they stay in memory, and no result shows this
# mistake.
#
# **Send without waiting, free activations early, and divide the loss once.**
#
# ## 5 Break it: sends that wait
#
# Gloo's `dist.send` waits until the other rank receives. The next cell uses it instead of `isend`,
# and computes nothing. Which schedule hangs?

# %% tags=["predict"]
guess_hang = predict("which one hangs?", choices=("GPipe", "1F1B", "both", "none"))
### GUESS guess_hang.commit("both")


# %% tags=["failure", "raises-exception"]
def only_messages(rank, schedule):
    x, p = torch.zeros(1), len(schedule)
    for action in schedule[rank]:
        if (source := source_of(action, p)) is not None:
            dist.recv(x, source)
        if (target := target_of(action, p)) is not None:
            dist.send(x, target)


ranks.run(only_messages, schedules.gpipe(4, 8))
try:
    ranks.run(only_messages, schedules.one_f_one_b(4, 8))
except RankError as hang:
    reveal(guess_hang, "1F1B")
    show(waiting(hang.waits, 4), alt="two neighbors wait in a send for each other")
    raise

# %% [markdown]
# In 1F1B's steady phase, one neighbor sends an activation while the other one sends a gradient, and
# neither receives.
#
# **When two neighbors send to each other, use sends that do not block, or combine each send with
# the receive.**
#
# ## 6 Break it: the loss that was not divided
#
# Hugging Face's teaching code picotron (commit 12e81c3, `pipeline_parallel.py`) divides the loss
# that it *logs* by $m$, but not the one that it backpropagates, so every gradient is $m$ times too
# large. After 30 steps, does the loss show that gradients are 8 times too large?


# %% tags=["measured"]
def last_loss(optimizer_cls, lr, times):
    torch.manual_seed(0)
    model = GPT(MODELS["tiny"])
    optimizer = optimizer_cls(model.parameters(), lr=lr)
    for n in range(30):
        inputs, targets = next_tokens(token_batch(n % 4, batch=8, seq=16, vocab=256))
        loss = token_loss(model(inputs), targets)
        optimizer.zero_grad()
        (times * loss).backward()
        optimizer.step()
    return loss.item()


for name, cls, lr in (("SGD", torch.optim.SGD, 0.2), ("Adam", torch.optim.Adam, 3e-3)):
    right, wrong = (last_loss(cls, lr, times) for times in (1, 8))
    print(f"{name:4}: loss {right:.3f}; with gradients 8 times too large {wrong:.3f}")

# %% [markdown]
# With SGD, the loss shows the mistake. Adam divides by a running average of the gradient's size, so
# a constant factor cancels, up to $\epsilon$. The factor matters in clipping, in weight decay that
# is added to the gradient, and if $m$ changes during training. So compare *gradients*.
#
# **A falling loss does not prove that the gradients are right.**
#
# *A good place for a break.*
#
# ## 7 On a slow link, more micro-batches can be slower
#
# The next cells run section 2's batch over a link with 30 ms latency. Is 1F1B faster with $m=4$ or
# with $m=16$?

# %% tags=["predict"]
from course_lib.core import Link

wire = Link(name="slow link", latency_s=30e-3, bytes_per_s=1e9)
guess_m = predict("faster with 1F1B over the slow link", choices=("m = 4", "m = 16"))
### GUESS guess_m.commit("m = 16")

# %% tags=["picture", "measured"]
numbers, both = [4, 8, 16], {"1F1B": schedules.one_f_one_b, "GPipe": schedules.gpipe}
pairs = {(name, m): make(4, m) for name, make in both.items() for m in numbers}
runs = {key: lab.emulated(plan, batch.times(key[1], wire)) for key, plan in pairs.items()}
made = lab.measure(Ranks(4, link=wire), runs, turns=2)
few, many = (made["1F1B", m].step_s for m in (4, 16))
claim("1F1B is faster with m = 4 than with m = 16", few < many)
reveal(guess_m, "m = 4" if few < many else "m = 16")

# %% tags=["picture", "measured"]
times_s = {key: real.seconds for key, real in made.items()}
show(*pictures.steps_on_link(4, numbers, batch, wire, times_s))
print(cost.parts_table(4, numbers, batch, wire))

# %% [markdown]
# In 1F1B, rank 0 starts the forward of micro-batch $i+p$ only after the backward of micro-batch
# $i$. So every $p$ micro-batches cost one more round trip of $2(p-1)$ messages. In this example,
# GPipe *exposes* (waits for) only the $2(p-1)$ messages with which the pipeline fills and empties.
#
# **More micro-batches help only if their additional exposed messages cost less than the bubble that
# they save.**
#
# ## 8 Stages are not equally long
#
# All stages wait for the slowest one. GPT-2 small has 12 blocks. Counted in FLOP, how many blocks
# cost as much as its output layer (1,024 tokens, all attention scores counted)?

# %% tags=["predict"]
from course_lib.cost.flops import forward_flop

flop = forward_flop(MODELS["gpt2"], 1, 1024)
head = flop.pop("logits")
guess_head = predict("the output layer of GPT-2, in blocks")
### GUESS guess_head.commit(1)

# %% [markdown]
# ### Exercise 4 (further): balance the stages
#
# How many consecutive layers, at least one, should each of $p$ stages get, so that the slowest
# stage is as fast as possible? About 4 lines, 15 minutes.
#
# <details><summary>Hint: all cuts</summary>
# <code>combinations(range(1, n), p - 1)</code> gives all cuts; <code>pairwise</code> of (0, *cut,
# n) gives where each stage begins and ends.
# </details>


# %% tags=["exercise"] exercise="pipeline-4"
def cut_layers(layer_times, p):
    """A list of p numbers of layers."""
    n = len(layer_times)
    ### BEGIN SOLUTION: of all cuts, the one whose slowest stage is fastest
    cuts = [[*pairwise((0, *cut, n))] for cut in combinations(range(1, n), p - 1)]
    best = min(cuts, key=lambda cut: max(sum(layer_times[i:j]) for i, j in cut))
    return [j - i for i, j in best]
    ### END SOLUTION


# %% tags=["check"] exercise="pipeline-4"
check("pipeline-4", cut_layers)

# %%
layers = [0.0, *[1.0] * 12, 12 * head / sum(flop.values())]  # embedding, blocks, output layer
reveal(guess_head, layers[-1])
cuts = {"equally many": [4, 3, 3, 4], "balanced": balance.balance_stages(layers, 4)}
for name, cut in cuts.items():
    each = balance.stage_times(layers, cut)
    times = PipelineTimes(forward_s=each, backward_input_s=each, backward_weight_s=each)
    step = simulate(schedules.one_f_one_b(4, 3), times)
    print(f"{name:12} {cut}: {step.step_s:.0f} block times a step, {step.bubble_fraction:.0%} idle")
h100 = cost.h100_stages()
print(f"a 1B model on 8 H100: its output layer costs {h100.head_layers:.1f} blocks")
print("(stages, published tokens/s per GPU, formula):")
print(*zip(h100.stages, map(round, h100.published), map(round, h100.formula), strict=True))

# %% [markdown]
# The printed steps are 1F1B with $m=3$; a block time is the forward of one block. The H100 runs are
# from the Ultra-Scale Playbook (Tazi et al. 2025). The formula takes the speed with one stage from
# the data, and predicts the other speeds from the bubble and the slowest stage. With 8 stages, the
# slowest one is the output layer alone: it costs 3.2 blocks, and the mean stage 2.4 blocks.
#
# In many models, embedding and output layer share one matrix (*tied* weights). Then the first and
# the last stage hold copies of it, and each copy gets only the gradient of its own use.
#
# ### Exercise 5 (further): a tied weight
#
# After backward, leave the sum of both gradients in both copies' `.grad`. `ends` is the process
# group of the first and the last stage. A frozen weight's `.grad` is None. Any other gradient may
# be a transposed view. Budget: one message in each direction; middle stages (their weight is None)
# send nothing. About 3 lines, 10 minutes.


# %% tags=["exercise"] exercise="pipeline-5"
def sum_tied(weight, ends):
    """weight: this rank's copy, or None; its .grad is summed over the group `ends`."""
    ### BEGIN SOLUTION: ranks with a gradient add it up
    if weight is not None and weight.grad is not None:
        weight.grad = weight.grad.contiguous()
        dist.all_reduce(weight.grad, group=ends)
    ### END SOLUTION


# %% tags=["check"] exercise="pipeline-5"
check("pipeline-5", sum_tied)

# %% [markdown]
# **Balance stages by time, not by number of layers. Copies of a tied weight need the sum of their
# gradients.**
#
# ## 9 Micro-batches inside a sequence
#
# With causal attention a token does not need later tokens. So **TeraPipe** (Li et al. 2021) splits
# one long *sequence*: while rank 1 computes the first piece, rank 0 computes the second piece. The
# second piece attends to the keys and values of the first piece, which rank 0 has kept.

# %%
from course_lib.pipeline.token_pipeline import TokenCost, balanced_cut, even_cut, token_forward_s

token_cost = TokenCost(piece_s=50e-6, token_s=1e-6, pair_s=4e-9)
print("tokens of 8 balanced pieces:", balanced_cut(2048, 8, token_cost))
print("forward (ms), equal and balanced pieces:")
for number in (1, 2, 4, 8, 16, 32):
    cuts = even_cut(2048, number), balanced_cut(2048, number, token_cost)
    print(f"{number:2} pieces:", *(f"{1e3 * token_forward_s(c, 4, token_cost):.1f}" for c in cuts))

# %% [markdown]
# If piece $i$ takes $t_i$ on each stage, the forward takes $\sum t_i+(p-1)\max t_i$ (Li et al.
# 2021, equation 5): the longest piece counts $p$ times. A later token attends to more tokens. So if
# all pieces take equally long, later pieces have fewer tokens.
#
# **Causal attention lets the pieces of one sequence follow each other through the stages.**
#
# ## 10 Schedules in use today
#
# **Interleaved 1F1B** (Narayanan et al. 2021, section 2.2.2). Each rank holds $v$ smaller *model
# chunks*: rank $r$ has chunks $r$, $r+p$, and so on. The pipeline fills and empties chunk by chunk,
# and a chunk takes $\frac1v$ of a stage's time: the bubble is $\frac{p-1}{vm}$ of the computing
# time.
#
# ### Exercise 6 (further): the interleaved order
#
# Return one list per rank of `Action(kind, rank, micro_batch, model_chunk)`, for $v\ge2$.
# Micro-batches run in rounds of $p$. In forward, a rank runs a whole round in its chunk 0, then 1,
# and so on; in backward, its last chunk is first. A rank's warm-up has $(v-1)p$ forwards, plus 2
# for each rank after it (at most $vm$). The rest is as in 1F1B. If $m$ is no multiple of $p$, raise
# a `ValueError`. About 10 lines, 15 minutes.


# %% tags=["exercise"] exercise="pipeline-6"
def interleaved(p, m, v):
    """For each rank the list of its actions, in the order of interleaved 1F1B."""
    schedule = []
    for rank in range(p):
        ### BEGIN SOLUTION: list pairs (micro-batch, chunk), then as in exercise 1
        if m % p:
            raise ValueError(f"{m} micro-batches are no multiple of {p} ranks")
        rounds = [range(first, first + p) for first in range(0, m, p)]
        forwards = [(i, chunk) for each in rounds for chunk in range(v) for i in each]
        backwards = [(i, v - 1 - chunk) for i, chunk in forwards]
        warmup = min((v - 1) * p + 2 * (p - 1 - rank), m * v)
        kinds = ["forward"] * warmup + ["forward", "backward"] * (m * v - warmup)
        next_of = {"forward": iter(forwards), "backward": iter(backwards)}
        kinds += ["backward"] * warmup
        schedule.append([Action(kind, rank, *next(next_of[kind])) for kind in kinds])
        ### END SOLUTION
    return schedule


# %% tags=["check"] exercise="pipeline-6"
check("pipeline-6", interleaved)

# %% [markdown]
# **ZB-H1** (Qi et al. 2024, section 2). A backward computes the gradient of the input, $I$, for
# which the previous rank waits, and the gradients of the weights, $W$, for which no rank waits.
# ZB-H1 runs $I$ at once. Rank $r$ defers each $W$ by $r$ micro-batches, so that deferred $W$ fill
# part of the bubble at the end.
#
# **ZB-V** (Qi et al. 2024, section 6) splits the backward, too. Each rank has two chunks, in a V:
# rank $r$ holds chunks $r$ and $2p-1-r$, so the loss is on rank 0.
#
# **DualPipeV** (Sea AI Lab 2025, from DeepSeek's DualPipe) has the same V. In the steady phase it
# pairs a forward with the backward of another micro-batch. If the two run at the same time, one can
# compute while the other communicates.

# %% tags=["predict"]
from course_lib.pipeline import dual_pipe_v, zero_bubble_v

guess_zero = predict("ratio of bubbles, 1F1B to ZB-V, if F = I = W")
### GUESS guess_zero.commit(3)


def five(p, m):
    plain = {"1F1B": schedules.one_f_one_b(p, m), "interleaved": schedules.interleaved(p, m, 2)}
    split = {"ZB-H1": schedules.zero_bubble_h1(p, m), "ZB-V": zero_bubble_v(p, m)}
    return {**plain, **split, "DualPipeV": dual_pipe_v(p, m)}


# %% tags=["picture"]
plans = five(3, 6)
played = {name: simulate(plan) for name, plan in plans.items()}  # F = I = W = 1
reveal(guess_zero, played["1F1B"].idle_s[0] / played["ZB-V"].idle_s[0])
show(*pictures.smaller_bubbles(played))

# %% tags=["measured"]
times = PipelineTimes(forward_s=0.03, backward_input_s=0.03, backward_weight_s=0.03)
made = lab.measure(three, {n: lab.emulated(plan, times) for n, plan in plans.items()}, turns=2)
formula = {"1F1B": 6, "interleaved": 6 / 2, "ZB-H1": 2, "ZB-V": 2 / 2, "DualPipeV": 2 / 2}
for name, real in made.items():
    idle = formula[name] / (18 + formula[name]), played[name].bubble_fraction, real.bubble_fraction
    held = max(real.peak_in_flight) * 3 / len(placement_of(plans[name]))
    sent = sum(event.kind == "send" for event in real.events)
    shown = "idle by formula {:.0%}, simulated {:.0%}, measured {:.0%};".format(*idle)
    print(f"{name:11}", shown, f"{held:g} in flight, {sent} messages")
print(cost.bubble_rate_table())

# %% [markdown]
# | | bubble of a rank | most in flight (one chunk counts $1/v$) | messages |
# |---|---|---|---|
# | 1F1B | $(p-1)(F+I+W)$ | $p$ | $2(p-1)m$ |
# | interleaved | $\frac1v(p-1)(F+I+W)$ | $p+\frac{p-1}{v}$ | $2(pv-1)m$ |
# | ZB-H1 | $(p-1)(F+I-W)$ | $p$ | $2(p-1)m$ |
# | ZB-V | $\frac12(p-1)F$ | $p$ | $4(p-1)m$ |
# | DualPipeV | $\frac12(p-1)(F+I-W)$ | $p+\frac12$ | $4(p-1)m$ |
#
# The table needs $m\ge2p$ (interleaved: also a multiple of $p$), $W\le F$ and $W\le I$. ZB-V's
# bubble also needs $F=I=W$ (Qi et al. count 0, because they measure from a rank's first action to
# its last). DualPipeV's bubble, found by our simulation, also needs $I\le F\le I+W$. ZB-H1 has on
# *every* rank as many micro-batches in flight as 1F1B has on the first. The last lines of the
# output compare our simulator with Qi et al. 2024 (table 5).
#
# **Compared with 1F1B, a smaller bubble costs memory here, at least on later ranks, and with chunks
# also messages.**
#
# ## 11 An open puzzle
#
# Which order is best for given $p$, $m$, memory and $F:I:W$?
#
# ### Exercise 7 (further): the shortest step
#
# Return a schedule with a short simulated step and, on each rank, at most `cap` $\ge p$
# micro-batches in flight (from F until W). `seconds` has the times of `"forward"`,
# `"backward_input"` and `"backward_weight"`; messages take none. It is right if it is never slower
# than ZB-H1 in seven puzzles. The loop is a *list scheduler*: of the actions in `ready`, it runs
# the first that can start, or the most urgent (0) of those. Fill `ready`. About 10 lines, 30
# minutes.
#
# <details><summary>Hint: what can run next</summary>
# Count each rank's F, I and W, which run in micro-batch order. I needs its F, W its I.
# </details>
# <details><summary>Hint: slower than ZB-H1</summary>
# F is most urgent if fewer than p - r micro-batches wait for their I, and not ready if cap - r do.
# W is least urgent.
# </details>


# %% tags=["exercise"] exercise="pipeline-7"
def pack(p, m, seconds, cap):
    """For each rank the list of its actions: a short step, at most `cap` in flight."""
    schedule, ends, free_s = [[] for _ in range(p)], {}, [0.0] * p
    while len(ends) < 3 * p * m:
        ready = []  # (when it can start, how urgent it is, action)
        ### BEGIN SOLUTION: add the next F, I and W of each rank, if they may run
        for rank, actions in enumerate(schedule):
            f, i, w = (sum(one.kind == kind for one in actions) for kind in seconds)
            room, urgent = min(m, w + cap, i + cap - rank), 0 if f - i < p - rank else 2
            nexts = [("forward", f, room, urgent)]
            nexts += [("backward_input", i, f, 1), ("backward_weight", w, i, 3)]
            for kind, number, end, urgency in nexts:
                source = source_of(action := Action(kind, rank, number), p)
                sent = action._replace(stage=source)
                if number < end and (source is None or sent in ends):
                    ready.append((max(free_s[rank], ends.get(sent, 0.0)), urgency, action))
        ### END SOLUTION
        start_s, _, action = min(ready)
        schedule[action.stage].append(action)
        ends[action] = free_s[action.stage] = start_s + seconds[action.kind]
    return schedule


# %% tags=["check"] exercise="pipeline-7"
check("pipeline-7", pack)

# %% tags=["measured"]
from course_lib.checks.pipeline.scores import scores

print(scores(pack))

# %% [markdown]
# The bound holds for one chunk per rank; ZB-V, with two, is below it here. ZB-H1 may win in the
# last column.
#
# **The best schedule depends on times and memory: simulate, then search.**
#
# ## 12 The real thing
#
# `torch.distributed.pipelining` has all five schedules, with our order of actions; its
# `ScheduleInterleavedZeroBubble` with one chunk per rank is ZB-H1. The next cell runs them on two
# ranks, without tied weights (PyTorch's `PipelineStage` does not sum their gradients). Are our
# gradients equal to PyTorch's?

# %% tags=["measured"]
from dataclasses import replace

from course_lib.pipeline import beside_frameworks as beside

names = ["1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
pair, spec = Ranks(2), replace(MODELS["small"], tied=False)
for name, plan in zip(names, five(2, 8).values(), strict=True):
    by_rank = pair.run(beside.run_schedule, spec, f"Schedule{name}", plan)
    shown = ", ".join(f"{whose} {1e3 * s:.0f} ms" for whose, s in by_rank[0][1].items())
    print(f"Schedule{name:21} {shown}; equal: {all(equal for equal, _ in by_rank)}")

# %% [markdown]
# Megatron-Core has 1F1B and interleaved 1F1B. The next cell counts the last rank's messages in one
# step with tied weights. Megatron-Core sums the tied gradients by all-reduce, our engine by
# messages.

# %% tags=["measured"]
from course_lib.frameworks import missing

batches = [next_tokens(token_batch(n, batch=8, seq=32, vocab=2048)) for n in range(4)]
print(missing("megatron.core") or "The last rank knows the loss:")
names = ["ours"] if missing("megatron.core") else ["ours", "Megatron-Core"]
for chunks, name in product((1, 2), names):
    ran = pair.run(beside.run_pipeline, MODELS["small"], batches, 8, name == "ours", chunks)[-1]
    calls = ran.calls().items()
    sent = "; ".join(f"{n} {kind}, together {size} bytes" for kind, (n, size) in calls)
    print(f"{chunks} chunks, {name}: loss {ran.losses[-1]:.5f}, {ran.median_ms:.0f} ms; {sent}")

# %% [markdown]
# ## What to keep
#
# - GPipe and 1F1B have a bubble of $\frac{p-1}{m}$ of the computing time. Rank $r$ holds $m$
#   micro-batches with GPipe, and at most $\min(p-r,m)$ with 1F1B.
# - Model chunks shorten the bubble; deferred weight gradients fill part of it.
#
# **Read on**
#
# - Huang et al. 2019, *GPipe*: micro-batches and recomputation.
# - Narayanan et al. 2021, *Efficient Large-Scale Language Model Training*, section 2.2: 1F1B,
#   interleaved.
# - Qi et al. 2024, *Zero Bubble Pipeline Parallelism*: $I$ (their $B$), $W$, ZB-H1, ZB-V, a search.
# - DeepSeek-AI 2024, *DeepSeek-V3*, section 3.2.1: DualPipe.
# - Sea AI Lab 2025, *DualPipe could be better without the Dual*: DualPipeV.
