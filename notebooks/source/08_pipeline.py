# %% [markdown]
# # 08 Pipeline parallelism: split the layers
#
# **Question.** A model that is too large for one device can be split between its layers. What do
# the other ranks do while one rank computes, and how far can their idle time be reduced?
#
# Tensor parallelism (lesson 07) splits every matrix, so the ranks communicate inside every layer.
# Pipeline parallelism splits the model *between* layers: each rank holds a *stage*, that is, some
# consecutive layers. It sends activations to the next stage, and their gradients back to the
# previous one. This is little traffic, so a pipeline can run over slower links. Its cost is idle
# time.
#
# *After this lesson you can*
#
# - write the 1F1B schedule, simulate it, and run it on real ranks;
# - predict the idle time and the memory of GPipe, 1F1B and newer schedules;
# - recognize a deadlock of sends, and a loss that was not divided by $m$;
# - choose the number of micro-batches, and balance the stages.
#
# **Prerequisites:** lessons 01, 02 and 04. **Time:** 80 minutes of reading, 125 of exercises.
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
# Take a model that is split into four stages, one on each rank, and send one batch through it. Rank
# 1 cannot begin before rank 0 has sent its output, and so on. Then backward runs through the ranks
# in reverse order. The next cell simulates this.

# %% tags=["picture"]
played = simulate(schedules.naive(4, 1))
print(f"each rank computes for {1 - played.bubble_fraction:.0%} of the time")
show(*pictures.one_batch(played))

# %% [markdown]
# Each rank computes for only $1/p$ of the time: four devices are as fast as one. In synchronous
# training, the next batch cannot fill the gaps, because its forward needs the weights that this
# step has not computed yet.
#
# **As long as the batch is not divided, only one rank of a pipeline computes at a time.**
#
# ## 2 Micro-batches
#
# If the next batch cannot fill the gaps, parts of the *same* batch can. **GPipe** (Huang et al.
# 2019) divides the batch into $m$ micro-batches, as lesson 02 did for gradient accumulation. While
# rank 1 computes the forward of micro-batch 0, rank 0 already computes that of micro-batch 1.
# GPipe runs all $m$ forwards, then all $m$ backwards. How much idle time is left?
#
# Follow the last rank through a step:
#
# 1. It waits until micro-batch 0 has passed the $p-1$ ranks before it: $(p-1)F$.
# 2. It computes all $m$ micro-batches without a gap: $m(F+B)$.
# 3. Its last gradient then passes the $p-1$ ranks before it, and the last rank has nothing left to
#    do: $(p-1)B$.
#
# A step takes the sum of the three, $(m+p-1)(F+B)$. Each rank computes for $m(F+B)$ of it, so each
# rank is idle for $(p-1)(F+B)$. This idle time is called the *bubble*. Divided by the computing
# time it is $\frac{p-1}{m}$; as a fraction of the whole step it is $\frac{p-1}{m+p-1}$.
#
# We now measure it on four ranks with emulated layers: the gradients are real, but a layer sleeps
# for its computing time, because four ranks on a laptop share its cores.

# %%
batch = BatchCost(forward_s=160e-3, backward_s=320e-3)  # a stage's seconds for the whole batch
ranks, numbers = Ranks(4), [1, 2, 4, 8]


# %% tags=["picture", "measured"]
runs = {m: lab.emulated(schedules.gpipe(4, m), batch.times(m)) for m in numbers}
made, whole_s = lab.measure(ranks, runs, turns=2), batch.forward_s + batch.backward_s
print(f"formula for m = 8: {cost.bubble_overhead(4, 8):.1%} of the computing time")
measured = [[100 * (s / whole_s - 1) for s in made[m].seconds] for m in numbers]
show(*pictures.gpipe_bubble(4, numbers, measured))

# %% [markdown]
# The dots may lie above the line, because messages and the engine take time, too. Huang et al.
# (2019, section 2.3) found the bubble negligible for $m\ge4p$, partly because their ranks recompute
# activations while they wait for gradients.
#
# Then why not choose $m$ as large as possible? Smaller micro-batches may use a GPU less
# efficiently, and more micro-batches need more messages (section 7).
#
# **GPipe's bubble is $(p-1)/m$ of the computing time, if all stages take equally long and messages
# take no time.**
#
# ## 3 1F1B: backward as soon as possible
#
# A small bubble needs many micro-batches, but GPipe begins its first backward only after the last
# forward. Unless it recomputes activations (lesson 03), each rank keeps those of all $m$
# micro-batches until then. Can a rank free activations earlier?
#
# Yes: the last rank can begin backward as soon as its *first* forward is done. **1F1B** (one
# forward, one backward; Narayanan et al. 2021, section 2.2.1) uses this. Each rank goes through
# three phases:
#
# - **Warm-up:** it runs as many forwards as there are ranks after it.
# - **Steady phase:** it alternates one forward and one backward.
# - **Cool-down:** it runs the remaining backwards.
#
# Such an order is called a **schedule**: a list of actions for each rank, without times. An action
# starts as soon as its rank is free and its input has arrived. The next cell prints GPipe's
# schedule; `F2` is the forward of micro-batch 2, and `B2` its backward.
#
# We say that a micro-batch is *in flight* on a rank from the start of its forward to the end of its
# backward: this is how long the rank keeps its activations. With 1F1B, $p=4$ and $m=32$, how many
# micro-batches are in flight on rank 0 at most?

