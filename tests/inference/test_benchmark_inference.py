"""`timm-gated bench`, on small images"""
import json
import os
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from forked import run_script
from PIL import Image
from small_analysis import write_images
from tool import TOOLS, load_tool, run_tool

from timm_gated import count_macs, gates, instruction_sets, save_pretrained
from timm_gated.inference import native
from timm_gated_cli._bench_networks import find_network

SMALL = ['--networks', '18', '--img-size', '64', '--rounds', '2', '--threads', '1']
PEAKS = {'avx512': 100., 'avx2': 40.}
VECTORISED = [isa for isa in instruction_sets() if isa != 'portable']


@pytest.fixture(autouse=True)
def peaks(monkeypatch):
    """Known peaks, so that shares of the peak can be computed by hand. Nothing is limited in this process."""
    monkeypatch.setenv('ONEDNN_MAX_CPU_ISA', 'ALL')
    monkeypatch.setattr(native, 'fma_peak', PEAKS.__getitem__, raising=False)


@pytest.mark.parametrize('name, dense_name', [
    ('gated_resnet50', 'resnet50'), ('gated_resnet20.bas_c10', 'cifar_resnet20'),
    ('gated_resnet20_w10', 'cifar_resnet20_w10'), ('gated_resnet50d', 'resnet50d'),
    ('gated_resnext50_32x4d', 'resnext50_32x4d')])
def test_dense_counterparts(name, dense_name):
    network = find_network(name)
    assert network.dense_name == dense_name
    with torch.device('meta'):
        dense = network.dense()
    assert dense.num_classes == timm.create_model(name, device='meta').num_classes


def read_results(output: Path) -> dict:
    return json.loads((output / 'results.json').read_text())


def read_rows(output: Path) -> list:
    return read_results(output)['rows']


def cells(table: str, network: str, runtime: str) -> dict:
    """The cells of the first row of a network and runtime, by column."""
    lines = table.splitlines()
    rule = next(i for i, line in enumerate(lines) if line.startswith('---'))
    ends = np.cumsum([len(part) + 2 for part in lines[rule].split('  ')]).tolist()
    rows = [[line[a:b].strip() for a, b in zip([0, *ends], ends, strict=False)] for line in lines[rule - 1:]]
    row = next(row for row in rows if row[:2] == [network, runtime])
    return dict(zip(rows[0], row, strict=True))


def test_table_figure_and_timings(tmp_path, capsys):
    output = tmp_path / 'bench'
    assert run_tool(
        'benchmark_inference', *SMALL, '--keep', '0.25', '0.5', '1', '--batch-sizes', '1', '--dense-runtimes',
        'eager', 'onnxruntime', 'openvino', 'openvino_int8', '--output', output) == 0
    printed = capsys.readouterr().out
    assert {path.name for path in output.iterdir()} == {'table.txt', 'results.json', 'speed.png'}
    table = (output / 'table.txt').read_text()
    assert table in printed
    with Image.open(output / 'speed.png') as figure:
        assert figure.width > figure.height
    results = read_results(output)
    assert results['weights'] == 'random (untrained)' and 'weights: random (untrained)' in printed
    assert {'cpu', 'cores', 'kernels', 'torch', 'openvino', 'nncf'} <= set(results['machine'])
    rows = results['rows']
    runtimes = [f'native {isa}' for isa in VECTORISED] + [
        f'native {isa} int8' for isa in instruction_sets('int8') if isa != 'portable']
    assert [row['runtime'] for row in rows if row['network'] == 'resnet18'] == [
        'eager', 'onnxruntime', 'openvino', 'openvino_int8', *runtimes]
    assert [row['runtime'] for row in rows if row['network'] == 'gated_resnet18'] == ['masked', 'torch', *runtimes] * 3
    for row in rows:
        assert len(row['times']) == 2 and min(row['times']) > 0
    macs = {row['keep']: row['gmacs'] for row in rows if row['runtime'] != 'masked'}
    assert macs[0.5] < 0.6 * macs[1.0] and macs[1.0] == pytest.approx(macs[None], rel=0.01)

    dense = {row['runtime']: row for row in rows if row['network'] == 'resnet18'}
    fastest = min(dense[name]['ms'] for name in ('eager', 'onnxruntime', 'openvino'))
    for runtime in (*dense, *runtimes):
        found = cells(table, 'resnet18', runtime)
        assert found['filters kept'] == '' and found['image'] == '64'
        assert found['× fastest dense'] == f'{dense[runtime]["ms"] / fastest:.2f}'
        assert found['× OpenVINO int8'] == f'{dense[runtime]["ms"] / dense["openvino_int8"]["ms"]:.2f}'
    assert cells(table, 'gated_resnet18', 'torch')['of MACs saved, time saved'].endswith('%')
    for runtime in ('openvino_int8', runtimes[-1]):
        assert dense[runtime]['share_of_peak'] is None
    assert cells(table, 'resnet18', 'openvino_int8')['share of peak'] == ''
    assert results['fma_peaks'] == {isa: PEAKS[isa] for isa in VECTORISED}
    for runtime, peak in (('eager', max(results['fma_peaks'].values(), default=0)), *(
            (f'native {isa}', PEAKS[isa]) for isa in VECTORISED)):
        if peak:
            row = dense[runtime]
            assert row['share_of_peak'] == pytest.approx(2e9 * row['gmacs'] / (row['ms'] / 1e3) / (peak * 1e9))
            assert f'{100 * row["share_of_peak"]:.0f} %' == cells(table, 'resnet18', runtime)['share of peak']
    for isa in VECTORISED:
        assert f'{isa} {PEAKS[isa]:.0f} GFLOP/s' in table

    assert [fit['runtime'] for fit in results['fits']] == ['torch', *runtimes]  # masked computes all MACs
    for fit in results['fits']:
        some = [row for row in rows if row['network'] == 'gated_resnet18' and row['runtime'] == fit['runtime']]
        x, y = ([row[key] for row in some] for key in ('gmacs', 'ms'))
        assert fit['r2'] == pytest.approx(np.corrcoef(x, y)[0, 1] ** 2)
        assert fit['intercept'] + fit['slope'] * np.mean(x) == pytest.approx(np.mean(y))
        assert f'{fit["intercept"]:.2f}' in table and f'{fit["r2"]:.3f}' in table


