"""The examples do what their pages say: in this process here, through `flwr run` and real nodes with `-m examples`."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from murmurfl.app.commands.main import cli
from murmurfl.app.engines.loopback import executable, free_port
from murmurfl.app.engines.superlink import run_flower_app
from murmurfl.app.fleet.deployment import deployment
from murmurfl.app.nodes.node_config import HelperConfig, NodeConfig
from murmurfl.clients.nodes.roster_files import read_roster
from murmurfl.privacy import (
    Guarantee,
    SQLiteOpeningRecord,
    policy_guarantee,
    read_ledger,
)
from murmurfl.privacy.accounting.loss import Loss
from murmurfl.privacy.setting import flat
from typer.testing import CliRunner

from tests.harness.packages import EXAMPLES, accuracy

ROOT = Path(__file__).parent.parent.parent
PROJECTS = (
    "edge-deployment",
    "legacy-numpyclient",
    "own-model",
    "pytorch-cnn",
    "secure-aggregation",
    "sklearn-breast-cancer",
    "swap-strategy",
    "tabular-network",
    "too-few-clients",
)
# What Flower starts must find this checkout, and not the hub.
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def clinics(tmp_path, project):
    return project("edge-deployment", "clinics").make_clinics(tmp_path / "clinics")


def test_edge_deployment_files_are_in_order(clinics):
    """What the README has an operator do before anything is connected."""
    config = clinics[0]
    ledger = str(config.parent / "ledger.sqlite")
    assert CliRunner().invoke(cli, ["ledger", "create", ledger, "--mu", "4", "--delta", "1e-5"]).exit_code == 0
    said = CliRunner().invoke(cli, ["node", str(config), "--check"]).stdout
    stated = Guarantee(2.0, 1e-5, "decay noise on each client").sentence
    assert f"clinic-0: up to 6 releases of 25 samples a run, {stated}" in " ".join(said.split())
    assert len(NodeConfig.read(config).load_samples()[0]) == 150


def readme_commands(folder):
    """The commands of an example's README, as words; file patterns are a shell's to resolve."""
    readme = (EXAMPLES / folder / "README.md").read_text()
    blocks = re.findall(r"^```sh\n(.*?)^```", readme, flags=re.DOTALL | re.MULTILINE)
    return [shlex.split(line) for block in blocks for line in block.replace("\\\n", " ").splitlines()]


@pytest.fixture
def operators(tmp_path, project, monkeypatch):
    """Three hospitals and an auditor who did what the README says before anything is connected; what was said."""
    hospitals = project("secure-aggregation", "hospitals")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["hospitals", "samples", "operators"])
    hospitals.make_samples(Path("operators"))
    said = {}
    for words in readme_commands("secure-aggregation"):
        if words[:3] == ["python", "-m", "secure_aggregation.hospitals"] and words[3] == "files":
            hospitals.make_files(Path("operators"), read_roster(Path("operators/roster.json"), None).digest)
        elif words[:2] in (["murmurfl", "owner"], ["murmurfl", "server"]):
            continue  # around the run: the test of the page of deployment types them
        elif words[0] == "murmurfl" and "--superlink" not in words:
            found = [str(path) for word in words[1:] for path in (sorted(Path().glob(word)) if "*" in word else [word])]
            if found[:2] == ["ledger", "show"]:
                continue  # after the run
            result = CliRunner().invoke(cli, found)
            assert result.exit_code == 0, f"{shlex.join(words)}: {result.output}"
            said[shlex.join(words[1:])] = " ".join(result.stdout.split())
    return tmp_path / "operators", said


def test_secure_aggregation_as_its_operators_set_it_up(operators):
    """All of the README but the run itself."""
    folder, said = operators
    digest = read_roster(folder / "roster.json", None).digest
    assert digest in said["roster make 'operators/*/*.card' --out operators/roster.json"]
    stated = policy_guarantee(
        NodeConfig.read(folder / "hospital-0" / "node.toml").make_client().privatizer.policy, Loss.of(2.0, 2 * 2**0.5)
    )
    assert stated.sentence in said["node operators/hospital-0/node.toml --check"]
    assert "are in order" in said["helper operators/auditor/helper.toml --check"]
    for check in ("hospital-0/node.toml", "auditor/helper.toml"):
        assert "WRONG" not in said[f"roster check operators/{check}"]
    for name in ("hospital-1", "hospital-2"):
        assert NodeConfig.read(folder / name / "node.toml").make_client().masking is not None
    assert HelperConfig.read(folder / "hospital-0" / "helper.toml").opener().name == "hospital-0-helper"


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("folder", PROJECTS)
def test_every_example_is_a_project_of_its_own(folder):
    project = tomllib.loads((EXAMPLES / folder / "pyproject.toml").read_text())
    assert project["project"]["name"] == folder
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [r for r in project["project"]["dependencies"] if r.startswith("murmurfl")]
    assert requirements == [f"murmurfl>={ours['version'].rpartition('.')[0]},<0.3"]
    flower = [r for r in project["project"]["dependencies"] if r.startswith("flwr")]
    assert set(flower) <= {*ours["dependencies"], *ours["optional-dependencies"]["simulation"]}
    readme = (EXAMPLES / folder / "README.md").read_text()
    assert "pip install -e ." in readme
    assert "flwr run ." in readme


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("folder", PROJECTS)
def test_a_readme_says_unit_epsilon_and_accuracy_first(folder):
    _, title, first, *_ = re.split(r"^(.+)\n\n", (EXAMPLES / folder / "README.md").read_text(), maxsplit=1, flags=re.M)
    assert title.startswith("# ")
    first = first.partition("\n\n")[0]
    assert re.match(r"\*\*Unit: (one \w+|all data of a client)\. Epsilon: \d+ \(", first), first
    assert re.search(r"Accuracy: about\s\d+(\.\d)?\s%", first), first


def test_nobody_is_told_to_end_processes_that_may_be_other_peoples():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *EXAMPLES.glob("*/README.md")]
    assert len(pages) > 30
    assert [
        page.name for page in pages if re.search(r"\bp?killall?\b -f|\bpkill\b|\bkillall\b", page.read_text())
    ] == []


# Through Flower's own commands: long.


@pytest.mark.examples
@pytest.mark.parametrize(
    ("folder", "config", "least", "said"),
    [
        ("swap-strategy", {}, 0.85, "first round: useful"),
        ("too-few-clients", {}, 0.0, "LIKELY TO BE USELESS"),
        ("too-few-clients", {"trust": "secure-aggregation"}, 0.7, "first round: useful"),
        ("legacy-numpyclient", {}, 0.78, "first round: useful"),
        ("own-model", {}, 0.85, "first round: useful"),
        ("sklearn-breast-cancer", {}, 0.9, "first round: useful"),
        ("sklearn-breast-cancer", {"privacy": "untrusted-server"}, 0.85, "first round: useful"),
    ],
)
def test_flwr_run(folder, config, least, said, tmp_path):
    """The README's commands, on Ray, with as many virtual nodes as it says, and the accuracy it says, in that order."""
    readme = (EXAMPLES / folder / "README.md").read_text()
    order = -1 if config else 0
    nodes = int(re.findall(r"num-supernodes=(\d+)", readme)[order])
    if folder == "own-model":
        config = {"out": str(tmp_path / "report")}
    result = run_flower_app(
        EXAMPLES / folder, run_config=config, num_supernodes=nodes, timeout_s=580, environment=ENVIRONMENT
    )
    assert result.status == "finished:completed"
    assert said in result.log
    found = accuracy(result.log.splitlines())
    assert found > least
    promised = re.findall(r"about\s+(\d+)\s%,\s(?:give|where)", readme)[order]
    assert found == pytest.approx(int(promised) / 100, abs=0.1)
    if folder == "own-model":
        assert (tmp_path / "report" / "result.json").is_file()


