"""Results of the inference benchmark: rows, fits, table and figure"""
from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple

from timm_gated_cli._bench_runtimes import BASELINES, INT8, is_int8
from timm_gated_cli._options import format_table

__all__ = ['Fit', 'LEGEND', 'Row', 'fit_lines', 'fit_table', 'plot', 'table']

Peaks = Dict[str, float]  # GFLOP/s of one core, by instruction set


@dataclass
class Row:
    """One line of the table."""
    network: str
    dense: str  # name of the dense counterpart, or of the network itself
    runtime: str
    keep: Optional[float]  # share of filters kept by the gates; None for dense and for trained networks
    image_size: Tuple[int, int]
    batch_size: int
    threads: int
    gmacs: float  # per image
    times: List[float] = field(default_factory=list)  # milliseconds per batch

    @property
    def ms(self) -> float:
        return statistics.median(self.times)

    @property
    def spread(self) -> float:
        """Half the interquartile range."""
        quartiles = statistics.quantiles(self.times, n=4) if len(self.times) > 1 else [0., 0., 0.]
        return (quartiles[2] - quartiles[0]) / 2

    @property
    def is_gated(self) -> bool:
        return self.network != self.dense

    @property
    def is_baseline(self) -> bool:
        """Whether the row is a dense float32 baseline: neither our kernels nor int8."""
        return not self.is_gated and self.runtime in BASELINES

    @property
    def setting(self) -> Tuple[int, int]:
        return self.batch_size, self.threads

    def share_of_peak(self, peaks: Peaks) -> Optional[float]:
        """Share of the FMA peak of the cores in use; None for int8 and without a measured peak.

        A native row is compared with the peak of its own instruction set, other rows with the highest one.
        """
        if is_int8(self.runtime) or not peaks:
            return None
        peak = peaks.get(self.runtime.rpartition(' ')[2], max(peaks.values()))
        return 2 * self.gmacs * self.batch_size / (self.ms / 1e3) / (peak * self.threads)


@dataclass
class Fit:
    """Line through the rows of a gated network: milliseconds per image = intercept + slope * GMACs."""
    network: str
    runtime: str
    image_size: Tuple[int, int]
    batch_size: int
    threads: int
    intercept: float  # ms per image that gating cannot save
    slope: float  # ms per GMAC
    r2: float
    full_ms: float  # ms per image of the row with the most MACs
    max_gmacs: float


def fit_lines(rows: Sequence[Row]) -> List[Fit]:
    """Fit milliseconds against MACs, per gated network, runtime and setting.

    A fit needs at least three different MAC counts: a line through two points always fits.
    """
    import numpy as np
    groups: Dict[Tuple, List[Row]] = {}
    for row in rows:
        if row.is_gated and row.keep is not None:
            groups.setdefault((row.network, row.runtime, row.image_size, *row.setting), []).append(row)
    fits = []
    for key, group in groups.items():
        macs = np.array([row.gmacs for row in group])
        ms = np.array([row.ms / row.batch_size for row in group])
        if len(set(macs.tolist())) < 3:
            continue
        slope, intercept = np.polyfit(macs, ms, 1)
        total = ((ms - ms.mean()) ** 2).sum()
        r2 = 1 - ((ms - intercept - slope * macs) ** 2).sum() / total if total else 1.
        fits.append(Fit(*key, float(intercept), float(slope), float(r2), float(ms[macs.argmax()]), float(macs.max())))
    return fits


def fastest_dense(rows: Sequence[Row], like: Row, network: str, runtimes: Sequence[str] = BASELINES) -> Optional[Row]:
    """Find the fastest of the given runtimes of a dense network, for the same images and in the same setting."""
    found = [
        row for row in rows if row.network == network and not row.is_gated and row.runtime in runtimes
        and row.image_size == like.image_size and row.setting == like.setting]
    return min(found, key=lambda row: row.ms, default=None)


def same_row(rows: Sequence[Row], row: Row, keep: Optional[float], threads: int) -> Optional[Row]:
    """Find the row that differs only in the share of filters kept or in the number of threads."""
    return next((other for other in rows if (other.keep, other.threads) == (keep, threads) and (
        other.network, other.runtime, other.image_size, other.batch_size) == (
        row.network, row.runtime, row.image_size, row.batch_size)), None)


def ratio(row: Row, other: Optional[Row]) -> str:
    return '' if other is None else f'{row.ms / other.ms:.2f}'


