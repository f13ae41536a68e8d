"""``murmurfl node`` with a ``private_client_app``: privacy is the operator's file's, and no sample's failure shows."""

from contextlib import nullcontext

import numpy as np
import pytest
from flwr.app import ConfigRecord, RecordDict
from murmurfl.app.commands.main import cli
from murmurfl.app.fleet.health import NodeHealth
from murmurfl.app.fleet.preflight import check_node
from murmurfl.app.nodes.journal import Journal
from murmurfl.app.nodes.node_app import answers_of, check_before_records, client_of, own_app, read_node
from murmurfl.app.nodes.supernode import prepared_answers
from murmurfl.clients import Label, Part, Schema, UpdateNode, messages, trainable_arrays
from murmurfl.clients.adapters.per_sample_gradients import programs_of
from murmurfl.clients.nodes.client_file import SampleNode
from murmurfl.clients.nodes.roster_files import write_client_key, write_roster
from murmurfl.clients.records.drafting import document
from murmurfl.privacy import ConfigurationError, Guarantee, LedgerError, SQLiteLedger, gdp_mu, protocol, read_ledger
from murmurfl.privacy.sums.roster import ClientKey, HelperKey, Roster
from typer.testing import CliRunner

from tests.harness.clients import training_config
from tests.harness.errors import raises
from tests.harness.grid import ask_real_node
from tests.harness.schemas import write_samples, write_schema
from tests.harness.secure import unmasked

torch = pytest.importorskip("torch")

SECRET = "patient 4711"
PROJECT = """
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from flwr.clientapp import ClientApp
from murmurfl.clients import private_client_app

HERE = Path(__file__).parent


class Visits:
    def __len__(self):
        return 6

    def __getitem__(self, chosen):
        numbers = range(6)[chosen]
        if 2 in numbers and (HERE / "broken").exists():
            raise ValueError("SECRET")
        return np.array([[i, 1.0] for i in numbers], np.float32), np.array([i % 2 for i in numbers])


def load(context):
    (HERE / "seen.json").write_text(json.dumps([dict(context.run_config), dict(context.node_config)]))
    return Visits()


def make():
    module = torch.nn.Linear(2, 2)
    torch.nn.init.zeros_(module.weight), torch.nn.init.zeros_(module.bias)
    return module


# What the code says of privacy is a simulation's and no protection at all.
app = private_client_app(make, samples=load, mu=1e3, rounds=100, clip_norm=1e3)
updates = private_client_app(make, samples=load, mu=1e3, rounds=100, clip_norm=1e3, method="fedavg")
plain = ClientApp()


class Files(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, number):
        if number == 2:
            raise ValueError("SECRET")
        return np.array([number, 1.0], np.float32), number % 2


files = private_client_app(make, samples=lambda context: Files(), mu=1e3, rounds=100, clip_norm=1e3)


def weighted(output, target):
    losses = torch.nn.functional.cross_entropy(output, target, reduction="none")
    return (torch.softmax(output.sum(1), 0) * losses).sum()


class Remembers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.seen = torch.nn.Linear(2, 2), 0.0

    def forward(self, inputs):
        self.seen = self.seen + inputs.mean()
        return self.linear(inputs + self.seen)


mixing = private_client_app(lambda: torch.nn.Linear(2, 2), weighted, load, mu=1e3, rounds=100)
remembering = private_client_app(Remembers, samples=load, mu=1e3, rounds=100)


class Fails(torch.nn.Linear):
    def forward(self, inputs):
        raise KeyError("hidden")


failing = private_client_app(lambda: Fails(2, 2), samples=load, mu=1e3, rounds=100)


def exhausted(schema, measure):
    raise MemoryError("hidden")


exhausting = private_client_app(make, samples=load, mu=1e3, rounds=100)
exhausting.model = replace(exhausting.model, check_schema=exhausted)
""".replace("SECRET", SECRET)

FILE = """
client = "clinic-0"
ledger = "ledger.sqlite"
method = "full-batch"
clip-norm = 0.5
mu = 10.0
max-participations = 3
schema = "schema.toml"
num-records = 6
app = "{app}"

[run-config]
local-epochs = 2

[node-config]
partition-id = 4
"""


