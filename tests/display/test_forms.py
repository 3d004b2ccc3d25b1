"""show, predict, reveal, explore: with widgets, without them, and as text."""

import base64
import importlib
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import ipywidgets
import pytest
from matplotlib.figure import Figure

from course_lib.core import CourseError, Event
from course_lib.display import YES_NO, claim, explore, predict, reveal, show, timeline
from course_lib.display.predict import Form, Prediction, stand_in
from course_lib.display.show import has_widgets, picture, png_bytes


def drawn(p: int = 2) -> Figure:
    events = [Event(rank=r, kind="forward", start_s=r, end_s=r + 1) for r in range(p)]
    return timeline(events, f"{p} ranks")


class Kernel:
    """A shell that has a kernel, as in a notebook."""

    kernel = object()


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """A live notebook; yields what is displayed in it."""
    shown: list[dict[str, Any]] = []
    monkeypatch.delenv("COURSE_NO_WIDGETS", raising=False)
    module = importlib.import_module("course_lib.display.show")  # `show` itself is the function
    monkeypatch.setattr(module, "get_ipython", Kernel)
    monkeypatch.setattr(module, "display", lambda data, **options: shown.append(data))
    yield shown
    ipywidgets.Widget.close_all()


class Images(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[dict[str, str | None]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "img":
            self.found.append(dict(attrs))


def test_show_leaves_html_png_and_text_that_all_say_the_same(notebook: list) -> None:
    show(drawn(), alt='Two ranks take "turns": 2 s')
    (data,) = notebook
    (image,) = Images(data["text/html"]).found
    assert image["alt"] == data["text/plain"] == 'Two ranks take "turns": 2 s'
    assert image["src"] == f"data:image/png;base64,{data['image/png']}"
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")


def test_show_outside_a_notebook_prints_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    show(drawn(), alt="Two ranks take turns: 2 s")
    assert capsys.readouterr().out == "Two ranks take turns: 2 s\n"


@pytest.mark.parametrize("alt", [(), ("",), ("  ",), (None,)])
def test_show_refuses_a_picture_without_alt_text(alt: tuple) -> None:
    with pytest.raises(CourseError, match="show: need alt text"):
        show(drawn(), *alt)


def test_pictures_are_the_same_every_time_and_small() -> None:
    first, second = (png_bytes(drawn(8)) for _ in range(2))
    assert first == second
    assert len(first) < 60_000
    assert not {b"tEXt", b"tIME", b"iTXt"} & {first[at : at + 4] for at in range(len(first))}


def test_show_closes_figures_that_pyplot_would_draw_again(notebook: list) -> None:
    from matplotlib import pyplot

    figure = pyplot.figure()
    show(figure, alt="nothing: 0")
    assert not pyplot.fignum_exists(figure.number)


def test_widgets_are_for_live_notebooks_only(
    notebook: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert has_widgets()
    monkeypatch.setenv("COURSE_NO_WIDGETS", "1")
    assert not has_widgets()


def test_predict_and_reveal_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    p = predict("grad bytes per rank", unit="GiB")
    p.commit(12)
    reveal(p, 16.0)
    assert capsys.readouterr().out.splitlines() == [
        "Predict: grad bytes per rank, in GiB. Commit with p.commit(12).",
        "Committed: 12 GiB",
        "grad bytes per rank: yours 12 GiB, true 16 GiB, ratio 0.75.",
    ]


def test_reveal_hides_the_truth_where_nothing_was_committed(notebook: list) -> None:
    steps = predict("steps", unit="GiB")
    reveal(steps, 6)
    data = notebook[-1]
    assert data["text/plain"].startswith("steps: You have not committed to a prediction yet. ")
    assert data["text/plain"].endswith("or show it anyway: print(steps.truth).")
    assert "6" not in data["text/plain"]
    asked, _, folded = data["text/html"].partition("<details><summary>Show anyway</summary>")
    assert "6" not in asked
    assert "<td>6 GiB</td>" in folded
    assert steps.truth == "6 GiB"


@pytest.mark.parametrize(
    ("cell", "value", "is_folded"),
    [
        ("reveal(guess_steps, 6)\nshow(fig)", None, True),
        ("show(fig)\nreveal(guess_steps, 6)", None, True),
        ("reveal(guess_steps, 6)\nshow(fig)", 5.0, False),
        ("show(fig)", None, False),
    ],
)
def test_a_picture_of_the_truth_is_folded_with_it(
    cell: str,
    value: float | None,
    is_folded: bool,
    notebook: list,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = {"In": ["", cell], "guess_steps": Prediction("steps", value=value)}
    monkeypatch.setattr(Kernel, "user_ns", names, raising=False)
    show(drawn(), "6 steps")
    data = notebook[-1]
    assert data["text/html"].startswith("<details>") == is_folded
    assert ("6 steps" in data["text/plain"]) != is_folded
    assert ("image/png" in data) != is_folded


@pytest.mark.parametrize(("truth", "shown"), [(6.25, "6.25"), ("1F1B", "1F1B"), (True, "yes")])
def test_a_prediction_that_nobody_asked_for_is_told_below_what_was_measured(
    truth: object, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {"reveal": reveal, "truth": truth}
    cell = "reveal(guess_skipped, truth)"
    stand_in(names, cell, "cell 2")
    exec(cell, names)
    assert capsys.readouterr().out == (
        "The cell above that asks for this prediction was not run. Run it, commit to a prediction, "
        "then run this again, or show it anyway: print(guess_skipped.truth).\n"
    )
    assert names["guess_skipped"].truth == shown


def test_an_earlier_prediction_of_the_same_name_does_not_answer_a_later_question() -> None:
    first = Prediction("steps", value=6, name="guess")
    names: dict[str, Any] = {"guess": first}
    for cell_id in ("cell 2", "cell 2"):  # run again, it is the same question
        stand_in(names, "reveal(guess, 6)", cell_id)
        assert names["guess"] is first
    stand_in(names, "print(guess)", "cell 3")
    assert names["guess"] is first
    stand_in(names, "reveal(guess, 7)", "cell 4")
    assert names["guess"].value is None


def test_a_value_commits_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert predict("steps", value="3/4").value == 0.75
    assert "steps: you predict 0.75." in capsys.readouterr().out


@pytest.mark.parametrize(("truth", "verdict"), [(True, "right"), ("no", "not right this time")])
def test_yes_and_no(truth: object, verdict: str, capsys: pytest.CaptureFixture[str]) -> None:
    q = predict("does it hang?", choices=YES_NO)
    q.commit(True)
    reveal(q, truth)
    said = capsys.readouterr().out
    assert "does it hang? (yes or no). Commit with q.commit('yes')." in said
    assert f"so you are {verdict}." in said


@pytest.mark.parametrize(
    "value", ["", "twelve", float("nan"), float("inf"), None, [1], True, "1/0"]
)
def test_predict_refuses_what_is_no_number(value: object) -> None:
    with pytest.raises(CourseError, match="need a number of GiB; got"):
        Prediction("bytes", "GiB").commit(value)


def test_predict_refuses_a_word_that_is_no_choice() -> None:
    with pytest.raises(CourseError, match="need one of yes, no; got 'maybe'"):
        Prediction("does it hang?", choices=YES_NO).commit("maybe")


@pytest.mark.parametrize(
    ("yours", "true", "said"),
    [(0, 4, "ratio 0"), (3, 0, "difference 3 s"), (-2, 4, "difference -6 s"), (1e9, 3, "3.33e+08")],
)
def test_reveal_has_a_sensible_verdict(
    yours: float, true: float, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    reveal(predict("time", "s", yours), true)
    assert said in capsys.readouterr().out


def commit(form: Form, value: str | None) -> None:
    """What the browser sends when the button is pressed."""
    form._handle_custom_msg({"commit": value}, [])


def test_the_form_commits_what_is_typed_and_says_so() -> None:
    prediction = Prediction("grad bytes per rank", "GiB")
    form = Form(prediction)
    assert form.label == "your prediction (GiB)"
    commit(form, "twelve")
    assert prediction.value is None
    assert form.answer == "Type a number: 12, 1.5e9 or 3/4."
    commit(form, "12 GiB")
    assert prediction.value == 12
    assert form.answer == "Committed: 12 GiB"
    form.close()


def test_the_form_offers_choices_with_none_chosen_before() -> None:
    prediction = Prediction("does it hang?", choices=YES_NO)
    form = Form(prediction)
    assert form.choices == ["yes", "no"]
    commit(form, None)
    assert prediction.value is None
    assert form.answer == "Choose yes or no."
    commit(form, "no")
    assert prediction.value == "no"
    form.close()


def test_predict_in_a_notebook_shows_a_form_and_the_same_text(notebook: list) -> None:
    p = predict("steps", unit="s")
    reveal(p, 6)
    asked, told = notebook
    assert "application/vnd.jupyter.widget-view+json" in asked
    assert asked["text/plain"] == "Predict: steps, in s. Commit with p.commit(12)."
    assert "<td>6 s</td>" in told["text/html"]


def test_explore_draws_again_when_a_slider_moves() -> None:
    seen = explore(drawn, alt=lambda p: f"{p} ranks: {p} s", p=(1, 8, 2))
    before = seen.image.picture
    seen.sliders["p"].value = 5
    after = seen.image.picture
    assert (before["alt"], after["alt"]) == ("2 ranks: 2 s", "5 ranks: 5 s")
    assert after["png"] == png_bytes(drawn(5)) != before["png"]
    assert not before["is_title"]


def test_what_is_the_title_in_the_picture_is_not_shown_below_it_again() -> None:
    assert explore(drawn, alt="{p} ranks", p=(1, 8, 2)).image.picture["is_title"]


def test_explore_says_what_went_wrong_in_the_pictures_place() -> None:
    def fragile(p: int) -> Figure:
        if p == 3:
            raise ValueError("three is too many")
        return drawn(p)

    seen = explore(fragile, alt="{p} ranks", p=(1, 8, 2))
    seen.sliders["p"].value = 3
    assert seen.image.picture["failed"]
    assert "ValueError: three is too many" in seen.image.picture["alt"]
    seen.sliders["p"].value = 4
    assert not seen.image.picture["failed"]
    assert seen.image.picture["alt"] == "4 ranks"


def test_explore_raises_at_once_when_the_first_picture_fails() -> None:
    with pytest.raises(ZeroDivisionError):
        explore(lambda p: drawn(1 // p), alt="{p}", p=(0, 1, 0))
    with pytest.raises(CourseError, match="need a draw that returns a figure; got NoneType"):
        explore(lambda p: None, alt="{p}", p=(0, 1, 0))  # type: ignore[arg-type,return-value]
    with pytest.raises(CourseError, match="need alt text"):
        explore(drawn, alt="", p=(1, 2, 1))


def test_explore_leaves_a_picture_with_and_without_widgets(
    notebook: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, metadata = explore(drawn, "{p} ranks", p=(1, 8, 2))._repr_mimebundle_()
    monkeypatch.setenv("COURSE_NO_WIDGETS", "1")
    still, _ = explore(drawn, "{p} ranks", p=(1, 8, 2))._repr_mimebundle_()
    assert live.pop("application/vnd.jupyter.widget-view+json")
    assert live == still
    assert live["image/png"] == picture(drawn(2), "2 ranks")[0]["image/png"]
    assert live["text/plain"] == metadata["image/png"]["alt"] == "2 ranks"
    assert "p = 2. Run this cell in JupyterLab to move the sliders." in live["text/html"]


def test_explore_makes_the_slider_that_suits() -> None:
    def any_figure(**values: object) -> Figure:
        return drawn(1)

    own = ipywidgets.IntSlider(value=3)
    made = explore(
        any_figure,
        "x",
        n=(1, 8, 4),
        share=(0.0, 1.0, 0.5),
        size=[1, 2, 4],
        word=(["a", "b"], "b"),
        on=True,
        own=own,
    ).sliders
    assert [type(widget).__name__ for widget in made.values()] == [
        "IntSlider",
        "FloatSlider",
        "SelectionSlider",
        "SelectionSlider",
        "Checkbox",
        "IntSlider",
    ]
    names = [widget.description for widget in made.values()]
    assert names == ["n", "share", "size", "word", "on", "own"]
    assert [widget.value for widget in made.values()] == [4, 0.5, 1, "b", True, 3]


@pytest.mark.parametrize("given", [(1, 8), (1, 8, 9), ([1, 8], 9), [], "text", 3])
def test_explore_refuses_what_is_no_slider(given: object) -> None:
    with pytest.raises(CourseError, match=r"need .lowest, highest, start. or .choices, start."):
        explore(drawn, alt="{p}", p=given)


def test_explore_needs_a_slider() -> None:
    with pytest.raises(CourseError, match="at least one slider"):
        explore(drawn, alt="x")


def test_the_invitation_knows_what_the_prediction_is_called(capsys):
    guess_steps = predict("how many steps?")
    assert "how many steps? Commit with guess_steps.commit(12)." in capsys.readouterr().out
    with pytest.raises(CourseError, match=r"Try guess_steps\.commit\(12\)"):
        guess_steps.commit("many")


def test_a_cell_that_is_run_again_keeps_what_was_committed_to_its_question():
    cells = {"predict": predict}
    for question, kept in (("how many?", None), ("how many?", 3.0), ("how many more?", None)):
        exec(f"guess = predict({question!r})", cells)
        assert cells["guess"].value == kept
        cells["guess"].commit(3)


def test_a_claim_that_holds_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    claim("two are more than one", 2 > 1)
    assert capsys.readouterr().out == ""


def test_a_claim_that_does_not_hold_is_a_remark_to_a_learner_and_stops_a_build(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COURSE_CLAIMS", raising=False)
    claim("processes are faster", False)
    said = capsys.readouterr().out
    assert "On this machine, this time: not so: \u201cprocesses are faster\u201d" in said
    assert "run it again" in said
    monkeypatch.setenv("COURSE_CLAIMS", "strict")
    claim("processes are faster", True)
    with pytest.raises(CourseError, match=r"claim: expected .processes are faster."):
        claim("processes are faster", float("nan") > 1)