# %% tags=["predict"]
print(as_text(schedules.gpipe(4, 4)))
print(schedules.gpipe(4, 4)[1][0])
guess_held = predict("micro-batches in flight on rank 0 with 1F1B")
### GUESS guess_held.commit(8)

# %% [markdown]
# ### Exercise 1 (core): the order of 1F1B
# *Difficulty 2 of 5, importance 5 of 5, about 10 minutes and 5 lines.*
#
# Write the schedule of Megatron-LM. Return one list per rank of `Action(kind, stage, micro_batch)`:
# `kind` is `"forward"` or `"backward"`, and the stage is the rank. For $p=2$ and $m=3$, rank 0 runs
# F0 F1 B0 F2 B1 B2, and rank 1 runs F0 B0 F1 B1 F2 B2. Your function also has to work for $m<p$,
# where a warm-up has at most $m$ forwards.


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
# With 1F1B, rank $r$ has at most $\min(p-r,m)$ micro-batches in flight: the $p-1-r$ of its warm-up,
# and one more in the steady phase. This does not grow with $m$.
#
# The bubble, however, is the same as GPipe's. The last rank still waits until the first micro-batch
# has passed the $p-1$ ranks before it, and its last gradient still has to pass these ranks. In
# between, the last rank has no gap in either schedule. So what 1F1B saves is memory, and this lets
# us afford the many micro-batches that make the bubble small.
#
# To compare more schedules before we run them, we need a simulator.
#
# ### Exercise 2 (core): when does each action end?
# *Difficulty 3 of 5, importance 4 of 5, about 20 minutes and 9 lines.*
#
# Return `{action: when it ends}` for a schedule. `seconds[kind]` is the duration of an action.
# `source_of(action, p)` is the stage that sends its input, or None if it needs no message; a
# message arrives `message_s` after the action that produced it has ended. With $p=2$, $m=1$, $F=1$,
# $B=2$ and messages of 0.5 s, rank 0's forward ends at 1, rank 1's at 2.5, its backward at 4.5, and
# rank 0's backward at 7.
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
# The course's `simulate` does the same for every schedule of this lesson. Move the sliders: which
# schedule suffers most from slow messages?
#
# **A schedule is only an order. Together with the durations of actions and messages, it determines
# when everything in a step happens.**
#
# ## 4 An engine that runs any schedule
#
# The simulator moves no data. Now we let real ranks execute a schedule. For every schedule, a rank
# runs the same program: for each action of its list, it receives an input, computes, and sends the
# result.
#
# Backward needs some care. PyTorch's autograd knows only what happens inside one process, so its
# graph ends at the border of a stage. We continue it by hand. The received activation becomes a
# leaf that requires a gradient; after the stage's backward, this leaf's gradient is sent to the
# previous rank, which passes it to `y.backward(grad)`.
#
# ### Exercise 3 (core): run a schedule
# *Difficulty 4 of 5, importance 5 of 5, about 25 minutes and 17 lines.*
#
# Execute one rank's actions; add to each `param.grad` the gradient of the *mean* of the $m$ losses.
# In `(x, target)`, `x` is real on the first rank only, `target` on the last. Elsewhere `x` has the
# shape and dtype of the message to receive. Backwards may come in any order. `dist.isend` returns a
# handle; its tensor must not change before `handle.wait()` returns. Budget: one message per
# micro-batch and direction; for 1F1B with $p=4$, rank 0 keeps 4 micro-batches.
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
# `course_lib/pipeline/whole.py` has 1F1B alone. A pipeline changes the order of the work, but not
# the mathematics: after 3 steps, do all parameters equal those of one process, up to rounding?

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
# They do, and 1F1B holds fewer micro-batches. But comparing results does not find every mistake. If
# you forget to remove `x` and `y` from `kept`, all gradients are right, and the activations of
# every micro-batch stay in memory. Only a measurement of memory shows it.
#
# **A pipeline engine computes the gradients of one process if the loss is divided by $m$ once. It
# reaches the memory of its schedule only if activations are freed right after their backward.**
#
# ## 5 Break it: sends that wait
#
# Our engine used `isend`, which returns at once. A plain `dist.send` looks simpler. But with the
# gloo backend it waits until the other rank receives. The next cell uses it to send the messages of
# a schedule, without computing anything. Which schedule hangs?

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
# GPipe finishes, because its messages never cross: first all of them go forward, then all go
# backward. In 1F1B's steady phase, rank $r$ sends an activation forward while rank $r+1$ sends a
# gradient back. Each of the two waits until the other one receives, and neither gets to its
# receive: a deadlock. A test with GPipe alone would not have found it. Megatron-LM avoids it by
# combining the send with the receive that belongs to it in one call.
#
# **If two neighbors may send to each other at the same time, use sends that do not block, or
# combine each send with the matching receive.**
#
# ## 6 Break it: the loss that was not divided
#
# A hang is at least visible. The next mistake is not: nothing fails, and the loss falls. Hugging
# Face's teaching code picotron (commit 12e81c3, `pipeline_parallel.py`) divides the loss that it
# *logs* by $m$, but not the one that it backpropagates, so every gradient is $m$ times too large.
# The next cell trains a small model for 30 steps with right gradients, and with gradients that are
# 8 times too large. Does the loss show the difference?


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
# With SGD it does: a gradient that is 8 times too large acts like a learning rate that is 8 times
# too large. Adam divides each gradient by a running average of its size. So a constant factor
# cancels, except for the small $\epsilon$ in the denominator, and the curve looks right. The
# mistake still matters: gradient clipping sees a norm that is 8 times too large, weight decay that
# is added to the gradient becomes relatively weaker, and training changes if $m$ does. To find it,
# compare *gradients* with those of one process.
#
# **A falling loss does not prove that the gradients are right.**
#
# *A good place for a break.*
#
# ## 7 On a slow link, more micro-batches can be slower
#
# So far, messages took almost no time, and more micro-batches always made the step shorter. We run
# section 2's batch again, over an emulated link with a latency of 30 ms. Is 1F1B faster with $m=4$
# or with $m=16$?

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
# The bubble shrinks as before, but the exposed messages cost more than that. (A message is
# *exposed* if a rank waits for it.) The reason is 1F1B's limit on memory. Rank 0 may start the
# forward of micro-batch $i+p$ only after the backward of micro-batch $i$. This backward needs a
# round trip: $p-1$ messages to the last rank, and $p-1$ messages back. So every $p$ additional
# micro-batches expose another $2(p-1)$ latencies.
#
# GPipe has no such limit: its forwards follow each other without waiting for any gradient. In this
# example it exposes only the $2(p-1)$ messages with which the pipeline fills and empties, at the
# price of more memory.
#
# **More micro-batches shorten a step only if their additional exposed messages cost less than the
# bubble that they save.**
#
# ## 8 Stages are not equally long
#
# All formulas so far assumed that all stages take equally long. In a real model they do not: the
# first stage also has the embedding, which takes almost no time, and the last one has the output
# layer, a product with a matrix as wide as the vocabulary. Every micro-batch passes every stage, so
# the slowest stage sets the pace, and the others wait for it.
#
# GPT-2 small has 12 blocks. Counted in FLOP, how many blocks cost as much as its output layer
# (1,024 tokens, all attention scores counted)?

