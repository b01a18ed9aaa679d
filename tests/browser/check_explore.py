"""The explorer's page in Chromium, with a real upload

Run by `make browser`, not by `make test`: it needs chromium and chromedriver. It writes screenshots to output/browser.
"""
import threading
from pathlib import Path
from typing import Any

import pytest
from browser import Browser
from paths import ROOT
from PIL import Image, ImageDraw
from tool import load_tool

from timm_gated_cli import _explorer
from timm_gated_cli._explore_server import ExploreServer

SHOTS = ROOT / 'output' / 'browser'
NAMES = ('airplane', 'automobile', 'bird', 'cat', 'deer', 'dog', 'frog', 'horse', 'ship', 'truck')


def write_picture(path: Path, seed: int) -> Path:
    picture = Image.new('RGB', (90, 60), (60 + 17 * seed % 150, 120, 200))
    draw = ImageDraw.Draw(picture)
    draw.rectangle((0, 40, 90, 60), fill=(40, 80 + 11 * seed % 90, 120))
    draw.polygon([(10 + seed % 20, 38), (75, 38), (66, 50), (20, 50)], fill=(160, 50, 40))
    draw.rectangle((30, 24, 55, 38), fill=(240, 240, 240))
    picture.save(path)
    return path


@pytest.fixture(scope='module')
def pages(tmp_path_factory):
    """Addresses without and with a data set."""
    data = tmp_path_factory.mktemp('data')
    for number, name in enumerate(NAMES):
        folder = data / 'validation' / name
        folder.mkdir(parents=True)
        for index in range(3):
            write_picture(folder / f'{index}.png', 3 * number + index)
    addresses, servers = {}, []
    for key, more in (('plain', []), ('data', ['--data-dir', str(data), '--workers', '0'])):
        args = load_tool('explore').parse_args(['--model', 'gated_resnet20.bas_c10', *more])
        server = ExploreServer(('127.0.0.1', 0), _explorer.Explorer(args))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        addresses[key] = f'http://127.0.0.1:{server.server_port}/'
        servers.append(server)
    yield addresses
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(params=[1280, 390])
def browser(request, tmp_path):
    browser = Browser(tmp_path / 'browser', width=request.param)
    yield browser
    browser.close()


def wait_for_speed(browser: Browser) -> None:
    browser.wait("document.querySelectorAll('#speed li').length == 2 && !document.body.classList.contains('busy')")


def check_layout(browser: Browser, name: str) -> None:
    """Nothing is wider than the page, every image is there, and the page asked no other host."""
    browser.wait('[...document.images].every(image => image.complete && image.naturalWidth)')
    width, content = browser.run('return [innerWidth, document.documentElement.scrollWidth]')
    assert content == width
    assert browser.run(
        'return performance.getEntriesByType("resource").filter(entry => !/^(data|blob):/.test(entry.name)'
        ' && !entry.name.startsWith(location.origin)).map(entry => entry.name)') == []
    assert browser.log() == []
    SHOTS.mkdir(parents=True, exist_ok=True)
    browser.screenshot(SHOTS / f'{name}_{width}.png')


def test_upload(pages, browser, tmp_path):
    browser.open(pages['data'])
    browser.wait("document.querySelectorAll('#samples button').length == 10")
    browser.upload('#file', write_picture(tmp_path / 'ship.png', 40))
    wait_for_speed(browser)
    strips: Any = browser.run(
        "return [...document.querySelectorAll('.layer')].map(layer => [layer.innerText, "
        "layer.querySelector('path.open').getAttribute('d').split('M').length - 1])")
    assert len(strips) == 9
    for text, cells in strips:
        assert f'{cells} of ' in text  # one cell per open filter
    assert sum(cells for _, cells in strips) == int(browser.text('#ran').partition(' ')[0])
    assert browser.text('#classes').split('\n')[0] in NAMES and '%' in browser.text('#share')
    assert 'of the 30 images' in browser.text('#rank')
    assert browser.run("return document.querySelectorAll('#histogram rect').length") == 40
    check_layout(browser, 'data')
    before = browser.text('#seen-text')
    browser.run("document.querySelector('#neighbours button').click()")
    browser.wait(f"document.querySelector('#seen-text').innerText != {before!r}")
    assert 'label: ' in browser.text('#seen-text')
    assert browser.run("return document.querySelectorAll('#seen-before button').length") == 2


def test_drawings(pages, browser):
    browser.open(pages['plain'])
    browser.wait("document.querySelectorAll('#samples button').length == 6")
    browser.wait('[...document.images].filter(image => image.src).every(image => image.complete)')
    found = []
    for index in range(6):
        browser.run(f"document.querySelectorAll('#samples button')[{index}].click()")
        browser.wait(f"document.querySelectorAll('#seen-before button').length >= {index + (index > 0)}")
        wait_for_speed(browser)
        found.append(browser.text('#classes').split('\n')[0])
    assert found == ['airplane', 'automobile', 'ship', 'truck', 'bird', 'frog']
    check_layout(browser, 'plain')


def test_errors_are_shown(pages, browser, tmp_path):
    browser.open(pages['plain'])
    browser.wait("document.querySelectorAll('#samples button').length == 6")
    (tmp_path / 'text.png').write_text('no image')
    browser.upload('#file', tmp_path / 'text.png')
    browser.wait("!document.querySelector('#message').hidden")
    assert 'This is not an image that can be read' in browser.text('#message')
    with open(tmp_path / 'large.png', 'wb') as file:
        file.truncate(21_000_000)
    browser.upload('#file', tmp_path / 'large.png')
    browser.wait("document.querySelector('#message').innerText.includes('21.0 MB; at most 20 MB')")
    assert browser.run("return document.querySelector('#result').hidden")