def row(report, runtime='torch', keep=1., gmacs=1., ms=1., threads=1, batch_size=1):
    return report.Row('gated_a', 'a', runtime, keep, (32, 32), batch_size, threads, gmacs, [ms])


def test_fit_of_a_known_line():
    report = load_tool('_bench_report')
    rows = [row(report, gmacs=x, keep=x, ms=4 * (3 + 2 * x), batch_size=4) for x in (0.25, 0.5, 1.)]
    (fit,) = report.fit_lines(rows)
    assert (fit.intercept, fit.slope, fit.r2, fit.full_ms) == pytest.approx((3, 2, 1, 5))
    assert '60 %' in report.fit_table([fit])
    assert not report.fit_lines(rows[:2])
    bent = [row(report, gmacs=x, keep=x, ms=y) for x, y in ((0., 0.), (0.5, 1.), (1., 0.))]
    assert report.fit_lines(bent)[0].r2 == pytest.approx(0)


def test_time_relative_to_one_thread():
    report = load_tool('_bench_report')
    rows = [row(report, ms=8.), row(report, ms=5., threads=2), row(report, 'masked', ms=3., threads=2)]
    column = report.HEADER.index('× 1 thread')
    assert [report.columns(rows, one, {})[column] for one in rows] == ['', '0.62', '']
    assert [one.share_of_peak({'avx2': 100.}) for one in rows[:2]] == pytest.approx([2.5, 2.])


def test_int8_is_checked_loosely():
    tool, report = load_tool('benchmark_inference'), load_tool('_bench_report')
    output = torch.tensor([1., -2., 3.])

    def check(factor, runtime):
        tool.check_outputs([(row(report, runtime), lambda x: factor * x), (row(report), lambda x: x)], output)

    check(1.2, 'openvino_int8')
    check(1.2, 'native avx2 int8')
    for factor, runtime in (
            (2., 'openvino_int8'), (float('nan'), 'openvino_int8'), (1.2, 'openvino'), (1.2, 'native avx2')):
        with pytest.raises(AssertionError):
            check(factor, runtime)


