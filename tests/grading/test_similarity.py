"""Answers that are alike are found whatever their form; answers that people find alone are not."""

import csv
import random
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from course_tools.grading.similarity import SimilarPair, similar, tokens
from course_tools.grading.similarity_report import MOST_SHOWN, TABLE, write_similarity
from tests.grading.hostile import FORMULA, HOSTILE, Page, is_plain

STUB = '''
def ring_all_reduce(rank, world_size, shards):
    """Sum the shards over the ring."""
    raise NotImplementedError("exercise ring-1: about 12 lines")
'''
ANSWER = '''
def ring_all_reduce(rank, world_size, shards):
    """Sum the shards over the ring."""
    right = (rank + 1) % world_size
    left = (rank - 1) % world_size
    for step in range(world_size - 1):
        outgoing = shards[(rank - step) % world_size].clone()
        incoming = torch.empty_like(outgoing)
        request = dist.isend(outgoing, right)
        dist.recv(incoming, left)
        request.wait()
        shards[(rank - step - 1) % world_size] += incoming
    return [shard / world_size for shard in shards]
'''
RENAMED = """
def ring_all_reduce(rank, world_size, shards):
    nxt = (rank + 1) % world_size
    prv = (rank - 1) % world_size
    for i in range(world_size - 1):
        msg = shards[(rank - i) % world_size].clone()
        buf = torch.empty_like(msg)
        job = dist.isend(msg, nxt)
        dist.recv(buf, prv)
        job.wait()
        shards[(rank - i - 1) % world_size] += buf
    return [s / world_size for s in shards]
"""
COMMENTED = '''
# my own work
def ring_all_reduce(rank, world_size, shards):
    "Another docstring."

    right = (rank + 1) % world_size  # the next one
    left = (rank - 1) % world_size
    # now the loop

    for step in range(world_size - 1):
        """A text that does nothing."""
        outgoing = shards[(rank - step) % world_size].clone()
        incoming = torch.empty_like(outgoing)
        request = dist.isend(outgoing, right)  # do not wait here
        dist.recv(incoming, left)
        request.wait()
        # add
        shards[(rank - step - 1) % world_size] += incoming
    return [shard / world_size for shard in shards]
'''
REFORMATTED = """
def ring_all_reduce(
    rank,
    world_size,
    shards,
):
        right = ((rank + 1) %
                 world_size); left=(rank-1)%world_size
        for step in range(
            world_size - 1,
        ):
                outgoing = shards[
                    (rank - step) % world_size
                ].clone()
                incoming = torch.empty_like(outgoing); request = dist.isend(
                    outgoing, right)
                dist.recv(incoming, \\
                    left)
                request.wait()
                shards[(rank-step-1)%world_size] += (incoming)
        return ([shard / world_size for shard in shards])
"""
REORDERED = """
def ring_all_reduce(rank, world_size, shards):
    prv, nxt = (rank - 1) % world_size, (rank + 1) % world_size
    for i in range(world_size - 1):
        msg = shards[(rank - i) % world_size].clone()
        buf = torch.empty_like(msg)
        job = dist.isend(msg, nxt)
        dist.recv(buf, prv)
        job.wait()
        place = (rank - i - 1) % world_size
        shards[place] += buf
    print("done")
    return [s / world_size for s in shards]
"""
OWN = """
def ring_all_reduce(rank, world_size, shards):
    total = [shard.clone() for shard in shards]
    neighbours = {"to": (rank + 1) % world_size, "from": (rank + world_size - 1) % world_size}
    index = rank
    while index != (rank + 1) % world_size or len(total) == 0:
        received = torch.zeros(total[index].shape, dtype=total[index].dtype)
        if rank % 2:
            dist.recv(received, neighbours["from"])
            dist.send(total[index], neighbours["to"])
        else:
            dist.send(total[index], neighbours["to"])
            dist.recv(received, neighbours["from"])
        index = index - 1 if index else world_size - 1
        total[index] = total[index] + received
    for shard in total:
        shard.div_(world_size)
    return total
"""
TURNS_STUB = '''
def take_turns(rank, world_size, say):
    """Call say() on rank 0, then on rank 1, and so on."""
    raise NotImplementedError("exercise ranks-2: about 4 lines")
'''
TURNS = (
    "    for turn in range(world_size):\n        if turn == rank:\n            say()\n"
    "        dist.barrier()\n",
    "    for r in range(world_size):\n        if rank == r:\n            say()\n"
    "        dist.barrier()\n",
    "    for _ in range(rank):\n        dist.barrier()\n    say()\n"
    "    for _ in range(world_size - rank):\n        dist.barrier()\n",
    "    for i in range(world_size):\n        if i == rank: say()\n        dist.barrier()\n",
    "    for turn in range(world_size):\n        if turn == rank:\n            say()\n"
    "        dist.barrier()\n",
)


def found(**codes: str) -> list[SimilarPair]:
    """Return the pairs among answers to one exercise."""
    return similar({who: {"ring-1": code} for who, code in codes.items()}, {}, {"ring-1": STUB})


