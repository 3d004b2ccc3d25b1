"""The shortest cycle of a graph: ranks that wait for each other, and so will wait forever."""

from collections.abc import Mapping, Sequence


def shortest_cycle(edges: Mapping[int, Sequence[int]]) -> list[int]:
    """Return the nodes of the shortest cycle, each once, in its order; empty if there is none.

    `edges[node]` are the nodes that a node points to. Of cycles of one length, the first node's.
    """
    found: list[int] = []
    for start in sorted(edges):
        path = _way_back(edges, start)
        if path and (not found or len(path) < len(found)):
            found = path
    return found


def _way_back(edges: Mapping[int, Sequence[int]], start: int) -> list[int]:
    """Return the shortest path from a node along the edges back to itself, by breadth first."""
    paths = [[start]]
    seen: set[int] = set()
    while paths:
        path = paths.pop(0)
        for other in edges.get(path[-1], ()):
            if other == start:
                return path
            if other not in seen:
                seen.add(other)
                paths.append([*path, other])
    return []
