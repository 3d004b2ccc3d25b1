"""Choose how to train a model on a cluster: predict the step of a plan, and search (12_planner).

Files, in the order of reading:

    plan            a `Plan`: axes, schedule, batch, recomputation, precision
    cluster         a `Cluster`: GPUs, links, software; the profiles that ship
    prediction      a `PredictedStep`: seconds by cause, bytes by kind, what bounds it
    predicting      `predict(model, cluster, plan)`
    compute         matrix products at the efficiency of their shape, and the rest of a layer
    communication   what of each axis' messages is exposed
    pipeline_step   a pipeline's step in closed form
    memory          bytes by kind on the fullest rank
    experts         messages of expert parallelism
    constants       the few fitted numbers: meaning, source, rows
    notes           sentences beside plans: whose constants, how far to trust them
    searching       `search(model, cluster, global_batch)`: every plan, ranked
    table           a table of plans in, a table of predictions out
    stages          Alpa, inter-operator: unequal stages on sub-meshes by dynamic programming
    sharding        Alpa, intra-operator: how each matrix product of a chain is split
    launches        a plan as arguments of course_lib.train, torchtitan and Megatron-LM
    emit            the files that run a plan: arguments, batch scripts, a note
    lab             a plan's pipeline on real ranks, in miniature
    pictures        bills, memory, time against memory, predicted against published
    explorer        sliders for model, cluster and plan
    html_report     the best plans as a page with pictures
    published_runs  published runs as models, clusters and plans
    published_experts  those of models with experts
    published_run   one of them, and its prediction
    scores          how near the predictions come to them
"""

from course_lib.planner.cluster import Cluster, cluster_for, cluster_names, find_cluster
from course_lib.planner.plan import Plan
from course_lib.planner.predicting import predict
from course_lib.planner.prediction import CAUSES, PredictedStep
from course_lib.planner.searching import SearchResult, search

__all__ = [
    "CAUSES",
    "Cluster",
    "Plan",
    "PredictedStep",
    "SearchResult",
    "cluster_for",
    "cluster_names",
    "find_cluster",
    "predict",
    "search",
]
