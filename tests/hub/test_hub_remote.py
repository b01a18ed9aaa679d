"""Push and pull with the Hugging Face client, against a local server"""
import json
import multiprocessing
import os
import pickle
from concurrent.futures import ProcessPoolExecutor

import hub_client
import pytest
import timm
from hub_client import make, run
from hub_server import CUT, ERROR, FLIP, READER, SHORT, WRITER, Repository, serve
from mutations import Call
from safetensors.torch import save

from timm_gated import gates, save_pretrained

FILES = ['README.md', 'config.json', 'model.safetensors']


@pytest.fixture(scope='module')
def hub():
    with serve() as server:
        yield server


@pytest.fixture(scope='module')
def client(hub, tmp_path_factory):
    """Run a function of `hub_client` in another process that uses the test server and an empty cache."""
    env = dict(
        HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path_factory.mktemp('hf_home')), HF_TOKEN=WRITER, HF_HUB_DISABLE_XET='1',
        HF_HUB_DISABLE_TELEMETRY='1', HF_HUB_DISABLE_PROGRESS_BARS='1', OMP_NUM_THREADS='1', NO_PROXY='127.0.0.1')
    before = dict(os.environ)
    os.environ.update(env)
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context('spawn'), hub_client.begin) as pool:
            pool.submit(os.getpid).result()
            os.environ.clear()
            os.environ.update(before)
            yield lambda function, *args, **kwargs: pool.submit(function, *args, **kwargs).result()
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope='module')
def pushed(hub, client):
    """Repository with a model, and its commit."""
    return 'me/pushed', client(hub_client.push, 'me/pushed')


@pytest.fixture(scope='module')
def unseen(client):
    """Repository that is not in the client's cache."""
    client(hub_client.push, 'me/unseen')
    return 'me/unseen'


@pytest.fixture(autouse=True)
def no_faults(hub):
    hub.faults.clear()
    hub.requests.clear()


def lists(model):
    return [tensor.tolist() for tensor in run(model)]


def local(folder):
    """Outputs of a model that timm loads from a folder."""
    return lists(timm.create_model(f'local-dir:{folder}', pretrained=True).eval())


def put(hub, repo_id, model, tmp_path, **files):
    """Put the folder of a model on the server. Files can be replaced, or removed by None."""
    folder = save_pretrained(model, tmp_path / repo_id.replace('/', '_'))
    content = {path.name: path.read_bytes() for path in folder.iterdir()}
    content.update({name.replace('__', '.'): value for name, value in files.items()})
    hub.repositories[repo_id] = repository = Repository()
    return repository.commit({name: value for name, value in content.items() if value is not None})


def config_with(**model_args):
    config = {'architecture': 'gated_resnet20', 'num_classes': 10, 'pretrained_cfg': {'num_classes': 10}}
    return json.dumps({**config, 'model_args': {'layers': [1, 1, 1], **model_args}}).encode()


def test_pushed_and_loaded_by_timm(hub, client, pushed):
    repo_id, commit = pushed
    files = hub.repositories[repo_id].commits[commit]
    assert sorted(files) == ['.gitattributes', *FILES]
    assert f"'hf-hub:{repo_id}'" in files['README.md'].decode()
    ours = make()
    decisions = [gate.decision for _, gate in gates(ours)] if run(ours) else []
    assert any(0 < decision.mean() < 1 for decision in decisions)
    assert client(hub_client.run_from_hub, repo_id) == lists(ours)


def test_pulled(hub, client, pushed, tmp_path):
    repo_id, commit = pushed
    folder = client(hub_client.pull, repo_id, tmp_path / 'new' / 'folder')
    assert sorted(path.name for path in tmp_path.rglob('*')) == sorted([*FILES, 'folder', 'new'])
    assert {path.name: path.read_bytes() for path in folder.iterdir()}.items() <= (
        hub.repositories[repo_id].commits[commit].items())
    assert local(folder) == lists(make())
    with pytest.raises(ValueError, match='exists already'):
        client(hub_client.pull, repo_id, folder)