@pytest.fixture
def folder(tmp_path, monkeypatch, hushed_noise):
    name = f"samples_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(PROJECT)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("MURMURFL_NODE_CONFIG", raising=False)
    SQLiteLedger.create(tmp_path / "ledger.sqlite", budget_mu=10.0, delta=1e-5)
    write_schema(tmp_path / "schema.toml", (2,), bounds=(0, 10))
    return tmp_path, name


def write(folder, text=FILE, app="app"):
    path, name = folder
    (path / "node.toml").write_text(text.format(app=f"{name}:{app}"))
    return path / "node.toml"


def zeros():
    module = torch.nn.Linear(2, 2)
    arrays = trainable_arrays(module)
    return type(arrays)({name: type(array)(np.zeros(array.shape, np.float32)) for name, array in arrays.items()})


def asked(answers, kind="train", **entries):
    content = RecordDict({"arrays": zeros(), "config": ConfigRecord(training_config(**entries))})
    return ask_real_node(answers, content, kind)


def sent(reply):
    assert not reply.has_error(), reply.error
    return np.concatenate([array.numpy().ravel() for array in reply.content["arrays"].values()])


def clipped_sum(numbers=range(6), clip=0.5):
    """By hand: the gradient of a softmax at zero, (1/2 - y) times (features, 1)."""
    total = np.zeros(6)
    for i in numbers:
        residual = np.array([0.5, 0.5])
        residual[i % 2] -= 1.0
        row = np.concatenate([np.outer(residual, [i, 1.0]).ravel(), residual])
        total += row * min(1.0, clip / np.linalg.norm(row))
    return total


def test_clip_noise_and_cap_are_the_files_and_the_servers_settings_stay_outside(folder):
    answers, client = client_of(read_node(write(folder)))
    assert client.privatizer.policy.mu == 10.0
    assert not client.privatizer.simulated
    reply = asked(answers)
    assert sent(reply) == pytest.approx(clipped_sum(), abs=0.05), "a thousandth of the noise is in it"
    assert (sent(reply) != clipped_sum()).all()
    assert reply.content["metrics"]["num-examples"] == 6
    (session,) = read_ledger(folder[0] / "ledger.sqlite").sessions
    assert session.releases == 1
    assert (folder[0] / "seen.json").read_text() == '[{"local-epochs": 2}, {"partition-id": 4}]'
    assert not any(asked(answers, ack=ack).has_error() for ack in (1, 2))
    assert asked(answers, ack=3).error.code == protocol.CAP_REACHED
    assert asked(answers, session="t").error.code == protocol.BUDGET_EXHAUSTED
    assert asked(answers, "evaluate").error.code == protocol.EVALUATION_BLOCKED


def test_an_unreadable_sample_counts_as_zero_unnoticed(folder, caplog):
    whole = asked(client_of(read_node(write(folder)))[0])
    (folder[0] / "broken").touch()
    SQLiteLedger.create(folder[0] / "other.sqlite", budget_mu=10.0, delta=1e-5)
    reply = asked(client_of(read_node(write(folder, FILE.replace("ledger.sqlite", "other.sqlite"))))[0])
    assert sent(reply) == pytest.approx(clipped_sum([0, 1, 3, 4, 5]), abs=0.05)
    assert dict(reply.content["metrics"]).keys() == dict(whole.content["metrics"]).keys()
    assert reply.content["metrics"]["num-examples"] == 6
    assert SECRET not in str(reply.content)
    assert SECRET in caplog.text, "only the node's own log says why"


