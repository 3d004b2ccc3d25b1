"""Communication of each axis of a mesh in a step: calls, bytes, seconds on two-level links.

The calls are those of each method's own `cost.py`: tensor parallelism's all-reduces in every layer
and micro-batch, the pipeline's messages at every boundary, one all-reduce of this rank's gradients
along dp. Nothing is hidden behind computation here, so the seconds compare orders of axes; they do
not predict a step. Notebook 11_mesh.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations

from course_lib.core.errors import MeshError, ShapeError
from course_lib.core.parallelism import Parallelism
from course_lib.core.specs import ModelSpec
from course_lib.cost.network import AnyLink
from course_lib.cost.params import layers_on_stage, params_on_rank
from course_lib.cost.traffic import CollectiveCall, sent_bytes, traffic_s
from course_lib.mesh.mesh import Mesh
from course_lib.tensor_parallel.cost import finished_params, tensor_traffic

LOSS = CollectiveCall(phase="finish", part="loss", kind="all_reduce", num_bytes=8)
SUPPORTED = ("pp", "dp", "tp")


@dataclass(frozen=True, kw_only=True)
class MeshStep:
    """One training step of a model on a mesh of pp, dp and tp.

    batch               sequences of a step, all replicas together
    num_micro_batches   of each replica
    number_bytes        of a number of activations and gradients

    Raises: MeshError for other axes, or a model that they cannot split; ShapeError for a batch that
            they cannot share evenly
    """

    spec: ModelSpec
    mesh: Mesh
    batch: int
    seq: int
    num_micro_batches: int
    number_bytes: int = 4

    def __post_init__(self) -> None:
        if others := self.mesh.sizes.keys() - set(SUPPORTED):
            raise MeshError(f"MeshStep: need axes out of pp, dp, tp; got {', '.join(others)}.")
        self.parallelism.check(self.spec)
        together = self.mesh.size("dp") * self.num_micro_batches
        if together < 1 or self.batch % together:
            raise ShapeError(
                f"MeshStep: need batch divisible by dp * num_micro_batches; got {self.batch} and "
                f"{self.mesh.size('dp')} * {self.num_micro_batches}."
            )

    @property
    def parallelism(self) -> Parallelism:
        """The sizes of the axes, without their order."""
        pp, dp, tp = (self.mesh.size(axis) for axis in SUPPORTED)
        return Parallelism(pp=pp, dp=dp, tp=tp)

    @property
    def micro_batch(self) -> int:
        """Sequences of a micro-batch."""
        return self.batch // (self.mesh.size("dp") * self.num_micro_batches)

    @property
    def activation_bytes(self) -> int:
        """Bytes of a micro-batch's activations between two layers: what a pipeline sends."""
        return self.micro_batch * self.seq * self.spec.hidden * self.number_bytes

    def layers_of(self, stage: int) -> range:
        """Return the numbers of a stage's layers, which are divided evenly."""
        counts = [layers_on_stage(self.spec, self.parallelism, n) for n in range(stage + 1)]
        return range(sum(counts[:-1]), sum(counts))


def axis_traffic(step: MeshStep, rank: int = 0) -> dict[str, list[CollectiveCall]]:
    """Return the calls of one rank in a step, by axis; an axis of one rank has none."""
    stage = step.mesh.coordinates(rank).get("pp", 0)
    found = {
        "pp": [*_messages(step, stage), LOSS],
        "dp": [_gradients(step, stage), LOSS],
        "tp": [*step.num_micro_batches * _layer_calls(step, stage), *_finish(step, stage)],
    }
    return {axis: found[axis] if size > 1 else [] for axis, size in step.mesh.sizes.items()}


def axis_sent_bytes(step: MeshStep, rank: int = 0) -> dict[str, float]:
    """Return the bytes that a rank sends along each axis in a step, collectives around rings."""
    traffic = axis_traffic(step, rank)
    return {axis: sent_bytes(calls, step.mesh.size(axis)) for axis, calls in traffic.items()}


def axis_seconds(step: MeshStep, link: AnyLink, rank: int = 0) -> dict[str, float]:
    """Return the seconds of a rank's calls along each axis, one after another, none hidden.

    A message is one between neighbours along pp; a collective takes as long as its slowest link.
    """
    seconds = {}
    for axis, calls in axis_traffic(step, rank).items():
        group = step.mesh.group(rank, axis)
        neighbours = group[:2] if axis == "pp" else group
        seconds[axis] = traffic_s(calls, neighbours, link)
    return seconds


def mesh_step_s(step: MeshStep, link: AnyLink) -> float:
    """Return the seconds of communication of the rank that communicates longest."""
    ranks = range(step.mesh.world_size)
    return max(sum(axis_seconds(step, link, rank).values()) for rank in ranks)


def all_orders(mesh: Mesh) -> list[Mesh]:
    """Return the meshes with these sizes in every order of the axes."""
    return [Mesh(**dict(order)) for order in permutations(mesh.sizes.items())]


def _layer_calls(step: MeshStep, stage: int) -> list[CollectiveCall]:
    """Return tensor parallelism's calls of one micro-batch in the layers of a stage."""
    parts = {f"{name} {n}" for n in step.layers_of(stage) for name in ("attention", "mlp")}
    parts |= {"embedding"} if stage == 0 else set()
    parts |= {"head", "loss"} if stage == step.mesh.size("pp") - 1 else set()
    calls = tensor_traffic(step.spec, step.micro_batch, step.seq, step.number_bytes)
    return [call for call in calls if call.part in parts]


def _finish(step: MeshStep, stage: int) -> Iterator[CollectiveCall]:
    """Yield the sum over tp of the gradients of which each rank has a part, if there are any."""
    tp, layers = step.mesh.size("tp"), len(step.layers_of(stage))
    if numbers := finished_params(step.spec, tp, num_layers=layers):
        size = numbers * step.number_bytes
        yield CollectiveCall(phase="finish", part="norms", kind="all_reduce", num_bytes=size)


def _messages(step: MeshStep, stage: int) -> Iterator[CollectiveCall]:
    """Yield the messages that a stage sends: activations, their gradients, a tied embedding's."""
    last = step.mesh.size("pp") - 1
    for phase, sends in {"forward": stage < last, "backward": stage > 0}.items():
        for _ in range(step.num_micro_batches * sends):
            yield CollectiveCall(
                phase=phase, part="boundary", kind="send", num_bytes=step.activation_bytes
            )
    if step.spec.tied and stage in (0, last):
        table = -(-step.spec.padded_vocab // step.mesh.size("tp")) * step.spec.hidden
        yield CollectiveCall(
            phase="finish", part="embedding", kind="send", num_bytes=table * step.number_bytes
        )


def _gradients(step: MeshStep, stage: int) -> CollectiveCall:
    """Return the all-reduce of the gradients of this rank's part of the model."""
    num_params = params_on_rank(step.spec, step.parallelism, stage)
    return CollectiveCall(
        phase="finish",
        part="gradients",
        kind="all_reduce",
        num_bytes=num_params * step.number_bytes,
    )