def test_a_folder_is_pushed_as_it_is(hub, client, tmp_path):
    card = '---\nlicense: mit\n---\nMine, of hf-hub:owner/name'
    folder = save_pretrained(make(seed=3), tmp_path / 'saved', card=card)
    (folder / 'notes.txt').write_text('not for others')
    (folder / 'gates.png').write_bytes(b'a picture')
    commit = client(hub_client.push_folder, folder, 'me/folder', private=True)
    files = hub.repositories['me/folder'].commits[commit]
    assert sorted(files) == sorted(['.gitattributes', 'gates.png', *FILES])
    assert hub.repositories['me/folder'].private
    pulled = client(hub_client.pull, 'me/folder', tmp_path / 'pulled')
    assert (pulled / 'gates.png').read_bytes() == files['gates.png'] == b'a picture'
    assert all(files[name] == (folder / name).read_bytes() for name in ('config.json', 'model.safetensors'))
    assert files['README.md'].decode().endswith('Mine, of hf-hub:me/folder')
    (folder / 'model.safetensors').unlink()
    hub.requests.clear()
    with pytest.raises(ValueError, match='holds no model.safetensors'):
        client(hub_client.push_folder, folder, 'me/broken')
    assert 'me/broken' not in hub.repositories and not hub.requests


def test_revisions(hub, client, tmp_path):
    first = client(hub_client.push, 'me/twice', seed=1)
    second = client(hub_client.push, 'me/twice', seed=2)
    hub.repositories['me/twice'].branches['v1'] = first
    assert first != second
    for revision, seed in ((first, 1), ('v1', 1), (second, 2), (None, 2)):
        folder = client(hub_client.pull, 'me/twice', tmp_path / str(revision), revision=revision)
        assert local(folder) == lists(make(seed))
    assert client(hub_client.run_from_hub, 'me/twice@v1') == lists(make(seed=1))
    third = client(hub_client.push, 'me/twice', seed=3, revision='v1')
    assert hub.repositories['me/twice'].branches == {'main': second, 'v1': third}
    with pytest.raises(OSError, match='Revision Not Found'):
        client(hub_client.pull, 'me/twice', tmp_path / 'none', revision='v9')


def downloads(hub):
    """Byte ranges of the requests for weights."""
    return [asked for method, path, asked in hub.requests if method == 'GET' and path.endswith('.safetensors')]


def test_an_interrupted_download_is_resumed(hub, client, unseen, tmp_path):
    hub.faults['model.safetensors'] = [CUT, CUT]
    folder = client(hub_client.pull, unseen, tmp_path / 'folder')
    ranges = downloads(hub)
    assert len(ranges) == 3 and ranges[0] is None and all(asked.startswith('bytes=') for asked in ranges[1:])
    assert local(folder) == lists(make())


@pytest.mark.parametrize('name, faults, error, message', [
    ('model.safetensors', [CUT, ERROR], OSError, 'the disk is on fire'),
    ('model.safetensors', [FLIP, FLIP], ValueError, r'me/unseen was damaged twice: model.safetensors \(checksum'),
    ('config.json', [FLIP, FLIP], ValueError, r'damaged twice: config.json'),
    ('README.md', [FLIP, FLIP], ValueError, r'damaged twice: README.md'),
    ('model.safetensors', [SHORT], OSError, 'Consistency check failed'),
    ('info', [CUT], ConnectionError, 'the connection to the hub failed for me/unseen'),
])
def test_a_failed_download_leaves_nothing(hub, client, unseen, tmp_path, name, faults, error, message):
    hub.faults[name] = list(faults)
    with pytest.raises(error, match=message):
        client(hub_client.pull, unseen, tmp_path / 'folder')
    assert not hub.faults[name] and not any(tmp_path.iterdir())
    folder = client(hub_client.pull, unseen, tmp_path / 'folder')
    assert local(folder) == lists(make())


def test_a_damaged_cache_is_not_trusted(hub, client, tmp_path):
    """timm does not compare checksums, so that damaged files stay in the client's cache."""
    client(hub_client.push, 'me/cached')
    hub.faults['model.safetensors'] = [FLIP]
    assert client(hub_client.run_from_hub, 'me/cached')
    folder = client(hub_client.pull, 'me/cached', tmp_path / 'folder')
    assert len(downloads(hub)) == 2
    assert local(folder) == lists(make())


