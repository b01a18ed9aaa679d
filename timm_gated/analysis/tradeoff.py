"""Accuracy against average MACs, for any number of runs

Measured points come from the JSON files that `tools/evaluate.py` and `tools/analyze_gates.py` write; the paper's from
`published`. Every point says which it is.
"""
import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Dict, List, Mapping, Sequence, Tuple, Union

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox

from .figures import CLASS_COLOURS, WIDTH
from .published import Point

__all__ = ['group_points', 'load_points', 'trade_off_figure']

RESULT_FILES = ('evaluation.json', 'gates.json')  # looked for in a folder


def load_points(paths: Sequence[Union[str, Path]]) -> List[Point]:
    """Measured points of result files.

    Args:
        paths: JSON files, or folders that hold one.
    """
    points = []
    for path in map(Path, paths):
        if not path.exists():
            raise ValueError(f'{path} does not exist: make it with tools/evaluate.py --output or '
                             f'tools/analyze_gates.py --output.')
        if path.is_dir():
            found = [path / name for name in RESULT_FILES if (path / name).is_file()]
            if not found:
                raise ValueError(
                    f'{path} holds neither {" nor ".join(RESULT_FILES)}: write one there with tools/evaluate.py '
                    f'--output or tools/analyze_gates.py --output.')
            path = found[0]
        try:
            results = json.loads(path.read_text(encoding='utf-8'))['results']
            points += [_measured(result) for result in results]
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f'{path} is no result of tools/evaluate.py or tools/analyze_gates.py: '
                f'{type(error).__name__} {error}.') from error
    if not points:
        raise ValueError('there is no result to draw. Give files or folders with results of tools/evaluate.py.')
    return points


def _measured(result: Dict) -> Point:
    accuracy = result['top1'] if 'top1' in result else result['pixel_accuracy']
    series = result['model'] if result['num_gates'] else 'dense'
    return Point(result['name'], series, accuracy, result['mean_macs'], result['macs_share'], 'measured')


def group_points(points: Sequence[Point], series: Mapping[str, str], only: Sequence[str] = ()) -> List[Point]:
    """Some of the points, in series of one's own.

    Args:
        points: The points.
        series: Names of series, each with the pattern (`b_l0_*`) of its points' names; other points stay in theirs.
        only: Patterns of the names to keep; none for all of them.
    """
    for pattern in (*series.values(), *only):
        if not any(fnmatchcase(point.name, pattern) for point in points):
            names = ', '.join(point.name for point in points)
            raise ValueError(f"no result has a name like '{pattern}'; there are {names}.")
    kept = [point for point in points if not only or any(fnmatchcase(point.name, pattern) for pattern in only)]
    own = ([name for name, pattern in series.items() if fnmatchcase(point.name, pattern)] for point in kept)
    return [point._replace(series=names[0]) if names else point for point, names in zip(kept, own, strict=True)]


def trade_off_figure(points: Sequence[Point], x: str = 'macs', accuracy: str = 'top-1') -> Figure:
    """Accuracy against average MACs; filled points are measured, hollow ones published.

    Args:
        points: The points.
        x: 'macs', or 'share' of the dense network's.
        accuracy: Name of the accuracy.
    """
    if x not in ('macs', 'share'):
        raise ValueError(f"x must be 'macs' or 'share', got '{x}'.")
    drawn = [point for point in points if x == 'share' or point.macs is not None]
    if not drawn:
        raise ValueError("none of the points has MACs; draw their share (x='share').")
    divisor = 0.01 if x == 'share' else 1e9 if max(point.macs or 0 for point in drawn) >= 1e9 else 1e6
    unit = '% of the dense MACs' if x == 'share' else f'{"G" if divisor == 1e9 else "M"} MACs a sample, on average'
    series: Dict[tuple, List[Point]] = {}
    for point in drawn:
        series.setdefault((point.source, point.series), []).append(point)

    def position(point: Point) -> float:
        return ((point.share if x == 'share' else point.macs) or 0) / divisor

    figure = Figure(figsize=(WIDTH, 4.6), layout='constrained')
    axis = figure.subplots()
    for index, ((source, name), members) in enumerate(series.items()):
        members = sorted(members, key=position)
        xs = [position(point) for point in members]
        ys = [point.accuracy for point in members]
        colour = CLASS_COLOURS[index % len(CLASS_COLOURS)]
        measured = source == 'measured'
        axis.plot(
            xs, ys, marker='o' if measured else 's', color=colour, linestyle='-' if measured else ':', linewidth=1,
            markerfacecolor=colour if measured else 'white', label=f'{name} ({source})')
    axis.set(xlabel=unit, ylabel=f'{accuracy} (%)')
    axis.margins(x=0.15)
    axis.grid(color='#eeeeee')
    figure.legend(loc='outside upper center', ncols=2, frameon=False, fontsize=8)
    # (A point whose name is that of its series is in the legend.)
    _write_names(axis, [(point.name, position(point), point.accuracy) for point in drawn if point.name != point.series])
    return figure


# Where a name may be, from its point: a shift in typographic points, and which of the name's edges is there.
_SIDES = [
    (dx, dy, 'left' if dx > 0 else 'right', 'top' if dy < 0 else 'bottom')
    for distance in (3, 12, 21, 30) for dy in (-distance, distance) for dx in (5, -5)]


def _write_names(axis: Axes, points: Sequence[Tuple[str, float, float]]) -> None:
    """Write names beside their points, each where no point and no other name is, if there is such a place.

    Args:
        axis: Axes that hold all they are going to.
        points: Name, x and y of each.
    """
    figure = axis.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()  # settles where the axes are
    renderer = FigureCanvasAgg(figure).get_renderer()
    centres = axis.transData.transform(np.concatenate([np.stack(line.get_data(), 1) for line in axis.lines]))
    taken = [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in centres]
    for name, x, y in points:
        text = axis.annotate(
            name, (x, y), xytext=(0, 0), textcoords='offset points', fontsize=7, color='#444444', in_layout=False)
        boxes = [_put(text, side).get_window_extent(renderer) for side in _SIDES]
        outside = [not all(axis.bbox.contains(*corner) for corner in box.corners()) for box in boxes]
        hidden = [sum(box.overlaps(other) for other in taken) for box in boxes]
        best = min(zip(outside, hidden, range(len(_SIDES)), strict=True))[-1]
        _put(text, _SIDES[best])
        taken.append(boxes[best])


def _put(text: Annotation, side: Tuple[float, float, str, str]) -> Annotation:
    dx, dy, horizontal, vertical = side
    text.set(position=(dx, dy), ha=horizontal, va=vertical)
    return text
