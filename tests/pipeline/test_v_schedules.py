"""Schedules in a V, and the bound that no schedule beats."""

from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from course_lib.core import CourseError
from course_lib.pipeline import (
    Action,
    PipelineTimes,
    ScheduleError,
    dual_pipe_v,
    gpipe,
    interleaved,
    naive,
    one_f_one_b,
    schedule_bound,
    score_schedule,
    simulate,
    v_placement,
    zero_bubble_h1,
    zero_bubble_v,
)
from course_lib.pipeline.actions import (
    LETTERS,
    depths_of,
    loop_placement,
    placement_of,
    sent_from_to,
    source_of,
)
from course_lib.pipeline.schedule_rules import check_schedule
from tests.pipeline.test_schedules import Stage

SIZES = [(p, m) for p in range(1, 7) for m in range(1, 3 * p + 2)]
LONG = [(p, m) for p, m in SIZES if m >= 2 * p]
SCHEDULES = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": lambda p, m: interleaved(p, m, 2),
    "zb-h1": zero_bubble_h1,
    "zb-v": zero_bubble_v,
    "dualpipe-v": dual_pipe_v,
}


def every_schedule(sizes=SIZES):
    """All that can be made, with their sizes."""
    for (p, m), (name, make) in product(sizes, SCHEDULES.items()):
        try:
            schedule = make(p, m)
        except ScheduleError:
            continue
        yield name, p, m, schedule


# --- orders


def torch_order(schedule_class, p, m):
    """Torch's actions on each rank, and the pairs of a forward and a backward among them."""
    stages = [Stage(index, 2 * p, p, group_rank=0) for index in (0, 2 * p - 1)]
    order = schedule_class(stages, m).pipeline_order
    plain, pairs = [], []
    for rank in range(p):
        given = [one for one in order[rank] if one is not None]
        flat = [action for one in given for action in one.sub_actions or (one,)]
        plain.append([torch_name(action) for action in flat])
        pairs.append([tuple(map(torch_name, one.sub_actions)) for one in given if one.sub_actions])
    return plain, pairs


def torch_name(action):
    return action.computation_type.value, action.stage_index, action.microbatch_index


def names(actions, p):
    return [(LETTERS[one.kind], one.depth(p), one.micro_batch) for one in actions]


def test_zb_v_has_the_order_of_torch():
    for p, m in SIZES:
        plain, _ = torch_order(torch_schedules.ScheduleZBVZeroBubble, p, m)
        assert [names(actions, p) for actions in zero_bubble_v(p, m)] == plain, (p, m)


def test_dual_pipe_v_has_the_order_of_torch():
    for p, m in LONG:
        plain, _ = torch_order(torch_schedules.ScheduleDualPipeV, p, m)
        assert [names(actions, p) for actions in dual_pipe_v(p, m)] == plain, (p, m)


def test_the_pairs_that_may_overlap_are_those_of_torch_but_for_one():
    """Torch leaves the first pair of the last rank apart, so that its forward waits for nothing.

    Here a forward never waits for the backward after it, and that pair needs no exception.
    """
    for p, m in LONG:
        _, pairs = torch_order(torch_schedules.ScheduleDualPipeV, p, m)
        pairs[-1].insert(0, (("F", p - 1, p), ("B", p, 0)))
        for actions, wanted in zip(dual_pipe_v(p, m), pairs, strict=True):
            order = names(actions, p)
            found = [
                (one, after)
                for one, after in pairwise(order)
                if (one[0], after[0]) == ("F", "B") and one[2] != after[2]
            ]
            assert found == wanted, (p, m)


def test_dual_pipe_v_takes_2p_micro_batches_or_more_as_torch_does():
    for p in range(1, 6):
        with pytest.raises(ValueError, match="at least as many microbatches as stages"):
            torch_order(torch_schedules.ScheduleDualPipeV, p, 2 * p - 1)
        says = rf"num_micro_batches >= 2 \* num_stages; got {2 * p} and {p + 1}. Try {2 * p + 2}"
        with pytest.raises(ScheduleError, match=says):
            dual_pipe_v(p + 1, 2 * p)


