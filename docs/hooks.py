"""Pages of the site that live outside docs/, and links to files of the repository

README.md, CONTRIBUTING.md and the READMEs of configs and experiments stay where readers of the repository look for
them; the site includes them. All links are relative to the file that contains them, as on a repository's web page.
Here they become links between pages of the site, or to copies of the files under files/.
"""
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

__all__ = ['on_files', 'on_page_markdown']

ROOT = Path(__file__).resolve().parents[1]
# Sources in the repository and their pages
PAGES = {
    'README.md': 'index.md',
    'CONTRIBUTING.md': 'contributing.md',
    'CHANGELOG.md': 'changelog.md',
    'configs/timm/README.md': 'reference/timm_configs.md',
    'configs/mmseg/README.md': 'reference/mmseg_configs.md',
    'experiments/README.md': 'experiments.md',
}
SOURCES = {page: source for source, page in PAGES.items()}
LINK = re.compile(r'(?<=\]\()([^)\s:#]+)')


def source_of(uri: str) -> str:
    """Path in the repository of a page."""
    return SOURCES.get(uri, f'docs/{uri}')


def targets(markdown: str, source: str) -> Iterator[str]:
    """Paths in the repository of the files that a page links to."""
    for match in LINK.finditer(markdown):
        target = normpath(str(PurePosixPath(source).parent / match.group()))
        if (ROOT / target).is_file():
            yield target


def uri_of(target: str) -> str:
    """Path in the site of a file of the repository."""
    return PAGES.get(target) or (target.removeprefix('docs/') if target.startswith('docs/') else f'files/{target}')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for page in list(files.documentation_pages()):
        for target in targets(page.content_string, source_of(page.src_uri)):
            if files.get_file_from_path(uri_of(target)) is None:
                files.append(File.generated(config, uri_of(target), abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    uri = page.file.src_uri
    folder = str(PurePosixPath(uri).parent)

    def rewrite(match: re.Match) -> str:
        found = list(targets(f']({match.group()}', source_of(uri)))
        return relpath(uri_of(found[0]), folder) if found else match.group()
    return LINK.sub(rewrite, markdown)