@pytest.mark.parametrize("first", ["unreadable", "of another shape"])
def test_nothing_shows_of_the_first_sample_either(folder, first, monkeypatch, caplog):
    import importlib

    class First(importlib.import_module(folder[1]).Visits):
        def __getitem__(self, chosen):
            inputs, targets = super().__getitem__(chosen)
            if 0 in range(6)[chosen]:
                if first == "unreadable":
                    raise SystemExit(SECRET)
                inputs = inputs[:, :1]
            return inputs, targets

    monkeypatch.setattr(importlib.import_module(folder[1]), "Visits", First)
    answers, _ = client_of(read_node(write(folder)))
    assert sent(asked(answers)) == pytest.approx(clipped_sum(range(1, 6)), abs=0.05)
    assert "5 of 6 records fit the schema" in caplog.text, "its operator is told"


def test_a_sample_is_read_once_however_often_it_is_used(folder, monkeypatch):
    """So that one that is another at every read, as with random crops, is one sample."""
    import importlib

    draws = []

    class Augmented(importlib.import_module(folder[1]).Visits):
        def __getitem__(self, chosen):
            draws.append(chosen)
            inputs, targets = super().__getitem__(chosen)
            return inputs + len(draws), targets

    monkeypatch.setattr(importlib.import_module(folder[1]), "Visits", Augmented)
    answers, _ = client_of(read_node(write(folder)))
    first, second = (sent(asked(answers, ack=ack)) for ack in (0, 1))
    assert len(draws) == 6
    assert first == pytest.approx(second, abs=0.05)


def test_items_of_a_data_set_are_read_one_by_one(folder):
    answers, _ = client_of(read_node(write(folder, app="files")))
    assert sent(asked(answers)) == pytest.approx(clipped_sum([0, 1, 3, 4, 5]), abs=0.05)


def test_a_file_of_records_is_read_in_the_place_of_the_apps_samples(folder):
    features, labels = np.array([[i, 1.0] for i in range(6)]), np.arange(6) % 2
    labels[4] = 7
    write_samples(folder[0], features, labels, bounds=(0, 10))
    answers, client = client_of(
        read_node(write(folder, FILE.replace("num-records =", 'samples = "samples.npz"\nnum-records =')))
    )
    assert client.privatizer.num_samples == 6
    assert sent(asked(answers)) == pytest.approx(clipped_sum([0, 1, 2, 3, 5]), abs=0.05)
    assert not (folder[0] / "seen.json").exists(), "the app's own were not asked for"


def test_model_runs_before_a_file_of_records_is_read_and_is_named_by_its_hash(folder, monkeypatch):
    from murmurfl.clients.adapters import private_app
    from murmurfl.clients.adapters.torch_graph import RecordPrograms

    events, read, captured = [], private_app.file_items, RecordPrograms._captured
    monkeypatch.setattr(private_app, "file_items", lambda *given: events.append("read") or read(*given))
    monkeypatch.setattr(RecordPrograms, "_captured", lambda *given: events.append("captured") or captured(*given))
    write_samples(folder[0], np.array([[i, 1.0] for i in range(6)]), np.arange(6) % 2, bounds=(0, 10))
    path = write(folder, FILE.replace("num-records =", 'samples = "samples.npz"\nnum-records ='))
    _, client = client_of(read_node(path))
    assert events == ["captured", "read"]
    assert client.gradients.process.pid is not None
    (model,) = (check for check in check_node(path, {}).checks if check.name == "model")
    assert programs_of(client.gradients).split()[1] in model.sentence


@pytest.mark.parametrize(("rows", "counted"), [(4, range(4)), (6, range(6)), (9, range(6))])
def test_the_operators_number_of_rows_stands_whatever_the_app_gives(folder, rows, counted):
    answers, client = client_of(read_node(write(folder, FILE.replace("num-records = 6", f"num-records = {rows}"))))
    assert client.privatizer.num_samples == rows
    reply = asked(answers)
    assert reply.content["metrics"]["num-examples"] == rows
    assert sent(reply) == pytest.approx(clipped_sum(counted), abs=0.05)


