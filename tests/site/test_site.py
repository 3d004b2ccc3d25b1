"""The site: every link leads somewhere, nothing comes from elsewhere, and no solution slips out."""

import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page

from .conftest import REPOSITORY, ROOT, Site, run_builder

LESSONS = sorted(path.stem for path in (ROOT / "notebooks").glob("[0-9]*.ipynb"))
JUDGED = ["index.html", "notebooks/00_ranks.html", "docs/glossary.html", "api/pipeline.html"]
SOLUTION = re.compile(r"### BEGIN SOLUTION[^\n]*\n(.*?)\n[ \t]*### END SOLUTION", re.DOTALL)
SECRET = "**For instructors only.**"
NO_FETCHING = {"preload": False}  # axe would fetch style sheets, which a file: page may not
MAX_BUILD_S = 300  # about 25 s of one core; the machine may be busy


def solutions(stem: str) -> dict[str, str]:
    """The solution of each exercise of a lesson, without its white space."""
    path = ROOT / "notebooks/solved" / f"{stem}.ipynb"
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    found = {}
    for cell in cells:
        parts = SOLUTION.findall("".join(cell["source"]))
        for number, part in enumerate(parts):
            found[f"{cell['metadata'].get('exercise')}.{number}"] = bare(part)
    return found


def bare(text: str) -> str:
    return re.sub(r"\s+", "", text)


@pytest.fixture(params=["learners", pytest.param("instructors", marks=pytest.mark.nightly)])
def site(request: pytest.FixtureRequest) -> Site:
    return request.getfixturevalue(request.param)


# -- what the files say ------------------------------------------------------------------------


def test_the_build_is_quick_and_says_what_it_made(learners: Site):
    assert "index.html: " in learners.said
    assert "for learners" in learners.said
    assert learners.seconds < MAX_BUILD_S


def package_of(stem: str) -> str:
    """The package of a lesson, which has mostly its name."""
    return {"16_experts": "expert_parallel"}.get(stem, stem.partition("_")[2])


def test_each_page_that_was_promised_is_there(site: Site):
    docs = [f"docs/{path.stem}.html" for path in (ROOT / "docs").glob("*.md")]
    tables = (ROOT / "course_lib/cost/published").glob("*.csv")
    published = [f"published/{path.stem}.html" for path in tables]
    lessons = [f"notebooks/{stem}.html" for stem in LESSONS]
    packages = [f"api/{package_of(stem)}.html" for stem in LESSONS]
    wanted = {"index.html", "search.html", "play/index.html", "play/schedule_by_hand.html"}
    wanted |= {*docs, *published, *lessons, *packages}
    assert wanted <= set(site.pages)


def test_every_link_and_anchor_leads_somewhere(site: Site):
    broken = []
    for name, page in site.pages.items():
        for link in [*page.links, *page.loads, *(one["src"] for one in page.pictures)]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            path = os.path.normpath(Path(name).parent / unquote(parts.path)) if parts.path else name
            anchor = unquote(parts.fragment)
            if not (site.folder / path).is_file() or (
                anchor and path in site.pages and anchor not in site.pages[path].ids
            ):
                broken.append(f"{name}: {link}")
    assert broken == []


def test_nothing_is_loaded_from_another_host(site: Site):
    loads = {load for page in site.pages.values() for load in page.loads}
    assert [load for load in loads if urlsplit(load).netloc] == []
    for sheet in site.folder.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        urls = re.findall(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)", text)
        assert [url for pair in urls for url in pair if urlsplit(url).netloc] == []


def test_every_picture_says_what_it_shows(site: Site):
    silent = [
        f"{name}: {picture['src']}"
        for name, page in site.pages.items()
        for picture in page.pictures
        if not (picture.get("alt") or "").strip()
    ]
    assert silent == []


