from course_lib.core.cycles import shortest_cycle


def test_the_shortest_cycle_is_found():
    assert shortest_cycle({0: (3,), 1: (0,), 2: (1,), 3: (2,)}) == [0, 3, 2, 1]
    assert shortest_cycle({0: (1, 2, 3), 1: (2,), 2: (1,), 3: ()}) == [1, 2]
    assert shortest_cycle({0: (1,), 1: (2,)}) == []


def test_a_cycle_is_found_behind_a_branch_that_leads_nowhere():
    assert shortest_cycle({0: (1, 2), 1: (3,), 2: (0,), 3: (4,)}) == [0, 2]