def test_check_says_how_many_records_fit_and_fails_if_none_does(folder):
    path = write(folder)

    def line():
        said = CliRunner().invoke(cli, ["node", str(path), "--check"])
        (found,) = [one for one in said.stdout.splitlines() if one.startswith("records")]
        return said.exit_code, " ".join(found.split())

    assert line() == (0, "records ok 6 of 6 records fit the schema.")
    (folder[0] / "broken").touch()
    code, found = line()
    assert code == 0
    assert found.startswith("records warning 5 of 6 records fit the schema; the others count as zero (1 with")
    assert SECRET not in found
    write_schema(folder[0] / "schema.toml", (2,), bounds=(0, 10), classes=("no", "yes"))
    code, found = line()
    assert code == 1
    assert found.startswith("records failed 0 of 6 records fit")


def test_a_failure_that_zeroed_a_whole_release_is_noticed(folder, monkeypatch):
    """The planted bug, for the test above: all samples at once, in one try."""
    from murmurfl.privacy.release.prefix_sums import Privatizer

    monkeypatch.setattr(Privatizer, "simulated", property(lambda self: True))
    (folder[0] / "broken").touch()
    answers, _ = client_of(read_node(write(folder)))
    assert asked(answers).has_error()


def test_a_file_without_an_app_serves_a_plain_supernode(folder, monkeypatch):
    import importlib

    app = importlib.import_module(folder[1]).app
    assert asked(app).error.code == protocol.NOT_CONFIGURED, "without a file it refuses, whatever its code says"
    text = FILE.replace('app = "{app}"\n', "")
    monkeypatch.setenv("MURMURFL_NODE_CONFIG", str(write(folder, text)))
    assert sent(asked(app)) == pytest.approx(clipped_sum(), abs=0.05)


@pytest.fixture
def plain_node(folder, monkeypatch):
    """Ask an app of the project on a plain SuperNode; None is what the server gets of a client that stays silent."""
    import importlib

    def stay_silent():
        raise messages.SilentFailureError  # in the place of a wait without end

    def ask_app(app="app", text=FILE, **asks):
        monkeypatch.setenv("MURMURFL_NODE_CONFIG", str(write(folder, text.replace('app = "{app}"\n', ""))))
        chosen = getattr(importlib.import_module(folder[1]), app)
        chosen._real = None  # a node that was started again
        try:
            return asked(chosen, "query" if asks else "train", **asks)
        except messages.SilentFailureError:
            return None

    monkeypatch.setattr(messages, "_stay_silent", stay_silent)
    return ask_app


UNCONFIGURED = {
    "another method": (FILE.replace("full-batch", "fedavg"), "app", protocol.NOT_CONFIGURED),
    "no schema there": (FILE.replace('"schema.toml"', '"none.toml"'), "app", protocol.NOT_CONFIGURED),
    "no ledger there": (FILE.replace('"ledger.sqlite"', '"none.sqlite"'), "app", protocol.LEDGER_UNUSABLE),
    "owners without a schema that names one": (
        FILE.replace("num-records = 6", "num-records = 6\nsamples-per-owner = 2"),
        "app",
        protocol.NOT_CONFIGURED,
    ),
    "a model that is refused": (FILE, "remembering", protocol.NOT_CONFIGURED),
    "a model that fails in its own words": (FILE, "failing", protocol.NOT_CONFIGURED),
    "a model whose library fails": (FILE, "exhausting", protocol.NOT_CONFIGURED),
}


@pytest.mark.parametrize(("text", "app", "code"), UNCONFIGURED.values(), ids=UNCONFIGURED)
def test_what_fails_before_the_first_record_is_a_fixed_code(folder, plain_node, text, app, code):
    (folder[0] / "broken").touch()
    reply = plain_node(app, text, **{protocol.ASK: protocol.ASK_HELLO})
    assert reply.error.code == code
    assert reply.error.reason in (
        "this client is not configured to answer",
        "this client's ledger cannot be used",
    ), "and nothing of the reason"
    assert not (folder[0] / "seen.json").exists(), "no record was asked for"


