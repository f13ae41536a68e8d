"""Pages that are written while the site is built: everything public has one, and nothing is written twice."""

import json
import re
import runpy
from pathlib import Path

import pytest

from docs import site_pages

ROOT = Path(__file__).parents[1]
MADE = dict(site_pages.pages())


def test_each_public_class_and_function_has_a_page():
    things = [(package, name) for package, name, thing in site_pages.public_things() if site_pages.is_shown(thing)]
    assert len(things) > 200
    assert ("murmurfl", "fit") in things
    for package, name in things:
        assert re.search(rf"^\.\. auto\w+:: {package}\.{name}$", MADE[f"api/{package}.{name}.rst"], flags=re.MULTILINE)


def test_each_public_class_and_function_has_an_example():
    things = {f"{package}.{name}": thing for package, name, thing in site_pages.public_things()}
    shown = {name: thing for name, thing in things.items() if site_pages.is_shown(thing)}
    assert len(shown) > 200
    assert [name for name, thing in shown.items() if ">>> " not in (thing.__doc__ or "")] == []


@pytest.mark.parametrize("package", site_pages.PUBLIC)
def test_a_packages_table_leads_to_pages_and_has_every_name(package):
    table = site_pages.name_table(package)
    assert all(f"`{name}`" in table for name in site_pages.PUBLIC[package])
    links = re.findall(r"\(generated/([^)]+)\)", table)
    assert links
    assert set(links) <= MADE.keys()


def test_each_command_has_a_page_with_its_options():
    known = site_pages.commands()
    assert {"fit", "run", "plan", "federation join", "ledger create"} <= known.keys()
    for words, command in known.items():
        page = MADE[f"commands/{words.replace(' ', '-')}.rst"]
        assert all(f"``{option.opts[0]}``" in page for option in command.params if option.opts[0].startswith("--"))
    assert set(re.findall(r"\(generated/([^)]+)\)", site_pages.command_table())) <= MADE.keys()


def test_a_command_shows_calls_that_stand_on_pages():
    calls = site_pages.examples_of("fit")
    assert calls
    assert all(call.startswith("murmurfl fit ") and page.endswith(".md") is False for call, page in calls)
    assert f"   {calls[0][0]}\n" in MADE["commands/fit.rst"]


def test_help_is_marked_up():
    assert site_pages.in_rst("With --set `a` or `--b`, *c*") == r"With ``--set`` ``a`` or ``--b``, \*c\*"


def test_the_gallery_has_each_example_and_notebook():
    for path in (ROOT / "examples").glob("*/README.md"):
        assert f"({path.parent.name}.markdown)" in MADE["examples/index.markdown"]
        assert f"examples/{path.parent.name}.markdown" in MADE
    for path in (ROOT / "examples" / "notebooks").glob("*.ipynb"):
        assert json.loads(MADE[f"notebooks/{path.name}"])["cells"]
        assert f"(../notebooks/{path.name})" in MADE["examples/index.markdown"]


def test_what_has_not_changed_is_not_written_again_and_what_is_gone_is_removed(tmp_path):
    site_pages.write(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert len(before) == len(MADE)
    (tmp_path / "api" / "gone.rst").touch()
    first = tmp_path / "commands" / "fit.rst"
    first.write_text("old")
    site_pages.write(tmp_path)
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert {path for path in after if after[path] != before[path]} == {first}
    assert after.keys() == before.keys()


def test_links_to_examples_lead_to_their_pages():
    follow = runpy.run_path(str(ROOT / "docs" / "conf.py"), run_name="conf")["follow_examples"]
    source = ["[a](../examples/notebooks/table.ipynb) [b](../examples/own-model/README.md) [c](../examples/README.md)"]
    follow(None, "start", source)
    made = re.findall(r"\(generated/([^)]+)\)", source[0])
    assert made == ["notebooks/table.ipynb", "examples/own-model.markdown", "examples/index.markdown"]
    assert set(made) <= MADE.keys()


def test_every_generated_page_is_reached():
    """From a toctree of the first page, or by a link of a table or of the gallery."""
    linked = set(re.findall(r"^generated/(\S+)$", (ROOT / "docs" / "index.md").read_text(), flags=re.MULTILINE))
    tables = [site_pages.command_table(), site_pages.module_table(), *map(site_pages.name_table, site_pages.PUBLIC)]
    reached = {link for table in tables for link in re.findall(r"\(generated/([^)]+)\)", table)}
    reached |= {f"examples/{link}" for link in re.findall(r"\(([\w-]+\.markdown)\)", MADE["examples/index.markdown"])}
    rest = {name for name in MADE if name not in reached and name.rpartition(".")[0] not in linked}
    assert rest <= {f"api/murmurfl.{name}.rst" for name in site_pages.FIRST}
    assert "api/murmurfl.fit.rst" in (ROOT / "docs" / "api.md").read_text()