def test_packaged_weights_and_threads(tmp_path, capsys):
    assert run_tool(
        'benchmark_inference', '--networks', 'gated_resnet20.bas_c10', 'gated_resnet20_w10', '--keep', '1', '--rounds',
        '1', '--threads', '1', '2', '--batch-sizes', '1', '--dense-runtimes', 'eager', '--isa', 'portable',
        '--precision', 'float32', '--output', tmp_path) == 0
    torch.set_num_threads(1)
    results = read_results(tmp_path)
    assert results['weights'] == 'gated_resnet20.bas_c10 (gated), random (all others, untrained)'
    rows = [row for row in results['rows'] if row['threads'] == 2]
    assert [(row['network'], row['runtime'], row['keep']) for row in rows] == [
        ('cifar_resnet20', 'eager', None), ('cifar_resnet20', 'native portable', None),
        *(('gated_resnet20.bas_c10', runtime, None) for runtime in ('masked', 'torch', 'native portable')),
        ('cifar_resnet20_w10', 'eager', None), ('cifar_resnet20_w10', 'native portable', None),
        *(('gated_resnet20_w10', runtime, 1.) for runtime in ('masked', 'torch', 'native portable'))]
    assert all(row['image_size'] == [32, 32] for row in rows)
    assert rows[3]['gmacs'] < 0.9 * rows[0]['gmacs'] and rows[5]['gmacs'] > 5 * rows[0]['gmacs']
    two = capsys.readouterr().out.split('batch 1, 2 threads\n')[1]
    assert 'as trained' in two and float(cells(two, 'gated_resnet20.bas_c10', 'torch')['× 1 thread']) > 0


def test_batch_sizes(tmp_path, capsys):
    run_tool('benchmark_inference', *SMALL, '--keep', '0.5', '--batch-sizes', '1', '3', '--dense-runtimes', 'eager',
             '--isa', 'portable', '--output', tmp_path)
    assert read_results(tmp_path)['machine']['kernels'] == 'portable'
    assert [(row['batch_size'], row['runtime'], len(row['times'])) for row in read_rows(tmp_path)] == [
        (size, runtime, rounds) for size, rounds, native in (
            (1, 2, ['native portable', 'native portable int8']), (3, 5, ['native portable']))
        for runtime in ('eager', *native, 'masked', 'torch', *native)]
    table = capsys.readouterr().out
    assert 'batch 1, 1 thread\n' in table and 'batch 3, 1 thread\n' in table


def test_accuracies_in_both_precisions(tmp_path, capsys):
    write_images(tmp_path / 'data', ['cat', 'dog'], 3)
    assert run_tool(
        'benchmark_inference', '--networks', 'gated_resnet20.bas_c10', '--dense-weights', 'cifar_resnet20.e28_c10',
        '--data-dir', tmp_path / 'data', '--rounds', '1', '--threads', '1', '--batch-sizes', '1', '--dense-runtimes',
        'eager', 'openvino_int8', '--isa', 'portable', '--accuracy-images', '4', '--calibration-images', '6',
        '--output', tmp_path / 'bench') == 0
    results = read_results(tmp_path / 'bench')
    assert results['weights'] == 'gated_resnet20.bas_c10 (gated), cifar_resnet20.e28_c10 (dense)'
    assert [(row['network'], row['runtime'], row['num_images']) for row in results['accuracies']] == [
        ('gated_resnet20.bas_c10', 'native portable', 4), ('gated_resnet20.bas_c10', 'native portable int8', 4),
        ('cifar_resnet20', 'eager', 4), ('cifar_resnet20', 'openvino_int8', 4)]
    assert all(row['top1'] in (0, 25, 50, 75, 100) for row in results['accuracies'])
    captioned = capsys.readouterr().out.split('Accuracies')[1]
    assert f'{results["accuracies"][0]["top1"]:.2f}' in captioned and 'up to 6.' in captioned


