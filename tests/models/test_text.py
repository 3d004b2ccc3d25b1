"""Text as tokens, and a file from the web: broken off, damaged, missing, or not to be reached."""

import hashlib
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from course_lib.core import CourseError, ShapeError
from course_lib.models import download
from course_lib.models.download import WebFile, cache_folder, fetch
from course_lib.models.text import (
    SHAKESPEARE,
    Synthetic,
    Text,
    generated_text,
    load_shakespeare,
    read_text,
)

CONTENT = b"To be, or not to be: that is the question.\n" * 5000  # more than one chunk


class Place(ThreadingHTTPServer):
    """A web server with one file. `cut`: the first answers break off after so many bytes each."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.code, self.cut, self.ranges = CONTENT, 200, [], True
        self.asked: list[str] = []

    def file(self, **changes) -> WebFile:
        digest = hashlib.sha256(CONTENT).hexdigest()
        url = f"http://127.0.0.1:{self.server_port}/play.txt"
        file = WebFile(name="play.txt", urls=(url,), num_bytes=len(CONTENT), sha256=digest)
        return replace(file, **changes)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        place = self.server
        wanted = self.headers.get("Range", "")
        place.asked.append(wanted)
        if place.code != 200:
            return self.send_error(place.code)
        first = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and place.ranges else 0
        body = place.content[first:]
        self.send_response(206 if first else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: place.cut.pop(0)] if place.cut else body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def place(monkeypatch):
    monkeypatch.setattr(download, "PAUSE_S", 0)
    monkeypatch.setenv("no_proxy", "*")
    server = Place()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


# -- the download -------------------------------------------------------------------------------


def test_a_file_is_downloaded_once_and_progress_is_told(place, tmp_path):
    told = []
    path = fetch(place.file(), folder=tmp_path, tell=lambda *numbers: told.append(numbers))
    assert path.read_bytes() == CONTENT
    assert told[-1] == (len(CONTENT), len(CONTENT))
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    assert fetch(place.file(), folder=tmp_path) == path
    assert place.asked == [""]
    assert [one.name for one in tmp_path.iterdir()] == ["play.txt"]


def test_a_broken_download_goes_on_where_it_was(place, tmp_path):
    place.cut = [70_000, 50_000]
    assert fetch(place.file(), folder=tmp_path).read_bytes() == CONTENT
    assert place.asked == ["", "bytes=70000-", "bytes=120000-"]


def test_a_server_without_ranges_sends_it_all_again(place, tmp_path):
    place.cut, place.ranges = [70_000], False
    assert fetch(place.file(), folder=tmp_path).read_bytes() == CONTENT
    assert len(place.asked) == 2


def test_what_an_earlier_run_left_is_used_also_if_it_is_wrong(place, tmp_path):
    part = tmp_path / "play.txt.part"
    part.write_bytes(CONTENT[:1000])
    assert fetch(place.file(), folder=tmp_path / ".").read_bytes() == CONTENT
    assert place.asked == ["bytes=1000-"]
    (tmp_path / "play.txt").unlink()
    part.write_bytes(b"something else")
    assert fetch(place.file(), folder=tmp_path).read_bytes() == CONTENT
    assert place.asked[1:] == ["bytes=14-", ""]


@pytest.mark.parametrize("damage", [b"", CONTENT[:-1], CONTENT[:-1] + b"X"])
def test_a_damaged_file_in_the_cache_is_loaded_again(place, tmp_path, damage):
    (tmp_path / "play.txt").write_bytes(damage)
    assert fetch(place.file(), folder=tmp_path).read_bytes() == CONTENT
    assert len(place.asked) == 1


@pytest.mark.parametrize(
    ("changes", "tries", "says"),
    [
        ({"content": CONTENT[::-1]}, 3, "sends is another file: its SHA-256 begins with"),
        ({"content": CONTENT * 20}, 3, "sends is another file: it has"),
        ({"cut": [10, 10, 10]}, 3, "sends is another file: it has 30 bytes instead of"),
        ({"code": 404}, 1, "answers 404"),
        ({"code": 503}, 3, "answers 503"),
    ],
)
def test_a_file_that_cannot_be_had_is_one_sentence(place, tmp_path, changes, tries, says):
    vars(place).update(changes)
    with pytest.raises(CourseError, match=says) as raised:
        fetch(place.file(), folder=tmp_path)
    assert len(str(raised.value).splitlines()) == 1
    assert len(place.asked) == tries
    assert not (tmp_path / "play.txt").exists()


def test_the_second_place_is_asked_when_the_first_does_not_have_it(place, tmp_path):
    (good,) = place.file().urls
    file = place.file(urls=("http://127.0.0.1:9/nobody-listens", good))
    assert fetch(file, folder=tmp_path).read_bytes() == CONTENT


def test_a_folder_that_cannot_be_written_is_one_sentence(place, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CourseError, match=r"play.txt: need a download; .* cannot be written"):
        fetch(place.file(), folder=tmp_path / "file" / "inside")


def test_the_cache_is_where_the_user_wants_it(monkeypatch, tmp_path):
    monkeypatch.delenv("COURSE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "distributed-training-course"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder().parent.name == ".cache"
    monkeypatch.setenv("COURSE_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"


# -- Shakespeare, or what stands in for him -----------------------------------------------------


def test_the_plays_come_from_the_cache_and_nothing_is_said(place, tmp_path):
    said: list[str] = []
    text = load_shakespeare(said.append, file=place.file(), folder=tmp_path)
    assert text.decode(text.tokens) == CONTENT.decode()
    assert said == []


def test_offline_the_text_is_generated_and_one_line_says_so(place, tmp_path):
    said: list[str] = []
    file = place.file(urls=("http://127.0.0.1:9/nobody-listens",))
    text = load_shakespeare(said.append, file=file, folder=tmp_path)
    assert text.decode(text.tokens) == generated_text()
    assert text.name == "generated"
    (line,) = said
    assert "no connection to 127.0.0.1:9" in line
    assert line.endswith("Going on with generated text instead.")
    assert "\n" not in line


def test_generated_text_is_long_varied_and_always_the_same():
    text = generated_text()
    assert text == generated_text()
    assert text != generated_text(seed=1)
    assert len(text) > 100_000
    assert len(set(text.split("\n\n"))) > 3000
    assert len(set(text)) <= 64


def test_the_real_file_is_named_by_content():
    assert SHAKESPEARE.num_bytes == 1_115_394
    assert SHAKESPEARE.sha256.startswith("86c4e6aa9db7c042")
    assert len(SHAKESPEARE.sha256) == 64
    assert all(url.startswith("https://") for url in SHAKESPEARE.urls)


# -- tokens -------------------------------------------------------------------------------------


def test_tokens_are_the_sorted_characters():
    text = Text.of("née Zoë 🎭", "t")
    assert text.characters == " Zenoéë🎭"
    assert text.vocab == 8
    assert text.decode(text.tokens) == "née Zoë 🎭"
    assert text.identity != Text.of("nee Zoe", "t").identity


def test_batch_n_is_a_function_of_seed_and_n():
    text = Text.of(generated_text(200))
    batch = text.batch(5, batch=4, seq=30, seed=1)
    assert batch.shape == (4, 31)
    assert torch.equal(batch, text.batch(5, batch=4, seq=30, seed=1))
    for other in (text.batch(6, batch=4, seq=30, seed=1), text.batch(5, batch=4, seq=30, seed=2)):
        assert not torch.equal(batch, other)
    whole = text.decode(text.tokens)
    assert all(text.decode(row) in whole for row in batch)


def test_every_piece_of_a_text_can_come_up():
    text = Text.of("abcde")
    starts = {text.decode(row) for n in range(9) for row in text.batch(n, batch=8, seq=2)}
    assert starts == {"abc", "bcd", "cde"}


def test_what_cannot_be_read_is_one_sentence(tmp_path):
    (tmp_path / "latin.txt").write_bytes("née".encode("latin-1"))
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("abc")
    for name, says in [
        ("latin.txt", "it is not UTF-8"),
        ("nowhere.txt", "No such file"),
        ("empty.txt", "it is empty"),
    ]:
        with pytest.raises(CourseError, match=says):
            read_text(tmp_path / name)
    with pytest.raises(ShapeError, match="more than seq = 3 characters; got 3"):
        read_text(tmp_path / "short.txt").batch(0, batch=1, seq=3)
    with pytest.raises(ShapeError, match="need batch, seq >= 1 and n >= 0"):
        Text.of("abc").batch(-1, batch=1, seq=1)


def test_synthetic_tokens_have_the_same_methods():
    stream = Synthetic(vocab=11)
    assert stream.batch(3, batch=2, seq=5, seed=4).shape == (2, 6)
    assert stream.batch(3, batch=2, seq=5, seed=4).max() < 11
