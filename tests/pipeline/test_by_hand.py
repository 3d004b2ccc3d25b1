"""The schedule by hand: each par is reached by the course's own schedule, and refusals are true."""

import re
import sys
from dataclasses import replace
from itertools import product

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from course_lib.core import CourseError
from course_lib.pipeline import (
    Schedule,
    breadth_first,
    interleaved,
    naive,
    read_schedule,
    run_schedule,
    simulate,
    split_model,
    v_placement,
    zero_bubble_v,
)
from course_lib.pipeline.actions import as_text, depths_of, placement_of
from course_lib.pipeline.levels import LEVELS, Level, clock_of, moves_of, name_of, read_moves
from course_lib.pipeline.live_by_hand import BY_HAND, UNIT_S, by_hand_drawing
from course_lib.pipeline.schedule_rules import check_schedule

cloudpickle.register_pickle_by_value(sys.modules[__name__])

NAMES = ["GPipe", "1F1B", "1F1B", "1F1B", "interleaved 1F1B", "ZB-H1", "ZB-V", "1F1B"]
NAMES += ["breadth-first"]


def built(level: Level, moves: list[str]) -> Schedule:
    placed = read_moves(level, " ".join(moves))
    ranks = range(len(level.reference))
    return [[action for at, action in placed if at == rank] for rank in ranks]


@pytest.mark.parametrize(("name", "known"), [*zip(LEVELS, NAMES, strict=True)])
def test_the_courses_own_schedule_reaches_par_by_moves_that_are_allowed(name: str, known: str):
    level = LEVELS[name]
    moves = moves_of(level, level.reference)
    schedule = built(level, moves)
    assert schedule == level.reference
    check_schedule(schedule, num_micro_batches=level.num_micro_batches, max_in_flight=level.limit)
    step = simulate(schedule, level.times)
    clock = clock_of(replace(level, gather_s=0.0), read_moves(level, " ".join(moves)))
    for rank, actions in enumerate(schedule):
        played = zip(step.starts_s[rank], step.ends_s[rank], strict=True)
        assert [clock[action] for action in actions] == list(played)
    assert (level.bound if level.gather_s else step.step_s) == level.par >= level.bound
    drawing = by_hand_drawing(name, " ".join(moves), 0)
    assert f"Done in {level.par:g}, par:" in drawing.finding
    assert f"This is {known}." in drawing.finding
    assert all(reason for row in list(drawing.buttons.values())[:-1] for *_, reason in row)


@pytest.mark.parametrize("name", LEVELS)
def test_help_leads_to_par(name: str):
    level, moves = LEVELS[name], ""
    for _ in range(sum(map(len, level.reference))):
        drawing = by_hand_drawing(name, moves, 3)
        told = drawing.note.rpartition("goes on with ")[2].rstrip(".").partition(" on ")
        (moves,) = (
            value
            for label, _, value, reason in drawing.buttons[told[2]]
            if label == told[0] and not reason
        )
    assert built(level, moves.split()) == level.reference


@pytest.mark.parametrize(
    ("name", "moves", "says"),
    [
        ("1 GPipe", "1F", "F0 on rank 1: it needs F0 of rank 0"),
        ("1 GPipe", "0F 0B", "B0 on rank 0: it needs B0 of rank 1"),
        ("2 memory wall", "0F 0F 0F 0F", "rank 0 has memory for 3 in flight"),
        ("4 few micro-batches", "0F 0F 0F", "all 2 micro-batches are placed"),
        ("5 interleaved", "0F 0F.1", "F0.1 on rank 0: it needs F0 of rank 1"),
        ("6 zero bubble", "0F 0W", "W0 on rank 0: it needs I0 of rank 0"),
        ("6 zero bubble", "0B", "need one such as 0F"),
        ("7 ZB-V", "0F 1F 0F.1", "F0.1 on rank 0: it needs F0.1 of rank 1"),
        ("1 GPipe", "3F", "no rank or chunk"),
        ("1 GPipe", "0F.1", "no rank or chunk"),
        ("1 GPipe", "F0", "need one such as 0F"),
    ],
)
def test_a_place_that_is_not_allowed_is_refused_with_its_reason(name: str, moves: str, says: str):
    with pytest.raises(CourseError, match=says):
        by_hand_drawing(name, moves, 0)
    assert says in BY_HAND.answer({"level": name, "moves": moves})


