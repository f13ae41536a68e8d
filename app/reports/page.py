"""The page of a report: one HTML document that contains its styles and figures and loads nothing."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment

_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>murmurfl: {{ runs | map(attribute="name") | join(", ") }}</title>
<style>
:root {
  color-scheme: light dark;
  --paper: #ffffff; --panel: #f6f7f8; --ink: #1a1c1e; --soft: #5a6168; --line: #d9dde1; --grid: #9aa0a6;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #cc79a7; --c4: #e69f00; --c5: #56b4e9;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #131619; --panel: #1c2024; --ink: #e8eaec; --soft: #a3abb3; --line: #343a40; --grid: #6b737b;
    --c0: #4aa8e0; --c1: #f0824a; --c2: #2fc294; --c3: #e3a0c5; --c4: #f2b93b; --c5: #8fd0f5;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 78rem; padding: 1.5rem 1.25rem 4rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
}
h1 { font-size: 1.5rem; margin: 0 0 .25rem; }
h2 { font-size: 1.25rem; margin: 2.75rem 0 .5rem; border-top: 1px solid var(--line); padding-top: 1.5rem; }
h3 { font-size: 1rem; margin: 1.75rem 0 .5rem; }
p { max-width: 62rem; margin: .4rem 0; }
.soft { color: var(--soft); }
.guarantee {
  border-left: 4px solid var(--c0); background: var(--panel); padding: .7rem 1rem; border-radius: 0 6px 6px 0;
}
.worrying { border-left: 4px solid var(--c1); background: var(--panel); padding: .7rem 1rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: .6rem; margin: 1rem 0; }
.tile { background: var(--panel); border-radius: 6px; padding: .55rem .8rem; }
.tile b { display: block; font-size: 1.2rem; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: .85rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(27rem, 100%), 1fr)); gap: 1rem; }
figure { margin: 0; background: var(--panel); border-radius: 8px; padding: .9rem 1rem; }
figure h4 { margin: 0 0 .4rem; font-size: .95rem; }
figure svg { width: 100%; height: auto; display: block; }
figcaption { color: var(--soft); font-size: .85rem; margin-top: .4rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
caption { caption-side: bottom; text-align: left; color: var(--soft); padding-top: .4rem; font-size: .85rem; }
th, td { text-align: left; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 600; }
td.set { font-weight: 700; }
details { margin: .8rem 0; }
summary { cursor: pointer; font-weight: 600; padding: .2rem 0; }
@media print { details > * { display: block; } figure { break-inside: avoid; } }
</style>
</head>
<body>
<h1>{{ "Report of a run" if runs | length == 1 else "Report of %d runs" % (runs | length) }}</h1>
<p class="soft">Made by <code>murmurfl report</code> from what the server wrote down. Only what is marked as a
simulation's exceeds what a server knows.</p>

{% macro figures(plots) %}
<div class="plots">
{% for plot in plots %}
<figure><h4>{{ plot.title }}</h4>{{ plot.svg | safe }}<figcaption>{{ plot.caption }}</figcaption></figure>
{% endfor %}
</div>
{% endmacro %}

{% macro listed(table) %}
<div class="scroll"><table>
<thead><tr>
{% for column in table.columns %}<th scope="col" title="{{ column.meaning }}">{{ column.name }}</th>{% endfor %}
</tr></thead>
<tbody>
{% for row in table.texts() %}
<tr>{% for value in row.values() %}<td>{{ value }}</td>{% endfor %}</tr>
{% endfor %}
</tbody>
<caption>{{ caller() }}</caption>
</table></div>
{% endmacro %}

{% if runs | length > 1 %}
<h2>{{ summary.title }}</h2>
{% call listed(summary) %}Each μ and ε is true of its own run only, in these words:{% endcall %}
{% for group in groups %}
<p class="guarantee"><b>{{ group.name }}</b>: {{ group.guarantee }}
{% if group.meaning %}<br>In plain words: {{ group.meaning }}{% endif %}</p>
{% endfor %}
{{ figures(compared) }}
<h3>Settings that differ</h3>
{% if differing %}
<div class="scroll"><table>
<thead><tr><th scope="col">setting</th>
{% for group in groups %}<th scope="col">{{ group.name }}</th>{% endfor %}</tr></thead>
<tbody>
{% for key, values in differing.items() %}
<tr><th scope="row">{{ key }}</th>{% for value in values %}<td>{{ value }}</td>{% endfor %}</tr>
{% endfor %}
</tbody>
</table></div>
{% else %}<p>None.</p>{% endif %}
{% endif %}

{% for run in runs %}
{% if folded %}<details class="run"><summary>{{ run.name }}</summary>{% else %}<h2>{{ run.name }}</h2>{% endif %}
<p class="guarantee">{{ run.guarantee }}
{% if run.meaning %}<br>In plain words: {{ run.meaning }}{% endif %}</p>
<div class="tiles">
{% for name, value in run.tiles %}
<div class="tile"><b>{{ value }}</b><span>{{ name }}</span></div>
{% endfor %}
</div>
{{ figures(run.plots) }}
{% if not run.recorded %}
<p class="soft">This run did not record which machines were asked: no heat map, no ε by machine.</p>
{% endif %}
{% if run.refusals %}
<p>Refusals:
{% for reason, count in run.refusals.items() %}
{{ reason }} {{ count }}{{ "." if loop.last else "," }}
{% endfor %}
</p>
{% endif %}
{% if run.forecast %}
<p{% if run.forecast.warning %} class="worrying"{% endif %}>{{ run.forecast.sentence }}</p>
{% if run.forecast.changes %}
<details{% if run.forecast.warning %} open{% endif %}><summary>What would help</summary>
<table>
<thead><tr><th scope="col">each alone</th><th scope="col">noise over a typical update</th></tr></thead>
<tbody>
{% for change in run.forecast.changes %}
<tr><td>{{ change.words }}</td><td>{{ "%.2g" | format(change.ratio) }}</td></tr>
{% endfor %}
</tbody></table></details>
{% endif %}
{% endif %}
{% for line in run.compared %}
<p class="worrying">{{ line }}</p>
{% endfor %}
{% if run.training %}
<p{% if run.training.worrying %} class="worrying"{% endif %}><b>Training</b> ({{ run.training.note }}):
{{ run.training.sentence }}</p>
{% endif %}
{% if run.machines.rows %}
<details><summary>{{ run.machines.title }}</summary>
{% call listed(run.machines) %}
Each machine's own figures. "Of its releases" is bookkeeping that holds only if the number of releases was
fixed in advance; the other is the guarantee. Every ε is in the terms above.
{% if run.left_out %}{{ run.left_out }} more machines are left out.{% endif %}
{% endcall %}
</details>
{% endif %}
<details><summary>Configuration</summary>
<div class="scroll"><table>
<tbody>
{% for key, (value, is_set) in run.settings.items() %}
<tr><th scope="row">{{ key }}</th><td{% if is_set %} class="set"{% endif %}>{{ value }}</td></tr>
{% endfor %}
</tbody>
<caption>Bold: differs from the default.</caption>
</table></div></details>
{% if folded %}</details>{% endif %}
{% endfor %}
</body>
</html>
"""


def page(**parts: Any) -> str:
    """Render the document; all text is escaped except our own figures."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_PAGE).render(**parts)