# %% tags=["predict"]
from course_lib.cost.flops import forward_flop

flop = forward_flop(MODELS["gpt2"], 1, 1024)
head = flop.pop("logits")
guess_head = predict("the output layer of GPT-2, in blocks")
### GUESS guess_head.commit(1)

# %% [markdown]
# ### Exercise 4 (further): balance the stages
# *Difficulty 2 of 5, importance 3 of 5, about 15 minutes and 4 lines.*
#
# Divide consecutive layers into $p$ stages, at least one layer each, so that the slowest stage is
# as fast as possible. Return the number of layers of each stage. For `layer_times = [0, 1, 1, 1,
# 3]` and $p=2$, `[4, 1]` is right: both stages take 3, while `[3, 2]` takes 2 and 4. A planner
# (lesson 12) needs this for every model.
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
mean = (16 + h100.head_layers) / 8
print(f"1B model, 16 blocks, 8 stages: output layer {h100.head_layers:.1f} blocks, mean {mean:.1f}")
print("(stages, published tokens/s per GPU, formula):")
print(*zip(h100.stages, map(round, h100.published), map(round, h100.formula), strict=True))

# %% [markdown]
# The first two lines are 1F1B with $m=3$, in units of the forward of one block: with equally many
# layers, the last stage slows down every micro-batch. The H100 runs are from the Ultra-Scale
# Playbook (Tazi et al. 2025). The formula takes the speed with one stage from the data, and
# predicts the other speeds from the bubble and from the slowest stage. With 8 stages, the slowest
# one is the output layer alone, which costs more than the mean stage. Here the imbalance costs more
# than the bubble.
#
# Stages differ in a second way. In many models, embedding and output layer share one matrix (*tied*
# weights). In a pipeline, the first and the last stage then hold copies of it. Each copy gets only
# the gradient of its own use, so without communication the copies drift apart, and nothing fails.
#
# ### Exercise 5 (further): a tied weight
# *Difficulty 2 of 5, importance 4 of 5, about 10 minutes and 3 lines.*
#
# Keep two copies of one weight equal. `ends` is the process group of the first and the last stage.
# After backward, leave the sum of both gradients in both copies' `.grad`: if they are 3 and 5, both
# become 8. In the middle stages `weight` is None; a frozen weight has `.grad` None. Budget: one
# message in each direction between the ends, none from the others.


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
# To fill a pipeline, GPipe and 1F1B need many sequences per batch. A batch of a few very long
# sequences gives only a few micro-batches. Can one *sequence* be divided?
#
# With causal attention it can, because a token does not need later tokens. **TeraPipe** (Li et al.
# 2021) splits the sequence into pieces: while rank 1 computes the first piece, rank 0 computes the
# second one. The second piece attends to the keys and values of the first piece, which each rank
# has kept for its own layers. The next cell computes the forward time for different numbers of
# pieces.

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
# 2021, equation 5). The first term is the work of one rank; the second is the time in which the
# pipeline fills and empties, at the pace of the longest piece. So the longest piece counts $p$
# times, and pieces should take equally long. But a later token attends to more tokens. Balanced
# pieces therefore have fewer and fewer tokens. And more pieces help less and less, because each
# piece has a fixed cost.
#
# **With causal attention, the pieces of one sequence can follow each other through the stages, like
# micro-batches.**
#
# ## 10 Schedules in use today
#
# For a given batch and number of stages, $\frac{p-1}{m}$ cannot be reduced by reordering whole
# forwards and backwards of whole stages. Newer schedules divide the stages or the backwards.
#
# **Interleaved 1F1B** (Narayanan et al. 2021, section 2.2.2) divides the stages. Each rank holds
# $v$ smaller *model chunks*: rank $r$ has chunks $r$, $r+p$, and so on. A chunk takes $\frac1v$ of
# a stage's time. So the first micro-batch reaches the last rank after $(p-1)\frac Fv$ instead of
# $(p-1)F$, and the pipeline also empties in $\frac1v$ of the time. The bubble is $\frac{p-1}{vm}$
# of the computing time. The price is that each micro-batch visits every rank $v$ times, with a
# message for every visit.
#
# ### Exercise 6 (further): the interleaved order
# *Difficulty 4 of 5, importance 2 of 5, about 15 minutes and 10 lines.*
#
# Return a list per rank of `Action(kind, rank, micro_batch, model_chunk)`, for $v\ge2$.
# Micro-batches run in rounds of $p$ (`ValueError` if $p$ does not divide $m$): a whole round in
# chunk 0, then in chunk 1, and so on; in backward the last chunk is first. The warm-up has $(v-1)p$
# forwards, plus 2 for each later rank (at most $vm$); the rest is as in 1F1B. For $p=m=v=2$, rank 1
# runs F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1 (F0.1: chunk 1).


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
# **ZB-H1** (Qi et al. 2024, section 2) divides the backward. Backward computes two things: the
# gradient of the stage's input, $I$, for which the previous rank waits, and the gradients of its
# weights, $W$, for which no other rank waits. ZB-H1 runs $I$ at once, and rank $r$ defers each $W$
# by $r$ micro-batches. Look at the last rank again. After its last $I$, the gradient still has to
# pass $p-1$ ranks, but each of them now takes only $I$ instead of $I+W$. Meanwhile the last rank
# runs its $p-1$ deferred $W$. So it is idle for $(p-1)F$ at the beginning and for $(p-1)(I-W)$ at
# the end.
#
# **ZB-V** (Qi et al. 2024, section 6) splits the backward, too, and gives each rank two chunks in
# the shape of a V: rank $r$ holds chunks $r$ and $2p-1-r$. So rank 0 has the first and the last
# chunk, and the loss.
#
# **DualPipeV** (Sea AI Lab 2025, from DeepSeek's DualPipe) uses the same V. In the steady phase it
# pairs the forward of one micro-batch with the backward of another. If the two run at the same
# time, one can compute while the other communicates.

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
drawn = {name: one for name, one in played.items() if name != "1F1B"}  # which section 3 has drawn
show(*pictures.smaller_bubbles(drawn))

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
# The table holds for $m\ge2p$ (interleaved: $m$ is also a multiple of $p$), $W\le F$ and $W\le I$.
# ZB-V's bubble also needs $F=I=W$. Qi et al. count it as 0, because they measure from each rank's
# first action to its last, and so leave out the time in which a rank waits for its first input.
# DualPipeV's bubble is from our simulation, and also needs $I\le F\le I+W$.
#
# The columns show what a smaller bubble costs. 1F1B has $p$ micro-batches in flight only on rank 0,
# and one on the last rank. ZB-H1 has $p$ of them on *every* rank, because a deferred $W$ needs its
# activations. Chunks add messages. The last lines of the output compare our simulator with the
# bubble rates that Qi et al. calculate from measured times (2024, table 5).
#
# **Compared with 1F1B, the schedules here pay for a smaller bubble with memory, at least on later
# ranks; those with chunks also pay with messages.**
#
# ## 11 An open puzzle
#
# The pictures assumed $F=I=W$. In real models the three differ. Which order is best for given $p$,
# $m$, memory and $F:I:W$? No formula is known; Qi et al. (2024, section 3) search for a good order
# with a program. So do you.
#
# ### Exercise 7 (further): the shortest step
# *Difficulty 5 of 5, importance 2 of 5, about 30 minutes and 10 lines.*
#
# Find a schedule with a short simulated step: in seven puzzles, never slower than ZB-H1. `seconds`
# has the times of `"forward"`, `"backward_input"` and `"backward_weight"`; messages take none. At
# most `cap` $\ge p$ micro-batches are in flight on a rank, from F until W. The loop is a *list
# scheduler*: of the actions in `ready`, it runs the one that can start first; of equals, the most
# urgent (0). With `(0.0, 2, a)` and `(0.0, 0, b)` it runs `b`. Fill `ready`.
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
# The bound in the table holds for schedules with one chunk per rank. ZB-V has two chunks, so it may
# be below the bound. In the last column, with the times that Qi et al. measured, ZB-H1 may be
# faster than yours.
#
# **The best schedule depends on the durations and on the memory: simulate, then search.**
#
# ## 12 The real thing
#
# In practice you would use a library. `torch.distributed.pipelining` has all five schedules, with
# our order of actions. (Its `ScheduleInterleavedZeroBubble` with one chunk per rank is ZB-H1.) The
# next cell runs them on two ranks. The model has no tied weights, because PyTorch's `PipelineStage`
# does not sum their gradients. Are our gradients equal to PyTorch's?

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
# step with tied weights, with one chunk per rank and with two. Megatron-Core sums the tied
# gradients by an all-reduce, our engine by messages.

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
# **With the same schedule, frameworks and a short engine compute the same gradients. They differ in
# speed, and in what they leave to you, such as tied weights.**
#
# ## What to keep
#
# - With an undivided batch only one rank computes. Micro-batches let the ranks work at the same
#   time; what remains is the bubble.
# - GPipe and 1F1B have the same bubble, $\frac{p-1}{m}$ of the computing time for equal stages.
#   Rank $r$ holds $m$ micro-batches with GPipe, and at most $\min(p-r,m)$ with 1F1B.
# - Model chunks shorten the bubble and cost messages; deferred weight gradients fill part of it and
#   cost memory on the later ranks.
# - On a slow link, 1F1B exposes a round trip for every $p$ micro-batches. And the slowest stage
#   sets the pace, often the one with the output layer.
# - Compare gradients with those of one process: neither a falling loss nor a test with one schedule
#   proves an engine right.
#
# **Read on**
#
# - Huang et al. 2019, *GPipe*: micro-batches and recomputation.
# - Narayanan et al. 2021, *Efficient Large-Scale Language Model Training*, section 2.2: 1F1B,
#   interleaved.
# - Qi et al. 2024, *Zero Bubble Pipeline Parallelism*: $I$ (their $B$), $W$, ZB-H1, ZB-V, a search.
# - DeepSeek-AI 2024, *DeepSeek-V3*, section 3.2.1: DualPipe.
# - Sea AI Lab 2025, *DualPipe could be better without the Dual*: DualPipeV.