@pytest.mark.parametrize(
    ("copy", "least"),
    [
        (ANSWER, 1.0),
        (RENAMED, 1.0),
        (COMMENTED, 1.0),
        (REFORMATTED, 1.0),
        (ANSWER.replace("\n", "\r\n"), 1.0),
        (textwrap.indent(ANSWER, "    ").replace("    ", "\t"), 0.6),
        (REORDERED, 0.6),
    ],
    ids=["equal", "renamed", "comments", "reformatted", "CRLF", "indented", "split and reordered"],
)
def test_a_copy_in_another_form_is_found(copy, least):
    (pair,) = found(ann=ANSWER, bob=copy, cem=OWN)
    assert (pair.left, pair.right, pair.mark, pair.source) == ("ann", "bob", "", False)
    assert pair.share >= least
    assert pair.left_lines


def test_two_answers_written_alone_are_not_found():
    assert found(ann=ANSWER, bob=OWN) == []
    assert found(ann=STUB, bob=STUB, cem=STUB) == []


def test_a_copy_that_does_not_tokenize_is_found():
    broken = RENAMED.replace("return [s", "return '''[s")
    with pytest.raises(Exception, match=r"EOF|unterminated"):
        compile(broken, "broken", "exec")
    (pair,) = found(ann=ANSWER, bob=broken, cem=OWN)
    assert (pair.left, pair.right) == ("ann", "bob")


@pytest.mark.parametrize("class_size", [5, 40])
def test_right_answers_to_a_simple_exercise_are_not_found(class_size):
    head = "def take_turns(rank, world_size, say):\n"
    codes = {f"s{i}": {"ranks-2": head + TURNS[i % len(TURNS)]} for i in range(class_size)}
    assert similar(codes, {"solved": {"ranks-2": head + TURNS[0]}}, {"ranks-2": TURNS_STUB}) == []


def test_a_short_answer_is_found_only_where_its_text_is_equal_and_peculiar():
    body = "    # let us queue, as in a bakery: the one whose number is called may speak now\n"
    codes = {
        who: {"ranks-2": f"def take_turns(rank, world_size, say):\n{text}"}
        for who, text in {"ann": body + TURNS[0], "bob": body + TURNS[0], "cem": TURNS[0]}.items()
    }
    (pair,) = similar(codes, {}, {"ranks-2": TURNS_STUB})
    assert (pair.left, pair.right, pair.mark, pair.share) == ("ann", "bob", "short", 1.0)
    codes["bob"]["ranks-2"] = codes["bob"]["ranks-2"].replace("range(w", "range( w")
    assert similar(codes, {}, {"ranks-2": TURNS_STUB}) == []


def test_a_short_text_that_several_wrote_is_the_obvious_one():
    text = (
        "def take_turns(rank, world_size, say):\n    # let us queue, as in a bakery: the one whose "
        f"number is called may speak now\n{TURNS[0]}"
    )
    codes = {f"s{i}": {"ranks-2": text} for i in range(4)}
    assert similar(codes, {}, {"ranks-2": TURNS_STUB}) == []


def test_what_the_exercise_hands_out_is_no_likeness():
    own = ("v[{0}] = w({0}) ** v", "if {0} < a: print(b, {0})")
    codes = {
        f"s{i}": {"ring-1": ANSWER + "\n".join(line.format(number) for number in range(5))}
        for i, line in enumerate(own)
    }
    assert len(similar(codes, {}, {})) == 1
    assert similar(codes, {}, {"ring-1": ANSWER}) == []


def test_a_student_who_hands_in_twice_counts_once():
    codes = {name: {"ring-1": ANSWER} for name in ("ann (1)", "ann (2)", "ann (3)", "bob")}
    students = {name: name.split()[0] for name in codes}
    pairs = similar(codes, {}, {"ring-1": STUB}, students=students)
    assert {(pair.left, pair.right, pair.others) for pair in pairs} == {
        (f"ann ({number})", "bob", 0) for number in (1, 2, 3)
    }


def test_what_much_of_the_class_wrote_is_no_likeness():
    codes = {f"s{i}": RENAMED.replace("msg", f"msg{i}") for i in range(10)}
    assert found(**codes) == []
    assert {one.mark for one in found(**codes, x=ANSWER + "# me\n", y=ANSWER + "# me\n")} == {
        "common"
    }


def test_pasted_text_of_the_library_is_found():
    library = "import torch\n\n\nHELP = 3\n" + RENAMED + "\n\ndef other(x):\n    return x\n"
    pairs = similar(
        {"ann": {"ring-1": ANSWER}, "bob": {"ring-1": OWN}},
        {"course_lib.collectives.ring": {"ring-1": library}, "elsewhere": {"ring-2": library}},
        {"ring-1": STUB},
    )
    (pair,) = pairs
    assert (pair.left, pair.right) == ("ann", "course_lib.collectives.ring")
    assert pair.source
    assert pair.share == 1.0