@pytest.mark.examples
def test_edge_deployment_over_real_nodes(tmp_path, clinics):
    """With TLS and node keys, where the README does without."""
    lines = []
    with deployment(tmp_path / "run", timeout_s=300, on_line=lines.append, environment=ENVIRONMENT) as running:
        nodes = {}
        for config in clinics:
            settings = tomllib.loads(config.read_text())
            own = {key: str(config.parent / settings[key]) for key in ("samples", "schema")}
            own |= {"budget-mu": 4.0, "delta": 1e-5}
            nodes[settings.pop("client")] = {**{k: v for k, v in settings.items() if k != "ledger"}, **own}
        running.add_nodes(nodes)
        for name in nodes:
            running.start_node(name)
        running.submit({}, EXAMPLES / "edge-deployment")
        ledgers = [read_ledger(files.config.parent / "ledger.sqlite") for files in running.nodes.values()]
    assert accuracy(lines) > 0.8
    assert [sum(session.releases for session in ledger.sessions) for ledger in ledgers] == [3, 3, 3]
    stated = Guarantee(2.0, 1e-5, "decay noise on each client, by its own account").sentence
    assert any(f"clinic-2: 3 of 6 releases. {stated}" in line for line in lines)


@pytest.mark.examples
def test_secure_aggregation_over_real_nodes(tmp_path, project):
    """With TLS and node keys, where the README does without."""
    hospitals, lines = project("secure-aggregation", "hospitals"), []
    hospitals.make_samples(tmp_path / "operators")
    with deployment(tmp_path / "run", timeout_s=400, on_line=lines.append, environment=ENVIRONMENT) as running:
        nodes = {}
        for number in range(hospitals.HOSPITALS):
            settings = tomllib.loads(hospitals.CLIENT.format(number=number, rows=150, digest=""))
            settings = flat(settings, NodeConfig.settings())
            name = settings.pop("client")
            own = {key: str(tmp_path / "operators" / name / settings[key]) for key in ("samples", "schema")}
            own |= {"budget-mu": 4.0, "delta": 1e-5}
            nodes[name] = {**{k: v for k, v in settings.items() if k != "ledger"}, **own, "budget-local-mu": 6.0}
        running.add_nodes(nodes, list(hospitals.HELPERS))
        for name in (*running.helpers, *nodes):
            running.start_node(name)
        running.submit({}, EXAMPLES / "secure-aggregation")
        ledgers = [read_ledger(files.config.parent / "ledger.sqlite") for files in running.nodes.values()]
        records = [HelperConfig.read(files.config).record for files in running.helpers.values()]
    assert accuracy(lines) > 0.8
    assert [sum(session.releases for session in ledger.sessions) for ledger in ledgers] == [3, 3, 3]
    assert [SQLiteOpeningRecord(record).sets for record in records] == [3, 3]
    assert any("hospital-2: 3 of 6 releases. mu = 2 Gaussian DP" in line for line in lines)
    assert any("if one helper and 2 clients of each sum are honest, and mu = 2.829" in line for line in lines)