@pytest.mark.parametrize(("text", "app", "code"), UNCONFIGURED.values(), ids=UNCONFIGURED)
def test_a_murmurfl_node_stays_and_answers_the_same_code(folder, text, app, code):
    (folder[0] / "broken").touch()
    journal = Journal()
    health = NodeHealth(journal)
    answers = prepared_answers(read_node(write(folder, text, app=app)), journal)
    for _ in range(2):
        reply = asked(answers, "query", **{protocol.ASK: protocol.ASK_HELLO})
        assert reply.error.code == code
        assert reply.error.reason in ("this client is not configured to answer", "this client's ledger cannot be used")
    assert not (folder[0] / "seen.json").exists(), "no record was asked for"
    journal.note("connected", superlink="a:1")
    assert health.problem == "not-configured"


@pytest.mark.parametrize("name", ["input", ""])
def test_owners_with_inputs_by_name_are_refused_before_a_record_is_read(folder, name):
    part = Part(shape=(2,), bounds=(0, 10), name=name)
    schema = Schema(inputs=(part,), label=Label(classes=2), owner="patient", reviewed=True)
    (folder[0] / "schema.toml").write_text(document(schema))
    node = read_node(write(folder, FILE.replace("num-records = 6", "num-records = 6\nsamples-per-owner = 2")))
    expected = raises(ConfigurationError, "unsupported", "owner", match="one array") if name else nullcontext()
    with expected:
        check_before_records(node)
    assert not (folder[0] / "seen.json").exists()


def no_memory(context):
    raise MemoryError


STRANGE = {
    "none": lambda context: [],
    "of no kind": lambda context: {"a": 1},
    "of two lengths": lambda context: (np.zeros((6, 2)), np.zeros(5)),
    "an exception": lambda context: 1 / 0,
    "an exit": lambda context: exit(SECRET),
    "no memory": no_memory,
}


@pytest.mark.parametrize("load", STRANGE.values(), ids=STRANGE)
def test_what_fails_once_records_are_read_is_silence(folder, plain_node, load, monkeypatch, caplog):
    """No code and no text: whether it fails may depend on them."""
    import importlib

    monkeypatch.setattr(importlib.import_module(folder[1]).app, "_samples", load)
    assert plain_node() is None
    assert "It stays silent, as if it were off" in caplog.text


def test_a_murmurfl_node_whose_records_fail_does_not_start(folder, monkeypatch):
    """A code that was answered would say something about rows."""
    import importlib

    journal, node = Journal(), read_node(write(folder))
    monkeypatch.setattr(importlib.import_module(folder[1]).app, "_samples", STRANGE["of two lengths"])
    with raises(ConfigurationError, "wrong-shape"):
        prepared_answers(node, journal)
    monkeypatch.undo()
    asks = {protocol.ASK: protocol.ASK_HELLO}
    assert not asked(prepared_answers(node, journal), "query", **asks).has_error()


def test_a_failure_of_reading_that_was_answered_would_show(folder, plain_node, monkeypatch):
    """The planted bug, for the test above."""
    import importlib

    from murmurfl.clients.adapters import private_app

    monkeypatch.setattr(private_app, "records_being_read", nullcontext)
    monkeypatch.setattr(importlib.import_module(folder[1]).app, "_samples", STRANGE["an exception"])
    assert plain_node().error.code == protocol.INTERNAL_ERROR


def test_a_statement_of_a_real_client_says_nothing_of_its_records(folder, plain_node):
    """A simulated one states how many fit (:func:`log_simulated_records`)."""
    asks = {protocol.ASK: protocol.ASK_PRIVACY}
    (folder[0] / "broken").touch()  # first, because an app keeps what it read
    broken = dict(plain_node(**asks).content["config"])
    (folder[0] / "broken").unlink()
    whole = dict(plain_node(**asks).content["config"])
    assert broken == whole
    assert not whole.keys() & {protocol.RECORDS, protocol.INVALID_RECORDS, protocol.INVALID_REASON, protocol.CHANGING}


def test_check_says_that_records_change(folder, monkeypatch):
    import importlib

    class Cropped(importlib.import_module(folder[1]).Visits):
        reads = 0

        def __getitem__(self, chosen):
            Cropped.reads += 1
            inputs, targets = super().__getitem__(chosen)
            return inputs + Cropped.reads / 100, targets

    monkeypatch.setattr(importlib.import_module(folder[1]), "Visits", Cropped)
    said = CliRunner().invoke(cli, ["node", str(write(folder)), "--check"])
    assert "others when they are read again" in " ".join(said.stdout.split())