# --- the V


def test_a_rank_of_a_v_holds_the_chunks_r_and_2p_minus_1_minus_r():
    for p, m in LONG:
        for schedule in (zero_bubble_v(p, m), dual_pipe_v(p, m)):
            check_schedule(schedule, num_micro_batches=m)
            assert placement_of(schedule) == v_placement(p)
            for rank, actions in enumerate(schedule):
                assert {action.depth(p) for action in actions} == {rank, 2 * p - 1 - rank}
                assert depths_of(rank, v_placement(p)) == [rank, 2 * p - 1 - rank]


def test_in_flight_stay_within_2p_and_2p_plus_1():
    for p, m in SIZES:
        assert max(simulate(zero_bubble_v(p, m)).peak_in_flight()) == min(2 * p, 2 * m)
    for p, m in LONG:
        peaks = simulate(dual_pipe_v(p, m)).peak_in_flight()
        assert max(peaks) == 2 * p + 1


def test_with_equal_times_no_rank_waits_in_zb_v_from_2p_micro_batches_on():
    """All that is idle is idle before a rank's first input. DualPipeV waits, and ends as early."""
    times = PipelineTimes(forward_s=2, backward_input_s=2, backward_weight_s=2)
    for p, m in LONG:
        step, dual = (simulate(make(p, m), times) for make in (zero_bubble_v, dual_pipe_v))
        assert step.bubble_rate == 0
        assert step.step_s == dual.step_s == 6 * m + p - 1


def test_with_few_micro_batches_or_other_times_ranks_wait():
    assert simulate(zero_bubble_v(4, 6)).bubble_rate > 0
    assert simulate(zero_bubble_v(4, 16), PipelineTimes(backward_weight_s=0.5)).bubble_rate > 0


def test_zb_v_idles_half_as_long_as_zb_h1_in_the_same_memory():
    for p, m in LONG:
        v, h1 = simulate(zero_bubble_v(p, m)), simulate(zero_bubble_h1(p, m))
        assert 2 * v.idle_s[0] == h1.idle_s[0] == p - 1
        assert max(v.peak_in_flight()) == 2 * max(h1.peak_in_flight())  # of half the size


def test_in_a_v_messages_are_not_needed_in_the_order_in_which_they_are_sent():
    """A gradient of chunk 1 is needed before a forward of chunk 0 that was sent before it."""
    schedule = zero_bubble_v(2, 4)
    sent = [one.label for one in sent_from_to(schedule, 0, 1)]
    assert sent == ["F0", "F1", "F2", "I0.1", "I1.1", "F3", "I2.1", "I3.1"]
    needed = [one.label for one in schedule[1] if source_of(one, 2, v_placement(2)) == 0]
    assert needed == ["F0", "F1", "I0.1", "F2", "I1.1", "F3", "I2.1", "I3.1"]


def test_a_chunk_on_two_ranks_and_two_chunks_in_one_are_told():
    def order(*stages):
        return [[Action(kind, s, 0) for kind in ("forward", "backward")] for s in stages]

    check_schedule(order(1, 2, 0))
    with pytest.raises(ScheduleError, match=r"ranks 0 and 2: .* chunk 0; got stage 1 for both"):
        check_schedule(order(1, 2, 1))
    (one,) = order(0)
    with pytest.raises(ScheduleError, match=r"rank 0: need actions of one stage .* stages 0 and 1"):
        check_schedule([[*one, Action("forward", 1, 0)], []])
    with pytest.raises(ScheduleError, match=r"rank 0: need actions of stages 0 to 0, .* stage 1"):
        check_schedule(order(1))


def test_any_placement_has_the_step_of_the_same_ranks_in_another_order():
    given = one_f_one_b(4, 6)
    times = PipelineTimes(forward_s=[1, 3, 2, 1])
    turned = PipelineTimes(forward_s=[1, 2, 3, 1])
    shuffled = [given[stage] for stage in (3, 2, 1, 0)]
    assert placement_of(shuffled) == [3, 2, 1, 0]
    assert simulate(shuffled, turned).step_s == simulate(given, times).step_s