def test_trained_networks_of_folders_get_another_image_in_each_round(tmp_path, monkeypatch):
    torch.manual_seed(0)
    gated = timm.create_model('gated_resnet20', num_classes=2)
    for _, gate in gates(gated):
        torch.nn.init.normal_(gate.fc2.weight, std=5.)
    save_pretrained(gated, tmp_path / 'gated')
    save_pretrained(timm.create_model('cifar_resnet20', num_classes=2), tmp_path / 'dense')
    write_images(tmp_path / 'data', ['cat', 'dog'], 3)
    tool, timed = load_tool('benchmark_inference'), []
    time_in_turns = tool.time_in_turns
    monkeypatch.setattr(tool, 'time_in_turns', lambda sides, batches, rounds: (
        timed.extend(batches), time_in_turns(sides, batches, rounds)))
    assert tool.main([
        '--networks', f'local-dir:{tmp_path / "gated"}', '--dense-weights', f'local-dir:{tmp_path / "dense"}',
        '--data-dir', str(tmp_path / 'data'), '--rounds', '5', '--threads', '1', '--batch-sizes', '1',
        '--dense-runtimes', 'eager', '--isa', 'portable', '--precision', 'float32', '--accuracy-images', '2',
        '--output', str(tmp_path / 'bench')]) == 0
    assert len(timed) == 5 and len({float(image.sum()) for image in timed}) == 5
    macs = torch.cat([count_macs(gated.eval(), image).per_sample for image in timed]).double()
    row = next(row for row in read_results(tmp_path / 'bench')['rows'] if row['runtime'] == 'native portable' and
               row['network'] == 'gated_resnet20')
    assert row['gmacs'] == pytest.approx(macs.mean().item() / 1e9) and macs.std() > 0 and len(row['times']) == 5


def test_one_instruction_set_limits_all(monkeypatch):
    runtimes = load_tool('_bench_runtimes')
    names = {'avx2': 'AVX2', 'avxvnni': 'AVX2_VNNI', 'avx512': None, 'portable': None, 'avx2 avx512': None}
    for isa, name in names.items():
        monkeypatch.delenv('ONEDNN_MAX_CPU_ISA', raising=False)
        runtimes.limit_onednn(isa.split())
        assert os.environ.get('ONEDNN_MAX_CPU_ISA') == name
    monkeypatch.setenv('ONEDNN_MAX_CPU_ISA', 'SSE41')
    runtimes.limit_onednn(['avx2'])
    assert os.environ['ONEDNN_MAX_CPU_ISA'] == 'SSE41'


def test_simulation(tmp_path):
    done = run_script(
        TOOLS / 'benchmark_inference.py', *SMALL, '--keep', '0.5', '0', '--simulate', '2', '--simulate-batch-size', '2',
        '--output', tmp_path / 'bench', cwd=tmp_path)
    assert done.returncode == 0, done.output[-3000:]
    assert [(row['network'], row['runtime'], len(row['times'])) for row in read_rows(tmp_path / 'bench')] == [
        ('resnet18', 'eager', 1), ('gated_resnet18', 'simulated', 2), ('gated_resnet18', 'simulated', 2)]


def test_a_checkpoint_without_gates_is_refused(tmp_path, capsys):
    torch.save(timm.create_model('resnet18').state_dict(), tmp_path / 'dense.pth')
    assert run_tool(
        'benchmark_inference', *SMALL, '--checkpoint', tmp_path / 'dense.pth', '--dense-runtimes', 'eager',
        '--batch-sizes', '1', '--output', tmp_path / 'bench') == 2
    assert 'dense.pth has no weights for the gates' in capsys.readouterr().err
    assert not list((tmp_path / 'bench').iterdir())


@pytest.mark.parametrize('name, message', [
    ('resnet18', "'resnet18' is not a gated network"),
    ('19', "timm has no model 'gated_resnet19'; near: gated_resnet18"),
    ('gated_resnet20.none', "has no tag 'none'"),
    ('gated_resnet18.untrained', 'no pretrained weights'),
])
def test_unknown_networks(name, message, tmp_path, capsys):
    assert run_tool('benchmark_inference', '--networks', name, '--output', tmp_path / 'bench') == 2
    assert message in capsys.readouterr().err and not (tmp_path / 'bench').exists()


@pytest.mark.parametrize('arguments, message', [
    (['--keep', '1.5'], 'between 0 and 1'),
    (['--rounds', '0'], 'at least 1'),
    (['--checkpoint', 'model.pth'], 'needs a single network'),
    (['--checkpoint', 'model.pth', '--networks', '18'], '--checkpoint model.pth does not exist'),
    (['--data-dir', 'nowhere'], '--data-dir nowhere does not exist'),
    (['--dense-weights', 'resnet18.a1_in1k'], 'needs a single network'),
    (['--networks', 'pspnet_r50', '--quick'], 'not part of --quick'),
    (['--networks', 'pspnet_r50', '--batch-sizes', '2'], 'batch size 1 only'),
])
def test_bad_arguments(arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        run_tool('benchmark_inference', *arguments, '--output', tmp_path / 'bench')
    assert stop.value.code == 2 and message in capsys.readouterr().err
    assert not (tmp_path / 'bench').exists()