def test_records_that_do_not_fit_make_no_client_silent(folder, plain_node):
    """They count as zero: which of them do is nobody's to see."""
    (folder[0] / "broken").touch()
    assert sent(plain_node()) == pytest.approx(clipped_sum([0, 1, 3, 4, 5]), abs=0.05)


def test_fedavg_answers_with_updates_and_says_what_is_guaranteed(folder):
    node = read_node(write(folder, FILE.replace("full-batch", "fedavg"), app="updates"))
    reply = asked(client_of(node)[0])
    assert sent(reply) == pytest.approx(-clipped_sum(), abs=0.05)
    metrics = reply.content["metrics"]
    assert (metrics["mu-guaranteed"], metrics["delta"], metrics["client-level"]) == (10.0, 1e-5, 0)


def test_fedavg_beside_an_evaluation_guarantees_what_both_come_to(folder):
    text = FILE.replace("full-batch", "fedavg").replace("mu = 10.0", "mu = 10.0\nevaluation.share = 0.36")
    answers, client = client_of(read_node(write(folder, text, app="updates")))
    assert client.privatizer.plan.mu == pytest.approx(8.0), "of the updates alone"
    assert asked(answers).content["metrics"]["mu-guaranteed"] == pytest.approx(10.0)


def test_an_epsilon_is_kept_at_the_ledgers_delta(folder):
    node = read_node(write(folder, FILE.replace("mu = 10.0", "epsilon = 3.0")))
    assert client_of(node)[1].privatizer.policy.mu == gdp_mu(3.0, 1e-5)


def test_check_says_what_the_client_guarantees(folder):
    path = write(folder)
    said = CliRunner().invoke(cli, ["node", str(path), "--check"])
    assert said.exit_code == 0, said.output
    mechanism = "independent noise on each client, every sample in up to 3 releases"
    stated = Guarantee(10.0, 1e-5, mechanism, unit="sample").sentence
    assert stated in " ".join(said.stdout.split())
    assert stated in answers_of(read_node(path))[1]


@pytest.mark.parametrize(("app", "complaint"), [("mixing", "mixes samples"), ("remembering", "Expected a model")])
def test_a_refused_model_fails_the_check_for_any_samples(folder, app, complaint):
    path = write(folder, app=app)
    said = {}
    for state in ("whole", "broken"):
        result = CliRunner().invoke(cli, ["node", str(path), "--check"])
        assert result.exit_code == 1
        assert "configuration  failed" in result.stdout
        assert complaint in result.stderr
        said[state] = result.stderr
        (folder[0] / "broken").touch()
    assert said["whole"] == said["broken"]
    with raises(ConfigurationError, "unsupported", match=complaint):
        client_of(read_node(path))


