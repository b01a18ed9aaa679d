"""HTML page of a report: one self-contained file for phones and desktops"""
import base64
import html
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any, List, Mapping, Optional, Sequence, Tuple

from matplotlib.figure import Figure

from .statistics import GateCounts

__all__ = ['Section', 'render_page', 'write_figure']

STYLE = """
body { margin: 0 auto; max-width: 46rem; padding: 1rem; font: 1rem/1.5 system-ui, sans-serif; color: #222;
  background: #fff; }
h1 { font-size: 1.5rem; line-height: 1.25; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .5rem; }
figure { margin: 0; }
img { display: block; width: 100%; max-width: 40rem; height: auto; }
figcaption, .about { color: #555; font-size: .9rem; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .2rem; border-bottom: 1px solid #ddd; text-align: left; font-weight: normal; }
td { text-align: right; }
"""


@dataclass
class Section:
    """One figure of a report, or the reason why it is missing."""
    key: str
    title: str
    text: str
    figure: Optional[Figure] = None


def write_figure(folder: Path, section: Section) -> bytes:
    """Write the figure of a section as PNG and SVG and return the PNG, empty without a figure."""
    if section.figure is None:
        return b''
    buffer = io.BytesIO()
    section.figure.savefig(buffer, format='png', dpi=160)
    (folder / f'{section.key}.png').write_bytes(buffer.getvalue())
    section.figure.savefig(folder / f'{section.key}.svg', metadata={'Date': None})
    return buffer.getvalue()


def _rows(result: Mapping[str, Any]) -> List[Tuple[str, str]]:
    """Rows of the table at the top of the page."""
    accuracy = ('top-1', result['top1']) if 'top1' in result else ('pixel accuracy', result['pixel_accuracy'])
    rows = [('images', f'{result["num_samples"]:,}'), (accuracy[0], f'{accuracy[1]:.2f} %')]
    if result['top5'] is not None:
        rows.append(('top-5', f'{result["top5"]:.2f} %'))
    used, parameters = result['parameters_used'] / 1e6, result['parameters'] / 1e6
    return rows + [
        ('mean MACs per sample', f'{result["mean_macs"] / 1e6:,.2f} M'),
        ('share of the dense MACs', f'{result["macs_share"]:.1%}'),
        ('mean parameters used', f'{used:.3f} M of {parameters:.3f} M'),
        ('gates', f'{result["num_gates"]:,}, {result["gate_density"]:.1%} open on average'),
        ('always on / conditional / always off', ' / '.join(str(result[kind]) for kind in GateCounts._fields)),
    ]


def render_page(
        title: str,
        about: str,
        content: Mapping[str, Any],
        sections: Sequence[Section],
        pictures: Sequence[bytes],
) -> str:
    """Render the page with embedded images.

    Args:
        title: Title of the page.
        about: Description of model and data.
        content: Content of gates.json.
        sections: Sections of the report.
        pictures: PNG of each section's figure, empty without a figure.
    """
    absent = ', '.join(entry['name'] for entry in content['classes'] if not entry['num_samples'])
    note = f'<p class="about">Classes without images: {html.escape(absent)}.</p>' if absent else ''
    table = ''.join(
        f'<tr><th scope="row">{html.escape(label)}</th><td>{html.escape(value)}</td></tr>'
        for label, value in _rows(content['results'][0]))
    body = []
    for section, picture in zip(sections, pictures, strict=True):
        name, encoded = html.escape(section.title), base64.b64encode(picture).decode('ascii')
        image = f'<img alt="{name}" src="data:image/png;base64,{encoded}">' if picture else ''
        body.append(
            f'<section id="{section.key}"><h2>{name}</h2><figure>{image}'
            f'<figcaption>{html.escape(section.text)}</figcaption></figure></section>')
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{html.escape(title)}</title><style>{STYLE}</style></head><body>'
        f'<h1>{html.escape(title)}</h1><p class="about">{html.escape(about)}</p>{note}'
        f'<table>{table}</table>{"".join(body)}</body></html>\n')
