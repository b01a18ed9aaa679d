"""Figures and reports of a tiny model"""
import base64
import io
import itertools
import json
import re
import xml.etree.ElementTree as ElementTree
from datetime import date
from html.parser import HTMLParser

import matplotlib.pyplot as plt
import numpy as np
import pyarrow.parquet
import pytest
import timm
import torch
from matplotlib.figure import Figure
from PIL import Image
from small_analysis import CLASSES, fetch_image, make_batches, make_net, make_record

from timm_gated import Beta, GateCounts, Uniform
from timm_gated.analysis import (
    PUBLISHED,
    Point,
    ReportOptions,
    class_similarity,
    class_similarity_figure,
    difficulty_figure,
    extremes_figure,
    firing_figure,
    gate_distribution_figure,
    gates_over_training_figure,
    group_points,
    load_distribution,
    macs_figure,
    prior_figure,
    report,
    specialised_figure,
    specialised_gates,
    summary,
    trade_off_figure,
    write_report,
)
from timm_gated.analysis.figures import short_layers
from timm_gated.loss.snapshots import Snapshots
from timm_gated.version import __version__

FIGURES = {
    'gate_distribution', 'firing', 'specialised', 'extremes', 'macs', 'difficulty', 'class_similarity', 'prior',
    'training'}


@pytest.fixture(scope='module')
def record():
    return make_record(make_net(), make_batches())


@pytest.fixture(scope='module')
def snapshots():
    counts = np.random.default_rng(0).integers(0, 9, (4, 6, 10)) + 1
    names = [f'layer1.0.gate1/{i}' for i in range(6)]
    return Snapshots(names, np.array([0, 1, 2, 5]), counts, {'lam': np.arange(4.), 'gamma': np.zeros(4)})


