"""Live parts in Chromium, and in a Firefox that is there: CPython's answers, used by hand."""

import json
import sys
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page

from course_lib.core.live import Live
from course_lib.pipeline.levels import LEVELS, moves_of
from tests.firefox import FIREFOX, Firefox

ROOT = Path(__file__).resolve().parents[2]
SLOW_MS = 120_000  # until Python is there; 3 s where nothing else runs
HEAD = '<!doctype html><html lang="en"><meta charset="utf-8"><title>Play</title>'
HEAD += (
    '<meta name="viewport" content="width=device-width"><link rel="stylesheet" href="course.css">'
)
ASK = """asked => new Promise((done, failed) => {
  const worker = new Worker("/live/live_worker.js", { type: "module" });
  const answers = [];
  worker.onerror = (event) => failed(event.message);
  worker.onmessage = ({ data }) => {
    if (data.progress) return;
    answers[data.id] = data.answer ?? data.failed;
    if (data.id === asked.length - 1) done(answers);
  };
  asked.forEach(([where, values], id) => worker.postMessage({ id, where, values }));
})"""


PRESS = """([row, label]) => new Promise((done) => {
  const said = () => document.querySelector(".live-finding").innerText, before = said();
  const all = [...document.querySelectorAll(`[aria-label="${row}"] button`)];
  all.find((one) => one.innerText === label).click();
  const timer = setInterval(() => {
    if (said() !== before) { clearInterval(timer); done(said()); }
  }, 20);
})"""


class Server(SimpleHTTPRequestHandler):
    """Serves a folder without writing a log."""

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def parts() -> dict[str, tuple[Live, list[str]]]:
    sys.path.insert(0, str(ROOT / "tools"))
    from site_live import all_parts

    return all_parts(ROOT)


@pytest.fixture(scope="module")
def folder(parts, tmp_path_factory) -> Path:
    """A page with each part, and what they need, without the rest of the site."""
    from site_live import html_of, write_live

    out = tmp_path_factory.mktemp("live")
    write_live(ROOT, out, [])
    (out / "extra/course.css").write_text((ROOT / "tools/site_theme/course.css").read_text())
    for name in parts:
        page = f"{HEAD}<main><h1>{name}</h1>{html_of(name, '')}</main>"
        (out / f"extra/{name}.html").write_text(page)
    if not (out / "extra/live/pyodide").exists():
        pytest.skip("Pyodide's npm package cannot be had here")
    return out / "extra"


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Server, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    page = browser.new_page()
    page.set_default_timeout(SLOW_MS)
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("requestfailed", lambda request: complaints.append(request.url))
    yield page
    page.close()
    assert complaints == []


@pytest.fixture(params=["chromium", *["firefox"] * bool(FIREFOX)])
def window(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Page | Firefox]:
    """A page of each browser that is there: `goto` and `evaluate`."""
    if request.param == "chromium":
        yield request.getfixturevalue("page")
        return
    window = Firefox(tmp_path / "profile")
    yield window
    window.close()


def asked_of(part: Live) -> list[dict[str, object]]:
    """The start, and each choice at its first and its last value, the others at the start.

    A search lasts 20 s in the page: one of them, and all of its plans.
    """
    options = part.options().items()
    if part.name == "plan_search":
        return [{"plan": plan} for plan in part.options()["plan"][0]]
    ends = [{name: all_[end]} for name, (all_, _) in options for end in (0, -1) if all_]
    return [{}, *ends]


def test_python_in_the_page_gives_the_same_answer_to_the_last_digit(parts, address, window):
    asked = [
        (where, json.dumps(values)) for part, where in parts.values() for values in asked_of(part)
    ]
    level = LEVELS["7 ZB-V"]
    moves = {"level": "7 ZB-V", "moves": " ".join(moves_of(level, level.reference))}
    asked.append((parts["schedule_by_hand"][1], json.dumps(moves)))
    window.goto(f"{address}/calculator.html")
    answers = window.evaluate(ASK, asked)
    part_of = {tuple(where): part for part, where in parts.values()}
    wrong = [
        (where, values)
        for (where, values), answer in zip(asked, answers, strict=True)
        if part_of[tuple(where)].answer(json.loads(values)) != answer
    ]
    assert len(asked) > 140
    assert wrong == []


def test_hands_can_use_a_part_in_each_browser(address: str, window):
    window.goto(f"{address}/schedule_by_hand.html")
    for move in ("F0", "F1", "F2"):
        window.evaluate(PRESS, ["rank 0", move])
    said = window.evaluate(PRESS, ["rank 1", "F0"])
    assert said.startswith("4 of 18 placed, up to 3;")
    assert "it needs F0 of rank 1" not in said
    said = window.evaluate(PRESS, ["game", "undo"])
    assert said.startswith("3 of 18 placed")
    window.goto(f"{address}/plan_explorer.html")
    said = window.evaluate("() => document.querySelector('.live svg').getAttribute('aria-label')")
    assert "s per step, MFU" in said
    wide = window.evaluate("() => document.querySelector('.live svg').clientWidth")
    assert wide > 300