def columns(rows: Sequence[Row], row: Row, peaks: Peaks) -> List[str]:
    """Format a row of the table."""
    ratios = [
        ratio(row, fastest_dense(rows, row, row.dense)), ratio(row, fastest_dense(rows, row, 'resnet18')),
        ratio(row, fastest_dense(rows, row, row.dense, [INT8]))]
    scaling = ratio(row, same_row(rows, row, row.keep, 1)) if row.threads > 1 else ''
    share = row.share_of_peak(peaks)
    full = same_row(rows, row, 1., row.threads)
    became_time = ''
    if full is not None and row.gmacs < full.gmacs:
        became_time = f'{100 * (1 - row.ms / full.ms) / (1 - row.gmacs / full.gmacs):.0f} %'
    filters = '' if not row.is_gated else 'as trained' if row.keep is None else f'{100 * row.keep:.0f} %'
    height, width = row.image_size
    return [row.network, row.runtime, filters, f'{height}' if height == width else f'{height} x {width}',
            f'{row.gmacs:.2f}', f'{row.ms:.1f}', f'± {row.spread:.1f}', f'{1e3 * row.batch_size / row.ms:.1f}',
            *ratios, scaling, '' if share is None else f'{100 * share:.0f} %', became_time]


HEADER = ['network', 'runtime', 'filters kept', 'image', 'GMACs', 'ms', '', 'images/s', '× fastest dense',
          '× dense ResNet-18', '× OpenVINO int8', '× 1 thread', 'share of peak', 'of MACs saved, time saved']


LEGEND = """ms: median per batch, ± half the interquartile range.
GMACs: computed MACs per image (masked: all of them).
× fastest dense: time relative to the fastest float32 baseline of the dense counterpart (eager, compile, onnxruntime,
openvino), with the same images, batch size and threads. Native rows of dense networks are not baselines: they show what
the kernels give without gates.
× 1 thread: time relative to the same row with one thread.
share of peak: 2 * MACs / time, relative to the FMA peak of all threads: native rows to the peak of their instruction
set, other float32 rows to the highest one. Winograd computes fewer products than the MACs counted here, so its share
may exceed 100 %.
of MACs saved, time saved: saved time as a share of saved MACs, relative to the same runtime with all filters kept."""


def heading(setting: Tuple[int, int]) -> str:
    return f'batch {setting[0]}, {setting[1]} thread{"s" if setting[1] > 1 else ""}'


def table(rows: Sequence[Row], peaks: Peaks) -> str:
    """Format all rows, grouped by setting."""
    text = []
    for setting in dict.fromkeys(row.setting for row in rows):
        cells = [HEADER, *(columns(rows, row, peaks) for row in rows if row.setting == setting)]
        text.append(f'{heading(setting)}\n{format_table(cells)}\n')
    return '\n'.join(text)


def fit_table(fits: Sequence[Fit]) -> str:
    """Format the fits."""
    cells = [['network', 'runtime', 'batch', 'threads', 'ms at 0 MACs', 'of full time', 'ms per GMAC', 'R²']]
    for fit in fits:
        cells.append([
            fit.network, fit.runtime, f'{fit.batch_size}', f'{fit.threads}', f'{fit.intercept:.2f}',
            f'{100 * fit.intercept / fit.full_ms:.0f} %', f'{fit.slope:.2f}', f'{fit.r2:.3f}'])
    return ('Milliseconds per image against GMACs, a line over the shares of filters kept. Its value at 0 MACs is time '
            f'that gating cannot save.\n{format_table(cells)}\n')


def plot(rows: Sequence[Row], fits: Sequence[Fit], weights: str, path: Path) -> None:
    """Plot milliseconds against MACs per image, with one column per setting and one row per image size."""
    from matplotlib.figure import Figure
    settings = list(dict.fromkeys(row.setting for row in rows))
    sizes = list(dict.fromkeys(row.image_size for row in rows))
    runtimes = list(dict.fromkeys(row.runtime for row in rows))
    fig = Figure(figsize=(5.2 * len(settings) + 2, 4.4 * len(sizes)), layout='constrained')
    fig.suptitle(f'Weights: {weights}', fontsize='small')
    axes = fig.subplots(len(sizes), len(settings), squeeze=False)
    for i, size in enumerate(sizes):
        for j, setting in enumerate(settings):
            axis = axes[i][j]
            for row in rows:
                if (row.image_size, row.setting) == (size, setting):
                    axis.plot(
                        row.gmacs, row.ms / row.batch_size, 'o' if row.is_gated else 's',
                        color=f'C{runtimes.index(row.runtime)}')
            for fit in fits:
                if (fit.image_size, fit.batch_size, fit.threads) == (size, *setting):
                    axis.plot(
                        [0, fit.max_gmacs], [fit.intercept, fit.intercept + fit.slope * fit.max_gmacs], linewidth=1,
                        color=f'C{runtimes.index(fit.runtime)}')
            axis.set(
                xlabel='GMACs per image', ylabel='ms per image', ylim=(0, None), xlim=(0, None),
                title=f'{heading(setting)}, images of {size[0]} x {size[1]}')
            axis.grid(alpha=0.3)
    for runtime in runtimes:
        axes[0][0].plot([], [], 'o', color=f'C{runtimes.index(runtime)}', label=runtime)
    fig.legend(
        loc='outside right center', frameon=False, title='dense: squares\ngated: dots, fitted lines', fontsize='small')
    fig.savefig(path, dpi=150)
