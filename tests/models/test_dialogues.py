"""Dialogues as tokens: the corpus' own form, what stands in for it, and the batches of both."""

import hashlib
import zipfile
from collections import Counter

import pytest
import torch

from course_lib.core import CourseError, ShapeError
from course_lib.core.presets import ENCODERS
from course_lib.models.dialogues import (
    CLS,
    CORNELL,
    FOLDER,
    MASK,
    SEP,
    SPECIAL,
    UNK,
    VOCAB,
    Dialogues,
    generated_dialogues,
    load_dialogues,
    read_corpus,
    words_of,
)
from course_lib.models.download import WebFile

LINES = """\
L10 +++$+++ u0 +++$+++ m0 +++$+++ ZOË +++$+++ Où est Zoë?
L9 +++$+++ u1 +++$+++ m0 +++$+++ BEN +++$+++ Here. <i>Here</i>!\r
L8 +++$+++ u0 +++$+++ m0 +++$+++ ZOË +++$+++ \n\
L7 +++$+++ u1 +++$+++ m0 +++$+++ BEN +++$+++ a +++$+++ b\x85c
"""
TALKS = """\
u0 +++$+++ u1 +++$+++ m0 +++$+++ ['L10', 'L9']
u1 +++$+++ u0 +++$+++ m0 +++$+++ ['L9', 'L8', 'L7']
"""


@pytest.fixture
def corpus(tmp_path):
    """Writes a zip file of the corpus' form."""

    def write(lines=LINES, talks=TALKS, folder=FOLDER):
        path = tmp_path / "corpus.zip"
        with zipfile.ZipFile(path, "w") as file:
            file.writestr(f"{folder}/movie_lines.txt", lines.encode("latin-1"))
            file.writestr(f"{folder}/movie_conversations.txt", talks.encode("latin-1"))
        return path

    return write


# -- the corpus ---------------------------------------------------------------------------------


def test_conversations_are_put_together_from_both_files(corpus):
    assert read_corpus(corpus()) == [
        ["Où est Zoë?", "Here. <i>Here</i>!"],
        ["Here. <i>Here</i>!", "", "a +++$+++ b\x85c"],
    ]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"lines": "L1 +++$+++ u0 +++$+++ m0\n"},
            "movie_lines.txt, line 1: need 5 fields .* got 3",
        ),
        ({"talks": TALKS + "u0 +++$+++ u1\n"}, "conversations.txt, line 3: need 4 fields .* got 2"),
        ({"talks": TALKS.replace("L8", "L88")}, "need the line L88 that a conversation names"),
        ({"folder": "elsewhere"}, "need cornell movie-dialogs corpus/movie_lines.txt in it"),
    ],
)
def test_a_corpus_of_another_form_is_one_sentence(corpus, changes, says):
    with pytest.raises(CourseError, match=says):
        read_corpus(corpus(**changes))


def test_what_is_no_zip_file_is_one_sentence(tmp_path):
    (tmp_path / "page.zip").write_text("<html>")
    for name in ("page.zip", "nowhere.zip"):
        with pytest.raises(CourseError, match=f"{name}: need a zip file that can be read"):
            read_corpus(tmp_path / name)


def test_the_real_file_is_named_by_content():
    assert CORNELL.num_bytes == 9_916_637
    assert CORNELL.sha256.startswith("3bde8a571f615201")
    assert len(CORNELL.sha256) == 64
    assert all(url.startswith("https://") for url in CORNELL.urls)


def test_the_corpus_comes_from_the_cache_and_nothing_is_said(corpus):
    path, said = corpus(), []
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    file = WebFile(name=path.name, urls=(), num_bytes=len(content), sha256=digest)
    data = load_dialogues(said.append, file=file, folder=path.parent)
    assert said == []
    assert (
        data.decode(data.tokens[:13]) == "[CLS] où est zoë ? [SEP] here . here ! [SEP] [CLS] here"
    )


