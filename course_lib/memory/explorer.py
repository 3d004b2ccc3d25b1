"""Memory of a setup as a table for terminals, and as a picture with sliders for notebooks."""

from dataclasses import replace
from typing import Any

import ipywidgets
from matplotlib.figure import Figure
from rich.console import Group
from rich.table import Table
from rich.text import Text

from course_lib.core.errors import CourseError
from course_lib.core.recipes import find_recipe
from course_lib.core.records import Ledger
from course_lib.core.units import format_bytes
from course_lib.display.explore import Explore
from course_lib.display.memory import memory
from course_lib.display.show import has_widgets, widget_data
from course_lib.memory.calculator import KINDS, Setup, read_setup
from course_lib.memory.live import CALCULATOR, bytes_at_peak, setup_alt

PARAMS_BY = {
    "layers, split by tp": "split",
    "layers, on every rank of tp": "whole",
    "layers, experts": "experts",
    "embedding and output": "ends",
}


def accounting_table(setup: Setup) -> Group:
    """Return what `course memory` prints: bytes by kind on the fullest rank, then a summary.

    Where micro-batches are recomputed, the parts of the activations are what forward leaves, and
    their sum is less than the most.
    """
    told = setup.accounting()
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("on the fullest rank")
    table.add_column("at the peak", justify="right")
    table.add_column("most", justify="right")
    for kind in KINDS:
        sizes = (format_bytes(told[which][kind]) for which in ("peak_bytes", "most_bytes"))
        table.add_row(kind, *sizes)
        if kind == "params" and setup.spec.experts:
            weight_bytes = find_recipe(setup.recipe).weight_bytes
            for words, part in PARAMS_BY.items():
                num_bytes = told["params_on_rank"][part] * weight_bytes
                table.add_row(f"  {words}", "", format_bytes(num_bytes))
    for part, num_bytes in told["activation_bytes"].items():
        if num_bytes:
            table.add_row(f"  {part}", "", format_bytes(num_bytes))
    table.add_row("all", format_bytes(told["total_bytes"]), "")
    table.add_row(f"{setup.device.name} holds", format_bytes(told["limit_bytes"]), "")
    return Group(table, "", Text("\n".join(_sentences(setup, told))))


def _sentences(setup: Setup, told: dict[str, Any]) -> list[str]:
    share = told["total_bytes"] / told["limit_bytes"]
    ranks, batch = told["world_size"], told["global_batch"]
    active = f", {told['active_params']:,} of them active," if setup.spec.experts else ""
    size, ranks_word = told["num_params"], "rank" + "s" * (ranks > 1)
    lines = [
        f"{setup.spec.name}: {size:,} parameters{active} on {ranks} {ranks_word}.",
        f"It {'fits' if told['fits'] else 'does not fit'}: {share:.0%} of the GPU's memory.",
        f"Largest micro-batch that fits: {told['largest_batch']}."
        if told["largest_batch"]
        else _how_it_fits(setup),
        f"A step is {told['tokens_a_step']:,} tokens (global batch {batch}) and "
        f"{told['step_flop']:.4g} FLOP; 6ND says {told['six_n_d_flop']:.4g}.",
    ]
    lines.append(
        f"Keys and values of a sequence of {setup.seq:,} tokens, which generation keeps in 16 bits:"
        f" {format_bytes(told['kv_cache_bytes'])}, {told['kv_cache_bytes'] / setup.seq:,.0f} bytes"
        " a token."
    )
    if told["mfu"]:
        lines.append(f"At {setup.step_time_s:g} s a step the MFU is {told['mfu']:.1%}.")
    return lines


def _how_it_fits(setup: Setup) -> str:
    """Return which options make a setup fit for which not even one sequence does."""
    more = replace(setup, batch=1).with_more_ranks()
    if more is None:
        return (
            f"No --dp up to {setup.dp * 1024} makes it fit, sharded and with full recomputation. "
            "Try a smaller --seq, or a larger --tp, --pp, --cp or --ep."
        )
    names = ("batch", "dp", "zero", "recompute")
    other = [name for name in names if getattr(more, name) != getattr(setup, name)]
    words = " ".join(f"--{name} {getattr(more, name)}" for name in other)
    return f"It fits on {more.parallelism.world_size} ranks with {words}."


