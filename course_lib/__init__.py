"""Distributed training of language models: built by hand, broken on purpose, measured.

The lessons, in the order of the course. Each package opens with a docstring that says what its
files are for: the method, and where the lesson has them, what predicts, measures and draws it.

    ranks              00  real processes in a notebook, their calls traced, hangs explained
    memory             01  parameters, gradients, optimizer state, activations: predicted, weighed
    speed              01b the FLOP of a step, MFU, rooflines of memory and links
    accumulation       02  one large batch from small ones
    recompute          03  activation recomputation, mixed precision, FP8 and MX
    collectives        04  broadcast to all-reduce, written by hand from send and recv
    data_parallel      05  replicas, samplers, a parameter server, local SGD
    ddp                06  gradients in buckets, communicated while backward still computes
    tensor_parallel    07  matrices split over ranks
    pipeline           08  layers split over ranks: schedules, their execution and simulation
    zero               09  ZeRO 1, 2, 3 and offload
    fsdp               10  gather a unit, use it, free it
    mesh               11  ranks on named axes: data, tensor and pipeline parallelism combined
    planner            12  a training step predicted: its seconds by cause, its bytes by kind
    scaling_study      13  predict, run and compare strategies on a laptop or a cluster
    checkpoint         14  sharded, whole or not at all, loaded at any world size
    context_parallel   15  one long sequence split over ranks: ring, Ulysses, all-gathered keys
    expert_parallel    16  experts of a layer on many ranks: dispatch, combine, gradients, balance
    clinic             17  training runs with a fault that the loss hides: examined, and mended

What they stand on, and what serves them:

    core                   the words: events, ledgers, model specs, links, units, errors
    cost                   formulas that belong to no method: network, traffic, FLOP, parameters
    models                 what is trained: GPT and BERT, tokens, texts
    frameworks             DeepSpeed, Accelerate and fully_shard behind one handle
    display                pictures and widgets
    hub                    models of Hugging Face: config.json, tensor names, files, both ways
    debugging              where two runs differ first, who is behind, where the time went
    train                  the training script, `python -m course_lib.train`
    jobs                   job scripts, schedulers, run records brought home
    cluster_ranks          ranks of a notebook on the nodes of an allocation, or reached by ssh
    checks                 what exercises call, by lesson (`checks/zero`): what is wrong, and why
    workbooks              a learner's notebooks: found, checked, updated, handed in
    cli                    the `course` command

What instructors and authors use besides is in course_tools.
"""