def test_offline_dialogues_are_generated_and_one_line_says_so(tmp_path):
    file = WebFile(name="d.zip", urls=("http://127.0.0.1:9/none",), num_bytes=1, sha256="")
    said = []
    data = load_dialogues(said.append, file=file, folder=tmp_path, vocab=50)
    (line,) = said
    assert "no connection to 127.0.0.1:9" in line
    assert line.endswith("Going on with generated dialogues instead.")
    assert "\n" not in line
    assert data.name == "generated"
    assert data.vocab <= 50
    assert len(data.tokens) > 50_000


# -- words and tokens ---------------------------------------------------------------------------


def test_words_numbers_and_signs_are_split():
    text = "Don't,  Zoë -- 21 of 'em_all...<b>NOW</b>"
    expected = "don't , zoë - - 21 of ' em _ all . . . now"
    assert words_of(text) == expected.split()
    assert words_of(" \t ") == []


def test_the_most_frequent_words_have_tokens():
    data = Dialogues.of([["b a a c c c", "c b"], ["d"]], vocab=6)
    assert data.words == (*SPECIAL, "c", "a")  # a before b: as frequent, and first by name
    assert (UNK, MASK, CLS, SEP) == (0, 1, 2, 3)
    assert data.tokens.tolist() == [2, 0, 5, 5, 4, 4, 4, 3, 4, 0, 3, 2, 0, 3]
    assert data.starts.tolist() == [0, 8, 11]
    assert data.identity != Dialogues.of([["b a a c c c", "c b"], ["e"]], vocab=6).identity


def test_an_utterance_without_words_leaves_no_token():
    data = Dialogues.of([["", "hi", "  "], [" "]])
    assert data.decode(data.tokens) == "[CLS] hi [SEP]"


def test_the_preset_takes_the_whole_vocabulary():
    assert ENCODERS["bert-dialogues"].vocab == VOCAB
    assert Dialogues.of(generated_dialogues(50)).vocab < VOCAB


def test_batch_n_is_a_function_of_seed_and_n():
    data = Dialogues.of(generated_dialogues(200))
    batch = data.batch(5, batch=6, seq=12, seed=1)
    assert batch.shape == (6, 12)
    assert torch.equal(batch, data.batch(5, batch=6, seq=12, seed=1))
    for other in (data.batch(6, batch=6, seq=12, seed=1), data.batch(5, batch=6, seq=12, seed=2)):
        assert not torch.equal(batch, other)
    whole = data.decode(data.tokens)
    assert all(data.decode(row) in whole for row in batch)


def test_pieces_begin_with_an_utterance_and_the_last_ones_end_with_the_stream():
    data = Dialogues.of([["a b c d", "e f"], ["g"]])
    whole = data.decode(data.tokens).split()
    rows = torch.cat([data.batch(n, batch=8, seq=5) for n in range(9)])
    seen = Counter(data.decode(row) for row in rows)
    first, last = " ".join(whole[:5]), " ".join(whole[-5:])
    assert set(seen) == {first, "e f [SEP] [CLS] g", last}


def test_generated_dialogues_are_many_and_always_the_same():
    talks = generated_dialogues()
    assert talks == generated_dialogues()
    assert talks != generated_dialogues(seed=1)
    assert len({tuple(talk) for talk in talks}) > 100
    assert {len(talk) for talk in talks} == {2, 4}


def test_what_cannot_be_read_is_one_sentence():
    with pytest.raises(CourseError, match="need conversations with words; there are none"):
        Dialogues.of([["", " "]])
    with pytest.raises(ShapeError, match="need a vocab above 4; got 4"):
        Dialogues.of([["a"]], vocab=4)
    data = Dialogues.of([["a b"]])
    with pytest.raises(ShapeError, match="need at least seq = 9 tokens; got 4"):
        data.batch(0, batch=1, seq=9)
    with pytest.raises(ShapeError, match="need batch, seq >= 1 and n >= 0"):
        data.batch(-1, batch=1, seq=1)
