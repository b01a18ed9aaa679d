"""The explorer over HTTP: answers, errors, protection against other sites, simultaneous uploads"""
import http.client
import io
import json
import os
import re
import struct
import subprocess
import sys
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, Dict, Tuple

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from small_analysis import CLASSES, MODEL_OPTIONS, make_net, write_images
from tool import TOOLS, load_tool, run_tool

from timm_gated import count_macs, gates
from timm_gated_cli import _explorer, _speed
from timm_gated_cli._explore_server import MAX_BYTES, PAGE, ExploreServer
from timm_gated_cli.prepare_cifar10 import CLASSES as CIFAR10

NET = ['--model', 'gated_resnet20', *MODEL_OPTIONS, '--img-size', '8']


@pytest.fixture(scope='module', autouse=True)
def quick():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_speed.time, 'sleep', lambda seconds: None)
        yield


@pytest.fixture(scope='module')
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp('weights') / 'weights.pth'
    torch.save(make_net().state_dict(), path)
    return ['--checkpoint', path]


def serve(*options: Any) -> ExploreServer:
    args = load_tool('explore').parse_args([str(option) for option in options])
    server = ExploreServer(('127.0.0.1', 0), _explorer.Explorer(args), args.allow_host, args.embed_in)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@pytest.fixture(scope='module')
def server(weights, tmp_path_factory):
    data = write_images(tmp_path_factory.mktemp('data') / 'drawn', CLASSES)
    with serve(*NET, *weights, '--data-dir', data, '--workers', '0', '--limit', '20') as server:
        yield server
        server.shutdown()


@pytest.fixture(scope='module')
def alone():
    """Server of random weights without data and speed, under another name."""
    names = ['--allow-host', 'Explorer.example', '--embed-in', 'https://a.example']
    with serve(*NET, '--untrained', '--no-accelerate', *names) as server:
        yield server
        server.shutdown()


def ask(server: ExploreServer, method: str, path: str, body: Any = None, **headers) -> Tuple[int, Any, Any]:
    """Status, content (decoded if JSON) and headers of a response."""
    connection = http.client.HTTPConnection('127.0.0.1', server.server_port, timeout=60)
    connection.request(method, path, body, headers)
    response = connection.getresponse()
    content: Any = response.read()
    connection.close()
    if response.headers['Content-Type'] == 'application/json':
        content = json.loads(content)
    return response.status, content, response.headers


def picture(seed: int, format: str = 'PNG', size: int = 24) -> bytes:
    rng, buffer = np.random.default_rng(seed), io.BytesIO()
    Image.fromarray(rng.integers(0, 40 * (seed % 6) + 40, (size, size, 3), dtype=np.uint8)).save(buffer, format)
    return buffer.getvalue()


def as_computed(server: ExploreServer, content: bytes) -> Dict[str, Any]:
    """What the model itself computes."""
    explorer = server.explorer
    net, image = explorer.network, explorer.preprocessing(Image.open(io.BytesIO(content)))[None]
    with torch.no_grad():
        probabilities = net(image).softmax(1)[0]
    layers = [''.join(str(int(value)) for value in gate.decision[0]) for _, gate in gates(net)]
    return {
        'best': CLASSES[probabilities.argmax()], 'probability': probabilities.max().item(), 'layers': layers,
        'macs': int(count_macs(net, image).per_sample[0])}


def check(answer: Dict[str, Any], expected: Dict[str, Any]) -> None:
    assert answer['top'][0]['probability'] == pytest.approx(expected['probability'], rel=1e-4)
    assert answer['layers'] == expected['layers'] and answer['macs'] == expected['macs']


# Answers


def test_page(server):
    status, page, headers = ask(server, 'GET', '/')
    assert status == 200 and b'<title>timm-gated explorer' in page
    policy = headers['Content-Security-Policy']
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and 'unsafe' not in policy
    for name in re.findall(rb'(?:src|href)="(/.*?)"', page):
        assert ask(server, 'GET', name.decode())[0] == 200
    assert not re.search(rb'https?://|style=| on\w+=', page)  # other hosts, or what the policy forbids


def test_constants_of_the_page():
    script = (PAGE / 'explore.js').read_text()
    assert float(re.search(r'MAX_BYTES = ([\w.]+);', script).group(1)) == MAX_BYTES
    samples = re.findall(r"'(\w+)'", re.search(r'SAMPLES = \[(.*)\];', script).group(1))
    assert sorted(samples) == sorted(path.stem for path in (PAGE / 'samples').iterdir())


