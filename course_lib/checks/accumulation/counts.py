"""Exercise 1 of 02_accumulation, the batch arithmetic: its check and its planted mistakes."""

from collections.abc import Callable

from course_lib.accumulation.accumulation import count_micro_batches
from course_lib.checks.exercise import CheckFailed, NotDone
from course_lib.checks.expect import Cause, expect_equal, on_ranks


def check_count(answer: Callable[..., int]) -> str:
    """Check 4 Mi tokens on 128 and 512 ranks, and batches that do not divide evenly."""
    for num_tokens, seq, micro, dp in (
        (64, 8, 2, 1),
        (64, 8, 2, 4),
        (2**22, 2**12, 2, 128),
        (2**22, 2**12, 2, 512),
    ):
        where = f"{num_tokens} tokens in sequences of {seq}, {micro} at a time {on_ranks(dp)}"
        right = num_tokens // seq // micro // dp
        causes: list[Cause] = [
            (num_tokens // micro // dp, "Those are tokens; a micro-batch holds sequences."),
            (num_tokens // seq // micro, "The ranks share the work: each does 1/dp of it."),
            (num_tokens // seq // dp, "That is in sequences; need it in micro-batches."),
            (num_tokens // seq // micro * dp, "More ranks run fewer: divide by dp."),
            (float(right), "The value is right, but a count is an int: divide with //."),
        ]
        expect_equal(answer(num_tokens, seq, micro, dp), right, where=where, causes=causes)
    for num_tokens, micro, dp, where in (
        (96, 8, 1, "12 sequences, 8 at a time"),
        (96, 4, 2, "12 sequences, 4 at a time on 2 ranks"),
        (100, 2, 3, "100 tokens in sequences of 8"),
    ):
        _expect_refused(answer, num_tokens, micro, dp, where)
    most = answer(2**22, 2**12, 2, 512)
    return f"512 ranks run {most} micro-batch each; what does not come out even is an error."


def _expect_refused(
    answer: Callable[..., int], num_tokens: int, micro: int, dp: int, where: str
) -> None:
    try:
        got = answer(num_tokens, 8, micro, dp)
    except NotImplementedError as error:
        raise NotDone(str(error)) from None
    except ValueError:
        return
    except AssertionError:
        raise CheckFailed(
            f"{where}: need a ValueError; got an AssertionError. Use raise."
        ) from None
    if isinstance(got, BaseException):
        raise CheckFailed(f"{where}: the error came back as a result: raise it.")
    raise CheckFailed(
        f"{where}: need a ValueError; got {got!r}. Rounding would change the batch without a word."
    )


def count(num_tokens: int, seq: int, micro_batch: int, dp: int) -> int:
    if num_tokens % seq:
        raise ValueError(f"{num_tokens} tokens are no multiple of {seq}")
    return count_micro_batches(num_tokens // seq, micro_batch, dp)


def count_tokens(num_tokens: int, seq: int, micro_batch: int, dp: int) -> int:
    return num_tokens // micro_batch // dp


def count_of_one_rank(num_tokens: int, seq: int, micro_batch: int, dp: int) -> int:
    return num_tokens // seq // micro_batch


def count_as_float(num_tokens: int, seq: int, micro_batch: int, dp: int) -> float:
    return num_tokens / seq / micro_batch / dp


def count_rounded(num_tokens: int, seq: int, micro_batch: int, dp: int) -> int:
    return -(-num_tokens // (seq * micro_batch * dp))


def count_ranks_uneven(num_tokens: int, seq: int, micro_batch: int, dp: int) -> int:
    if num_tokens % (seq * micro_batch):
        raise ValueError("not even")
    return num_tokens // seq // micro_batch // dp


def count_tokens_uneven(num_tokens: int, seq: int, micro_batch: int, dp: int) -> int:
    return count_micro_batches(num_tokens // seq, micro_batch, dp)