def test_sources_are_not_compared_with_each_other():
    sources = {"library": {"ring-1": ANSWER}, "solved": {"ring-1": ANSWER}}
    assert similar({"ann": {"ring-1": OWN}}, sources, {"ring-1": STUB}) == []


def test_the_same_code_for_another_exercise_is_no_pair():
    codes = {"ann": {"ring-1": ANSWER}, "bob": {"ring-2": ANSWER}}
    assert similar(codes, {}, {}) == []


def test_the_most_alike_come_first_and_the_threshold_holds():
    pairs = found(ann=ANSWER, bob=RENAMED, cem=REORDERED, dan=OWN)
    shares = [pair.share for pair in pairs]
    assert shares == sorted(shares, reverse=True)
    assert (pairs[0].left, pairs[0].right) == ("ann", "bob")
    codes = {"ann": {"ring-1": ANSWER}, "cem": {"ring-1": REORDERED}}
    assert similar(codes, {}, {"ring-1": STUB}, at_least=1.0) == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x = (1 + 2)", "y = 1 + 2"),
        ("f(a,\n  b,\n)", "f(a, b)"),
        ("x = 'a'", 'x = "b"'),
        ("x = 1; y = 2", "x = 1\ny = 2"),
        ("def f():\n    'doc'\n    return 1", "def g():\n    return 1"),
        ("f'{x} and {y}'", "f'other {z}'"),
        ("self.total = self.total + 1", "self.sum = self.sum + 1"),
    ],
)
def test_form_does_not_change_the_tokens(one, other):
    texts = [[token.text for token in tokens(code)] for code in (one, other)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("f(x)", "f[x]"),
        ("x + 1", "x - 1"),
        ("dist.send(x)", "dist.recv(x)"),
        ("if x: y", "while x: y"),
    ],
)
def test_meaning_changes_the_tokens(one, other):
    texts = [[token.text for token in tokens(code)] for code in (one, other)]
    assert texts[0] != texts[1]


def test_names_of_the_stub_are_kept():
    assert [token.text for token in tokens("rank + mine", {"rank"})] == ["rank", "+", "name"]


def test_a_class_of_200_is_compared():
    """Five different exercises, of answers that are edited at random."""
    rng = random.Random(3)
    lines = [f"value{i} = compute(value{i - 1}, {i}) ** {i}" for i in range(60)]
    codes = {
        f"s{i}": {f"own-{key}": "\n".join(rng.sample(lines, 25)) for key in range(5)}
        for i in range(200)
    }
    codes["s1"] = {**codes["s0"]}
    pairs = similar(codes, {"library": {"own-1": "\n".join(lines)}}, {})
    assert {("s0", "s1", f"own-{key}") for key in range(5)} <= {
        (pair.left, pair.right, pair.key) for pair in pairs
    }


@given(st.text(st.characters(codec=None, exclude_categories=())), st.text())
def test_no_text_stops_the_comparison(one, other):
    similar({"a": {"k": one}, "b": {"k": other}, "c": {"k": one}}, {"s": {"k": one}}, {"k": other})


def write(tmp_path, pairs: list[SimilarPair]) -> tuple[list, Page]:
    write_similarity(tmp_path, pairs)
    content = (tmp_path / TABLE).read_bytes().decode()
    html = (tmp_path / "similarity.html").read_text(encoding="utf-8")
    assert is_plain(html)
    return list(csv.reader(content.splitlines(), strict=True)), Page(html)


def test_the_report_shows_both_texts_and_claims_nothing(tmp_path):
    rows, page = write(tmp_path, found(ann=ANSWER, bob=RENAMED, cem=OWN))
    assert rows[1][:5] == ["ring-1", "ann", "bob", "student", "1"]
    assert "proves nothing" in page.text
    assert "outgoing = shards" in page.text
    assert "msg = shards" in page.text
    assert page.tags.count("mark") > 15
    assert not {"plagiarism", "cheat", "copied"} & set(page.text.lower().split())


def test_a_class_without_likeness_has_a_report(tmp_path):
    rows, page = write(tmp_path, [])
    assert len(rows) == 1
    assert "No two answers are alike" in page.text


def test_a_long_report_is_cut_on_the_page_only(tmp_path):
    pair = SimilarPair(
        key="k", left="a", right="b", share=1.0, left_code="x\n" * 9000, right_code="y"
    )
    rows, page = write(tmp_path, [pair] * (MOST_SHOWN + 1))
    assert len(rows) == MOST_SHOWN + 2
    assert page.tags.count("section") == MOST_SHOWN
    assert "(cut)" in page.text


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text)[:20])
def test_no_field_injects_anything(tmp_path, text):
    codes = {f"{text}{i}": {text: f"{ANSWER}\n{text}\n"} for i in range(2)}
    (pair,) = similar(codes, {}, {text: STUB})
    rows, page = write(tmp_path, [pair])
    assert len(rows) == 2
    assert not any(cell.startswith(FORMULA) for cell in rows[1])
    assert all(link.startswith("#p") for link in page.links)
    assert (tmp_path / "similarity.html").stat().st_size < 80_000