def test_description(server, alone):
    answer = ask(server, 'GET', '/api/model')[1]
    assert answer['title'] == 'gated_resnet20, weights.pth' and not answer['untrained']
    assert answer['classes'] == CLASSES
    assert answer['layers'] == [{'name': name, 'gates': 8} for name, _ in gates(server.explorer.network)]
    data = answer['data']
    assert data['name'] == 'drawn, validation' and data['images'] == sum(data['counts']) == 20
    macs = [entry['macs'] for entry in data['samples']]
    assert macs == sorted(macs) and [macs[0], macs[-1]] == [data['edges'][0], data['edges'][-1]]
    answer = ask(alone, 'GET', '/api/model')[1]
    assert answer['data'] is None and answer['untrained'] == 'untrained network' and 'class 3' in answer['classes']


@pytest.mark.parametrize('format', _explorer.FORMATS)
def test_upload(format, server):
    content = picture(1, format)
    status, answer, _ = ask(server, 'POST', '/api/explore', content)
    assert status == 200 and answer['seen'].startswith('data:image/png;base64,')
    expected = as_computed(server, content)
    check(answer, expected)
    assert answer['top'][0]['name'] == expected['best'] and len(answer['top']) == 5
    shares = [entry['probability'] for entry in answer['top']]
    assert shares == sorted(shares, reverse=True)
    assert len(answer['neighbours']) == 12 and 0 <= answer['share_below'] <= 1


def test_upload_without_data(alone):
    status, answer, _ = ask(alone, 'POST', '/api/explore', picture(1))
    assert status == 200 and 'neighbours' not in answer
    check(answer, as_computed(alone, picture(1)))


def test_a_turned_photograph(server):
    """Phones store how the camera was held."""
    upright = Image.open(io.BytesIO(picture(3)))
    buffer, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6  # turn clockwise
    upright.transpose(Image.Transpose.ROTATE_90).save(buffer, 'PNG', exif=exif)
    check(ask(server, 'POST', '/api/explore', buffer.getvalue())[1], as_computed(server, picture(3)))


def test_image_of_the_data_set(server):
    answer = ask(server, 'POST', '/api/explore?image=7')[1]
    explorer = server.explorer
    assert answer['label'] == CLASSES[explorer._known.record.label[7]]
    assert answer['macs'] == explorer._known.record.macs[7]
    assert 7 not in [entry['index'] for entry in answer['neighbours']]
    decisions = explorer._known.decisions
    for entry in answer['neighbours']:
        assert entry['different'] == (decisions[7] != decisions[entry['index']]).sum()
    status, content, headers = ask(server, 'GET', '/api/thumbnail?image=7')
    assert status == 200 and headers['Content-Type'] == 'image/png'
    assert Image.open(io.BytesIO(content)).size == (8, 8)


def test_speed(server, alone):
    answer = ask(server, 'POST', '/api/speed', picture(1))[1]
    assert list(answer['milliseconds']) == ['accelerated', 'dense', 'eager']
    assert all(0 < time < 1000 for time in answer['milliseconds'].values())
    status, answer, _ = ask(alone, 'POST', '/api/speed', picture(1))
    assert status == 400 and '--no-accelerate' in answer['error']


def test_simultaneous_uploads_do_not_mix(server):
    pictures = [picture(seed) for seed in range(6)]
    expected = [as_computed(server, content) for content in pictures]
    assert len({tuple(one['layers']) for one in expected}) > 1
    with ThreadPoolExecutor(6) as threads:
        for _ in range(3):
            answers = list(threads.map(lambda content: ask(server, 'POST', '/api/explore', content), pictures))
            for (status, answer, _), one in zip(answers, expected, strict=True):
                assert status == 200
                check(answer, one)


def test_too_many_uploads(server):
    taken = 0
    while server.free.acquire(blocking=False):
        taken += 1
    status, answer, _ = ask(server, 'POST', '/api/explore', picture(1))
    for _ in range(taken):
        server.free.release()
    assert taken == 8 and status == 503 and 'Try again' in answer['error']
    assert ask(server, 'POST', '/api/explore', picture(1))[0] == 200


# Errors


def bomb() -> bytes:
    """PNG of a few bytes that claims 60000 × 60000 pixels."""
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))
    header = struct.pack('>IIBBBBB', 60000, 60000, 8, 2, 0, 0, 0)
    return b'\x89PNG\r\n\x1a\n' + chunk(b'IHDR', header) + chunk(b'IDAT', zlib.compress(b'')) + chunk(b'IEND', b'')