def test_every_term_of_the_glossary_has_an_anchor(learners: Site):
    terms = re.findall(r"^- \*\*", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
    anchors = {one for one in learners.pages["docs/glossary.html"].ids if one.startswith("term-")}
    assert "term-all-reduce" in anchors
    assert len(anchors) == len(terms)


def test_the_page_of_a_package_has_its_functions_and_their_costs(learners: Site):
    page = learners.pages["api/collectives.html"]
    assert "course_lib.collectives.tree.tree_broadcast" in page.ids
    assert "ceil(log2 p) rounds of x bytes" in " ".join(page.words)
    assert not any(name.startswith("api/checks") for name in learners.pages)


@pytest.mark.parametrize("stem", LESSONS)
def test_a_lesson_links_to_its_notebook_and_its_package(learners: Site, stem: str):
    links = learners.pages[f"notebooks/{stem}.html"].links
    assert f"../files/{stem}.ipynb" in links
    package = package_of(stem)
    assert f"../api/{package}.html" in links
    stored = (ROOT / "notebooks" / f"{stem}.ipynb").read_bytes()
    assert (learners.folder / "files" / f"{stem}.ipynb").read_bytes() == stored


@pytest.mark.parametrize("stem", LESSONS)
def test_a_lesson_opens_where_it_has_enough_memory(learners: Site, stem: str):
    links = learners.pages[f"notebooks/{stem}.html"].links
    hosts = {urlsplit(link).netloc for link in links if f"{REPOSITORY}/" in link}
    sizes = (ROOT / "docs/containers.md").read_text()
    fits = re.search(rf"\| {stem} \| .* \| (yes|no) \|", sizes)[1] == "yes"
    assert hosts == {"colab.research.google.com"} | ({"mybinder.org"} if fits else set())


def test_no_page_has_a_placeholder_for_the_repository(site: Site):
    assert "OWNER" not in site.text
    assert f"gitclonehttps://github.com/{REPOSITORY}/opt/course" in site.text


@pytest.mark.parametrize("stem", LESSONS)
def test_learners_see_no_solution(learners: Site, stem: str):
    assert [key for key, solution in solutions(stem).items() if solution in learners.text] == []


def test_instructors_see_every_solution(instructors: Site):
    for stem in LESSONS:
        shown = bare("".join(instructors.pages[f"notebooks/{stem}.html"].words))
        assert solutions(stem)
        assert [key for key, one in solutions(stem).items() if one not in shown] == []


def test_answers_to_exam_questions_are_for_instructors_only(site: Site):
    says = "instructors' site only" if site.audience == "learners" else SECRET.strip("*")
    secret = [page for page in (ROOT / "docs").glob("*.md") if SECRET in page.read_text()]
    assert secret
    for page in secret:
        assert says in " ".join(site.pages[f"docs/{page.stem}.html"].words)


def test_learners_search_in_no_solution(learners: Site):
    index = (learners.folder / "searchindex.js").read_text()
    assert len(index) > 10_000
    assert "BEGIN SOLUTION" not in index


def test_only_instructors_get_files_with_solutions(site: Site):
    files = site.folder.rglob("*.ipynb")
    solved = sorted(path.stem for path in files if "BEGIN SOLUTION" in path.read_text())
    assert solved == ([] if site.audience == "learners" else LESSONS)


# -- what a browser says -----------------------------------------------------------------------


class Opened:
    """A page in a browser without a network, and what the browser complained about."""

    def __init__(self, browser: Browser, address: str, scheme: str, width: int) -> None:
        context = browser.new_context(
            viewport={"width": width, "height": 1000},
            color_scheme=scheme,
            offline=address.startswith("file:"),
        )
        self.page: Page = context.new_page()
        self.complaints: list[str] = []
        self.page.on("console", self.hear)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("requestfailed", lambda request: self.complaints.append(request.url))
        self.page.goto(address)
        self.page.wait_for_function("!window.MathJax || MathJax.startup?.promise")
        self.page.evaluate("window.MathJax && MathJax.startup.promise")

    def hear(self, message) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)


