"""Sliders, steppers and predictions in JupyterLab, by mouse and by keyboard."""

import json
from collections.abc import Callable

import pytest
from playwright.sync_api import Locator, expect

from .notebook import Notebook

TITLE = "After two steps each rank has one sum"
CELLS = (
    """
from course_lib.core import Event
from course_lib.display import *

def turns(p):
    return [Event(rank=r, kind="forward", start_s=r, end_s=r + 1, label="F") for r in range(p)]
""",
    'explore(lambda p: timeline(turns(p), "Turns"), alt="{p} ranks: {p} s", p=(1, 8, 4))',
    """
ring = [
    Message(step=step, sender=rank, receiver=(rank + 1) % 3, shard=(rank - step) % 3, adds=True)
    for step in (1, 2) for rank in range(3)
]
stepper(frames_from_messages(ring, own_everything(3)), "TITLE")
""".replace("TITLE", TITLE),
    'size = predict("bytes sent by each rank", unit="MB")',
    'faster = predict("is it faster?", choices=YES_NO)',
    "reveal(size, 6)\nreveal(faster, True)",
    'show(timeline(turns(3), "Three turns"), alt="three turns")',
)
LATENCIES = """image => {
    window.pressed = 0;
    window.latencies = [];
    window.addEventListener("keydown", () => (window.pressed = performance.now()), true);
    image.addEventListener("load", () => window.latencies.push(performance.now() - window.pressed));
}"""


@pytest.fixture(scope="module")
def notebook(new_lesson: Callable[..., Notebook]) -> Notebook:
    """Every widget of the course in one notebook, run."""
    notebook = new_lesson("widgets.ipynb", CELLS)
    notebook.run_all()
    assert notebook.prompts() == [str(number) for number in range(1, len(CELLS) + 1)]
    return notebook


@pytest.fixture
def slider(notebook: Notebook) -> Locator:
    return notebook.page.get_by_role("slider", name="p", exact=True)


@pytest.fixture
def picture(notebook: Notebook) -> Locator:
    return notebook.cells().nth(1).locator("img")


def test_a_slider_moves_by_mouse_and_the_picture_follows_the_drag(
    notebook: Notebook, slider: Locator, picture: Locator
) -> None:
    expect(picture).to_have_attribute("alt", "4 ranks: 4 s")
    before, box = picture.get_attribute("src"), slider.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    mouse = notebook.page.mouse
    mouse.move(x, y)
    mouse.down()
    mouse.move(x + 40, y, steps=5)
    expect(picture).not_to_have_attribute("alt", "4 ranks: 4 s")  # while it is held
    mouse.move(x + 300, y, steps=5)
    mouse.up()
    expect(picture).to_have_attribute("alt", "8 ranks: 8 s")
    expect(notebook.cells().nth(1).locator("p[aria-live]")).to_have_text("8 ranks: 8 s")
    assert picture.get_attribute("src") != before
    notebook.screenshot("explore_mouse")


def test_a_slider_moves_by_keyboard_and_the_picture_follows_at_once(
    notebook: Notebook, slider: Locator, picture: Locator
) -> None:
    slider.focus()
    notebook.page.keyboard.press("Home")
    expect(picture).to_have_attribute("alt", "1 ranks: 1 s")
    picture.evaluate(LATENCIES)
    for ranks in range(2, 8):
        notebook.page.keyboard.press("ArrowRight")
        expect(picture).to_have_attribute("alt", f"{ranks} ranks: {ranks} s")
    expect(slider).to_have_attribute("aria-valuetext", "7")
    notebook.page.wait_for_function("window.latencies.length == 6")
    latencies_ms = notebook.page.evaluate("window.latencies")
    print(f"from key to picture: {[round(ms) for ms in latencies_ms]} ms")
    assert min(latencies_ms) < 1000  # 100 ms is wanted; the machine may be busy
    notebook.screenshot("explore_keyboard")


