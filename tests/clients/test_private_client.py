"""A client against a server that lies: whatever it is asked, it releases within its budget and says nothing else."""

import math

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.client import NumPyClient
from flwr.serverapp.strategy import FedAvg
from murmurfl.clients import (
    ContextLedger,
    CorrelatedNoiseMod,
    DelayedMomentumClient,
    IsrlDpClient,
    Mu2Client,
    NoisySGDClient,
    TorchGradients,
    UpdatePolicy,
    numpy_client_app,
)
from murmurfl.privacy import (
    ConfigurationError,
    LedgerError,
    MemoryLedger,
    PrivacyPolicy,
    RefusedError,
    SimulatedKeys,
    SQLiteLedger,
    SumAssumption,
    SystemKeys,
    protocol,
)
from murmurfl.privacy.sums.masking import Masking
from murmurfl.privacy.sums.roster import ClientKey, Roster
from murmurfl.strategies import CorrelatedFedAvg

from tests.harness.clients import DurableLedger, concatenated, training_config
from tests.harness.errors import raises
from tests.harness.grid import NodesGrid
from tests.harness.grid import ask as ask_node

pytestmark = pytest.mark.usefixtures("no_result_folder")

SHAPES = [(3, 2), (3,)]
CAP, BATCH, CLIP, MU = 12, 2, 1.0, 2.0


class Gradients:
    """Loss 1/2 (w . z)^2 for a fake model of nine parameters; counts what it is asked."""

    shapes = SHAPES

    def __init__(self):
        self.calls = 0

    def __call__(self, parameters, samples):
        self.calls += 1
        point = concatenated(parameters)
        return (samples @ point)[:, None] * samples + samples


DATA = np.random.Generator(np.random.Philox(key=11)).normal(size=(CAP * BATCH, 9))
ROSTER = Roster.simulated(1, [str(i) for i in range(12)], ["helper-0", "helper-1"])


def client(kind=Mu2Client, ledger=None, keys=None, data=DATA, masking=None, **changes):
    policy = {"clip_norm": CLIP, "batch_size": BATCH, "max_participations": CAP, "mu": MU, **changes}
    if issubclass(kind, NoisySGDClient):
        policy["mechanism"] = "independent"
    keys = SimulatedKeys(1, "7") if keys is None else keys
    ledger = MemoryLedger() if ledger is None else ledger
    hidden = {} if masking is None else {"masking": masking}
    return kind(Gradients(), data, PrivacyPolicy(**policy), ledger, keys, name="7", **hidden)


def request(t=1, ack=0, points=2, value=0.0, **changes):
    arrays = [np.full(shape, value) for _ in range(points) for shape in SHAPES]
    return arrays, training_config(**{protocol.SERVER_ROUND: t, protocol.ACK: ack, **changes})


def test_samples_do_not_return_to_a_trusted_server_that_counts_them_once():
    returning = {"sample_participations": 2, "min_separation": CAP, "trust": "trusted-server"}
    with raises(ConfigurationError, "conflict", "sample_participations"):
        client(**returning)
    client(NoisySGDClient, **returning)  # whose servers count them as often as they return
    client(**{**returning, "trust": "untrusted-server"})


def test_mu2_contributes_the_corrected_gradient_of_the_paper():
    subject = client(trust="trusted-server", clip_norm=1e3)
    current, previous = ([np.random.Generator(np.random.Philox(key=k)).normal(size=s) for s in SHAPES] for k in (1, 2))
    _, config = request(t=5)
    arrays, examples, _ = subject.fit([*current, *previous], config)
    gradients = Gradients()
    expected = (5 * gradients(current, DATA[:2]) - 4 * gradients(previous, DATA[:2])).mean(axis=0)
    assert examples == BATCH
    assert [values.shape for values in arrays] == SHAPES
    assert concatenated(arrays) == pytest.approx(expected, abs=subject.privatizer.plan.grid.spacing)


def test_the_first_round_needs_no_previous_gradient():
    subject = client()
    subject.fit(*request(t=1))
    assert subject.gradients.calls == 1


def test_a_reply_says_nothing_that_depends_on_data():
    replies = []
    for data in (DATA, DATA * 100):
        arrays, examples, metrics = client(data=data).fit(*request())
        replies.append((examples, metrics, [values.shape for values in arrays]))
    assert replies[0] == replies[1]
    assert set(replies[0][1]) == {
        protocol.VERSION, protocol.RELEASE, protocol.ACK, protocol.SENSITIVITY, protocol.CLIENT,
    }  # fmt: skip


