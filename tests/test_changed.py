"""Which tests a change reaches."""

import pytest

from tests.changed import Reach


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkout")
    for name, text in {
        "privacy/__init__.py": "from .one import first as renamed\nfrom .two import second\n",
        "privacy/one.py": "first = 1\n",
        "privacy/two.py": "def second():\n    from .three import third\n",
        "privacy/three.py": "third = 3\n",
        "app/server.py": "from ..privacy import second\n",
        "tests/harness/making.py": "from murmurfl.app.server import thing\n",
        "tests/test_one.py": "from murmurfl.privacy import renamed\n",
        "tests/test_two.py": "from murmurfl import privacy\n",
        "tests/test_harness.py": "from tests.harness.making import made\n",
        "tests/test_page.py": "PAGE = 'start.md'\n",
        "tests/test_pages.py": "PAGES = ROOT / 'docs'\n",
        "tests/test_process.py": "import subprocess\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return Reach(root)


@pytest.mark.parametrize(
    ("changed", "reached"),
    [
        ("privacy/one.py", {"one", "two", "process"}),
        ("privacy/three.py", {"two", "harness", "process"}),
        ("app/server.py", {"harness", "process"}),
        ("tests/harness/making.py", {"harness"}),
        ("tests/test_one.py", {"one"}),
        ("tests/__snapshots__/test_one.ambr", {"one"}),
        ("docs/start.md", {"page", "pages"}),
        ("docs/other.md", {"pages"}),
        ("README.md", set()),
        ("pyproject.toml", {"one", "two", "harness", "page", "pages", "process"}),
    ],
)
def test_a_change_reaches_what_imports_or_names_it(small, changed, reached):
    assert small.tests_of([changed]) == sorted(f"tests/test_{name}.py" for name in reached)


def test_a_change_of_a_command_does_not_reach_the_proofs():
    here = Reach()
    assert "app/commands/plan_command.py" in here.of("tests/app/commands/test_command_line.py")
    assert "app/commands/plan_command.py" not in here.of("tests/proofs/test_owner_places.py")
    assert "privacy/accounting/gdp.py" in here.of("tests/proofs/test_owner_places.py")