def drawn(figure: Figure) -> np.ndarray:
    """Pixels of a figure. Checks that it is not empty."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format='png', dpi=50)
    pixels = np.asarray(Image.open(buffer).convert('L'))
    assert 0.02 < (pixels < 200).mean() < 0.9
    return pixels


def bar_shares(axis) -> list:
    return sorted(round(bar.get_width(), 6) for bar in axis.patches)


# Figures


def test_gate_distribution_by_hand():
    figure = gate_distribution_figure({
        'BAS': {'layer1.0.gate1': GateCounts(1, 2, 1), 'layer2.0.gate1': GateCounts(0, 8, 0)},
        'L0': {'layer1.0.gate1': GateCounts(2, 0, 2)}})
    left, right = figure.axes
    assert bar_shares(left) == [0, 0, 25, 25, 50, 100] and bar_shares(right) == [0, 50, 50]
    assert left.get_title() == 'BAS\n8 % on, 83 % conditional, 8 % off'
    assert [label.get_text() for label in left.get_yticklabels()] == ['layer1', 'layer2']
    drawn(figure)


def test_firing_histograms_are_sorted_by_the_whole_set(record):
    figure = firing_figure(record, classes=['bee', 'gnu'])
    assert len(figure.axes) == 3
    for axis, (_, span) in zip(figure.axes, record.spans(), strict=True):
        everything, bee, gnu = (patch.get_data().values for patch in axis.patches)
        order = np.argsort(-record.open_share[span], kind='stable')
        np.testing.assert_allclose(everything, 100 * record.open_share[span][order])
        np.testing.assert_allclose(bee, 100 * record.open_share_by_class[1, span][order])
        np.testing.assert_allclose(gnu, 100 * record.open_share_by_class[6, span][order])
        assert (np.diff(everything) <= 0).all()
    drawn(figure)
    assert len(firing_figure(record, max_layers=2).axes) == 2
    with pytest.raises(ValueError, match="no class 'owl'"):
        firing_figure(record, ['owl'])


def test_a_wide_layer_has_the_means_of_neighbouring_gates():
    record = make_record(make_net(channels=(32, 48, 80)), make_batches())
    for axis, (_, span) in zip(firing_figure(record).axes, record.spans(), strict=True):
        values, edges, _ = axis.patches[0].get_data()
        share = 100 * np.sort(record.open_share[span])[::-1]
        assert len(values) == 32 and edges[[0, -1]].tolist() == [0, len(share)]
        np.testing.assert_allclose(values[5], share[edges[5]:edges[6]].mean())


def test_legends_are_outside_the_axes(record):
    for figure in (macs_figure(record), difficulty_figure(record), firing_figure(record)):
        figure.draw_without_rendering()
        assert [axis.get_legend() for axis in figure.axes] == [None] * len(figure.axes)
        box = figure.legends[0].get_window_extent()
        assert not any(box.overlaps(axis.get_window_extent()) for axis in figure.axes)


def test_specialised_gates_and_extremes_show_their_images(record):
    fetched = []

    def fetch(index):
        fetched.append(index)
        return fetch_image(index)

    rare = specialised_gates(record, rare=0.9, count=2)
    drawn(specialised_figure(rare, fetch, columns=4))
    assert fetched == [index for gate in rare for index in gate.examples[:4]]
    fetched.clear()
    figure = extremes_figure(record, fetch, columns=3, rows=1)
    order = np.argsort(record.macs, kind='stable')
    assert fetched == [*order[::-1][:3], *order[:3]]
    texts = [axis.get_xlabel() for axis in figure.axes]
    assert f'{record.macs.max() / 1e6:.2f} M' in texts[0] and f'{record.macs.min() / 1e6:.2f} M' in texts[3]
    drawn(figure)
    with pytest.raises(ValueError, match='no gates to draw'):
        specialised_figure([], fetch)


def test_macs_and_difficulty(record):
    figure = macs_figure(record)
    assert sum(bar.get_height() for bar in figure.axes[0].patches) == record.num_samples
    means = {name: record.macs[record.of_class(k)].mean() for k, name in enumerate(CLASSES)}
    labels = [label.get_text() for label in figure.axes[1].get_yticklabels()]
    assert labels == sorted(CLASSES, key=means.__getitem__)
    drawn(figure)
    drawn(difficulty_figure(record))


def test_prior_figure(record):
    figure = prior_figure(record, Beta(), ['layer1.0.gate1/3'])
    gate, prior = figure.axes[0].lines
    assert gate.get_ydata()[[0, -1]].tolist() == [0, 1] and prior.get_ydata()[50] == pytest.approx(
        Beta().cdf(torch.tensor([0.5])).item(), abs=1e-6)
    assert gate.get_ydata()[50] == pytest.approx(record.histogram[3, :50].sum() / 64)
    drawn(prior_figure(record, Uniform()))


def test_gates_over_training(snapshots):
    figure = gates_over_training_figure(snapshots, ['layer1.0.gate1/5', 'layer1.0.gate1/2'])
    assert [axis.get_title() for axis in figure.axes[1:3]] == ['layer1.0.gate1/5', 'layer1.0.gate1/2']
    drawn(figure)
    assert len(gates_over_training_figure(snapshots).axes) == 1 + 4 + 1  # weights, gates, colour bar
    with pytest.raises(ValueError, match="do not have gate 'layer9/0'"):
        gates_over_training_figure(snapshots, ['layer9/0'])


def test_class_similarity_figure(record):
    similarity = class_similarity(record, {'a': CLASSES[:3], 'b': CLASSES[3:]})
    figure = class_similarity_figure(similarity)
    image = figure.axes[1].images[0].get_array()
    np.testing.assert_allclose(image, similarity.correlation)
    assert f'within groups {similarity.within:.2f}' in figure.get_suptitle()
    drawn(figure)


def test_trade_off_says_what_is_measured_and_what_published():
    measured = Point('mine', 'gated_resnet34', 73., 2e9, 0.55, 'measured')
    figure = trade_off_figure([measured, *PUBLISHED['imagenet']])
    labels = figure.axes[0].get_legend_handles_labels()[1]
    assert 'gated_resnet34 (measured)' in labels and 'ResNet34-BAS (published)' in labels
    assert sum('(measured)' in label for label in labels) == 1
    line = figure.axes[0].lines[labels.index('ResNet34-BAS (published)')]
    assert line.get_xdata() == pytest.approx([1.67, 2.92]) and line.get_markerfacecolor() == 'white'
    drawn(figure)
    drawn(trade_off_figure(PUBLISHED['cityscapes'], x='share'))
    with pytest.raises(ValueError, match='none of the points has MACs'):
        trade_off_figure(PUBLISHED['cityscapes'])
    with pytest.raises(ValueError, match="'macs' or 'share', got 'flops'"):
        trade_off_figure([measured], x='flops')


def test_names_in_a_trade_off_do_not_hide_one_another():
    points = [Point(f'a_run_with_a_name_{i}', 'runs', 87 + i / 10, 28e6 + i, 0.69, 'measured') for i in range(6)]
    figure = trade_off_figure([*points, Point('dense', 'dense', 89., 40e6, 1., 'measured')])
    figure.canvas.draw()
    axis, renderer = figure.axes[0], figure.canvas.get_renderer()
    boxes = [text.get_window_extent(renderer) for text in axis.texts]
    assert [text.get_text() for text in axis.texts] == [point.name for point in points]  # the other is in the legend
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    assert all(axis.bbox.contains(*corner) for box in boxes for corner in box.corners())
    centres = axis.transData.transform([xy for line in axis.lines for xy in line.get_xydata()])
    assert not any(box.contains(*centre) for box in boxes for centre in centres)


def test_group_points():
    points = [Point(name, 'gated_resnet20', 80., 1e6, 0.5, 'measured') for name in ('l0_1', 'bas_1', 'bas_2', 'x')]
    grouped = group_points(points, {'L0': 'l0_*', 'shaping': 'bas*'}, only=['*_*'])
    assert [(point.name, point.series) for point in grouped] == [
        ('l0_1', 'L0'), ('bas_1', 'shaping'), ('bas_2', 'shaping')]
    assert group_points(points, {}) == points
    for bad in (dict(series={'L0': 'L0*'}), dict(series={}, only=['L0*'])):
        with pytest.raises(ValueError, match=r"no result matches 'L0\*'; the results: l0_1, bas_1"):
            group_points(points, **bad)


def test_no_figure_leaks_into_pyplot(record):
    macs_figure(record)
    assert plt.get_fignums() == []


def test_short_names_of_layers():
    assert short_layers(['backbone.layer1.0.gate1', 'backbone.layer1.1.gate1']) == ['0', '1']
    assert short_layers(['layer1.0.gate1', 'layer1.0.gate2']) == ['gate1', 'gate2']
    assert short_layers(['gate']) == ['gate']


# Report


class Page(HTMLParser):
    """Images and links of a page. Fails on unclosed tags."""

    void = ('meta', 'img', 'wbr')

    def __init__(self, text: str) -> None:
        super().__init__()
        self.images, self.links, self.external, self.open, self.text = [], [], [], [], ''
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        if tag not in self.void:
            self.open.append(tag)
        for name, value in attrs:
            if name in ('src', 'href', 'srcset', 'action', 'data'):
                if tag == 'a':  # a link fetches nothing by itself
                    self.links.append(value)
                elif not value.startswith('data:'):
                    self.external.append(value)
                if tag == 'img':
                    self.images.append(value)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data.replace('\xa0', ' ')


def test_report(record, snapshots, tmp_path):
    options = ReportOptions(
        name='tiny <net>', model='gated_resnet20', snapshots=snapshots, rare=0.9,
        groups={'a': CLASSES[:3], 'b': CLASSES[3:]}, command='python analyze.py --name "tiny <net>"',
        dense={**summary(record), 'name': 'dense_net', 'model': 'cifar_resnet20', 'num_gates': 0, 'top1': 12.34})
    folder = write_report(tmp_path / 'new' / 'report', record, fetch_image, options)
    assert {path.name for path in folder.iterdir()} == {
        'index.html', 'gates.json', 'gates.parquet', 'samples.parquet',
        *(f'{name}.{suffix}' for name in FIGURES for suffix in ('png', 'svg'))}
    assert [path.name for path in (tmp_path / 'new').iterdir()] == ['report']

    text = (folder / 'index.html').read_text()
    page = Page(text)
    assert page.external == [] and 'http' not in text and '@import' not in text and 'url(' not in text
    assert 'name="viewport"' in text and 'tiny &lt;net&gt;' in text
    assert len(page.images) == len(FIGURES)
    sections = re.findall(r'<section id="(\w+)"><h2>[^<]+\?</h2><p>[^<]+\.</p><figure><a', text)
    assert set(sections) == FIGURES
    assert text.index('id="overview"') < text.index('<nav') < text.index('<table') < text.index('<figure')
    assert 'points more than dense_net without gates' in page.text and '12.34 %' in page.text
    assert f'with timm-gated {__version__}, timm {timm.__version__}, torch {torch.__version__} by' in page.text
    assert 'python analyze.py --name "tiny <net>"' in page.text and date.today().isoformat() in page.text
    for source in page.images:
        header, _, encoded = source.partition(',')
        assert header == 'data:image/png;base64'
        with Image.open(io.BytesIO(base64.b64decode(encoded, validate=True))) as image:
            image.load()
            assert image.width >= 800
    assert page.links == ['#measured', *(f'#{name}' for name in sections), *(f'{name}.svg' for name in sections)]
    for name in FIGURES:
        assert ElementTree.parse(folder / f'{name}.svg').getroot().tag.endswith('svg')

    content = json.loads((folder / 'gates.json').read_text())
    assert [result['name'] for result in content['results']] == ['tiny <net>', 'dense_net']
    assert content['results'][0]['num_samples'] == 64 and content['results'][0]['name'] == 'tiny <net>'
    assert f'{content["results"][0]["top1"]:.2f} %' in page.text
    assert len(content['layers']) == 3 and content['class_similarity']['within'] is not None
    assert load_distribution(folder) == {'tiny <net>': record.counts_by_layer()}
    table = pyarrow.parquet.read_table(folder / 'gates.parquet').to_pydict()
    assert table['module'][8] == 'layer2.0.gate1' and table['gate'][8:10] == [0, 1]
    np.testing.assert_allclose(table['open_share'], record.open_share)
    np.testing.assert_allclose(table['open_share/cow'], record.open_share_by_class[2], rtol=1e-6)
    samples = pyarrow.parquet.read_table(folder / 'samples.parquet').to_pydict()
    assert samples['macs'] == record.macs.tolist() and samples['label'] == record.label.tolist()


@pytest.mark.parametrize('name', ['fbs_resnet20', 'gated_resnet20', 'skipnet_resnet38'])
def test_report_on_any_method(name, tmp_path):
    record = make_record(make_net(name), make_batches())
    folder = write_report(tmp_path / 'report', record, fetch_image)
    content = json.loads((folder / 'gates.json').read_text())
    assert content['results'][0]['num_gates'] == sum(record.layers.values()) == len(record.open_share)
    assert 0 < content['results'][0]['gate_density'] < 1
    assert (folder / 'gate_distribution.png').is_file() and (folder / 'firing.png').is_file()


def test_report_of_one_class(tmp_path):
    record = make_record(make_net(), make_batches(classes=1))
    folder = write_report(tmp_path / 'report', record, fetch_image)
    text = (folder / 'index.html').read_text()
    assert 'Classes without images: bee, cow, dog' in text
    assert 'class similarity needs at least three classes, but the data has 1' in text
    assert not (folder / 'class_similarity.png').exists()
    content = json.loads((folder / 'gates.json').read_text())
    assert content['class_similarity'] is None and content['classes'][1]['mean_macs'] is None
    with pytest.raises(ValueError, match='at least three classes'):  # requested
        write_report(tmp_path / 'other', record, fetch_image, ReportOptions(groups={'a': ['ant']}))
    assert not (tmp_path / 'other').exists()


def test_failure_leaves_nothing(record, tmp_path, monkeypatch):
    def broken(*args):
        raise OSError('disk full')
    monkeypatch.setattr(report, 'render_page', broken)
    with pytest.raises(OSError, match='disk full'):
        write_report(tmp_path / 'report', record, fetch_image)
    with pytest.raises(ValueError, match="no class 'owl'"):
        write_report(tmp_path / 'report', record, fetch_image, ReportOptions(classes=['owl']))
    assert list(tmp_path.iterdir()) == []


def test_an_older_report_is_replaced_only_when_asked(record, tmp_path, monkeypatch):
    monkeypatch.setattr(report, 'report_sections', lambda *args: [])  # figures are slow
    target = tmp_path / 'report'
    write_report(target, record, fetch_image, ReportOptions(name='first'))
    with pytest.raises(ValueError, match='exists and is not empty.*--overwrite'):
        write_report(target, record, fetch_image)
    write_report(target, record, fetch_image, ReportOptions(name='second'), overwrite=True)
    assert 'Gates of second' in (target / 'index.html').read_text()
    assert [path.name for path in tmp_path.iterdir()] == ['report']
    (tmp_path / 'photos').mkdir()
    (tmp_path / 'photos' / 'cat.png').write_bytes(b'')
    with pytest.raises(ValueError, match='is not a report'):
        write_report(tmp_path / 'photos', record, fetch_image, overwrite=True)
    assert (tmp_path / 'photos' / 'cat.png').exists()


def test_bad_reports_to_compare_with(tmp_path):
    with pytest.raises(ValueError, match='is not the gates.json of a report: FileNotFoundError'):
        load_distribution(tmp_path)
    (tmp_path / 'gates.json').write_text('{}')
    with pytest.raises(ValueError, match='is not the gates.json of a report: KeyError'):
        load_distribution(tmp_path)
