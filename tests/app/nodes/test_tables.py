"""Settings of an operator's file in their tables: as by themselves, never twice, and none that is not its kind's."""

import pytest
from murmurfl.app.nodes.node_app import read_node
from murmurfl.app.nodes.node_config import HelperConfig, NodeConfig
from murmurfl.clients import UpdateNode
from murmurfl.clients.nodes.machine_file import SampleNode
from murmurfl.privacy import ConfigurationError

PLACE = {"machine": "clinic", "ledger": "ledger"}
NODE = {**PLACE, "task": "digits", "num-partitions": 4, "partition-id": 1, "batch-size": 4, "clip-norm": 1.0, "mu": 1.0}
OF_SAMPLES = {**PLACE, "app": "a:b", "method": "mu2", "schema": "s", "rows": 20, "batch-size": 4, "clip-norm": 1.0}
OF_SAMPLES |= {"max-participations": 5, "mu": 1.0}
OF_UPDATES = {**PLACE, "app": "a:b", "clip-norm": 1.0, "max-participations": 5, "mu": 1.0}
HELPER = {"helper": "ward", "record": "r", "key": "k", "roster": "list", "roster-digest": "ab"}
KINDS = [(NodeConfig, NODE), (SampleNode, OF_SAMPLES), (UpdateNode, OF_UPDATES), (HelperConfig, HELPER)]


def tabled(kind, values):
    """The same document with every setting in its table that has one."""
    found = {}
    for name, value in values.items():
        table = kind.settings()[name].table
        (found.setdefault(table, {}) if table else found)[name] = value
    assert any(isinstance(value, dict) for value in found.values())
    return found


@pytest.mark.parametrize(("kind", "values"), KINDS)
def test_a_setting_means_the_same_in_its_table(kind, values):
    assert kind.from_mapping(tabled(kind, values)) == kind.from_mapping(values)


@pytest.mark.parametrize(("kind", "values"), KINDS)
def test_a_setting_in_both_places_or_in_anothers_table_is_refused(kind, values):
    tables = {name: inner for name, inner in tabled(kind, values).items() if isinstance(inner, dict)}
    for table, inner in tables.items():
        twice = next(iter(inner))
        with pytest.raises(ConfigurationError, match=rf"Expected {twice} once, got it both in \[{table}\] and outside"):
            kind.from_mapping({**values, table: {twice: values[twice]}})
        for stranger in ("ledger", "min-honest" if table != "secure-aggregation" else "mu", "nothing"):
            with pytest.raises(ConfigurationError, match=rf"keys of the table \[{table}\], .* got '{stranger}' in it"):
                kind.from_mapping({**values, table: {stranger: 1}})


@pytest.mark.parametrize(("kind", "values"), KINDS)
@pytest.mark.parametrize("value", [{"a": 1}, {}, [1], ["a"], [{}]])
def test_a_table_or_a_list_is_no_value(kind, values, value):
    for name in kind.settings():
        if name in ("run-config", "node-config") and isinstance(value, dict):
            continue
        if name == "data-files" and value == ["a"]:
            continue
        with pytest.raises(ConfigurationError, match=f"Expected {name} to be"):
            kind.from_mapping({**values, name: value})


@pytest.mark.parametrize(("kind", "values"), KINDS)
def test_what_another_kind_of_file_says_is_refused(kind, values):
    others = {name for other, _ in KINDS for name in other.settings()} - set(kind.settings())
    assert others
    for name in (*others, "num-clients", "noise-quality", "release-rule", "helpers"):
        with pytest.raises(ConfigurationError, match=f"Expected known node-config keys, got {name}"):
            kind.from_mapping({**values, name: 1})


@pytest.mark.parametrize(("kind", "values"), KINDS[:3])
@pytest.mark.parametrize("value", [True, "1", float("nan"), float("inf"), -1, 10**400])
def test_no_mu_and_no_clip_but_numbers_above_zero(kind, values, value):
    for name in ("mu", "clip-norm"):
        with pytest.raises(ConfigurationError, match=f"Expected {name}"):
            kind.from_mapping({**values, name: value})


@pytest.mark.parametrize(("kind", "values"), KINDS[:3])
def test_mu_beside_epsilon_is_refused_in_whichever_place(kind, values):
    for more in ({"epsilon": 1.0}, {"privacy": {"epsilon": 1.0}} if kind is not UpdateNode else {"epsilon": 2.0}):
        with pytest.raises(ConfigurationError, match="Expected mu or epsilon, got both"):
            kind.from_mapping({**values, **more})


def test_a_node_is_known_by_settings_in_tables(tmp_path):
    path = tmp_path / "node.toml"
    path.write_text(
        'machine = "clinic"\nledger = "ledger"\n[releases]\nbatch-size = 4\n[privacy]\nmu = 1.0\n'
        '[clip]\nclip-norm = 1.0\n[data]\ntask = "digits"\nnum-partitions = 4\npartition-id = 1\n'
    )
    path.chmod(0o600)
    node = read_node(path)
    assert isinstance(node, NodeConfig)
    assert (node.batch_size, node.task, node.ledger) == (4, "digits", str(tmp_path / "ledger"))