def finding(page: Page, name: str) -> str:
    return page.locator(f"[data-live={name}] .live-finding").inner_text()


def changed(page: Page, name: str, before: str) -> str:
    """The finding after it is another than before."""
    page.wait_for_function(
        "([name, old]) => document.querySelector(`[data-live=${name}] .live-finding`).innerText"
        " !== old",
        arg=[name, before],
    )
    return finding(page, name)


def test_a_slider_moves_by_key_and_the_address_keeps_it(address: str, page: Page):
    loaded: list[str] = []
    page.on("request", lambda request: loaded.append(request.url))
    page.goto(f"{address}/schedule_explorer.html")
    before = finding(page, "schedule_explorer")
    assert "1F1B: a bubble of 50%" in before
    assert not any("pyodide" in url for url in loaded)  # nothing before the first touch
    page.get_by_label("m", exact=True).focus()
    page.keyboard.press("ArrowRight")
    after = changed(page, "schedule_explorer", before)
    assert "a bubble of 43%" in after
    assert page.url.endswith("#schedule_explorer?m=7")
    page.goto("about:blank")
    page.goto(f"{address}/schedule_explorer.html#schedule_explorer?m=7")
    assert changed(page, "schedule_explorer", before) == after
    assert not [url for url in loaded if not url.startswith((address, "about:", "blob:"))]


def test_a_schedule_is_built_by_buttons(address: str, page: Page):
    level = LEVELS["2 memory wall"]
    page.goto(f"{address}/schedule_by_hand.html#schedule_by_hand?level=2 memory wall&moves=0F")
    page.wait_for_function("document.querySelector('.live-finding').innerText.startsWith('1 of')")
    page.get_by_role("group", name="rank 2").get_by_role("button", name="F0").click(force=True)
    assert "it needs F0 of rank 1" in page.get_by_role("status").inner_text()
    for number, move in enumerate(moves_of(level, level.reference)[1:], 2):
        row = page.get_by_role("group", name=f"rank {move[0]}")
        row.locator(f"button:not([aria-disabled]):has-text('{move[1]}')").click()
        page.wait_for_function(
            "n => document.querySelector('.live-finding').innerText.match(`^(${n} of|Done)`)",
            arg=number,
        )
    assert "Done in 14, par" in finding(page, "schedule_by_hand")
    assert "This is 1F1B." in finding(page, "schedule_by_hand")
    assert "rank 2  F0 B0 F1 B1" in page.locator("pre").inner_text()
    page.get_by_label("level").select_option("6 zero bubble")  # the moves of another do not stay
    page.get_by_text("0 of 45 placed").wait_for()


def test_a_config_is_pasted_and_a_plan_chosen(address: str, page: Page):
    sizes = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32}
    sizes |= {"model_type": "llama", "intermediate_size": 8192, "vocab_size": 32000}
    sizes["max_position_embeddings"] = 8192
    page.goto(f"{address}/plan_search.html")
    before = finding(page, "plan_search")
    page.get_by_label("model").fill(json.dumps(sizes))
    page.get_by_label("model").blur()
    assert "plans of llama fit on 8 GPUs" in changed(page, "plan_search", before)
    assert "course plan --model config.json --cluster hf-h100" in page.locator("pre").inner_text()
    page.get_by_label("model").fill("{")
    page.get_by_label("model").blur()
    page.get_by_text("Paste the whole file").wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_part_fits_a_phone_and_axe_finds_nothing(
    parts, address: str, browser: Browser, scheme: str, screenshots: Path
):
    page = browser.new_page(viewport={"width": 390, "height": 900}, color_scheme=scheme)
    for name in parts:
        page.goto(f"{address}/{name}.html")
        page.locator(".live-pictures > *").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, name
        found = Axe().run(page, options={"preload": False}).response["violations"]
        bad = [
            (one["id"], one["nodes"][0]["html"][:200])
            for one in found
            if one["impact"] in ("serious", "critical")
        ]
        assert bad == [], name
        page.screenshot(path=screenshots / f"live-{name}-{scheme}.png", full_page=True)
    page.close()


def test_a_page_that_is_opened_as_a_file_says_how_to_serve_it(folder: Path, page: Page):
    page.goto((folder / "zero_explorer.html").as_uri())
    page.get_by_label("p", exact=True).focus()
    page.keyboard.press("ArrowRight")
    page.get_by_text("python -m http.server").wait_for()
    assert page.locator(".live svg").count() == 1  # the start is drawn without Python


def test_another_package_than_the_one_that_was_tried_is_refused(parts, tmp_path: Path):
    from site_live import PYODIDE, fetch_pyodide

    package = tmp_path / f"{PYODIDE.replace('@', '-')}.tgz"
    with tarfile.open(package, "w:gz"):
        pass
    assert "not the package that was tried" in fetch_pyodide(tmp_path, tmp_path / "out")
    assert not package.exists()
    assert not (tmp_path / "out").exists()