def draw_setup(setup: Setup) -> Figure:
    """Draw the stacked bar of the fullest rank at its peak, with the GPU's memory as the limit."""
    peak, limit = setup.peak_bytes, setup.device.memory_bytes
    words = f"{peak / limit:.0%} of" if peak <= limit else f"{peak / limit:.3g} times"
    title = f"{setup.spec.name} takes {words} the memory of {setup.device.name}: "
    title += f"{format_bytes(peak)} per rank"
    bar = Ledger()
    bar.add(0.0, **bytes_at_peak(setup))
    return memory({"peak": bar}, title, limit_bytes=limit)


class Calculator(Explore):
    """Interactive calculator for a notebook; `setup` holds the current values of its sliders."""

    def __init__(self, setup: Setup) -> None:
        self._own = setup
        super().__init__(
            lambda **values: draw_setup(self._at(values)),
            lambda **values: setup_alt(self._at(values)),
            _controls(setup),
        )
        self.line = ipywidgets.Text(
            value=setup.text(),
            description="this setup:",
            continuous_update=False,
            layout=ipywidgets.Layout(width="98%"),
            style={"description_width": "initial"},
        )
        for slider in self.sliders.values():
            slider.layout.width = "auto"
            slider.style.description_width = "8em"
        self.line.observe(self._read_line, "value")

    @property
    def setup(self) -> Setup:
        """Setup with the sliders' current values."""
        return self._at(self.values())

    def _at(self, values: dict[str, Any]) -> Setup:
        """Return the setup with these values; for unchanged values the same object."""
        made = replace(self._own, **values)
        if made != self._own:
            self._own = made
        return self._own

    def _update(self, change: Any) -> None:
        super()._update(change)
        if not self.image.picture["failed"]:
            self.line.unobserve(self._read_line, "value")
            self.line.value = self.setup.text()
            self.line.observe(self._read_line, "value")

    def _read_line(self, change: Any) -> None:
        """Move the sliders to the setup of the line; show the error if it cannot be parsed."""
        try:
            setup = read_setup(change["new"])
        except CourseError as problem:
            self.image.picture = {**self.image.picture, "alt": str(problem), "failed": True}
            return
        self._own = setup
        for name, slider in self.sliders.items():
            slider.unobserve(self._update, "value")
            value = getattr(setup, name)
            if hasattr(slider, "options") and value not in slider.options:
                slider.options = [*slider.options, value]
            slider.value = value
            slider.observe(self._update, "value")
        self._update(change)

    def _repr_mimebundle_(self, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        data, metadata = super()._repr_mimebundle_(**options)
        if has_widgets():
            columns = ipywidgets.Layout(
                grid_template_columns="repeat(3, minmax(0, 1fr))", width="98%"
            )
            grid = ipywidgets.GridBox([*self.sliders.values()], layout=columns)
            data |= widget_data(ipywidgets.VBox([grid, self.line, self.image]))
        return data, metadata


def calculator(setup: str = "--model llama-8b --gpu h100") -> Calculator:
    """Return sliders for a setup, its bytes against the GPU's limit, and its line of options.

    setup   options of `course memory`, such as the line of another calculator

    Raises: CourseError for a line that cannot be parsed
    """
    return Calculator(read_setup(setup))


def _controls(setup: Setup) -> dict[str, Any]:
    """Return a menu for each choice, with the setup's value among its options, and the time."""
    controls: dict[str, Any] = {}
    for name, (options, _) in CALCULATOR.options().items():
        value = getattr(setup, name)
        menu = options if value in options else [*options, value]
        controls[name] = (
            value if isinstance(value, bool) else ipywidgets.Dropdown(options=menu, value=value)
        )
    return {**controls, "step_time_s": ipywidgets.FloatText(value=setup.step_time_s, step=0.1)}
