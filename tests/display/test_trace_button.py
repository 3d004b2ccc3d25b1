"""The button under a timeline saves what is drawn as a trace."""

import json
import re
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from course_lib.core import Event
from course_lib.display import show, timeline
from course_lib.display.show import png_bytes
from course_lib.display.timeline import timelines
from course_lib.display.trace_button import trace_button

EVENTS = [
    Event(rank=rank, kind="forward", start_s=2.0 + rank, end_s=3.0 + rank, label=f"F{rank}")
    for rank in range(2)
]


def pressed(button):
    """Press a button; what is said beside it."""
    press, said = button.children
    press.click()
    return said.value


def test_it_writes_the_drawn_events(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    figure = timelines({"one": EVENTS, "two": EVENTS[:1]}, "Two runs: 1 & 2!", unit="F")
    said = pressed(trace_button(figure))
    path = Path("traces/two-runs-1-2.json")
    assert str(path) in said
    assert "https://ui.perfetto.dev" in said
    trace = json.loads(path.read_text())
    names = [part["name"] for part in trace["traceEvents"] if part["ph"] == "X"]
    assert names == ["forward F0", "forward F1", "forward F0"]
    assert trace["otherData"]["unit"].endswith("1 F")


def test_a_place_that_cannot_be_written_to_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("traces").write_text("a file in the way")
    said = pressed(trace_button(timeline(EVENTS, "Turns")))
    assert "traces/turns.json: need a file that can be written; got: " in said


def path_of(title, tmp_path, monkeypatch):
    """The file that the button of a figure with this title writes."""
    monkeypatch.chdir(tmp_path)
    (path,) = re.findall(r"<code>(.*)</code>", pressed(trace_button(timeline(EVENTS, title))))
    assert Path(path).is_file()
    return path


LONG = "Each micro-batch visits every rank twice, and the bubble is half as long as "


@pytest.mark.parametrize(
    ("one", "two"), [(LONG + "1", LONG + "2"), ("模型", "并行"), ("Größe", "Grüße"), ("?", "!")]
)
def test_two_titles_have_two_files(tmp_path, monkeypatch, one, two):
    paths = [path_of(title, tmp_path, monkeypatch) for title in (one, two, one)]
    assert paths[0] == paths[2] != paths[1]
    assert all(re.fullmatch(r"traces/[a-z0-9-]{1,80}\.json", path) for path in paths)


def test_a_short_title_is_the_name(tmp_path, monkeypatch):
    assert path_of("A" * 60, tmp_path, monkeypatch) == f"traces/{'a' * 60}.json"


def test_other_figures_have_no_button():
    assert trace_button(Figure()) is None
    assert trace_button(timeline([], "Nothing")) is None


@pytest.mark.parametrize("live", [False, True])
def test_only_a_live_notebook_shows_it_and_the_picture_is_saved_alone(monkeypatch, live):
    module, shown = sys.modules["course_lib.display.show"], []
    monkeypatch.setattr(module, "has_widgets", lambda: live)
    monkeypatch.setattr(module, "put", lambda data, metadata: shown.append(data))
    show(timeline(EVENTS, "Turns"), alt="Turns: 2 s")
    (data,) = shown
    assert data["text/plain"] == "Turns: 2 s"
    assert {"text/html", "image/png"} <= set(data)
    assert ("application/vnd.jupyter.widget-view+json" in data) is live


def test_the_picture_is_the_same_with_and_without(monkeypatch):
    figure = timeline(EVENTS, "Turns")
    before = png_bytes(figure)
    trace_button(figure)
    assert png_bytes(figure) == before
