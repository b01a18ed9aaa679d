"""Accuracy against mean MACs of several runs

Measured points come from the JSON files of `timm-gated evaluate` and `timm-gated analyze`, published points from
`published`. The legend tells them apart.
"""
import json
from fnmatch import fnmatchcase
from itertools import cycle
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

RESULT_FILES = ('evaluation.json', 'gates.json')  # looked up in a folder


def load_points(paths: Sequence[Union[str, Path]]) -> List[Point]:
    """Load measured points from result files.

    Args:
        paths: JSON files, or folders with one.
    """
    points = []
    for path in map(Path, paths):
        if not path.exists():
            raise ValueError(f'{path} does not exist: write it with `timm-gated evaluate --output` or '
                             f'`timm-gated analyze --output`.')
        if path.is_dir():
            found = [path / name for name in RESULT_FILES if (path / name).is_file()]
            if not found:
                raise ValueError(
                    f'{path} holds neither {" nor ".join(RESULT_FILES)}: write one there with '
                    f'`timm-gated evaluate --output` or `timm-gated analyze --output`.')
            path = found[0]
        try:
            results = json.loads(path.read_text(encoding='utf-8'))['results']
            points += [_measured(result) for result in results]
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f'{path} is not a result of `timm-gated evaluate` or `timm-gated analyze`: '
                f'{type(error).__name__} {error}.') from error
    if not points:
        raise ValueError('no results to draw. Give files or folders with results of `timm-gated evaluate`.')
    return points


def _measured(result: Dict) -> Point:
    accuracy = result['top1'] if 'top1' in result else result['pixel_accuracy']
    series = result['model'] if result['num_gates'] else 'dense'
    return Point(result['name'], series, accuracy, result['mean_macs'], result['macs_share'], 'measured')


def group_points(points: Sequence[Point], series: Mapping[str, str], only: Sequence[str] = ()) -> List[Point]:
    """Select points and assign them to series.

    Args:
        points: Points to select from.
        series: Pattern of point names, such as `b_l0_*`, by name of the series. Other points keep their series.
        only: Patterns of the names to keep; empty to keep all.
    """
    for pattern in (*series.values(), *only):
        if not any(fnmatchcase(point.name, pattern) for point in points):
            names = ', '.join(point.name for point in points)
            raise ValueError(f"no result matches '{pattern}'; the results: {names}.")
    kept = [point for point in points if not only or any(fnmatchcase(point.name, pattern) for pattern in only)]
    own = ([name for name, pattern in series.items() if fnmatchcase(point.name, pattern)] for point in kept)
    return [point._replace(series=names[0]) if names else point for point, names in zip(kept, own, strict=True)]


def trade_off_figure(points: Sequence[Point], x: str = 'macs', accuracy: str = 'top-1') -> Figure:
    """Draw accuracy against mean MACs. Filled points are measured, hollow ones published.

    Args:
        points: Points to draw.
        x: 'macs' or, as a share of the dense MACs, 'share'.
        accuracy: Name of the accuracy metric.
    """
    if x not in ('macs', 'share'):
        raise ValueError(f"x must be 'macs' or 'share', got '{x}'.")
    drawn = [point for point in points if x == 'share' or point.macs is not None]
    if not drawn:
        raise ValueError("none of the points has MACs; use x='share'.")
    divisor = 0.01 if x == 'share' else 1e9 if max(point.macs or 0 for point in drawn) >= 1e9 else 1e6
    unit = '% of the dense MACs' if x == 'share' else f'{"G" if divisor == 1e9 else "M"} MACs per sample, mean'
    series: Dict[tuple, List[Point]] = {}
    for point in drawn:
        series.setdefault((point.source, point.series), []).append(point)

    def position(point: Point) -> float:
        return ((point.share if x == 'share' else point.macs) or 0) / divisor

    figure = Figure(figsize=(WIDTH, 4.6), layout='constrained')
    axis = figure.subplots()
    for colour, ((source, name), members) in zip(cycle(CLASS_COLOURS), series.items(), strict=False):
        members = sorted(members, key=position)
        xs = [position(point) for point in members]
        ys = [point.accuracy for point in members]
        measured = source == 'measured'
        axis.plot(
            xs, ys, marker='o' if measured else 's', color=colour, linestyle='-' if measured else ':', linewidth=1,
            markerfacecolor=colour if measured else 'white', label=f'{name} ({source})')
    axis.set(xlabel=unit, ylabel=f'{accuracy} (%)')
    axis.margins(x=0.15)
    axis.grid(color='#eeeeee')
    figure.legend(loc='outside upper center', ncols=2, frameon=False, fontsize=8)
    # Points named like their series are in the legend.
    _write_names(axis, [(point.name, position(point), point.accuracy) for point in drawn if point.name != point.series])
    return figure


# Positions of a label relative to its point: offset in typographic points and alignment.
_SIDES = [
    (dx, dy, 'left' if dx > 0 else 'right', 'top' if dy < 0 else 'bottom')
    for distance in (3, 12, 21, 30) for dy in (-distance, distance) for dx in (5, -5)]


def _write_names(axis: Axes, points: Sequence[Tuple[str, float, float]]) -> None:
    """Label points, avoiding overlap with points and other labels where possible.

    Args:
        axis: Axes with everything else already drawn.
        points: Name, x and y of each point.
    """
    figure = axis.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()  # fixes the position of the axes
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