# --- overlap


def test_overlap_hides_the_shorter_of_a_forward_and_the_backward_after_it():
    times = {"forward_s": 4, "backward_input_s": 4, "backward_weight_s": 2}  # a chunk: 2 and 3
    for p, m in ((1, 4), (2, 4), (4, 12)):
        apart, half, at_once = (
            simulate(dual_pipe_v(p, m), PipelineTimes(**times, overlap=overlap))
            for overlap in (0, 0.5, 1)
        )
        assert apart.step_s > half.step_s > at_once.step_s
        assert apart.busy_s == [10 * m] * p
        num_pairs = 2 * (m - 2 * p) + 2 + 2 * (p - 1)  # of rank 0; steps 4 and 5
        assert at_once.busy_s[0] >= 10 * m - 2 * num_pairs
        for starts, ends in zip(at_once.starts_s, at_once.ends_s, strict=True):
            assert starts == sorted(starts)
            assert ends == sorted(ends)
    assert simulate(dual_pipe_v(1, 4), PipelineTimes(**times, overlap=1)).step_s == 40 - 2 * 6


def test_a_backward_does_not_overlap_its_own_forward_or_a_split_half():
    times = PipelineTimes(overlap=1)
    assert simulate(one_f_one_b(1, 3), times).step_s == 9
    assert simulate(zero_bubble_h1(3, 6), times).step_s == simulate(zero_bubble_h1(3, 6)).step_s
    with pytest.raises(CourseError, match="need overlap from 0 to 1; got 2"):
        PipelineTimes(overlap=2)


# --- the bound


def test_no_schedule_beats_the_bound_and_the_zero_bubble_ones_reach_it():
    reached = {"zb-h1": 0, "zb-v": 0, "dualpipe-v": 0}
    for name, p, m, schedule in every_schedule():
        step = simulate(schedule)
        v = len(placement_of(schedule)) // p
        score = score_schedule(schedule, m, max(step.peak_in_flight()) / v)
        assert score.is_valid
        assert score.step_s == step.step_s >= score.bound_s
        assert max(score.peak_in_flight) * v == max(step.peak_in_flight())
        if name in reached:
            reached[name] += score.above_bound == 0
    assert reached["zb-h1"] == len(SIZES)
    assert reached["dualpipe-v"] == len(LONG)
    assert reached["zb-v"] >= len(LONG)


seconds = st.integers(1, 9)


@settings(max_examples=60)
@given(
    p=st.integers(1, 4),
    m=st.integers(1, 9),
    forwards=st.lists(seconds, min_size=8, max_size=8),
    parts=st.tuples(seconds, seconds),
    overlap=st.sampled_from([0, 0.5, 1]),
)
def test_no_schedule_beats_the_bound_whatever_the_times(p, m, forwards, parts, overlap):
    for _, _, _, schedule in every_schedule([(p, m)]):
        placement = placement_of(schedule)
        times = PipelineTimes(
            forward_s=forwards[: len(placement)],
            backward_input_s=parts[0],
            backward_weight_s=parts[1],
            overlap=overlap,
        )
        most = max(simulate(schedule).peak_in_flight()) * p / len(placement)
        score = score_schedule(schedule, m, most, times)
        assert score.step_s >= score.bound_s - 1e-9


