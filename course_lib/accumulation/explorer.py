"""The explorer of notebook 02_accumulation: the worked graph, event by event."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from course_lib.accumulation.pictures import graph
from course_lib.accumulation.worked_graph import GraphState, graph_words
from course_lib.display.explore import Explore, explore


def graph_explorer(ways: Mapping[str, Sequence[GraphState]], event: int = 4) -> Explore:
    """Return the worked graph with sliders for the way to train and the event.

    A way with fewer events than another stays in its last state.
    """

    def at(way: str, event: int) -> GraphState:
        return ways[way][min(event, len(ways[way]) - 1)]

    def draw(way: str, event: int) -> Figure:
        return graph(at(way, event), f"{at(way, event).words} ({way})")

    def words(way: str, event: int) -> str:
        return f"{graph_words(at(way, event))} ({way})"

    last = max(map(len, ways.values())) - 1
    return explore(draw, words, way=list(ways), event=(0, last, event))