def test_evaluation_is_refused():
    with raises(RefusedError, "refused", code=protocol.EVALUATION_BLOCKED):
        client().evaluate(*request())


BAD = {
    "no version": request(**{protocol.VERSION: None}),
    "another version": request(**{protocol.VERSION: 99}),
    "round 0": request(t=0),
    "huge round": request(t=2**40),
    "round as text": request(t="1"),
    "round as bool": request(t=True),
    "round as float": request(t=1.5),
    "weighed as round 0": request(**{protocol.WEIGHED_AS: 0}),
    "weighed as text": request(**{protocol.WEIGHED_AS: "1"}),
    "skipped as text": request(**{protocol.SKIPPED: "1"}),
    "skipped twice": request(**{protocol.SKIPPED: 2}),
    "no session": request(**{protocol.SESSION: None}),
    "session with a slash": request(**{protocol.SESSION: "a/b"}),
    "long session": request(**{protocol.SESSION: "a" * 65}),
    "negative ack": request(ack=-1),
    "ack from the future": request(ack=3),
    "ack as list": request(ack=[1]),
    "one point": request(points=1),
    "three points": request(points=3),
    "nan": request(value=np.nan),
    "infinite": request(value=np.inf),
    "another client": request(**{protocol.CLIENT: "8"}),
    "integers": ([np.zeros(s, dtype=np.int64) for _ in range(2) for s in SHAPES], request()[1]),
    "wrong shape": ([np.zeros((3, 2)), np.zeros(4)] * 2, request()[1]),
}


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_a_malformed_request_is_refused_and_costs_nothing(bad):
    subject = client()
    before = subject.privatizer.statement("s")
    with pytest.raises(RefusedError):
        subject.fit(*bad)
    assert subject.privatizer.statement("s") == before
    assert subject.gradients.calls == 0, "refused on the request alone, before any data was touched"


def spent(ledger, subject):
    with ledger.exclusive() as page:
        account = page.account()
        return account.spent.mu, account.samples_used


@pytest.mark.parametrize("keys", [SimulatedKeys(1, "7"), SystemKeys(bytes(32))], ids=["simulated", "real"])
def test_ten_thousand_random_requests_never_exceed_the_budget(keys):
    """Repeated rounds, acks backwards and from the future, absurd points, forged sessions, wrong shapes and types."""
    generator = np.random.Generator(np.random.Philox(key=99))
    ledger = DurableLedger()
    subject = client(ledger=ledger, keys=keys, budget_mu=MU * math.sqrt(2))
    released: dict[str, list[int]] = {}
    values = [0.0, 1.0, 1e30, 1e300, -1e308, np.nan, np.inf]
    for _ in range(10_000):
        pick = generator.integers
        session = ["s", "t", "u", "v" * int(pick(1, 80)), "../x", ""][pick(6)]
        arrays, config = request(
            t=[1, 2, int(pick(1, 2**31)), -5, 2**60, "x", 2.0][pick(7)],
            ack=[0, 1, int(pick(0, CAP + 2)), -1, 2**62, None, "0"][pick(7)],
            points=[2, 2, 2, 1, 3][pick(5)],
            value=values[pick(len(values))],
        )
        config[protocol.SESSION] = session
        if pick(10) == 0:
            with np.errstate(all="ignore"):
                arrays[0] = arrays[0].astype([np.float32, np.int32, np.complex128][pick(3)])
        config.update({"clip-norm": 1e9, "mu": 1e9, "noise": 0.0, "batch-size": 1})  # asked for; ignored
        try:
            reply, _, metrics = subject.fit(arrays, config)
        except RefusedError:
            continue
        released.setdefault(session, []).append(metrics[protocol.RELEASE])
        vector = concatenated(reply)
        assert np.isfinite(vector).all()
        # Never un-noised: contributions are bounded by what was carried over, noise is there on top.
        assert np.count_nonzero(vector) == len(vector)
    assert sum(len(releases) for releases in released.values()) == CAP, "as many as samples allow, and no more"
    assert len(released) <= 2
    assert all(releases == sorted(set(releases)) for releases in released.values())
    reserved, used = spent(ledger, subject)
    assert reserved <= MU * math.sqrt(2) * (1 + 1e-9)
    assert used == CAP * BATCH