@contextmanager
def opened(
    browser: Browser, address: str, scheme: str = "light", width: int = 1280
) -> Iterator[Opened]:
    one = Opened(browser, address, scheme, width)
    yield one
    one.page.context.close()
    assert one.complaints == []


@pytest.mark.parametrize("stem", LESSONS)
def test_math_is_typeset_without_a_network(learners: Site, browser: Browser, stem: str):
    with opened(browser, (learners.folder / f"notebooks/{stem}.html").as_uri()) as one:
        formulas = one.page.locator(".math").count()
        assert one.page.locator("mjx-container").count() >= formulas > 0
        assert one.page.locator("mjx-merror, [data-mjx-error]").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    "name", [JUDGED[0], *(pytest.param(name, marks=pytest.mark.nightly) for name in JUDGED[1:])]
)
def test_axe_finds_nothing_serious(learners: Site, browser: Browser, name: str, scheme: str):
    with opened(browser, (learners.folder / name).as_uri(), scheme) as one:
        found = Axe().run(one.page, options=NO_FETCHING).response["violations"]
    serious = [
        f"{rule['id']}: {node['html'][:120]} {node.get('failureSummary', '')[:200]}"
        for rule in found
        if rule["impact"] in ("serious", "critical") or rule["id"] == "empty-table-header"
        for node in rule["nodes"]
    ]
    assert serious == []


@pytest.mark.parametrize(
    "name", [*JUDGED, "published/bandwidth.html", "notebooks/08_pipeline.html"]
)
def test_a_page_fits_a_phone(learners: Site, browser: Browser, name: str, screenshots: Path):
    with opened(browser, (learners.folder / name).as_uri(), width=390) as one:
        assert one.page.evaluate("document.documentElement.scrollWidth") <= 390
        one.page.screenshot(path=screenshots / f"phone-{Path(name).stem}.png")


def test_the_dark_theme_is_the_one_that_the_reader_has_chosen(learners: Site, browser: Browser):
    def background(scheme: str) -> str:
        with opened(browser, (learners.folder / "index.html").as_uri(), scheme) as one:
            return one.page.evaluate("getComputedStyle(document.body).backgroundColor")

    assert background("light") == "rgb(255, 255, 255)"
    assert max(map(int, re.findall(r"\d+", background("dark"))[:3])) < 60


def test_a_solution_is_folded_until_it_is_asked_for(instructors: Site, browser: Browser):
    with opened(browser, (instructors.folder / "notebooks/00_ranks.html").as_uri()) as one:
        fold = one.page.locator(".tag_solution details").first
        assert not fold.locator("pre").is_visible()
        fold.locator("summary").click()
        assert "return node * ranks_per_node + local_rank" in fold.locator("pre").inner_text()


