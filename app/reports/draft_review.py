"""A draft of a table's schema for a person to review: a table for the terminal, and a page that loads nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ...clients.records.drafting import Draft
from .page import STYLE, rendered
from .table import Column, Table

_MOST_SHOWN = 6
_COLUMNS = (
    Column("column", "its name in the file", label=True),
    Column("kind", "what its cells are read as"),
    Column("why", "what the cells are"),
    Column("lost", "cells that are not read as what they say"),
)
_PAGE = (
    """\
<!DOCTYPE html>
<html lang="en" class="one">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>murmurfl: draft of {{ name }}</title>
<style>
"""
    + STYLE
    + """\
</style>
</head>
<body>
<h1>Draft of a schema for {{ name }}</h1>
<div class="card">
<p><span class="word">DRAFT</span> Made from all rows, so it shows something of them: keep this page where the rows are.
Reading by a schema is row by row.</p>
<p>A person decides. Change what is wrong in the schema, remove what is private, and set
<code>reviewed = true</code>.</p>
</div>
<h2>To decide</h2>
{% if notes %}
<ul>
{% for note in notes %}<li class="note">{{ note }}</li>
{% endfor %}
</ul>
{% else %}<p>Nothing stands out.</p>{% endif %}
<h2>Columns</h2>
<table class="stacked">
<thead><tr>
{% for column in table.columns %}<th scope="col" title="{{ column.meaning }}">{{ column.name }}</th>{% endfor %}
<th scope="col">to decide</th>
</tr></thead>
<tbody>
{% for row, warnings in rows %}
<tr{% if row["kind"] == "left out" %} class="soft"{% endif %}>
{% for name, value in row.items() %}<td data-of="{{ name }}">{{ value }}</td>{% endfor %}
<td data-of="to decide">{{ warnings | join(" ") }}</td></tr>
{% endfor %}
</tbody>
</table>
</body>
</html>
"""
)


def draft_table(draft: Draft) -> Table:
    """Return a draft as a table: the label, then each column with its kind, the reason and what is lost."""
    return Table("Draft", _COLUMNS, list(_rows(draft)))


def _rows(draft: Draft) -> Iterator[Mapping[str, str]]:
    label = draft.schema.label
    if label.names:
        names = ", ".join(label.names[:_MOST_SHOWN]) + (", ..." if len(label.names) > _MOST_SHOWN else "")
        what = {"kind": "classes", "why": f"label: {names}"}
    else:
        low, high = label.bounds or (0.0, 0.0)
        what = {"kind": "number", "why": f"label: from {low:g} to {high:g}"}
    yield {"column": label.column, **what, "lost": "; ".join(draft.label_notes)}
    for name, says in draft.apart.items():
        yield {"column": name, "kind": "left out", "why": says, "lost": ""}
    for one in draft.columns:
        yield {"column": one.name or "(no name)", "kind": one.kind, "why": one.reason, "lost": one.lost}


def draft_page(name: str, draft: Draft) -> str:
    """Return a draft as an HTML page; ``name`` is the file's."""
    table = draft_table(draft)
    warnings = [(), *[()] * len(draft.apart), *(one.warnings for one in draft.columns)]
    rows = list(zip(table.texts(), warnings, strict=True))
    notes = [*draft.label_notes, *draft.notes]
    return rendered(_PAGE, "a page of a draft", name=name, table=table, rows=rows, notes=notes)