class Search:
    """The fastest of all orders, by trying every one: action after action, by their start."""

    def __init__(self, p, m, placement, most, times):
        self.m, self.placement, self.most = m, placement, most
        self.depth_s, self.num_depths = times.by_depth(placement), len(placement)
        self.clock, self.held = [0.0] * p, [0] * p
        work_s = [
            sum(pair)
            for pair in zip(self.depth_s["forward"], self.depth_s["backward"], strict=True)
        ]
        self.left_s = [m * sum(work_s[d] for d in depths_of(rank, placement)) for rank in range(p)]
        self.ends, self.best_s = {}, float("inf")

    def ready(self):
        """Yield what could be done next: start, kind, depth, micro-batch."""
        for depth, i in product(range(self.num_depths), range(self.m)):
            done, rank = self.ends.get, self.placement[depth]
            if ("W", depth, i) in self.ends:
                continue
            if ("I", depth, i) in self.ends:
                kind, needs = "W", ("I", depth, i)
            elif ("F", depth, i) in self.ends:
                last = depth == self.num_depths - 1
                kind, needs = "I", ("F", depth, i) if last else ("I", depth + 1, i)
            else:  # micro-batches are alike: they enter in order
                kind, needs = "F", ("F", depth - 1, i) if depth else ("F", 0, i - 1)
                if self.held[rank] == self.most:
                    continue
            first = kind == "F" and depth == i == 0
            if first or needs in self.ends:
                yield max(self.clock[rank], 0 if first else done(needs)), kind, depth, i

    def run(self, last=(0.0, 0)):
        """Try everything that starts from `last` on; keep the shortest step."""
        if not any(self.left_s):
            self.best_s = min(self.best_s, max(self.clock))
        kinds = {"F": "forward", "I": "backward_input", "W": "backward_weight"}
        for start, kind, depth, i in sorted(self.ready()):
            rank, seconds = self.placement[depth], self.depth_s[kinds[kind]][depth]
            if (start, rank) < last or start + self.left_s[rank] >= self.best_s:
                continue
            before, change = self.clock[rank], {"F": 1, "I": 0, "W": -1}[kind]
            self.clock[rank] = self.ends[kind, depth, i] = start + seconds
            self.held[rank] += change
            self.left_s[rank] -= seconds
            self.run((start, rank))
            self.clock[rank] = before
            self.held[rank] -= change
            self.left_s[rank] += seconds
            del self.ends[kind, depth, i]


TINY = [
    (p, m, placement, most)
    for p, m, placement in [
        (1, 2, loop_placement(1)),
        (2, 1, loop_placement(2)),
        (2, 2, loop_placement(2)),
        (2, 3, loop_placement(2)),
        (3, 2, loop_placement(3)),
        (3, 3, loop_placement(3)),
        (2, 1, v_placement(2)),
        (2, 2, v_placement(2)),
    ]
    for most in range(len(placement) // p, m * len(placement) // p + 1)
]


@pytest.mark.parametrize("parts", [(2, 2, 2), (2, 4, 2), (4, 2, 2), (2, 2, 6)], ids=str)
def test_the_best_of_all_orders_does_not_beat_the_bound_and_mostly_reaches_it(parts):
    reached = 0
    times = PipelineTimes(forward_s=parts[0], backward_input_s=parts[1], backward_weight_s=parts[2])
    for p, m, placement, most in TINY:
        search = Search(p, m, placement, most, times)
        search.run()
        bound_s = schedule_bound(p, m, most * p / len(placement), times, placement)
        assert search.best_s >= bound_s, (p, m, placement, most)
        reached += search.best_s == bound_s
    assert reached > len(TINY) / 2


def test_an_order_that_breaks_a_rule_or_the_limit_says_so():
    given = gpipe(2, 4)
    assert score_schedule(given, 4).is_valid
    limited = score_schedule(given, 4, max_in_flight=3)
    assert limited.problem.startswith("rank 0: need at most 3 micro-batches in flight; got 4")
    assert not limited.is_valid
    assert limited.step_s == limited.above_bound == float("inf")
    assert "need F4" in score_schedule(given, 5).problem
    halves = score_schedule(zero_bubble_v(2, 4), 4, max_in_flight=1.5)
    assert "at most 3" in halves.problem
    for wrong in ({"max_in_flight": 0.5}, {"times": PipelineTimes(micro_batch_scale=[1, 2])}):
        with pytest.raises(CourseError, match="need max_in_flight of 1 micro-batch or more"):
            schedule_bound(2, 2, **wrong)