@pytest.mark.parametrize(
    ("word", "first"),
    [("deadlock", "notebooks/00_ranks.html"), ("bubble", "notebooks/08_pipeline.html")],
)
def test_search_shows_the_lesson_first(learners: Site, browser: Browser, word: str, first: str):
    handler = partial(QuietHandler, directory=str(learners.folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/search.html?q={word}"
        with opened(browser, address) as one:
            one.page.locator("#search-results li a").first.wait_for()
            links = one.page.locator("#search-results li a").evaluate_all(
                "all => all.map(a => a.href)"
            )
        server.shutdown()
    assert first in links[0]


def test_below_an_empty_exercise_a_verdict_is_that_of_a_right_answer(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    from site_lessons import page_cells

    output = {"output_type": "stream", "name": "stdout", "text": ["ddp-3: right. Yes.\n"]}
    cell = {"cell_type": "code", "metadata": {"tags": ["check"], "exercise": "ddp-3"}}
    cell["outputs"] = [output]
    (shown,) = page_cells(cell, {}, "learners")
    assert shown["outputs"][0]["text"] == "A right answer gets: ddp-3: right. Yes.\n"
    assert page_cells(cell, {}, "instructors") == [cell]


def test_the_map_draws_each_lesson_behind_those_that_it_builds_on(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    from site_map import after_what, drawn

    graph = "graph LR\n  00[00 a] --> 02[02 c]\n  00 & 01[01 b] --> 03[03 d] --> 04[04 e]\n"
    graph += "  02 --> 04\n"
    names, before = after_what(graph)
    assert names == {"00": "00 a", "01": "01 b", "02": "02 c", "03": "03 d", "04": "04 e"}
    assert before == {"00": [], "01": [], "02": ["00"], "03": ["00", "01"], "04": ["03", "02"]}
    boxes = re.findall(
        r'href="notebooks/(\w+).html"><rect x="(\d+)"', drawn(graph, [f"{n}_x" for n in names])
    )
    assert [name for name, _ in boxes] == [f"{n}_x" for n in names]
    x = [int(x) for _, x in boxes]
    assert x[0] == x[1] < x[2] == x[3] < x[4]


def test_the_front_page_has_the_map(learners: Site):
    links = learners.pages["index.html"].links
    for stem in LESSONS:
        assert links.count(f"notebooks/{stem}.html") >= 2  # at the side, and in the map


@pytest.mark.parametrize("stem", LESSONS)
def test_a_page_that_speaks_of_sliders_says_where_they_are(learners: Site, stem: str):
    words = "".join(learners.pages[f"notebooks/{stem}.html"].words)
    told = ("The sliders are in the notebook", "Move the sliders here")
    speaks = "slider" in (ROOT / f"notebooks/source/{stem}.py").read_text()
    assert speaks == any(one in words for one in told)


def test_the_front_page_has_a_question_with_its_commands_before_it(learners: Site):
    page = (learners.folder / "index.html").read_text()
    command, question = page.index("opens JupyterLab"), page.index("data-quiz=")
    assert command < question < page.rindex("predict_run_compare")
    for name in ("play/index.html", "docs/teaching.html", "docs/cluster_operator.html"):
        assert name in learners.pages["index.html"].links


def test_a_lesson_has_a_share_card_with_a_picture_that_is_there(learners: Site):
    place = "https://somebody.github.io/their-course/"
    for stem in LESSONS:
        text = (learners.folder / f"notebooks/{stem}.html").read_text()
        card = dict(re.findall(r'<meta property="(og:[\w:]+)" content="([^"]*)"', text))
        assert card["og:title"]
        assert card["og:image:alt"]
        assert (learners.folder / card["og:image"].removeprefix(place)).is_file()


def test_the_front_page_leads_to_the_first_lesson(learners: Site):
    front = learners.pages["index.html"]
    assert "Begin with lesson 00" in "".join(front.words)
    assert "makes a website" not in " ".join("".join(front.words).split())


class QuietHandler(SimpleHTTPRequestHandler):
    """Serves a folder without writing a log."""

    def log_message(self, *arguments) -> None:
        pass


# -- what can go wrong -------------------------------------------------------------------------


def test_a_lesson_that_is_not_there_is_named(tmp_path: Path):
    done = run_builder("99", "--out", tmp_path / "site")
    assert done.returncode == 1
    assert "No lesson is called 99" in done.stderr
    assert not (tmp_path / "site").exists()


def test_a_folder_that_is_not_a_site_is_left_alone(tmp_path: Path):
    (tmp_path / "mine.txt").write_text("mine")
    done = run_builder("00", "--out", tmp_path)
    assert done.returncode == 1
    assert "nothing was deleted" in done.stderr
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_pages_of_an_earlier_build_do_not_stay(monkeypatch, learners: Site, tmp_path: Path):
    monkeypatch.syspath_prepend(ROOT / "tools")
    from build_site import empty_folder

    old = tmp_path / "site"
    shutil.copytree(learners.folder / "notebooks", old / "notebooks")
    (old / "objects.inv").touch()
    empty_folder(old)
    assert not old.exists()
