"""HTML page of a report: one self-contained file for phones and desktops"""
import base64
import html
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, List, Mapping, Optional, Sequence, Tuple

from matplotlib.figure import Figure

from .answers import images, percent
from .sample_figures import amount
from .statistics import GateCounts

__all__ = ['Section', 'render_page', 'write_figure']

STYLE = """
body { margin: 0 auto; max-width: 40rem; padding: 1rem; font: 1rem/1.5 system-ui, sans-serif; color: #222;
  background: #fff; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .5rem; }
p { margin: .5rem 0; }
figure { margin: 0; }
img { display: block; width: 100%; height: auto; }
figcaption, .about, footer { color: #555; font-size: .9rem; }
a { color: #0b5394; }
nav ul { margin: 0; padding-left: 1.2rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .2rem; border-bottom: 1px solid #ddd; text-align: left; font-weight: normal; }
td, thead th { text-align: right; }
th { overflow-wrap: break-word; }
thead th { font-size: .9rem; vertical-align: bottom; }
footer { margin-top: 3rem; border-top: 1px solid #ddd; }
pre { white-space: pre-wrap; font-size: .85rem; }
"""


@dataclass
class Section:
    """Section of a report.

    Attributes:
        key: Name of its files, and its anchor in the page.
        question: Question that is the heading.
        answer: One sentence that answers it, with figures.
        text: Explanation of the figure, or the reason why it is missing.
        figure: Figure, None if it is missing.
    """
    key: str
    question: str
    answer: str
    text: str
    figure: Optional[Figure] = None


def write_figure(folder: Path, section: Section) -> bytes:
    """Write the figure of a section as PNG and SVG and return the PNG, empty without a figure."""
    if section.figure is None:
        return b''
    buffer = io.BytesIO()
    section.figure.savefig(buffer, format='png', dpi=200)
    (folder / f'{section.key}.png').write_bytes(buffer.getvalue())
    section.figure.savefig(folder / f'{section.key}.svg', metadata={'Date': None})
    return buffer.getvalue()


def _text(text: str) -> str:
    """Escape text for HTML. Numbers stay together with their units."""
    return re.sub(r'(?<=\d) (?=(%|M|G)(?!\w))', '&nbsp;', html.escape(text))


def _rows(result: Mapping[str, Any]) -> List[Tuple[str, str]]:
    """Rows of the table, for one network. Those about gates are the last ones."""
    accuracy = ('top-1', result['top1']) if 'top1' in result else ('pixel accuracy', result['pixel_accuracy'])
    rows = [(accuracy[0], f'{accuracy[1]:.2f} %')]
    if result['top5'] is not None:
        rows.append(('top-5', f'{result["top5"]:.2f} %'))
    rows += [
        ('mean MACs per sample', amount(result['mean_macs'])),
        ('share of the dense MACs', percent(result['macs_share'], 1)),
        ('parameters', f'{result["parameters"] / 1e6:.3f} M'),
        ('mean parameters used', f'{result["parameters_used"] / 1e6:.3f} M'),
    ]
    if result['num_gates']:
        rows += [
            ('gates', f'{result["num_gates"]:,}'),
            ('open on average', percent(result['gate_density'], 1)),
            *((kind.replace('_', ' '), f'{result[kind]:,}') for kind in GateCounts._fields)]
    return rows


def _table(results: Sequence[Mapping[str, Any]]) -> str:
    """Table of the networks side by side, that with gates first."""
    columns = [dict(_rows(result)) for result in results]
    breakable = (re.sub(r'(?<=[._/])', '<wbr>', _text(result['name'])) for result in results)
    names = ''.join(f'<th scope="col">{name}</th>' for name in breakable)
    rows = ''.join(
        f'<tr><th scope="row">{label}</th>' + ''.join(f'<td>{_text(column.get(label, "–"))}</td>' for column in columns)
        + '</tr>' for label in columns[0])
    return f'<table><thead><tr><td></td>{names}</tr></thead><tbody>{rows}</tbody></table>'


def _figure(section: Section, picture: bytes) -> str:
    """Figure of a section, which links to its SVG, with its caption."""
    image = ''
    if picture:
        encoded = base64.b64encode(picture).decode('ascii')
        image = (
            f'<a href="{section.key}.svg"><img alt="{_text(f"{section.question} {section.answer}")}" '
            f'src="data:image/png;base64,{encoded}"></a>')
    return f'<figure>{image}<figcaption>{_text(section.text)}</figcaption></figure>'


def render_page(
        title: str,
        overview: str,
        content: Mapping[str, Any],
        sections: Sequence[Section],
        pictures: Sequence[bytes],
) -> str:
    """Render the page with embedded images.

    Args:
        title: Title of the page.
        overview: First paragraph.
        content: Content of gates.json.
        sections: Sections of the report.
        pictures: PNG of each section's figure, empty without a figure.
    """
    result, made = content['results'][0], content['made']
    about = ', '.join(part for part in (result['model'], result['checkpoint'], result['data']) if part)
    absent = ', '.join(entry['name'] for entry in content['classes'] if not entry['num_samples'])
    note = f'<p class="about">Classes without images: {_text(absent)}.</p>' if absent else ''
    questions = {'measured': 'What was measured?', **{section.key: section.question for section in sections}}
    entries = ''.join(f'<li><a href="#{key}">{_text(question)}</a></li>' for key, question in questions.items())
    body = ''.join(
        f'<section id="{section.key}"><h2>{_text(section.question)}</h2><p>{_text(section.answer)}</p>'
        f'{_figure(section, picture)}</section>'
        for section, picture in zip(sections, pictures, strict=True))
    versions = ', '.join(f'{name} {version}' for name, version in made['versions'].items())
    command = f' by<pre><code>{html.escape(made["command"])}</code></pre>' if made['command'] else '.'
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{html.escape(title)}</title><style>{STYLE}</style></head><body>'
        f'<h1>{_text(title)}</h1><p class="about">{_text(about)}</p><p id="overview">{_text(overview)}</p>{note}'
        f'<nav aria-label="Contents"><ul>{entries}</ul></nav>'
        f'<section id="measured"><h2>{questions["measured"]}</h2><p>Accuracy, cost and gates over {images(result)}.</p>'
        f'{_table(content["results"])}</section>{body}'
        f'<footer><p>Made on {made["date"]} with {_text(versions)}{command}</p></footer></body></html>\n')
