"""Analysis of gated models over a data set: numbers, figures and a report

Statistics, records, their summary and sources of data need only numpy, torch and timm. Other measures, figures and
reports need the extra `analysis` (matplotlib, SciPy, PyArrow) and are imported on first use.

Examples:
    >>> record = record_classifier(model, loader, class_names)
    >>> firing_figure(record, classes=['cat', 'dog', 'truck']).savefig('firing.png')
    >>> write_report('report', record, fetch_image)
"""
import importlib
from typing import TYPE_CHECKING, Any, List

from .neighbours import DecisionRecord, ImageGates, image_gates, record_decisions
from .record import (
    GateRecord,
    Outcome,
    Recorder,
    check_gated,
    classification_step,
    record_classifier,
    record_gates,
)
from .statistics import GateCounts, GateStatistics, check_threshold, gate_kinds

if TYPE_CHECKING:
    from .figures import (
        class_similarity_figure,
        firing_figure,
        gate_distribution_figure,
        gates_over_training_figure,
        prior_figure,
    )
    from .measures import class_similarity, difficulty, prior_distance, specialised_gates, summary
    from .pictures import gates_picture, trade_off_picture
    from .published import PUBLISHED, Point
    from .report import ReportOptions, check_target, load_distribution, write_report
    from .sample_figures import difficulty_figure, extremes_figure, macs_figure, specialised_figure
    from .sources import (
        Data,
        FetchImage,
        Preprocessing,
        create_data,
        create_network,
        find_device,
        limit_loader,
        note_untrained,
        parse_checkpoint,
        spread_evenly,
        title,
    )
    from .tradeoff import group_points, load_points, trade_off_figure

# Names imported on first use, by module
_LAZY = {
    'figures': (
        'class_similarity_figure', 'firing_figure', 'gate_distribution_figure', 'gates_over_training_figure',
        'prior_figure'),
    'measures': ('class_similarity', 'difficulty', 'prior_distance', 'specialised_gates', 'summary'),
    'pictures': ('gates_picture', 'trade_off_picture'),
    'published': ('PUBLISHED', 'Point'),
    'report': ('ReportOptions', 'check_target', 'load_distribution', 'write_report'),
    'sample_figures': ('difficulty_figure', 'extremes_figure', 'macs_figure', 'specialised_figure'),
    'sources': (
        'Data', 'FetchImage', 'Preprocessing', 'create_data', 'create_network', 'find_device', 'limit_loader',
        'note_untrained', 'parse_checkpoint', 'spread_evenly', 'title'),
    'tradeoff': ('group_points', 'load_points', 'trade_off_figure'),
}
_MODULES = {name: module for module, names in _LAZY.items() for name in names}

__all__ = [
    'PUBLISHED',
    'Data',
    'DecisionRecord',
    'FetchImage',
    'GateCounts',
    'GateRecord',
    'GateStatistics',
    'ImageGates',
    'Outcome',
    'Point',
    'Preprocessing',
    'Recorder',
    'ReportOptions',
    'check_gated',
    'check_target',
    'check_threshold',
    'class_similarity',
    'class_similarity_figure',
    'classification_step',
    'create_data',
    'create_network',
    'difficulty',
    'difficulty_figure',
    'extremes_figure',
    'find_device',
    'firing_figure',
    'gate_distribution_figure',
    'gate_kinds',
    'gates_over_training_figure',
    'gates_picture',
    'group_points',
    'image_gates',
    'limit_loader',
    'load_distribution',
    'load_points',
    'macs_figure',
    'note_untrained',
    'parse_checkpoint',
    'prior_distance',
    'prior_figure',
    'record_classifier',
    'record_decisions',
    'record_gates',
    'specialised_figure',
    'specialised_gates',
    'spread_evenly',
    'summary',
    'title',
    'trade_off_figure',
    'trade_off_picture',
    'write_report',
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return getattr(importlib.import_module(f'.{_MODULES[name]}', __name__), name)


def __dir__() -> List[str]:
    return __all__
