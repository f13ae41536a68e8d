"""The page of a report: one HTML document that contains its styles and figures and loads nothing."""

from __future__ import annotations

from typing import Any

from ...privacy.errors import check_installed

STYLE = """\
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
h1 { font-size: 1.35rem; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 2rem 0 .5rem; border-top: 1px solid var(--line); padding-top: 1.25rem; }
h2, summary, th[scope=row], td[data-of=run], td[data-of=strategy], td.set { overflow-wrap: anywhere; }
td[data-of=run] { min-width: 7rem; }
h3 { font-size: 1rem; margin: 1.75rem 0 .5rem; }
p { max-width: 62rem; margin: .4rem 0; }
.soft { color: var(--soft); }
.card { border: 1px solid var(--line); border-radius: 8px; padding: .9rem 1.1rem; margin: .6rem 0 1rem; }
.card p { max-width: none; }
.word { background: var(--c1); color: var(--paper); font-weight: 700; padding: .1rem .6rem; border-radius: 4px; }
.word.real { background: var(--c2); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.2rem; margin: .7rem 0; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
.worrying { border-left: 4px solid var(--c1); background: var(--panel); padding: .5rem 1rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: .6rem; margin: 1rem 0; }
.tile { background: var(--panel); border-radius: 6px; padding: .55rem .8rem; }
.tile b { display: block; font-size: 1.2rem; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: .85rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(27rem, 100%), 1fr)); gap: 1rem; }
figure { margin: 0; background: var(--panel); border-radius: 8px; padding: .9rem 1rem; }
figure h4 { margin: 0 0 .4rem; font-size: .95rem; }
figure svg { width: 100%; height: auto; display: block; }
figcaption { color: var(--soft); font-size: .85rem; margin-top: .4rem; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
caption { caption-side: bottom; text-align: left; color: var(--soft); padding-top: .4rem; font-size: .85rem; }
th, td { text-align: left; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 600; }
td.set { font-weight: 700; }
details { margin: .8rem 0; }
summary { cursor: pointer; font-weight: 600; padding: .2rem 0; }
@media screen and (max-width: 56rem) {
  dl { grid-template-columns: 1fr; gap: 0; }
  dd { margin-bottom: .4rem; }
  .stacked thead { display: none; }
  .stacked, .stacked caption, .stacked tbody, .stacked tr, .stacked td, .stacked th { display: block; }
  .stacked tr { border-bottom: 1px solid var(--line); padding: .4rem 0; }
  .stacked td, .stacked th { border: 0; padding: .05rem 0; }
  .stacked td:empty { display: none; }
  .stacked td[data-of]::before { content: attr(data-of) ": "; color: var(--soft); }
}
@media print {
  :root {
    color-scheme: light; --paper: #ffffff; --panel: #f6f7f8; --ink: #1a1c1e; --soft: #5a6168; --line: #d9dde1;
    --grid: #9aa0a6; --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #cc79a7; --c4: #e69f00; --c5: #56b4e9;
  }
  @page { size: A4; margin: 10mm; }
  html { font-size: 8.5pt; }
  html.one { font-size: 7pt; }
  body { padding: 0; max-width: none; line-height: 1.4; print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  p { max-width: none; }
  .first { break-inside: avoid; }
  .plots { grid-template-columns: repeat(2, 1fr); gap: .6rem; }
  .one .plots { grid-template-columns: repeat(3, 1fr); }
  details:not([open]) { display: none; }
  .several .stacked { font-size: .75rem; }
  .several .stacked th, .several .stacked td { padding-right: .4rem; }
  .tiles { grid-template-columns: repeat(auto-fill, minmax(13rem, 1fr)); }
  figure { break-inside: avoid; padding: .5rem .7rem; }
}
"""
"""Style of a page: one for screens, light and dark, narrow ones, and paper."""
_PAGE = (
    """\
<!DOCTYPE html>
<html lang="en" class="{{ "one" if runs | length == 1 else "several" }}">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>murmurfl: {{ runs | map(attribute="name") | join(", ") }}</title>
<style>
"""
    + STYLE
    + """\
</style>
</head>
<body>
{% set seen = namespace(texts=[]) %}
{% macro figures(plots) %}
<div class="plots">
{% for plot in plots %}
<figure><h4>{{ plot.title }}</h4>{{ plot.svg | safe }}{{ once(plot.caption, "figcaption") }}</figure>
{% endfor %}
</div>
{% endmacro %}

{% macro once(text, tag) %}
{% if text not in seen.texts %}{% set seen.texts = seen.texts + [text] %}<{{ tag }}>{{ text }}</{{ tag }}>{% endif %}
{% endmacro %}

{% macro listed(table) %}
<table class="stacked">
<thead><tr>
{% for column in table.columns %}<th scope="col" title="{{ column.meaning }}">{{ column.name }}</th>{% endfor %}
</tr></thead>
<tbody>
{% for row in table.texts() %}
<tr>{% for name, value in row.items() %}<td data-of="{{ name }}">{{ value }}</td>{% endfor %}</tr>
{% endfor %}
</tbody>
<caption>{{ caller() }}</caption>
</table>
{% endmacro %}

{% macro told(pairs) %}
{% for text, names in pairs %}
{% if names %}<b>{{ names }}</b>: {% endif %}{{ text }}{% if not loop.last %}<br>{% endif %}

{% endfor %}
{% endmacro %}

{% macro facts(questions) %}
<dl>
{% for question, answers in questions.items() %}
<dt>{{ question }}</dt><dd>{{ told(answers) }}</dd>
{% endfor %}
</dl>
{% endmacro %}

{% macro lined(head, rows) %}
<thead><tr>{% for name in head %}<th scope="col">{{ name }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in rows %}
<tr>{% for value in row %}
{% if loop.first %}<th scope="row">{{ value }}</th>
{% else %}<td data-of="{{ head[loop.index0] }}">{{ value }}</td>{% endif %}
{% endfor %}</tr>
{% endfor %}
</tbody>
{% endmacro %}

<div class="first">
<h1>{{ "Run " + runs[0].name if runs | length == 1 else "%d runs" % (runs | length) }}</h1>
<div class="card">
{% for word, sentence, names in card.status %}
<p><span class="word {{ word | lower }}">{{ word }}</span>
{% if names %}<b>{{ names }}</b>: {% endif %}{{ sentence }}</p>
{% endfor %}
{% if card.warned %}<p class="worrying">{{ told(card.warned) }}</p>{% endif %}

{{ facts(card.who) }}
{% if card.figures %}
<table class="stacked">
{{ lined(card.figures[0], card.figures[1:]) }}
<caption>{{ told(card.below) }} A guess by tossing a coin is right 50 % of the time.</caption>
</table>
{% endif %}
{% if runs | length > 1 %}
{% call listed(summary) %}Each ε is true of its own run only. {{ told(card.below) }}{% endcall %}
{% endif %}
{{ facts(card.whence) }}
</div>
{% if accuracy %}
<div class="tiles">
{% for name, value in accuracy %}
<div class="tile"><b>{{ value }}</b><span>{{ name }}</span></div>
{% endfor %}
</div>
{% endif %}
{% if card.compared %}<p class="worrying">{{ told(card.compared) }}</p>{% endif %}

<details{% if runs | length == 1 %} open{% endif %}><summary>The guarantee in full</summary>
<p>{{ told(card.full) }}</p>
{% if card.plain %}<p>{{ told(card.plain) }}</p>{% endif %}
</details>
</div>

{% if runs | length > 1 %}
<h2>{{ summary.title }}</h2>
{{ figures(compared) }}
<h3>Settings that differ</h3>
{% if differing %}
<table class="stacked">
{{ lined(differing[0], differing[1:]) }}
</table>
{% else %}<p>None.</p>{% endif %}
{% endif %}

{% for run in runs %}
{% if folded %}<details class="run"><summary>{{ run.name }}</summary>
{% elif runs | length > 1 %}<h2>{{ run.name }}</h2>{% endif %}
{{ figures(run.plots) }}
{% if not run.recorded %}
{{ once("This run did not record which clients were asked: no heat map, no ε by client.", "p") }}
{% endif %}
<details><summary>What happened</summary>
<table>
<tbody>
{% for name, value in run.happened %}<tr><th scope="row">{{ name }}</th><td>{{ value }}</td></tr>
{% endfor %}
{% for reason, count in run.refusals.items() %}
<tr><th scope="row">refused: {{ reason }}</th><td>{{ count }}</td></tr>
{% endfor %}
</tbody>
</table></details>
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
{% if run.training %}
<p{% if run.training.worrying %} class="worrying"{% endif %}><b>Training</b> ({{ run.training.note }}):
{{ run.training.sentence }}</p>
{% endif %}
{% for table in run.rehearsal %}
<details><summary>{{ table.title }}</summary>
<table class="stacked">
{{ lined(table.head, table.rows) }}
<caption>Of a rehearsal, whose rows were seen: not private.</caption>
</table></details>
{% endfor %}
{% if run.clients.rows %}
<details><summary>{{ run.clients.title }}</summary>
{% call listed(run.clients) %}
Each client's own figures. "Of its releases" is bookkeeping that holds only if the number of releases was
fixed in advance; the other is the guarantee. Every ε is in the terms above.
{% if run.left_out %}{{ run.left_out }} more clients are left out.{% endif %}
{% endcall %}
</details>
{% endif %}
<details><summary>Configuration</summary>
<table>
<tbody>
{% for key, (value, is_set) in run.settings.items() %}
<tr><th scope="row">{{ key }}</th><td{% if is_set %} class="set"{% endif %}>{{ value }}</td></tr>
{% endfor %}
</tbody>
<caption>Bold: differs from the default.</caption>
</table></details>
{% if folded %}</details>{% endif %}
{% endfor %}
<p class="soft">Made by <code>murmurfl report</code> from what the server wrote down. Only what is marked as a
simulation's exceeds what a server knows.</p>
</body>
</html>
"""
)


def page(**parts: Any) -> str:
    """Render the document; all text is escaped except our own figures."""
    return rendered(_PAGE, "a report", **parts)


def rendered(template: str, what: str, **parts: Any) -> str:
    """Render a template of a page; ``what`` it is, for the error where the engine is not installed."""
    check_installed("jinja2", "reports", what)
    from jinja2 import Environment

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(**parts)