def test_an_evaluation_has_its_share_and_the_log_says_what_both_come_to(folder):
    text = FILE.replace("mu = 10.0", "mu = 10.0\nevaluation.share = 0.36\nevaluation.held-out = 0.34")
    answers, said = answers_of(read_node(write(folder, text)))
    assert "mu = 10 Gaussian DP" in said
    assert "Of it mu = 6 is for a private evaluation of the model, which it releases last." in said
    assert sent(asked(answers)) == pytest.approx(clipped_sum(range(4)), abs=0.05), "two of six are set aside"
    counted = asked(answers, session="e", of="evaluation")
    # At zeros both scores are equal, and class 0 is taken: of samples 4 and 5 the first is right.
    assert sent(counted) == pytest.approx([1.0, 1.0], abs=0.05)
    assert counted.content["metrics"]["num-examples"] == 2
    assert asked(answers, session="f", of="evaluation").error.code == protocol.BUDGET_EXHAUSTED


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("{app}", "no.such.module:app"), "Expected a ClientApp at no.such.module:app"),
        (("{app}", "email.message:Message"), "Expected a ClientApp at email.message:Message, got type"),
        (('"full-batch"', '"fedavg"'), "Expected method = 'full-batch', which the app is made for, got 'fedavg'"),
        (('"full-batch"', '"sgd"'), "Expected method to be a known name"),
        (("mu = 10.0", "mu = 20.0"), "Expected mu <= 10, the budget of all runs"),
        (("mu = 10.0", "mu = 10.0\nepsilon = 2.0"), "Expected mu or epsilon, got both"),
        (("mu = 10.0", ""), "Expected values for mu or epsilon"),
        (("mu = 10.0", "mu = 10.0\nbatch-size = 2"), "batch-size to be left out"),
        (("mu = 10.0", 'mu = 10.0\nmechanism = "cancelling"'), "mechanism 'independent'"),
        (("mu = 10.0", 'mu = 10.0\ntrust = "trusted-server"'), "trust"),
        (("mu = 10.0", 'mu = 10.0\nroster = "r"'), "roster"),
        (("local-epochs = 2", "local-epochs = [2]"), "Expected run-config to be a table"),
        (("clip-norm", "clip-nrom"), "perhaps clip-nrom for clip-norm"),
        (("num-records = 6\n", ""), "Expected values for num-records"),
        (("num-records = 6", "num-records = 0"), "Expected num-records to be"),
        (("schema.toml", "none.toml"), "`murmurfl schema FILE` drafts one"),
        (("num-records = 6", "num-records = 6\nsamples-per-owner = 2"), "with a schema that names an owner"),
        (
            ("num-records = 6", 'num-records = 6\nsamples = "none.csv"'),
            "Expected a schema of columns|Expected a CSV file",
        ),
    ],
)
def test_a_file_that_is_none_is_refused_before_anything_starts(folder, change, complaint):
    path = write(folder, FILE.replace(*change))
    with pytest.raises(ConfigurationError, match=complaint):
        client_of(read_node(path))


def test_another_client_app_is_not_taken_for_one_of_samples(folder):
    with raises(ConfigurationError, "wrong-type", "app", match=r"Expected a private_client_app at .*leave method out"):
        client_of(read_node(write(folder, app="plain")))


def test_a_file_for_updates_is_not_taken_for_one_of_samples(folder):
    path = write(
        folder, FILE.replace('method = "full-batch"\n', "").replace('schema = "schema.toml"\nnum-records = 6\n', "")
    )
    node = read_node(path)
    assert isinstance(node, UpdateNode)
    with raises(ConfigurationError, "missing", "method"):
        own_app(node)


def test_a_client_without_its_ledger_does_not_start(folder):
    with raises(LedgerError, "not-found", match="murmurfl ledger create"):
        client_of(read_node(write(folder, FILE.replace("ledger.sqlite", "gone.sqlite"))))


def test_under_secure_aggregation_nothing_leaves_without_masks(folder):
    path, _ = folder
    keys = {name: ClientKey.simulated(5, name) for name in ("clinic-0", "clinic-1")}
    helper = HelperKey.simulated(5, "auditor").entry("auditor")
    roster = Roster({name: key.public for name, key in keys.items()}, (helper,))
    write_roster(path / "roster.json", roster)
    write_client_key(path / "client.key", keys["clinic-0"])
    sums = f"""mu = 5.0
trust.kind = "secure-aggregation"
trust.min-honest = 2
trust.min-cohort = 2
roster = "roster.json"
roster-digest = "{roster.digest}"
signing-key = "client.key"
"""
    answers, client = client_of(read_node(write(folder, FILE.replace("mu = 10.0\n", sums))))
    reply = asked(answers)
    arrays = [array.numpy() for array in reply.content["arrays"].values()]
    counts, header = unmasked(arrays, dict(reply.content["config"]), roster, seed=5)
    assert counts * client.privatizer.plan.grid.spacing == pytest.approx(clipped_sum(), abs=0.05)
    assert (header.min_cohort, header.release) == (2, 1)
    with raises(ConfigurationError, "missing", "roster"):
        SampleNode.read(write(folder, FILE.replace("mu = 10.0\n", sums.replace('roster = "roster.json"\n', ""))))
