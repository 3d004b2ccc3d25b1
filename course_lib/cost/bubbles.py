"""What a pipeline wastes and holds, in formulas: p stages, m micro-batches, v model chunks.

The bubble is the time in which a rank has nothing to do. As an overhead it is counted in parts of
the time that a rank computes; as a fraction, in parts of the whole step. All stages are equally
long here; `schedule_simulation` plays the cases that have no formula. Notebook 08_pipeline.
"""


def bubble_overhead(num_stages: int, num_micro_batches: int, num_model_chunks: int = 1) -> float:
    """(p - 1) / (v m): seconds idle for each second computed, for GPipe, 1F1B and interleaved.

    With v > 1 it is exact where each round of the schedule has p micro-batches.

    Source: Narayanan et al. 2021, sections 2.2.1 and 2.2.2
    """
    return (num_stages - 1) / (num_model_chunks * num_micro_batches)


def bubble_fraction(num_stages: int, num_micro_batches: int, num_model_chunks: int = 1) -> float:
    """(p - 1) / (v m + p - 1): the same bubble as a part of the whole step."""
    return (num_stages - 1) / (num_model_chunks * num_micro_batches + num_stages - 1)


def naive_idle_fraction(num_stages: int) -> float:
    """(p - 1) / p: one rank works while the others wait, however many micro-batches there are."""
    return (num_stages - 1) / num_stages


def one_f_one_b_bubble_s(
    num_stages: int, forward_s: float, backward_input_s: float, backward_weight_s: float
) -> float:
    """(p - 1)(F + I + W): seconds that every rank is idle in a step of 1F1B, or of GPipe.

    Source: Qi et al. 2024 (Zero bubble pipeline parallelism), table 2
    """
    return (num_stages - 1) * (forward_s + backward_input_s + backward_weight_s)


def zero_bubble_h1_bubble_s(
    num_stages: int,
    num_micro_batches: int,
    forward_s: float,
    backward_input_s: float,
    backward_weight_s: float,
) -> float:
    """(p - 1)(F + I) - (min(p, m) - 1) W: seconds that every rank is idle in a step of ZB-H1.

    For W no longer than F and I. With m >= p it is (p - 1)(F + I - W), and a third of the bubble of
    1F1B when the three are equal.

    Source: Qi et al. 2024 (Zero bubble pipeline parallelism), table 2; m <= p: appendix H
    """
    num_filled = min(num_stages, num_micro_batches) - 1
    unfilled_s = (num_stages - 1) * (forward_s + backward_input_s)
    return unfilled_s - num_filled * backward_weight_s


def one_f_one_b_wire_s(num_stages: int, num_micro_batches: int, message_s: float) -> float:
    """What messages of `message_s` each add to a step of 1F1B, for m a multiple of p.

    In every p micro-batches, 2 (p - 1) messages have nothing to hide behind: what leaves stage i
    is what stage i + 1 waits for. Once more for the pipeline to fill and to empty.
    """
    if num_stages == 1:
        return 0.0
    rounds = num_micro_batches // num_stages
    return (2 * (num_stages - 1) * (rounds + 1) - 2) * message_s


# --- micro-batches in flight, that is, whose activations a rank holds


def gpipe_in_flight(num_micro_batches: int) -> int:
    """m: every micro-batch waits for all the others."""
    return num_micro_batches


def one_f_one_b_in_flight(num_stages: int, num_micro_batches: int, rank: int) -> int:
    """min(p - rank, m): a rank runs ahead only by what the ranks behind it need.

    Source: Narayanan et al. 2021, section 2.2.1 (at most p)
    """
    return min(num_stages - rank, num_micro_batches)


def zero_bubble_h1_in_flight(num_stages: int, num_micro_batches: int) -> int:
    """min(p, m) on every rank, as the weight halves that are put off hold activations too.

    Source: Qi et al. 2024 (Zero bubble pipeline parallelism), section 2.1
    """
    return min(num_stages, num_micro_batches)


def interleaved_in_flight(
    num_stages: int, num_micro_batches: int, num_model_chunks: int, rank: int
) -> int:
    """Model chunks in flight for v > 1, each 1/v of a stage, where a round has p micro-batches.

    min((v - 1) p + 2 (p - 1 - rank) + 1, v m): with v = 2, rank 0 holds 3 p - 1 halves.
    """
    ahead = (num_model_chunks - 1) * num_stages + 2 * (num_stages - 1 - rank)
    return min(ahead + 1, num_model_chunks * num_micro_batches)
