"""What it costs to add a setting: its declaration, its line in pyproject.toml, and whoever reads it."""

import ast
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from murmurfl.app.nodes.node_config import HelperConfig, NodeConfig
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.clients import UpdateNode
from murmurfl.clients.nodes.client_file import SampleNode
from murmurfl.privacy.setting import settings_of

ROOT = Path(__file__).parents[3]
PRODUCT = ("app", "clients", "privacy", "strategies")
CHANGES = {
    "privacy/release/tables.py": (
        "ScoreBins = Annotated[\n",
        'LeastVotes = Annotated[int, Declaration("Fewest votes of an evaluation.", key="evaluation.least-votes", '
        'at_least=2, below=9, read_by="strategy")]\nScoreBins = Annotated[\n',
    ),
    "app/settings/run_keys.py": (
        "    score_bins: tables.ScoreBins = 0\n",
        "    score_bins: tables.ScoreBins = 0\n    least_votes: tables.LeastVotes = 3\n",
    ),
    "app/nodes/node_config.py": (
        "    passes: tables.Passes = 1\n",
        "    passes: tables.Passes = 1\n    least_votes: tables.LeastVotes = 3\n",
    ),
    "pyproject.toml": ("evaluation.score-bins = 0\n", "evaluation.score-bins = 0\nevaluation.least-votes = 3\n"),
    "app/methods/method.py": (
        'BOUNDING = frozenset({"clipping",',
        'BOUNDING = frozenset({"evaluation.least-votes", "clipping",',
    ),
}
"""A new setting of a private evaluation, by the product's file."""
USED = """
import json, subprocess, sys, tomllib
from dataclasses import replace
from pathlib import Path
from murmurfl.app.settings.run_config import RunConfig, run_keys
from murmurfl.app.settings.layers import flower_config, parse_assignments, read_settings
from murmurfl.app.settings.catalogue import config_schema, key_table
from murmurfl.app.commands.run_options import complete_key
from murmurfl.app.nodes.node_config import NodeConfig
from murmurfl.privacy import ConfigurationError

def refused(call, *given):
    try:
        call(*given)
    except ConfigurationError as error:
        return str(error)

client = {"client": "a", "ledger": "l", "clip-norm": 1.0, "batch-size": 4, "mu": 1.0, "task": "digits"}
client |= {"num-partitions": 2, "partition-id": 0}
project = tomllib.loads(Path("pyproject.toml").read_text())
Path("run.toml").write_text("[evaluation]\\nleast-votes = 4\\nshare = 0.1\\n")
print(json.dumps({
    "run": [RunConfig().least_votes,
            RunConfig.from_mapping({"evaluation.least-votes": 5}).to_mapping()["evaluation.least-votes"]],
    "set": parse_assignments(["evaluation.least-votes=7"]),
    "file": read_settings(Path("run.toml")),
    "node": [NodeConfig.from_mapping({**client, **more}).least_votes
             for more in ({}, {"evaluation.least-votes": 6}, {"evaluation": {"least-votes": 8}})],
    "refused": [refused(RunConfig.from_mapping, {"evaluation.least-votes": 9}),
                refused(RunConfig.from_mapping, {"evaluation.least-votes": 4.0}),
                refused(NodeConfig.from_mapping, {**client, "evaluation.least-votes": 1}),
                refused(RunConfig.from_mapping, {"evaluation.least-votes": 4, "strategy": "shuffled"})],
    "schema": config_schema()["properties"]["evaluation.least-votes"],
    "table": "| `evaluation.least-votes` | `3` | an integer >= 2 and < 9 |" in key_table(),
    "completed": len(list(complete_key("evaluation.least-v"))),
    "pyproject": flower_config(project["tool"]["flwr"]["app"]["config"], deployed=True) == RunConfig(),
}))
"""


def test_a_setting_is_declared_listed_and_then_everywhere(tmp_path):
    assert len(CHANGES) <= 5
    for folder in PRODUCT:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("murmurfl.py", "pyproject.toml"):
        shutil.copy(ROOT / file, tmp_path / file)
    for file, (before, after) in CHANGES.items():
        text = (tmp_path / file).read_text()
        assert text.count(before) == 1, file
        (tmp_path / file).write_text(text.replace(before, after))
    ran = subprocess.run(
        [sys.executable, "-c", USED],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    seen = json.loads(ran.stdout)
    assert seen["run"] == [3, 5]
    assert seen["set"] == {"evaluation.least-votes": 7}
    assert seen["file"] == {"evaluation.least-votes": 4, "evaluation.share": 0.1}
    assert seen["node"] == [3, 6, 8]
    range_, kind, node, unread = seen["refused"]
    assert range_ == "Expected evaluation.least-votes to be an integer >= 2 and < 9, got 9."
    assert kind == "Expected evaluation.least-votes to be an integer, got 4.0."
    assert node == "Expected evaluation.least-votes to be an integer >= 2 and < 9, got 1."
    assert "with strategy = 'shuffled', which does not read it, got 4; it is read by strategy = " in unread
    assert seen["schema"] == {
        "type": "integer",
        "minimum": 2,
        "exclusiveMaximum": 9,
        "default": 3,
        "description": "Fewest votes of an evaluation.",
    }
    assert seen["table"]
    assert seen["completed"] == 1
    assert seen["pyproject"]


TWICE = {
    "schema": "a digest for the server, a path for an operator",
    "epsilon": "an own app's client has a policy for everything else",
    "min_cohort": "a client's, for sums with it, and a helper's, for every sum that it opens",
}


def test_every_setting_is_declared_once():
    calls = [
        node
        for folder in PRODUCT
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Declaration"
    ]
    declared = {
        (one.attribute, one.sentence)
        for kind in (RunConfig, NodeConfig, SampleNode, UpdateNode, HelperConfig)
        for one in settings_of(kind).values()
    }
    assert len(calls) == len(declared)
    assert {name for name, count in Counter(name for name, _ in declared).items() if count > 1} == set(TWICE)


@pytest.mark.parametrize("kind", [RunConfig, NodeConfig, SampleNode, UpdateNode, HelperConfig])
def test_every_setting_says_what_it_is(kind):
    for one in settings_of(kind).values():
        assert one.sentence.endswith("."), one.name