def test_a_hostile_pair_of_points_cannot_make_a_contribution_longer_than_the_clip():
    """If the server lies, t grad f(x_t) - (t-1) grad f(x_{t-1}) can be of any length; what leaves is clipped."""
    subject = client(trust="trusted-server")
    rng = np.random.Generator(np.random.Philox(key=4))
    points = [rng.normal(size=s) * 1e6 for _ in range(2) for s in SHAPES]
    arrays, _, _ = subject.fit(points, request(t=2**31 - 1)[1])
    assert np.linalg.norm(concatenated(arrays)) <= CLIP + subject.privatizer.plan.grid.charge(9)


def test_noisy_sgd_needs_independent_noise():
    with raises(ConfigurationError, "conflict", "mechanism"):
        NoisySGDClient(
            Gradients(), DATA, PrivacyPolicy(1.0, 1, 1, 1.0), MemoryLedger(), SimulatedKeys(1, "7"), name="7"
        )
    arrays, _, _ = client(NoisySGDClient).fit(*request(points=1))
    assert len(arrays) == len(SHAPES)


def test_isrl_dp_samples_return_as_declared_and_charged():
    """Three passes over four batches: sigma = Delta sqrt(3) / mu, and no fourth pass."""
    subject = client(IsrlDpClient, max_participations=12, sample_participations=3, min_separation=4)
    seen = []
    original = subject.samples
    subject.samples = type("Spy", (), {"__getitem__": lambda _, chosen: seen.append(chosen) or original[chosen]})()
    for t in range(1, 13):
        subject.fit(*request(t=t, points=1))
    assert [chosen.start for chosen in seen] == [0, 2, 4, 6] * 3
    assert all(chosen.stop - chosen.start == BATCH for chosen in seen)
    with raises(RefusedError, "refused", code=protocol.CAP_REACHED):
        subject.fit(*request(t=13, points=1))
    plan = subject.privatizer.plan
    assert plan.noise_std == pytest.approx(plan.sensitivity * math.sqrt(3) / MU)
    assert subject.privatizer.statement("s").mu_spent == pytest.approx(MU)
    once = client(IsrlDpClient, max_participations=12).privatizer.plan
    assert once.noise_std == pytest.approx(plan.noise_std / math.sqrt(3), rel=1e-3), "and more noise than for one pass"


@pytest.mark.parametrize("kind", ["context", "sqlite"])
def test_delayed_momentum_corrects_against_its_own_last_query_point_across_clients(kind, tmp_path):
    """Eq. 12 of reshef-levy-2025 with tau = 3. A reply is the whole momentum, also after a reply that was lost."""
    state, gradients = RecordDict(), Gradients()
    if kind == "sqlite":
        SQLiteLedger.create(tmp_path / "ledger", budget_mu=MU, delta=1e-5)
    points = [[np.random.Generator(np.random.Philox(key=k)).normal(size=s) for s in SHAPES] for k in range(3)]
    momentum, earlier = np.zeros(9), None
    for k, (t, point) in enumerate(zip((2, 5, 9), points, strict=True)):
        ledger = ContextLedger(state, "7") if kind == "context" else SQLiteLedger(tmp_path / "ledger")
        subject = client(DelayedMomentumClient, ledger, trust="trusted-server", clip_norm=1e3)
        arrays, _, metrics = subject.fit(point, request(t=t, points=1)[1])
        batch = DATA[BATCH * k : BATCH * (k + 1)]
        momentum = momentum + t * gradients(point, batch).mean(axis=0)
        if earlier is not None:
            momentum = momentum - earlier[0] * gradients(earlier[1], batch).mean(axis=0)
        earlier = t, point
        assert concatenated(arrays) == pytest.approx(momentum, abs=10 * subject.privatizer.plan.grid.spacing)
        assert (metrics[protocol.RELEASE], metrics[protocol.ACK]) == (k + 1, 0)


def test_delayed_momentum_needs_the_whole_prefix_and_its_own_ledger():
    with raises(ConfigurationError, "conflict", "release_rule"):
        client(DelayedMomentumClient, release_rule="paper")
    ledger = MemoryLedger()
    client(ledger=ledger).fit(*request())
    other = client(DelayedMomentumClient, ledger=ledger)
    with raises(LedgerError, "damaged", match="start a new session"):
        other.fit(*request(t=2, points=1))
    assert other.privatizer.statement("s").releases == 1


@pytest.mark.parametrize("kind", [DelayedMomentumClient, IsrlDpClient])
def test_a_hostile_point_cannot_make_a_baselines_contribution_longer_than_the_clip(kind):
    subject = client(kind, trust="trusted-server")
    rng = np.random.Generator(np.random.Philox(key=4))
    before = np.zeros(9)
    for t in (2**30, 2**31 - 1):
        arrays, _, _ = subject.fit([rng.normal(size=s) * 1e6 for s in SHAPES], request(t=t, points=1)[1])
        step = concatenated(arrays) - (before if kind is DelayedMomentumClient else 0.0)
        assert np.linalg.norm(step) <= CLIP + subject.privatizer.plan.grid.charge(9)
        before = concatenated(arrays)
        if kind is IsrlDpClient:
            break


