"""Model cards and `timm-gated hub`"""
import json

import pytest
import timm
import torch
import yaml
from hub_client import make, run
from huggingface_hub import ModelCard
from tool import load_tool, run_tool

from timm_gated import model_card, save_pretrained
from timm_gated.analysis import record_classifier, summary
from timm_gated.hub.card import training_settings


@pytest.fixture(scope='module')
def model():
    return make()


@pytest.fixture(scope='module')
def figures(model):
    loader = [(torch.randn(30, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.arange(30) % 10)]
    return summary(record_classifier(model, loader, [str(index) for index in range(10)]))


def test_measured_figures(model, figures):
    card = model_card(model, figures, 'uoft-cs/cifar10', 'test', 'python train.py --lr 0.1')
    text = str(card)
    counts = '{always_on} always on, {conditional} conditional, {always_off} always off'.format(**figures)
    assert figures['conditional'] > 0 and 0 < figures['macs_share'] < 1
    for row in (
            f'| top-1 accuracy | {figures["top1"]:.2f} % |', f'| top-5 accuracy | {figures["top5"]:.2f} % |',
            f'| MACs of an image, on average | {figures["mean_macs"] / 1e6:.2f} M |',
            f' | {100 * figures["macs_share"]:.1f} % of {figures["dense_macs"] / 1e6:.2f} M |',
            f'| parameters | {figures["parameters"] / 1e6:.3f} M |', f'| gates | {counts} |',
            f'| open gates, on average | {100 * figures["gate_density"]:.1f} % |',
            'Measured on 30 images of uoft-cs/cifar10, test.', 'more than 99 % of them',
            "timm.create_model('hf-hub:owner/name', pretrained=True)", 'import timm_gated',
            '```bash\npython train.py --lr 0.1\n```', '## Licence\n\napache-2.0', '@inproceedings{bejnordi2020'):
        assert row in text
    assert card.data.license == 'apache-2.0' and card.data.library_name == 'timm'
    assert card.data.datasets == ['uoft-cs/cifar10'] and 'timm_gated' in card.data.tags
    results = {result.metric_type: result for result in card.data.eval_results}
    assert results['accuracy'].metric_value == round(figures['top1'], 2)
    assert results['top_5_accuracy'].dataset_split == 'test' and card.data.model_name == 'gated_resnet20'
    again = ModelCard(text)
    assert str(again.data) == str(card.data)


def test_card_of_packaged_weights(model, figures):
    card = model_card(model, figures, 'uoft-cs/cifar10', tag='mine')
    assert "timm.create_model('gated_resnet20.mine', pretrained=True)" in str(card) and 'hf-hub' not in str(card)
    assert '\n# gated_resnet20.mine\n' in str(card) and card.data.model_name == 'gated_resnet20.mine'


def test_missing_figures_are_left_out(model, figures):
    text = str(model_card(model))
    assert 'Nothing else was measured' in text and '| parameters | ' in text and '## Training' not in text
    assert not any(word in text for word in ('accuracy', 'MACs', 'always on', 'model-index', 'datasets'))
    some = str(model_card(model, {'top1': 50., 'top5': None, 'checkpoint': '/home/me/x.pth', 'data': '/home/me/data'}))
    assert '| top-1 accuracy | 50.00 % |' in some and 'Measured on images.' in some
    assert not any(word in some for word in ('top-5', 'MACs', 'always on', '/home', 'model-index'))
    assert 'Measured on 30 images.' in str(model_card(model, figures))


def test_figures_of_another_model(model, figures):
    with pytest.raises(ValueError, match=r'of another model: parameters is 3 there, and \d+ here'):
        model_card(model, {**figures, 'parameters': 3})
    with pytest.raises(ValueError, match='num_gates is 1 there'):
        model_card(model, {**figures, 'num_gates': 1})
    for value in ('80', float('nan'), True):
        with pytest.raises(ValueError, match='the figure top1 must be a number, got'):
            model_card(model, {'top1': value})


def test_other_networks():
    text = str(model_card(timm.create_model('cifar_resnet20', num_classes=0), license='mit'))
    assert 'a residual network without gates' in text and 'license: mit' in text and 'image-feature-extraction' in text
    assert 'Of the network: <https://arxiv.org/abs/1512.03385>.' in text


def test_settings_of_a_training(model):
    args = dict(
        model='gated_resnet20', lr=0.1, epochs=10, data_dir='/data/cifar10', output='/runs', resume='', opt_eps=None,
        initial_checkpoint='/home/me/dense.pth', amp=False, workers=4, log_file='~/log', other='C:\\log',
        sched='cosine', model_kwargs=dict(gamma=0.01, snapshot_dir='/home/me/snapshots', lam_epochs=[0, 4]),
        num_classes=10)
    settings = training_settings(args)
    assert settings == dict(
        model='gated_resnet20', lr=0.1, epochs=10, initial_checkpoint='dense.pth', amp=False, sched='cosine',
        model_kwargs=dict(gamma=0.01, lam_epochs=[0, 4]), num_classes=10)
    text = str(model_card(model, training=settings))
    assert yaml.safe_load(text.split('```yaml\n')[1].split('```')[0]) == settings


# The tool


@pytest.fixture
def runs(model, figures, tmp_path):
    """Folder with the files of a training and an evaluation."""
    torch.save({'state_dict': model.state_dict()}, tmp_path / 'model_best.pth.tar')
    (tmp_path / 'args.yaml').write_text(yaml.safe_dump(dict(model='gated_resnet20', lr=0.1, data_dir=str(tmp_path))))
    (tmp_path / 'classes.txt').write_text(''.join(f'class {index}\n' for index in range(10)))
    results = [{'name': name, 'checkpoint': str(tmp_path), **figures} for name in ('mine', 'other')]
    (tmp_path / 'evaluation.json').write_text(json.dumps({'results': results}))
    return tmp_path


def test_tool_saves_and_describes(runs, model, figures, capsys):
    options = ['--evaluation', runs / 'evaluation.json', '--result', 'mine', '--dataset-id', 'uoft-cs/cifar10']
    command = [
        'save', '--model', 'gated_resnet20', '--model-kwargs', 'layers=(1,1,1)', '--checkpoint',
        runs / 'model_best.pth.tar', '--class-map', runs / 'classes.txt', '--output', runs / 'saved']
    assert run_tool('hub', *command, *options) == 0 and 'Saved' in capsys.readouterr().out
    again = timm.create_model(f'local-dir:{runs / "saved"}', pretrained=True).eval()
    assert all(torch.equal(one, other) for one, other in zip(run(again), run(model), strict=True))
    assert again.pretrained_cfg['label_names'][9] == 'class 9'
    text = (runs / 'saved' / 'README.md').read_text()
    assert f'{figures["top1"]:.2f} %' in text and 'lr: 0.1' in text and str(runs) not in text
    assert run_tool('hub', *command, *options) == 2 and 'exists already' in capsys.readouterr().err

    assert run_tool('hub', 'card', runs / 'saved', '--training', 'by hand', '--license', 'mit') == 0
    text = (runs / 'saved' / 'README.md').read_text()
    assert 'by hand' in text and 'license: mit' in text and 'accuracy' not in text
    assert sorted(path.name for path in (runs / 'saved').iterdir()) == ['README.md', 'config.json', 'model.safetensors']


@pytest.mark.parametrize('command, message', [
    (['card', 'saved', '--evaluation', 'evaluation.json'], '--result must be one of mine, other'),
    (['card', 'saved', '--evaluation', 'args.yaml'], 'is not a file that `timm-gated evaluate` wrote'),
    (['card', 'saved', '--training-args', 'none.yaml'], 'cannot be read from none.yaml'),
    (['card', 'saved', '--training-args', 'classes.txt'], 'classes.txt must hold settings'),
    (['card', 'nowhere'], 'config.json does not exist'),
    (['push', 'nowhere', 'me/model'], 'config.json does not exist'),
    (['save', '--output', 'new'], 'give --model'),
    (['save', '--model', 'gated_resnet20', '--checkpoint', 'none.pth', '--output', 'new'], 'no checkpoint at none.pth'),
    (['save', '--model', 'gated_resnet20', '--checkpoint', 'cut.safetensors', '--output', 'new'], 'the disk was full'),
    (['save', '--model', 'local-dir:nowhere', '--output', 'new'], 'cannot be made'),
    (['pull', 'me/model', 'saved'], 'saved exists already'),
])
def test_tool_says_what_is_wrong(runs, model, command, message, capsys, monkeypatch):
    monkeypatch.chdir(runs)
    save_pretrained(model, 'saved')
    (runs / 'cut.safetensors').write_bytes(b'cut')
    before = (runs / 'saved' / 'README.md').read_bytes()
    assert run_tool('hub', *command) == 2
    assert message in capsys.readouterr().err
    assert (runs / 'saved' / 'README.md').read_bytes() == before and not (runs / 'new').exists()


def test_tool_pushes_and_pulls(monkeypatch, capsys, tmp_path):
    tool = load_tool('hub')
    calls = []

    class Commit:
        pr_url, commit_url = None, 'https://hub/commit'
    monkeypatch.setattr('timm_gated.hub.push_to_hub', lambda *args, **kwargs: calls.append((args, kwargs)) or Commit)
    monkeypatch.setattr('timm_gated.hub.pull_from_hub', lambda *args: calls.append(args) or args[1])
    assert tool.main(['push', str(tmp_path), 'me/model', '--private', '--revision', 'v1', '--message', 'hello']) == 0
    options = dict(private=True, revision='v1', create_pr=False, commit_message='hello')
    assert tool.main(['pull', 'me/model', str(tmp_path), '--revision', 'v1']) == 0
    assert calls == [((tmp_path, 'me/model'), options), ('me/model', tmp_path, 'v1')]
    assert 'https://hub/commit' in capsys.readouterr().out