def test_a_stepper_plays_and_steps_by_mouse(notebook: Notebook) -> None:
    cell = notebook.cells().nth(2)
    words = cell.locator("p[aria-live]")
    expect(words).to_contain_text("step 1 of 2: rank 0 sends shard 2 to rank 1, which adds it")
    cell.get_by_role("button", name="one step forward").click()
    expect(words).to_contain_text("step 2 of 2:")
    cell.get_by_role("button", name="one step back").click()
    expect(words).to_contain_text("step 1 of 2:")
    cell.get_by_role("button", name="play all steps").click()
    expect(cell.get_by_role("button", name="pause")).to_be_visible()
    expect(cell.locator("svg .traveller").first).to_have_attribute("visibility", "visible")
    notebook.screenshot("stepper_playing")
    expect(words).to_contain_text("after 2 steps:")
    drawn = cell.get_by_role("img")
    expect(drawn).to_have_accessible_name(f"{TITLE}: {words.inner_text()}")
    expect(cell.get_by_role("button", name="one step forward")).to_be_disabled()
    notebook.screenshot("stepper_end")


def test_a_stepper_steps_by_keyboard(notebook: Notebook) -> None:
    cell, press = notebook.cells().nth(2), notebook.page.keyboard.press
    words = cell.locator("p[aria-live]")
    cell.get_by_label("step", exact=True).focus()
    for key, said in [
        ("Home", "step 1"),
        ("ArrowRight", "step 2"),
        ("End", "after"),
        ("Home", "1"),
    ]:
        press(key)
        expect(words).to_contain_text(said)
    for key, said in [("Enter", "step 2 of 2"), ("Space", "after 2 steps")]:
        cell.get_by_role("button", name="one step forward").focus()
        press(key)
        expect(words).to_contain_text(said)


def test_predictions_are_committed_by_mouse_and_keyboard_and_then_compared(
    notebook: Notebook,
) -> None:
    size, faster, told = (notebook.cells().nth(number) for number in (3, 4, 5))
    press = notebook.page.keyboard.press
    expect(told).to_contain_text("You have not committed to a prediction yet")
    expect(told.locator("td").first).to_be_hidden()
    told.get_by_text("Show anyway").first.click()
    expect(told.locator("td").first).to_have_text("6 MB")
    notebook.screenshot("predict_asked")
    size.get_by_label("your prediction (MB)").fill("twelve")
    press("Enter")
    expect(size.get_by_role("status")).to_contain_text("Type a number: 12, 1.5e9 or 3/4.")
    size.get_by_label("your prediction (MB)").fill("12")
    press("Tab")
    press("Space")
    expect(size.get_by_role("status")).to_have_text("Committed: 12 MB")
    faster.get_by_label("yes").click()
    press("ArrowDown")
    faster.get_by_role("button", name="Commit").click()
    expect(faster.get_by_role("status")).to_have_text("Committed: no")
    told.locator(".jp-InputArea").click()
    press("Control+Enter")
    expect(told).not_to_contain_text("You have not committed")
    expect(told.locator("table").first).to_contain_text("12 MB\t6 MB\t2", use_inner_text=True)
    expect(told.locator("table").last).to_contain_text("not right this time")
    told.scroll_into_view_if_needed()
    assert notebook.cut_off() == []
    notebook.screenshot("predict_revealed")


def test_a_prediction_committed_while_a_cell_runs_is_taken_whole(notebook: Notebook) -> None:
    size = notebook.cells().nth(3)
    notebook.write_cell("import time\ntime.sleep(2)")
    size.get_by_label("your prediction (MB)").fill("")
    notebook.page.keyboard.type("125", delay=50)
    size.get_by_role("button", name="Commit").click()
    assert notebook.prompts()[-1] == "*"
    expect(size.get_by_role("status")).to_have_text("Committed: 125 MB")


def test_a_timeline_is_saved_as_a_trace_by_its_button(notebook: Notebook) -> None:
    cell = notebook.cells().nth(6)
    expect(cell.get_by_role("img", name="three turns")).to_be_visible()
    cell.get_by_role("button", name="Save as a trace").click()
    expect(cell).to_contain_text("Saved as traces/")
    (path,) = (notebook.file.parent / "traces").glob("*.json")
    boxes = [part for part in json.loads(path.read_text())["traceEvents"] if part["ph"] == "X"]
    assert {box["pid"] for box in boxes} == {0, 1, 2}
    cell.scroll_into_view_if_needed()
    notebook.screenshot("trace_button")