def test_the_context_ledger_remembers_across_clients_and_agrees_with_the_one_in_memory():
    state = RecordDict()
    memory = client()
    for k in range(CAP):
        ack = k if k % 3 else max(k - 1, 0)  # some replies are not acknowledged
        expected = memory.fit(*request(t=k + 1, ack=memory_ack(memory, ack)))
        fresh = client(ledger=ContextLedger(state, "7"))
        actual = fresh.fit(*request(t=k + 1, ack=expected[2][protocol.ACK]))
        assert all((a == b).all() for a, b in zip(expected[0], actual[0], strict=True))
    assert client(ledger=ContextLedger(state, "7")).privatizer.statement("s") == memory.privatizer.statement("s")
    assert client(ledger=ContextLedger(state, "8")).privatizer.statement("s").releases == 0, "clients share a node"


SUMS = {"trust": "secure-aggregation", "sums": SumAssumption(9, 11)}


def masked(ledger=None, **changes):
    masking = Masking("7", ClientKey.simulated(1, "7"), ROSTER)
    return client(ledger=ledger, masking=masking, **SUMS, **changes)


def test_the_context_ledger_remembers_both_figures_and_the_names_of_releases():
    state = RecordDict()
    for k in range(3):
        masked(ContextLedger(state, "7")).fit(*request(t=k + 1, ack=min(k, 1)))
    with ContextLedger(state, "7").exclusive() as page:
        stream, account = page.stream("s"), page.account()
    assert account.reserved == {"s": MU}
    assert account.reserved_local == {"s": pytest.approx(3 * MU, rel=1e-8)}
    assert list(stream.ids) == [1, 2, 3]
    assert len(set(stream.ids.values())) == 3
    assert {len(name) for name in stream.ids.values()} == {16}


def test_a_client_states_both_figures_under_secure_aggregation_and_only_there():
    stated = masked().statement("s")
    assert stated["mu-guaranteed"] == MU
    assert stated["mu-local"] == pytest.approx(3 * MU, rel=1e-8)
    assert (stated["min-honest"], stated["min-cohort"], stated["trust"]) == (9, 11, "secure-aggregation")
    assert not {"mu-local", "min-honest", "min-cohort"} & set(client().statement("s"))


def memory_ack(subject, wanted):
    with subject.privatizer._ledger.exclusive() as page:
        stream = page.stream("s")
    return 0 if stream is None else max(wanted, stream.ack)


@pytest.mark.parametrize("damage", ["format", "pending", "missing arrays"])
def test_a_damaged_context_ledger_stops_the_client(damage):
    state = RecordDict()
    client(ledger=ContextLedger(state, "7")).fit(*request())
    if damage == "format":
        state["murmurfl/7/account"]["format"] = 99
    elif damage == "pending":
        record = state["murmurfl/7/stream/s"]
        record["stream"] = record["stream"].replace('"pending": [1]', '"pending": [1, 2]')
    else:
        del state["murmurfl/7/arrays/s"]
    with pytest.raises(LedgerError, match="Expected"):
        client(ledger=ContextLedger(state, "7")).fit(*request(ack=1))


def test_torch_gradients_are_those_of_each_sample_alone():
    import torch

    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    gradients = TorchGradients(module, torch.nn.functional.cross_entropy)
    parameters = [p.detach().numpy() for p in module.parameters()]
    inputs, targets = torch.randn(5, 4), torch.tensor([0, 1, 1, 0, 1])
    rows = gradients(parameters, (inputs, targets))
    for i in range(5):
        module.zero_grad()
        torch.nn.functional.cross_entropy(module(inputs[i : i + 1]), targets[i : i + 1]).backward()
        assert rows[i] == pytest.approx(concatenated([p.grad.numpy() for p in module.parameters()]), abs=1e-6)


def test_a_module_that_mixes_samples_is_refused():
    import torch

    with raises(ConfigurationError, "unsupported", "module"):
        TorchGradients(torch.nn.BatchNorm1d(3), torch.nn.functional.cross_entropy)


SECRET = "patient 4711 has blood group AB"


