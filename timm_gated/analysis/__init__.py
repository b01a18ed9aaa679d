"""See the gates: what a gated model does over a data set, as numbers, figures and a report

Needs the extra `analysis` (matplotlib, SciPy, PyArrow), and is therefore not imported by `timm_gated` itself.

Example:
    >>> record = record_classifier(model, loader, class_names)
    >>> firing_figure(record, classes=['cat', 'dog', 'truck']).savefig('firing.png')
    >>> write_report('report', record, fetch_image)
"""
from ..record import GateRecord, Outcome, Recorder, check_gated, record_classifier, record_gates
from .figures import (
    class_similarity_figure,
    firing_figure,
    gate_distribution_figure,
    gates_over_training_figure,
    prior_figure,
)
from .measures import class_similarity, difficulty, prior_distance, specialised_gates, summary
from .published import PUBLISHED, Point
from .report import ReportOptions, check_target, load_distribution, write_report
from .sample_figures import difficulty_figure, extremes_figure, macs_figure, specialised_figure
from .tradeoff import group_points, load_points, trade_off_figure

__all__ = [
    'PUBLISHED',
    'GateRecord',
    'Outcome',
    'Point',
    'Recorder',
    'ReportOptions',
    'check_gated',
    'check_target',
    'class_similarity',
    'class_similarity_figure',
    'difficulty',
    'difficulty_figure',
    'extremes_figure',
    'firing_figure',
    'gate_distribution_figure',
    'gates_over_training_figure',
    'group_points',
    'load_distribution',
    'load_points',
    'macs_figure',
    'prior_distance',
    'prior_figure',
    'record_classifier',
    'record_gates',
    'specialised_figure',
    'specialised_gates',
    'summary',
    'trade_off_figure',
    'write_report',
]