@pytest.mark.parametrize('content, message', [
    (b'', 'not an image'), (b'no image', 'not an image'), (b'<svg xmlns="http://www.w3.org/2000/svg"/>', 'not an'),
    (b'%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n', 'not an image'),
    (bomb(), 'too large'), (picture(1)[:400], 'damaged')])
def test_uploads_that_are_no_images(content, message, server):
    status, answer, _ = ask(server, 'POST', '/api/explore', content)
    assert status == 400 and message in answer['error']


def test_an_image_of_too_many_pixels(server, monkeypatch):
    monkeypatch.setattr(_explorer, 'MAX_PIXELS', 500)
    status, answer, _ = ask(server, 'POST', '/api/explore', picture(1))
    assert status == 400 and 'has 24 × 24 pixels' in answer['error']


@pytest.mark.parametrize('format', _explorer.FORMATS)
def test_damaged_images(format):
    """Either Pillow reads them, or there is a reason in words."""
    content, rng = picture(1, format), np.random.default_rng(0)
    for _ in range(60):
        damaged = bytearray(content[:rng.integers(1, len(content) + 1)])
        damaged[rng.integers(len(damaged))] = rng.integers(256)
        try:
            _explorer.open_image(bytes(damaged))
        except ValueError as error:
            assert 'this image' in str(error) or 'not an image' in str(error)


@pytest.mark.parametrize('method, path, status, message', [
    ('GET', '/nothing', 404, 'no page /nothing'), ('GET', '/../explore.py', 404, 'no page'),
    ('GET', '/%2e%2e/explore.py', 404, 'no page'), ('POST', '/api/model', 404, 'no page'),
    ('POST', '/api/explore?image=20', 400, 'it has 20 images'), ('GET', '/api/thumbnail?image=20', 400, '20 images'),
    ('POST', '/api/explore?image=-1', 400, "must be a number, got '-1'"), ('GET', '/api/thumbnail', 400, "got ''")])
def test_requests_that_do_not_exist(method, path, status, message, server):
    found, answer, _ = ask(server, method, path)
    assert found == status and message in answer['error']


@pytest.mark.parametrize('length, status', [(None, 411), ('-1', 411), ('x', 411), (str(MAX_BYTES + 1), 413)])
def test_length_of_an_upload(length, status, server):
    connection = http.client.HTTPConnection('127.0.0.1', server.server_port, timeout=60)
    connection.putrequest('POST', '/api/explore')
    if length is not None:
        connection.putheader('Content-Length', length)
    connection.endheaders()
    response = connection.getresponse()
    assert response.status == status and 'error' in json.load(response)
    connection.close()


# Other sites


@pytest.mark.parametrize('headers, status', [
    (dict(Host='evil.example:7860'), 403), (dict(Host='127.0.0.1.evil.example'), 403), (dict(Host=''), 403),
    (dict(Host='explorer.example'), 403), (dict(Origin='https://evil.example'), 403), (dict(Origin='null'), 403),
    (dict(Origin='http://127.0.0.1:1'), 403), (dict(Host='[::1]:80'), 200), (dict(Host='localhost:9'), 200),
    (dict(Host='localhost:9', Origin='http://localhost:9'), 200)])
def test_other_sites_are_refused(headers, status, server):
    for method, path, body in (('GET', '/api/model', None), ('POST', '/api/explore', picture(1))):
        found, answer, _ = ask(server, method, path, body, **headers)
        assert found == status and ('error' in answer) == (status != 200)


def test_allowed_names(alone):
    host = dict(Host='explorer.example')
    assert ask(alone, 'POST', '/api/explore', picture(1), Origin='https://explorer.example', **host)[0] == 200
    assert ask(alone, 'GET', '/', **host)[2]['Content-Security-Policy'].endswith('frame-ancestors https://a.example')
    assert ask(alone, 'GET', '/', Host='evil.example')[0] == 403


# Names of classes


def names(model: str, more: Tuple[str, ...] = (), **attributes) -> list:
    args = load_tool('explore').parse_args(['--model', model, *more])
    net = timm.create_model(model, pretrained=model == 'gated_resnet20.l0_c10')
    net.untrained = ''
    for name, value in attributes.items():
        setattr(net, name, value)
    return _explorer.class_names(net, args)