@pytest.mark.parametrize('token, status', [(READER, 403), ('hf_unknown', 401)])
def test_a_refused_push(hub, client, pushed, token, status):
    repo_id, commit = pushed
    for name in ('me/refused', repo_id):
        with pytest.raises(PermissionError, match=rf'you may not write to {name}: (.|\n)*{status}(.|\n)*hf auth login'):
            client(hub_client.push, name, seed=5, token=token)
    assert 'me/refused' not in hub.repositories and list(hub.repositories[repo_id].commits)[-1] == commit


def test_a_failed_upload_commits_nothing(hub, client, pushed):
    repo_id, commit = pushed
    hub.faults['upload'] = [ERROR]
    with pytest.raises(ConnectionError, match=r'the connection to the hub failed for me/pushed: (.|\n)*disk is full'):
        client(hub_client.push, repo_id, seed=6)
    assert hub.repositories[repo_id].branches['main'] == commit
    assert client(hub_client.run_from_hub, repo_id) == lists(make())


def test_no_such_repository(client, tmp_path):
    with pytest.raises(OSError, match='Repository Not Found'):
        client(hub_client.pull, 'me/nowhere', tmp_path / 'folder')
    assert not any(tmp_path.iterdir())


def test_pickles_are_not_downloaded(hub, client, tmp_path):
    marker = tmp_path / 'marker'
    content = pickle.dumps(Call(os.mkdir, str(marker)))
    put(hub, 'me/pickle', make(), tmp_path, model__safetensors=None, pytorch_model__bin=content)
    with pytest.raises(ValueError, match='me/pickle holds no model.safetensors'):
        client(hub_client.pull, 'me/pickle', tmp_path / 'folder')
    assert not any('pytorch_model' in path for _, path, _ in hub.requests) and not (tmp_path / 'folder').exists()
    with pytest.raises(RuntimeError, match='weights_only=True blocked'):  # by timm
        client(hub_client.run_from_hub, 'me/pickle')
    assert not marker.exists()


def test_a_config_does_not_say_where_files_go(hub, client, pushed, tmp_path):
    put(hub, 'me/writes', make(), tmp_path, config__json=config_with(snapshot_dir=str(tmp_path / 'written')))
    with pytest.raises(ValueError, match=r"the config of me/writes sets 'snapshot_dir' to"):
        client(hub_client.run_from_hub, 'me/writes')
    with pytest.raises(ValueError, match=r"me/writes/config.json sets 'snapshot_dir' to"):
        client(hub_client.pull, 'me/writes', tmp_path / 'folder')
    assert not (tmp_path / 'written').exists() and not (tmp_path / 'folder').exists()
    mine = str(tmp_path / 'mine')
    assert client(hub_client.snapshot_folder, pushed[0], mine) == mine


def test_a_gated_model_without_gates_is_not_pulled(hub, client, tmp_path):
    model = make()
    names = tuple(f'{name}.' for name, _ in gates(model))
    weights = {name: value for name, value in model.state_dict().items() if not name.startswith(names)}
    put(hub, 'me/dense', model, tmp_path, model__safetensors=save(weights))
    with pytest.raises(ValueError, match=r'weights in me/dense are not those of its config.*missing: layer1.0.gate1'):
        client(hub_client.pull, 'me/dense', tmp_path / 'folder')
    assert not (tmp_path / 'folder').exists()


@pytest.mark.parametrize('name', ['gated_test_resnet.r160_in1k', 'gated_resnet10t.c3_in1k'])
def test_tags_of_timm(hub, client, name):
    """timm's dense weights under fresh gates, from timm's repository."""
    hub.repositories[f'timm/{name.removeprefix("gated_")}'] = repository = Repository()
    repository.commit({'model.safetensors': save(hub_client.dense_weights(name, 3))})
    assert client(hub_client.dense_tag, name, 3)
