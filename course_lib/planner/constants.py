"""The constants of the predictor: what each means, and the published rows it was fitted on.

Everything else follows from the sizes of the model, the plan, data sheets and link profiles.
`docs/planner.md` shows the fit and its cross-validation. Notebook 12_planner.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from course_lib.core.recipes import BF16_FP32_GRADS, FP32, Recipe
from course_lib.memory.layer_bytes import PAPER, Kernels

# --- of the device

# Share of the peak that a large matrix product reaches, over hours. The best single product reaches
# 0.87 on an A100 and 0.80 on an H100 (stas00/ml-engineering, accelerators); a training step stays
# below it, because the clock falls under the power limit. Fitted: A100 on Korthikanti Table 5, SC21
# Table 1, vTrain multi-node and llm-foundry; H100 on llm-foundry and the Ultra-Scale Playbook.
# No run on a B200 or GB200 is published beside these: they take the share of an H100.
REACHED: Mapping[str, float] = {
    **{"a100-80": 0.80, "a100-40": 0.80},
    **{"h100": 0.57, "h200": 0.57, "b200": 0.57, "gb200": 0.57},
}
REACHED_ELSEWHERE = 0.65  # between the two: not fitted

# Depth (k of [m, k] x [k, n]) at which a product reaches half of that: each output tile is started
# and stored once, however deep it is. Fitted on the same rows.
HALF_DEPTH = 240

# Multiprocessors of a device: tiles of 128 x 256 numbers are computed in waves of so many. The last
# wave is half empty on average. Data sheets.
MULTIPROCESSORS: Mapping[str, int] = {
    **{"a100-80": 108, "a100-40": 108},
    **{"h100": 132, "h200": 132, "b200": 148, "gb200": 148},
}
MULTIPROCESSORS_ELSEWHERE = 84
TILE = (128, 256)

# Share of the data sheet's memory bandwidth that streaming kernels reach. Set, not fitted.
STREAMED = 0.85

# Share of what matrix products reach that the batched products of unfused attention reach: their
# depth is only a head's size. Set, not fitted.
BATCHED_PRODUCTS = 0.5

# Bytes read and written per logit, forward and backward: bf16 logits, their fp32 copy, maximum,
# exponential, sum, gradient. Fitted on llm-foundry's small models, where the head dominates.
BYTES_PER_LOGIT = 42

# Bytes read and written per attention score without a fused kernel, forward: scale, mask, softmax
# and dropout. Fitted on Korthikanti Table 5 and SC21 Table 1.
BYTES_PER_SCORE = 8.6

# Times that each number of a copy of a token is read or written besides its expert: once each when
# it is copied into the order in which it is sent, and when its result is added to the others;
# sorting by expert between is part of fused kernels. Chosen out of 4, 6 and 8 on the rows of
# moe.csv that are marked as fitted.
PERMUTED = 4

# Tokens of the experts of the rank that has most of them, relative to the mean: the layer waits for
# it. Chosen by us: rows of moe.csv whose router was not forced to balance want 1.05 (Mixtral, 8
# experts) to more than 1.5 (Qwen3, 128 experts), and their mean error is the same for all of these.
IMBALANCE = 1.2

# Share of a GPU's memory that a training step can use. The nine runs of the Playbook above 70 of 80
# GiB took 3 to 7 times as long as predicted, probably because PyTorch's allocator frees its cache
# and retries.
USABLE = 0.9

# Speed of fp8 matrix products relative to bf16, casts and scales included; the peak's ratio is 2.
# Chosen by us, checked on llm-foundry's fp8 rows.
FP8_SPEED = 1.5


@dataclass(frozen=True, kw_only=True)
class Software:
    """A training program, as far as it decides time and memory on a GPU.

    title               the program whose runs the constants describe
    zero, schedules     ZeRO stages and pipeline schedules that it has
    products            speed of its large matrix products, relative to `REACHED`
    passes              times that the activations between matrix products are read and written,
                        relative to one fused kernel for each norm, residual sum and activation
    attention           share of the speed of matrix products that its fused attention reaches
    host_s              seconds in which the host launches the kernels of a layer's forward
    host_tp_s           seconds more with tensor parallelism: its collectives and their waits
    host_routed_s       seconds more with experts: routing, sorting, grouped products
    imbalance           tokens of the experts of the rank that has most, relative to the mean; 1 if
                        the program sends them evenly by force, as in benchmarks
    sends_once          a token goes to a node once, and inside it to its experts (DeepEP)
    hides_routing       tokens are sent while the rank computes for another micro-batch
    step_s              seconds of a step whatever its plan: data, gradient norm, logging
    bucket_bytes        gradients of one message; 0: all in one
    overlaps            whether gradients are sent while backward still computes
    contention          seconds that computation loses per second of communication behind it
    balances_head       whether the output layer counts when layers are divided over stages
    selective_share     part of a layer's forward that selective recomputation repeats when
                        attention is fused
    splits_messages     whether the tp ranks each send their part between stages
    recipe              bytes per parameter
    kernels             what its kernels save for backward
    """

    title: str = "a program of your own"
    zero: Sequence[int] = (0, 1, 2, 3)
    schedules: Sequence[str] = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
    products: float = 1.0
    passes: float
    attention: float = 0.4
    host_s: float = 1e-4
    host_tp_s: float = 0.0
    host_routed_s: float = 0.0
    imbalance: float = IMBALANCE
    sends_once: bool = False
    hides_routing: bool = False
    step_s: float = 0.0
    bucket_bytes: float = 0.0
    overlaps: bool = True
    contention: float = 0.0
    balances_head: bool = False
    selective_share: float = 0.0
    splits_messages: bool = False
    recipe: Recipe = field(default=BF16_FP32_GRADS)
    kernels: Kernels = field(default=PAPER)


SOFTWARE: Mapping[str, Software] = {
    # Megatron-LM of 2021 and 2022. passes: set, its kernels are fused. attention: llm-foundry on
    # A100. Gradients are reduced after the last backward, as one buffer (Korthikanti, section 6.3).
    "megatron": Software(
        title="Megatron-LM of 2021 and 2022",
        zero=(0, 1),
        schedules=("1f1b", "interleaved"),
        passes=1.0,
        overlaps=False,
        splits_messages=True,
    ),
    # nanotron of the Ultra-Scale Playbook: passes, host_s, host_tp_s, step_s and bucket_bytes are
    # fitted on its 1B and 8B runs with an MFU of 20 % or more and TP of at most 8. kernels: RMSNorm
    # saves fp32 copies; the loss has bf16 and fp32 logits, softmax and gradient.
    "nanotron": Software(
        title="nanotron (Ultra-Scale Playbook)",
        zero=(0, 1),
        schedules=("gpipe", "1f1b"),
        passes=1.7,
        attention=0.5,
        host_s=6.2e-4,
        host_tp_s=8e-4,
        step_s=0.04,
        bucket_bytes=160e6,
        balances_head=True,
        splits_messages=True,
        kernels=Kernels(fused_rms=False, loss_bytes=12),
    ),
    # FSDP: passes, attention and contention are fitted on torchtitan's Llama 3 8B (half of the runs
    # compiled) and llm-foundry on H100. selective_share: every second product is saved.
    "torchtitan": Software(
        title="torchtitan (FSDP)",
        zero=(0, 2, 3),
        schedules=("gpipe", "1f1b", "interleaved", "zb-v"),
        passes=1.5,
        attention=0.33,
        contention=0.13,
        selective_share=0.5,
    ),
    # Models with experts on H100: products, attention and host_routed_s are fitted on the rows of
    # moe.csv that are marked so, for both programs together. Kernels are fused.
    # contention: DeepEP takes 20 of 132 multiprocessors (DeepSeek-V3, section 3.2.2).
    # selective_share: set, norms and activations are computed again.
    "megatron-core": Software(
        title="Megatron-Core of 2025",
        zero=(0, 1),
        schedules=("1f1b", "interleaved"),
        products=1.15,
        passes=1.0,
        attention=0.85,
        host_routed_s=3.5e-3,
        contention=0.15,
        selective_share=0.05,
        splits_messages=True,
        sends_once=True,
    ),
    "automodel": Software(
        title="NeMo AutoModel (FSDP)",
        zero=(0, 1, 2, 3),
        schedules=("1f1b", "interleaved"),
        products=1.15,
        passes=1.0,
        attention=0.85,
        host_routed_s=3.5e-3,
        contention=0.15,
        selective_share=0.05,
        sends_once=True,
    ),
    # eager PyTorch on a CPU: everything the host does is compute
    "eager": Software(
        title="eager PyTorch on a CPU",
        passes=3.0,
        host_s=0.0,
        bucket_bytes=25 * 2**20,
        recipe=FP32,
    ),
}


@dataclass(frozen=True, kw_only=True)
class MedianError:
    """The median error of predicted steps on runs that were measured.

    table    of `scores.score_table`, whose numbers these are
    runs     which runs, in words
    count    how many
    error    median of the absolute errors of the step, relative to the measured one
    beyond   where the error is larger, in words
    experts  the runs are of models with experts
    fitted   on which runs constants were fitted
    """

    table: str
    runs: str
    count: int
    error: float
    beyond: str = ""
    experts: bool = False
    fitted: str = "some of them"


_VTRAIN = MedianError(
    table="vTrain, multi-node A100", runs="vTrain's runs on A100 nodes", count=54, error=0.042
)
# By profile; the others have no measured runs. docs/planner.md, Score; tests/planner/test_scores.py
# computes them again.
MEASURED: Mapping[str, MedianError] = {
    "selene-a100": _VTRAIN,
    "vtrain-a100": _VTRAIN,
    "hf-h100": MedianError(
        table="Playbook H100, step, MFU >= 30 %, TP <= 8",
        runs="the Ultra-Scale Playbook's runs with an MFU of 30 % or more",
        count=153,
        error=0.022,
        beyond="over all its 1,027 runs it is 39 %",
    ),
    "torchtitan-h100": MedianError(
        table="torchtitan, Llama 3 8B on H100",
        runs="torchtitan's runs of Llama 3 8B on H100",
        count=16,
        error=0.081,
    ),
    "dgx-h100": MedianError(
        table="experts on H100, runs in no fit",
        runs="Megatron-Core's, NeMo AutoModel's and DeepSeek's runs of models with experts",
        count=23,
        error=0.147,
        experts=True,
        fitted="others",
    ),
}
