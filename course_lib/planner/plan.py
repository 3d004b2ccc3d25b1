"""A plan: how a model is split over GPUs, and how a global batch passes through it.

`Parallelism` has the sizes of the axes and the ZeRO stage; a `Plan` adds what the step time and the
memory depend on besides. Ranks are placed tp innermost, then cp, dp, and pp outermost, as in
Megatron-LM: the axis that sends most gets the neighbours. Expert parallelism has no ranks of its
own; see `course_lib.planner.experts` for its groups. Notebook 12_planner.
"""

from dataclasses import dataclass, field, replace

from course_lib.core.errors import CourseError
from course_lib.core.parallelism import Parallelism
from course_lib.core.specs import ModelSpec
from course_lib.cost.flops import RECOMPUTE

PRECISIONS = ("bf16", "fp16", "fp32", "fp8")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v")
PAPER_WORDS = {"1f1b-i": "interleaved", "zb-1p": "zb-h1", "zb-2p": "zb-h2", "zbv": "zb-v"}
COUNTS = ("num_model_chunks", "micro_batch", "num_micro_batches", "seq")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A way to train: sizes of the axes, pipeline schedule, batch, recomputation, precision.

    parallelism        dp, tp, pp, cp, zero, sequence_parallel, ep, expert_tp. zero=3 is ZeRO-3 or
                       FSDP, which send the same bytes
    schedule           of the pipeline: gpipe, 1f1b, interleaved, zb-h1, zb-h2 or zb-v
    num_model_chunks   per rank; above 1 the schedule is interleaved (zb-v has 2)
    micro_batch        sequences of a micro-batch
    num_micro_batches  of a step: per pipeline, or gradient accumulation steps without one
    seq                tokens of a sequence
    flash              attention in one fused kernel, which saves no scores
    precision          of the matrix products; weights have fp32 masters, unless it is fp32

    Raises: CourseError for values that do not go together
    """

    parallelism: Parallelism = field(default_factory=Parallelism)
    schedule: str = "1f1b"
    num_model_chunks: int = 1
    micro_batch: int = 1
    num_micro_batches: int = 1
    seq: int = 4096
    recompute: str = "none"
    flash: bool = True
    precision: str = "bf16"

    def __post_init__(self) -> None:
        for name in COUNTS:
            count = getattr(self, name)
            if type(count) is not int or count < 1:
                raise CourseError(
                    f"Plan: need {name} as a whole number above 0; got {count!r}. Try {name}=1."
                )
        for name, words in (
            ("schedule", SCHEDULES),
            ("recompute", RECOMPUTE),
            ("precision", PRECISIONS),
        ):
            if getattr(self, name) not in words:
                raise CourseError(
                    f"Plan: need {name} out of {', '.join(words)}; got {getattr(self, name)!r}."
                )
        self._check_chunks()

    def _check_chunks(self) -> None:
        chunks, pp = self.num_model_chunks, self.parallelism.pp
        wanted = {"interleaved": chunks > 1, "zb-v": chunks == 2}.get(self.schedule, chunks == 1)
        if not wanted:
            raise CourseError(
                f"Plan: need model chunks that go with the schedule {self.schedule}; got {chunks}. "
                f'Try schedule="{"1f1b" if chunks == 1 else "interleaved"}".'
            )
        if chunks > 1 and pp == 1:
            raise CourseError(
                f"Plan: need pp above 1 for {chunks} model chunks; got pp=1. "
                "Try num_model_chunks=1."
            )

    @property
    def world_size(self) -> int:
        """Number of GPUs."""
        return self.parallelism.world_size

    @property
    def global_batch(self) -> int:
        """Sequences of a step: micro_batch * num_micro_batches * dp."""
        return self.micro_batch * self.num_micro_batches * self.parallelism.dp

    @property
    def pipeline_words(self) -> str:
        """Schedule of the pipeline, or that there is none."""
        return self.schedule if self.parallelism.pp > 1 else "no pipeline"

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.global_batch * self.seq

    def check(self, model: ModelSpec) -> None:
        """Check that the model can be trained that way.

        Raises: CourseError for axes, model chunks or a sequence that the model does not allow
        """
        axes = self.parallelism
        axes.check(model)
        if self.seq % (axes.cp * (axes.tp if axes.sequence_parallel else 1)):
            raise CourseError(
                f"Plan: need seq divisible by cp, and by tp with sequence parallelism; got "
                f"{self.seq}, cp={axes.cp} and tp={axes.tp}. Try a smaller cp."
            )
        if model.experts is not None and axes.tp > 1 and not axes.sequence_parallel:
            raise CourseError(
                "Plan: need sequence_parallel with tp above 1 for a model with experts, because "
                f"each rank sends tokens of its own; got tp={axes.tp} without. "
                "Try sequence_parallel=True."
            )
        if axes.pp * self.num_model_chunks > model.num_layers:
            raise CourseError(
                f"Plan: need pp * num_model_chunks of at most the {model.num_layers} layers of "
                f"{model.name}; got {axes.pp} * {self.num_model_chunks}. Try fewer model chunks."
            )
        if self.schedule == "interleaved" and self.num_micro_batches % axes.pp:
            raise CourseError(
                "Plan: need num_micro_batches divisible by pp when the schedule is interleaved; "
                f"got {self.num_micro_batches} and {axes.pp}. "
                f"Try num_micro_batches={-(-self.num_micro_batches // axes.pp) * axes.pp}."
            )

    def with_axes(self, **sizes: int | bool) -> "Plan":
        """Return the plan with other sizes of the axes: `plan.with_axes(tp=4, dp=2)`."""
        return replace(self, parallelism=replace(self.parallelism, **sizes))  # type: ignore[arg-type]

    @property
    def short(self) -> str:
        """Axes and recomputation, as a row of a table has room for: `dp2 tp4 zero1 sp`."""
        words = [*self._sizes(), *["sp"] * self.parallelism.sequence_parallel]
        return " ".join([*words, *[f"recompute {self.recompute}"] * (self.recompute != "none")])

    def _sizes(self) -> list[str]:
        axes = self.parallelism
        words = [f"{name}{getattr(axes, name)}" for name in ("dp", "tp", "pp", "cp")]
        words = [word for word in words if not word.endswith("p1")] or ["1 GPU"]
        words += [f"ep{axes.ep}"] * (axes.ep > 1)
        words += [f"etp{axes.expert_tensor}"] * (axes.expert_tensor != axes.tp)
        return [*words, *[f"zero{axes.zero}"] * (axes.zero > 0)]

    def __str__(self) -> str:
        words = [*self._sizes(), *["sequence-parallel"] * self.parallelism.sequence_parallel]
        words += [f"{self.num_model_chunks} chunks"] * (self.num_model_chunks > 1)
        several = "es" * (self.num_micro_batches > 1)
        words += [f"{self.num_micro_batches} micro-batch{several} of {self.micro_batch}"]
        return ", ".join([*words, *[f"recompute {self.recompute}"] * (self.recompute != "none")])


def schedule_named(word: str) -> str:
    """Return the schedule that a table means by a word, in any case, such as 1F1B-I or ZB-1p.

    ZB-1p and ZB-2p are found by search in the memory of ZB-H1 and ZB-H2, which stand for them.

    Raises: CourseError that names the schedules

    Source: Qi et al. 2024 (Zero bubble pipeline parallelism), sections 2 and 3
    """
    found = PAPER_WORDS.get(word.lower(), word.lower())
    if found not in SCHEDULES:
        raise CourseError(
            f"schedule: need one of {', '.join((*SCHEDULES, *PAPER_WORDS))}; got {word!r}."
        )
    return found
