"""`timm-gated configs` lists and copies the packaged configs"""
import json

import pytest
from paths import ROOT
from tool import run_tool

CONFIGS = ROOT / 'configs'
FILES = sorted(
    path.relative_to(CONFIGS).as_posix() for pattern in ('timm/**/*.yaml', 'mmseg/**/*.py')
    for path in CONFIGS.glob(pattern))
PSPNET = 'mmseg/pspnet/gated-pspnet_r20-d4_1xb8-600-c10-pre_camvid-160x208.py'


def copied(folder) -> list:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob('*') if path.is_file())


def test_list(capsys):
    assert run_tool('configs') == 0
    listed = capsys.readouterr().out.splitlines()
    assert listed == [name for name in FILES if '/_base_/' not in name] and len(listed) > 70
    assert run_tool('configs', 'timm/imagenet/', 'mmseg/*/gated-pspnet_r20*', '--json') == 0
    assert json.loads(capsys.readouterr().out) == [
        name for name in listed if name.startswith('timm/imagenet/') or name == PSPNET]


def test_copies_have_all_that_they_inherit(tmp_path):
    assert run_tool('configs', PSPNET, '--output', tmp_path / 'one') == 0
    assert copied(tmp_path / 'one') == [
        'mmseg/_base_/camvid_240x320.py', 'mmseg/pspnet/gated-pspnet_r18-d8_1xb8-600_camvid-160x208.py', PSPNET,
        'mmseg/pspnet/pspnet_r18-d8_1xb8-600_camvid-160x208.py']
    assert run_tool('configs', 'timm', 'mmseg', '--output', tmp_path / 'all') == 0
    assert copied(tmp_path / 'all') == FILES
    assert all((tmp_path / 'all' / name).read_bytes() == (CONFIGS / name).read_bytes() for name in FILES)


def test_different_files_are_not_replaced(tmp_path, capsys):
    first, second = 'timm/cifar10/gated_resnet20.yaml', 'timm/cifar10/gated_resnet20_bs.yaml'
    assert run_tool('configs', second, '--output', tmp_path) == 0
    (tmp_path / second).write_text('mine')
    assert run_tool('configs', first, second, '--output', tmp_path) == 2
    assert f'{tmp_path / second} exists and is different' in capsys.readouterr().err
    assert copied(tmp_path) == [second] and (tmp_path / second).read_text() == 'mine'
    assert run_tool('configs', first, second, '--output', tmp_path, '--overwrite') == 0
    assert (tmp_path / second).read_bytes() == (CONFIGS / second).read_bytes()
    assert run_tool('configs', first, '--output', tmp_path) == 0  # equal files are no conflict


@pytest.mark.parametrize('pattern', ['timm/cifar100', 'gated_resnet20', 'mmseg/_base_'])
def test_no_match(pattern, capsys):
    assert run_tool('configs', pattern) == 2
    assert f"no config matches '{pattern}'" in capsys.readouterr().err
