"""Mixture of experts: a router sends every token to a few of many small MLPs.

What a token costs follows from the experts that it uses, what the model holds from all of them. A
router left to itself prefers few experts; two rules keep the load even: an auxiliary loss, whose
gradient goes to the router, or a bias per expert, which only selects and is moved against the load.
`course_lib.expert_parallel` divides the experts over ranks. Notebook 16_experts.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from course_lib.core.errors import CourseError
from course_lib.core.specs import Experts, ModelSpec, capacity_of
from course_lib.models.mlp import MLP


class Routing(NamedTuple):
    """Where a router sends tokens.

    experts   [tokens, top_k] int64: chosen experts, the best first; -1: over capacity, dropped
    weights   [tokens, top_k]: what their outputs are multiplied by
    scores    [tokens, num_experts]: all probabilities, of softmax or of a sigmoid each
    """

    experts: Tensor
    weights: Tensor
    scores: Tensor


class Router(nn.Module):
    """A score for every expert, of which a token takes the `active` best.

    Scores are a softmax over the experts, or a sigmoid each. With sigmoids, `bias` is added to
    choose, but not to weigh: `move_bias` moves it against the load, and it has no gradient. With
    experts.normalized the weights of a token are its scores over their sum.

    Shapes:  [tokens, hidden] -> Routing, with scores and weights in fp32 or wider
    Cost:    2 * tokens * hidden * count FLOP
    Source:  Lepikhin et al. 2020 (GShard), section 2.2; DeepSeek-AI 2024 (DeepSeek-V3), section
             2.1.2, equations 13 to 16
    """

    bias: Tensor | None

    def __init__(self, hidden: int, experts: Experts) -> None:
        super().__init__()
        self.experts = experts
        self.linear = nn.Linear(hidden, experts.count, bias=experts.router_bias)
        sigmoid = experts.router == "sigmoid"
        self.register_buffer("bias", torch.zeros(experts.count) if sigmoid else None)

    def forward(self, tokens: Tensor) -> Routing:
        logits = self.linear(tokens)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = logits.softmax(-1) if self.bias is None else logits.sigmoid()
        ranked = scores if self.bias is None else scores + self.bias
        chosen = self.choose(ranked)
        weights = scores.gather(-1, chosen.to(scores.device))
        if self.experts.normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        return Routing(chosen, weights, scores)

    def choose(self, ranked: Tensor) -> Tensor:
        """Return the experts of each token, the best first; on the meta device an even load.

        Shapes:  [tokens, num_experts] -> [tokens, top_k] int64
        """
        if ranked.is_meta:
            return evenly_chosen(len(ranked), self.experts)
        return ranked.topk(self.experts.active, dim=-1).indices


def evenly_chosen(num_tokens: int, experts: Experts) -> Tensor:
    """Return experts for tokens, all in turn: [tokens, top_k] int64, on the CPU."""
    copies = torch.arange(num_tokens * experts.active, device="cpu")
    return (copies % experts.count).view(num_tokens, experts.active)


class ExpertList(nn.ModuleList):
    """Experts, each of which computes its own tokens, in one tensor one expert after the other.

    All experts compute, without tokens as well: every parameter then has a gradient.

    Shapes:  inputs [sum(counts), hidden], counts [experts] -> [sum(counts), hidden]
    Cost:    one wait for the counts, as the sizes of the parts have to be known
    """

    def forward(self, inputs: Tensor, counts: Tensor) -> Tensor:
        """Run each expert on its part of the inputs."""
        parts = inputs.split(counts.tolist())
        return torch.cat([one(part) for one, part in zip(self, parts, strict=True)])


class MoE(nn.Module):
    """Experts in place of the MLP of a layer; every forward records how many tokens each was sent.

    capacity_factor    an expert computes ceil(factor * tokens * top_k / num_experts) tokens of a
                       forward, the first ones, and drops the others; None: it drops none
    aux_weight         each backward adds the gradient of aux_weight * aux_loss, whatever the loss
                       is multiplied by
    aux_loss           of the last forward, [], without its graph
    tokens_per_expert  of the last forward, [num_experts] int64, those over capacity included
    load               [num_experts] int64, the sum over all backwards since `load.zero_()`: a
                       forward that is recomputed counts once, one without gradients does not

    Shapes:  [..., hidden] -> the same
    Saves:   x, scores, the copies that are sent, their outputs and weights, and the experts' own
    Source:  Shazeer et al. 2017, section 2; Fedus et al. 2021 (Switch), section 2.2; the shared
             expert: DeepSeek-AI 2024 (DeepSeek-V3), equation 12
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        experts = spec.experts
        if experts is None:
            raise CourseError(
                f"MoE: need a spec with experts; got {spec.name}, which is dense. "
                "Try MODELS['moe-tiny']."
            )
        self.router = Router(spec.hidden, experts)
        self.experts = ExpertList(
            MLP(spec, experts.ffn_hidden, experts.bias) for _ in range(experts.count)
        )
        self.shared = MLP(spec, experts.shared_hidden) if experts.shared_hidden else None
        gated = experts.shared_gate and self.shared is not None
        self.shared_gate = nn.Linear(spec.hidden, 1, bias=False) if gated else None
        self.capacity_factor, self.aux_weight = experts.capacity, 0.0
        self.tokens_per_expert = torch.zeros(experts.count, dtype=torch.int64)
        self.aux_loss = torch.zeros(())
        self.load = self.tokens_per_expert.clone()  # no buffer: DDP would broadcast it

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)  # [tokens, hidden]
        routing = self.router(tokens)
        loss = self.record(routing)
        if self.capacity_factor is not None:
            routing = drop(routing, self.capacity_factor)
        y = self.run_experts(tokens, routing)
        if self.shared is not None:
            shared = self.shared(tokens)
            if self.shared_gate is not None:
                shared = shared * self.shared_gate(tokens).sigmoid()
            y = y + shared
        return _AddLoss.apply(y, loss, self).view(x.shape)

    def record(self, routing: Routing) -> Tensor:
        """Keep the load of a forward; return its auxiliary loss, with its graph."""
        counts = count_tokens(routing.experts, routing.scores.shape[1])
        self.tokens_per_expert = counts.to(routing.scores.device)
        loss = aux_loss(routing)
        self.aux_loss = loss.detach()
        return loss

    def run_experts(self, tokens: Tensor, routing: Routing) -> Tensor:
        """Return each token's weighted sum of its experts' outputs; `parallelize_experts` replaces.

        Shapes:  [tokens, hidden] and Routing -> [tokens, hidden]
        """
        order, counts = expert_order(routing.experts, len(self.experts))
        order = order.to(tokens.device)
        inputs = tokens[order // routing.experts.shape[1]]  # [sent, hidden], expert by expert
        outputs = self.experts(inputs, counts) * routing.weights.flatten()[order][:, None]
        own = outputs.new_zeros(tokens.shape)
        own = own.index_add(0, order // routing.experts.shape[1], outputs)
        return own.to(tokens.dtype)


class _AddLoss(torch.autograd.Function):
    """An output as it is, whose backward adds the auxiliary loss's gradient and the load.

    A pipeline stage that knows no loss, and a forward that is recomputed, need no more than this.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor, layer: MoE) -> Tensor:
        ctx.layer, ctx.counts = layer, layer.tokens_per_expert
        ctx.weight = loss.new_tensor(layer.aux_weight)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.layer.load = ctx.layer.load.to(ctx.counts.device) + ctx.counts
        return grad, ctx.weight, None


def expert_order(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the copies of tokens in the order of their experts, and how many each expert has.

    Copy n belongs to token n // top_k; those that are dropped (-1) are left out. An expert's tokens
    stay in their order.

    Shapes:  [tokens, top_k] -> [sent], [num_experts], int64
    """
    flat = experts.flatten()
    counts = count_tokens(experts, num_experts)
    return flat.argsort(stable=True)[int((flat < 0).sum()) :], counts


def count_tokens(experts: Tensor, num_experts: int) -> Tensor:
    """Count how many tokens each expert was sent: [tokens, top_k] -> [num_experts]."""
    return torch.bincount(experts.flatten() + 1, minlength=num_experts + 1)[1:]


def drop(routing: Routing, factor: float) -> Routing:
    """Mark with -1 what is over an expert's capacity, as `capacity_of` counts it.

    Its last tokens are dropped; the weights of the others stay as they are.
    """
    num_experts = routing.scores.shape[1]
    order, counts = expert_order(routing.experts, num_experts)
    starts = (counts.cumsum(0) - counts).repeat_interleave(counts)  # of each one's expert
    place = torch.arange(len(order), device=order.device) - starts
    late = order[place >= capacity_of(routing.experts.numel(), num_experts, factor)]
    experts = routing.experts.flatten().index_fill(0, late, -1)
    return routing._replace(experts=experts.view_as(routing.experts))


def aux_loss(routing: Routing, tokens_per_expert: Tensor | None = None) -> Tensor:
    """Return num_experts * sum f_i P_i: 1 when the load is even, at most num_experts.

    f_i is the share of expert i in all copies of tokens and has no gradient; P_i is the mean over
    tokens of its score, as a share of all its scores.

    tokens_per_expert   [num_experts], of the tokens of all ranks; None: of these ones

    Shapes:  Routing -> []
    Source:  Fedus et al. 2021 (Switch), equations 4 to 6, divided by top_k; sigmoids: DeepSeek-AI
             2024 (DeepSeek-V3), equations 17 to 20
    """
    num_experts = routing.scores.shape[1]
    if tokens_per_expert is None:
        tokens_per_expert = count_tokens(routing.experts, num_experts)
    shares = tokens_per_expert / tokens_per_expert.sum().clamp(min=1)
    scores = routing.scores / routing.scores.sum(-1, keepdim=True)
    means = scores.sum(0) / max(len(scores), 1)
    return num_experts * (shares.to(scores) * means).sum()


def move_bias(bias: Tensor, tokens_per_expert: Tensor, step: float) -> Tensor:
    """Return a router's bias, moved by `step` against the load: up for experts with too few tokens.

    router.bias.copy_(move_bias(router.bias, layer.load, 1e-3))

    Shapes:  [num_experts], [num_experts] -> [num_experts]
    Source:  Wang et al. 2024 (auxiliary-loss-free load balancing), algorithm 1; DeepSeek-AI 2024
             (DeepSeek-V3), section 2.1.2
    """
    load = tokens_per_expert.to(bias.dtype)
    return bias + step * (load.mean() - load).sign()