def test_names_of_classes(tmp_path):
    assert names('gated_resnet20.l0_c10') == list(CIFAR10)
    assert names('gated_resnet20.l0_c10', untrained='untrained head')[3] == 'class 3'
    assert names('gated_resnet20.l0_c10', ('--checkpoint', 'mine.pth'))[3] == 'class 3'
    named = {'num_classes': 10, 'label_names': list('abcdefghij')}
    assert names('gated_resnet20.l0_c10', pretrained_cfg=named)[1] == 'b'
    imagenet = SimpleNamespace(num_classes=1000, pretrained_cfg={'num_classes': 1000}, untrained='')
    args = load_tool('explore').parse_args(['--model', 'gated_resnet18'])
    assert _explorer.class_names(imagenet, args)[3] == 'tiger shark'
    path = tmp_path / 'names.txt'
    path.write_text('\n'.join('klmnopqrst') + '\n')
    assert names('gated_resnet20.l0_c10', ('--class-map', str(path)))[0] == 'k'
    path.write_text('one\ntwo\n')
    with pytest.raises(ValueError, match='has 2 names, but the model has 10 outputs'):
        names('gated_resnet20.l0_c10', ('--class-map', str(path)))


# Command line


@pytest.mark.parametrize('options, message', [
    ([], 'give --model'), (['--model', 'gated_resnet20', '--limit', '0'], '--limit must be at least 1, got 0'),
    (['--model', 'gated_resnet20', '--port', '70000'], 'got 70000'),
    (['--model', 'gated_resnet20', '--embed-in', 'example.org'], 'such as https://example.org, got example.org'),
    (['--model', 'gated_resnet20', '--embed-in', 'https://a;script-src*'], 'got https://a;script-src')])
def test_options(options, message, capsys):
    with pytest.raises(SystemExit) as stop:
        run_tool('explore', *options)
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_errors(server, tmp_path, capsys):
    port = ['--port', server.server_port]
    assert run_tool('explore', *NET, '--untrained', '--no-accelerate', *port) == 2
    assert f'port {server.server_port}: Address already in use. Choose another --port' in capsys.readouterr().err
    assert run_tool('explore', '--model', 'cifar_resnet20.e20_c10', *port) == 2
    assert 'has no gates' in capsys.readouterr().err
    assert run_tool('explore', *NET, '--untrained', '--data-dir', tmp_path / 'no', *port) == 2
    assert 'it does not exist' in capsys.readouterr().err


def test_ctrl_c_stops_the_server(monkeypatch, capsys):
    def interrupt(server: ExploreServer) -> None:
        raise KeyboardInterrupt
    monkeypatch.setattr(ExploreServer, 'serve_forever', interrupt)
    assert run_tool('explore', *NET, '--untrained', '--no-accelerate', '--port', '0') == 0
    assert re.match(r'gated_resnet20 \(untrained network\): http://127\.0\.0\.1:\d+ ', capsys.readouterr().out)


def test_the_space_starts_and_serves():
    """As on Spaces, but for the port and the address."""
    app = TOOLS.parent / 'examples' / 'space' / 'app.py'
    environment = dict(os.environ, SPACE_HOST='me-x.hf.space')
    process = subprocess.Popen(
        [sys.executable, str(app), '--host', '127.0.0.1', '--port', '0'], env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True)
    try:
        line = process.stdout.readline()
        found = re.fullmatch(r'gated_resnet20\.bas_c10: http://127\.0\.0\.1:(\d+) .*\n', line)
        assert found, line + process.communicate(timeout=60)[0]
        where: Any = SimpleNamespace(server_port=int(found.group(1)))
        space = dict(Host='me-x.hf.space', Origin='https://me-x.hf.space')
        status, page, headers = ask(where, 'GET', '/', **space)
        assert status == 200 and 'frame-ancestors https://huggingface.co' in headers['Content-Security-Policy']
        status, answer, _ = ask(where, 'POST', '/api/explore', picture(1), **space)
        assert status == 200 and {entry['name'] for entry in answer['top']} <= set(CIFAR10)
        assert ask(where, 'GET', '/', Host='evil.example')[0] == 403
    finally:
        process.kill()
        process.communicate()


def test_the_space_is_described():
    folder = TOOLS.parent / 'examples' / 'space'
    card, recipe = (folder / 'README.md').read_text(), (folder / 'Dockerfile').read_text()
    assert card.startswith('---\n') and '\nsdk: docker\napp_port: 7860\n' in card
    assert load_tool('explore').parse_args(['--model', 'x']).port == 7860 and 'CMD ["python", "app.py"]' in recipe