def test_an_order_above_par_is_told_so_and_has_no_name():
    level = LEVELS["2 memory wall"]
    late = ["0F", "1F", "2F", "2B", "1B", "0B"] * level.num_micro_batches
    drawing = by_hand_drawing("2 memory wall", " ".join(late), 0)
    assert "Done in 30, above par" in drawing.finding
    assert "This is naive." in drawing.finding
    lazy = [*late[:3], "0F", *late[3:]]
    lazy.pop(len(lazy) - 6)
    assert name_of(built(level, lazy), level.num_micro_batches) == ""


def test_a_schedule_is_read_back_from_its_text():
    schedule = zero_bubble_v(3, 6)
    assert read_schedule(as_text(schedule), v_placement(3)) == schedule
    for text in ("rank 1  F0", "rank 0  G0", "rank 0  F0.5\nrank 1  F0", "rank"):
        with pytest.raises(CourseError, match="need"):
            read_schedule(text, v_placement(2) if ".5" in text else None)


def steps_s(level: Level) -> set[float]:
    """Seconds of the step in every order that is allowed."""
    orders = {tuple(() for _ in level.reference): ""}
    ways = [*product(range(len(level.reference)), level.kinds, range(level.num_model_chunks))]
    for _ in range(sum(map(len, level.reference))):
        longer = {}
        for schedule, moves in orders.items():
            for rank, kind, chunk in ways:
                action = level.action(schedule, rank, kind, chunk)
                if not level.refusal(schedule, rank, action):
                    grown = [*schedule]
                    grown[rank] = (*grown[rank], action)
                    longer[tuple(grown)] = f"{moves} {rank}{kind[0].upper()}.{chunk}"
        orders = longer
    return {
        max(end_s for _, end_s in clock_of(level, read_moves(level, moves)).values())
        for moves in orders.values()
    }


def test_where_gathers_count_par_is_the_best_of_all_orders():
    level = replace(LEVELS["9 FSDP and pipeline"], reference=breadth_first(2, 2, 2))
    found = steps_s(level)
    assert len(found) > 5
    assert min(found) == level.par == level.bound
    hasty = " ".join(moves_of(level, interleaved(2, 4, 2)))
    assert "Done in 17.5, above par" in by_hand_drawing("9 FSDP and pipeline", hasty, 0).finding


def grads(rank: int, schedule: Schedule) -> list[torch.Tensor]:
    """The gradients of this rank's layers after one step, in float64."""
    torch.manual_seed(3)
    layers = nn.Sequential(*(nn.Linear(5, 5) for _ in range(4))).double()
    micro_batches = torch.randn(4, 2, 5, dtype=torch.float64).unbind()
    stage = split_model(layers, dist.get_world_size(), rank, placement=placement_of(schedule))
    run_schedule(schedule, stage, micro_batches, micro_batches, F.mse_loss)
    return [param.grad for param in stage.parameters()]


@pytest.mark.parametrize("name", [*LEVELS][4:7] + [*LEVELS][8:])
def test_the_copied_cell_runs_on_real_ranks(name: str, pools, monkeypatch, capsys):
    level, scope = LEVELS[name], dict[str, object]()
    monkeypatch.setattr("course_lib.ranks.Ranks", pools)
    exec(by_hand_drawing(name, " ".join(moves_of(level, level.reference)), 0).command, scope)
    assert scope["schedule"] == level.reference
    took, simulated = map(float, re.findall(r"(\S+) s ", capsys.readouterr().out))
    assert simulated == pytest.approx(simulate(level.reference, level.times).step_s * UNIT_S)
    assert took >= simulated - 1e-3  # what waits cannot be too early
    if len(level.reference) == 2:
        (alone,) = pools(1).run(grads, [naive(1, level.num_micro_batches)[0]])
        by_depth = {
            depth: found[2 * chunk : 2 * chunk + 2]  # a layer: weight and bias
            for rank, found in enumerate(pools(2).run(grads, scope["schedule"]))
            for chunk, depth in enumerate(depths_of(rank, level.placement))
        }
        found = [grad for depth in sorted(by_depth) for grad in by_depth[depth]]
        torch.testing.assert_close(found, alone, rtol=1e-12, atol=0)