class Averager(NumPyClient):
    def __init__(self, node):
        self.node = node

    def fit(self, parameters, config):
        return [values + self.node for values in parameters], self.node + 1, {"level": 0.5, "note": "hello"}

    def evaluate(self, parameters, config):
        return float(parameters[0].sum()), 3, {"accuracy": 0.25}

    def get_properties(self, config):
        return {"node": self.node}


class Leaky(NumPyClient):
    def fit(self, parameters, config):
        raise ValueError(SECRET)

    def evaluate(self, parameters, config):
        raise RefusedError(protocol.BUDGET_EXHAUSTED, "the budget is gone")

    def get_properties(self, config):
        raise LedgerError(SECRET)


def make_client(context):
    return Averager(int(context.node_config["partition-id"])).to_client()


def test_flowers_own_fedavg_averages_a_legacy_client():
    grid = NodesGrid(numpy_client_app(make_client), 3)
    strategy = FedAvg(min_available_nodes=3, min_train_nodes=3, min_evaluate_nodes=3)
    result = strategy.start(grid, ArrayRecord([np.zeros((2, 2)), np.ones(3)]), num_rounds=1)
    weights = np.array([1, 2, 3]) / 6
    assert result.arrays.to_numpy_ndarrays()[0] == pytest.approx(np.full((2, 2), weights @ [0, 1, 2]))
    assert result.train_metrics_clientapp[1]["level"] == pytest.approx(0.5)
    assert result.evaluate_metrics_clientapp[1]["accuracy"] == pytest.approx(0.25)


def test_arrays_keep_their_names():
    """A model with names, such as a state dict, can so go through a legacy client and a mod that compares names."""
    names = ["layer.weight", "layer.bias"]
    record = ArrayRecord({name: Array(np.zeros(2)) for name in names})
    app = numpy_client_app(make_client)
    assert list(ask(app, "train", RecordDict({"arrays": record})).content["arrays"]) == names
    assert list(ask(app, "train").content["arrays"]) == ["0"]
    policy = UpdatePolicy(clip_norm=1.0, mu=1e3, max_participations=1)
    private = numpy_client_app(make_client, mods=[CorrelatedNoiseMod(simulation=policy)])
    strategy = CorrelatedFedAvg(num_clients=2)
    result = strategy.start(NodesGrid(private, 2), record, num_rounds=1)
    assert list(result.arrays) == names
    # Client 0 adds nothing, client 1 adds 1 to every value, clipped to length 1.
    assert result.arrays["layer.bias"].numpy() == pytest.approx(np.full(2, 0.25), abs=0.05)


def ask(app, message_type, content=None):
    return ask_node(
        app, message_type, RecordDict({"arrays": ArrayRecord([np.zeros(2)])}) if content is None else content
    )


def test_queries_reach_get_properties():
    content = RecordDict({"config": ConfigRecord({"a": 1})})
    assert ask(numpy_client_app(make_client), "query", content).content["config"]["node"] == 0


def test_an_exception_never_leaves_the_client(monkeypatch):
    monkeypatch.setattr("murmurfl.clients.messages.in_simulation", lambda: False)  # whose text a server gets
    reply = ask(numpy_client_app(lambda context: Leaky()), "train")
    assert reply.has_error()
    assert reply.error.code == protocol.INTERNAL_ERROR
    assert SECRET not in reply.error.reason


def test_a_refusal_leaves_with_its_own_text():
    reply = ask(numpy_client_app(lambda context: Leaky()), "evaluate")
    assert (reply.error.code, reply.error.reason) == (protocol.BUDGET_EXHAUSTED, "the budget is gone")


def test_a_ledger_that_cannot_be_used_is_named_without_its_text(monkeypatch):
    monkeypatch.setattr("murmurfl.clients.messages.in_simulation", lambda: False)  # whose text a server gets
    reply = ask(numpy_client_app(lambda context: Leaky()), "query", RecordDict({"config": ConfigRecord({"a": 1})}))
    assert protocol.REFUSAL_NAMES[reply.error.code] == "ledger-unusable"
    assert SECRET not in reply.error.reason


def test_bytes_that_are_no_array_are_a_malformed_request():
    record = ArrayRecord([np.zeros(2)])
    record["0"].data = b"\x93NUMPY nonsense"
    reply = ask(numpy_client_app(make_client), "train", RecordDict({"arrays": record}))
    assert reply.error.code == protocol.MALFORMED_REQUEST


def test_a_client_fn_that_returns_no_client_is_not_configured():
    assert ask(numpy_client_app(lambda context: "no client"), "train").error.code == protocol.NOT_CONFIGURED
