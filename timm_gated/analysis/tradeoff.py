"""Accuracy against average MACs, for any number of runs

Measured points come from the JSON files that `tools/evaluate.py` and `tools/analyze_gates.py` write; the paper's from
`published`. Every point says which it is.
"""
import json
from pathlib import Path
from typing import Dict, List, Sequence, Union

from matplotlib.figure import Figure

from .figures import CLASS_COLOURS, WIDTH
from .published import Point

__all__ = ['load_points', 'trade_off_figure']

RESULT_FILES = ('evaluation.json', 'gates.json')  # looked for in a folder


def load_points(paths: Sequence[Union[str, Path]]) -> List[Point]:
    """Measured points of result files.

    Args:
        paths: JSON files, or folders that hold one.
    """
    points = []
    for path in map(Path, paths):
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

    middle = (min(map(position, drawn)) + max(map(position, drawn))) / 2
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
        for point, left, height in zip(members, xs, ys, strict=True):
            if point.name == name:  # the legend has it
                continue
            side = 1 if left < middle else -1  # names grow towards the middle, where there is room
            axis.annotate(
                point.name, (left, height), xytext=(4 * side, -4), textcoords='offset points', fontsize=7, va='top',
                ha='left' if side > 0 else 'right', color='#444444')
    axis.set(xlabel=unit, ylabel=f'{accuracy} (%)')
    axis.margins(x=0.15)
    axis.grid(color='#eeeeee')
    figure.legend(loc='outside upper center', ncols=2, frameon=False, fontsize=8)
    return figure
