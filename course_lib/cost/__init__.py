"""Cost formulas that belong to no single method, in pure Python.

params      parameters of a model, whole and on one rank
flops       FLOP of a training step, and model FLOP utilization (MFU)
hardware    devices by their data sheets: memory, bandwidth, peak FLOP/s
network     the alpha-beta model: seconds of each collective and algorithm
bandwidth   the inverse: bus bandwidth, and alpha and beta fitted to measured times
traffic     the collectives of a step: bytes sent per rank, and seconds
packing     tensors packed into buckets
"""
