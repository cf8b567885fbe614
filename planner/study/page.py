"""A study as one HTML file that needs nothing else: the picture, the table, what was left out."""

from __future__ import annotations

from html import escape

from ...files import write_for_user
from .figure import picture
from .study import Study
from .table import render

_WIDE = 100_000  # columns of text: the page scrolls
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; color: #222; }
h1 { font-size: 1.4rem; } svg { max-width: 100%; height: auto; } pre { overflow-x: auto; font-size: 13px; line-height: 1.35; }
"""


def write_page(path: str, study: Study) -> None:
    write_for_user(path, page(study))


def page(study: Study) -> str:
    """The HTML text."""
    svg = picture(study, "svg").decode()
    svg = svg[svg.index("<svg") :]  # without the XML declaration and doctype
    q = study.columns[0].prediction.question
    title = escape(f"Memory of {q['model']} on {study.scale[0]} x {study.columns[0].prediction.gpu}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style></head>\n'
        f"<body><h1>{title}</h1>\n{svg}\n<pre>{escape(render(study, _WIDE))}</pre>\n</body></html>\n"
    )