OPERATORS_FILE = """\
client = "{name}"
ledger = "ledger.sqlite"
clip-norm = 0.5
mu = 1.0
max-participations = 3
"""


@pytest.mark.examples
def test_the_noise_mod_on_real_nodes_takes_its_policy_from_the_operator(tmp_path):
    """A plain ``flower-supernode`` runs the bundle's ClientApp with the mod in it: two clients, three rounds asked."""
    lines = []
    with deployment(tmp_path / "run", timeout_s=300, on_line=lines.append, environment=ENVIRONMENT) as running:
        made = {"clip-norm": 1.0, "batch-size": 1, "mu": 1.0, "task": "digits", "num-partitions": 2, "partition-id": 0}
        # Budget for one run.
        running.add_nodes({f"clinic-{i}": {**made, "budget-mu": 1.0, "delta": 1e-6} for i in range(2)})
        for number, (name, files) in enumerate(running.nodes.items()):
            path = files.config.parent / "mod.toml"
            path.write_text(OPERATORS_FILE.format(name=name))
            settings = f'murmurfl-config="{path}" partition-id={number} num-partitions=2'
            command = [executable("flower-supernode"), "--superlink", f"127.0.0.1:{running.port}"]
            command += ["--root-certificates", str(running.certificates.authority), "--port", str(free_port())]
            command += ["--auth-supernode-private-key", str(files.private_key), "--node-config", settings]
            with files.log.open("ab") as log:
                running.start_process(command, stdout=log)
        config = {"num-clients": 2, "num-server-rounds": 3}
        running.submit(config, EXAMPLES / "swap-strategy")
        running.submit({**config, "num-server-rounds": 1}, EXAMPLES / "swap-strategy")
        ledgers = [read_ledger(files.config.parent / "ledger.sqlite") for files in running.nodes.values()]
        logs = [files.log.read_text() for files in running.nodes.values()]
    # Of the operator's file, not of the policy in the bundle (epsilon = 4).
    stated = Guarantee(1.0, 1e-6, "noise on each client, by its own account", unit="client").sentence
    assert sum("2 of 2 updates aggregated" in line and stated in line for line in lines) == 3
    assert [[session.releases for session in ledger.sessions] for ledger in ledgers] == [[3], [3]]
    assert any("0 of 2 replies aggregated" in line and "budget-exhausted" in line for line in lines)
    assert all("Client clinic-" in log and "release 3 of at most 3" in log for log in logs)
