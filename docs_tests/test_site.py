"""The site builds without warnings, has no dead link, and fetches nothing from elsewhere"""
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Dict, List, Optional, Set, Tuple
from urllib.parse import unquote, urlsplit

import pytest
from paths import ROOT


class Links(HTMLParser):
    """Anchors of a page, its links, and what the browser fetches for it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: Set[str] = set()
        self.links: List[str] = []
        self.fetched: List[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: List[Tuple[str, Optional[str]]]) -> None:
        for name, value in attrs:
            if name in ('id', 'name'):
                self.anchors.add(value or '')
            elif name in ('href', 'src') and value:
                is_page = tag == 'a' or dict(attrs).get('rel') in ('canonical', 'next', 'prev')
                (self.links if is_page else self.fetched).append(value)


@pytest.fixture(scope='module')
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp('site')
    env = dict(os.environ, NO_MKDOCS_2_WARNING='1')
    done = subprocess.run(
        [sys.executable, '-m', 'mkdocs', 'build', '--strict', '--quiet', '--site-dir', folder], cwd=ROOT, env=env,
        capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return folder


@pytest.fixture(scope='module')
def pages(site) -> Dict[Path, Links]:
    return {path: Links(path.read_text()) for path in site.rglob('*.html') if path.name != '404.html'}


def test_nothing_is_fetched_from_elsewhere(site, pages):
    assert len(pages) > 25
    for path, page in pages.items():
        for target in page.fetched:
            assert not urlsplit(target).netloc, f'{path.relative_to(site)} fetches {target}'
            assert (path.parent / unquote(urlsplit(target).path)).is_file(), f'{path.relative_to(site)}: {target}'
    for path in site.rglob('*.css'):
        assert 'url(http' not in path.read_text() and '@import' not in path.read_text(), path


def test_links(site, pages):
    for path, page in pages.items():
        for target in page.links:
            parts = urlsplit(target)
            if not parts.scheme:
                file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
                file = file / 'index.html' if file.is_dir() else file
                assert file.is_file(), f'{path.relative_to(site)}: {target}'
                assert not parts.fragment or unquote(parts.fragment) in pages[file].anchors, \
                    f'{path.relative_to(site)}: {target}'


def test_reference_describes_no_module(site):
    """A function has the name of a module in some rooms; the reference must find the function."""
    for path in (site / 'reference').glob('*.html'):
        assert 'doc-symbol-module' not in path.read_text(), path.name
