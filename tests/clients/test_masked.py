"""Under secure aggregation a client sends masks and nothing else, whatever kind it is and whatever fails."""

from dataclasses import asdict

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from murmurfl.clients import (
    ContextLedger,
    DelayedMomentumClient,
    FullBatchClient,
    IsrlDpClient,
    Mu2Client,
    NoisySGDClient,
    OnlineClient,
    numpy_client_app,
)
from murmurfl.clients import messages as masked
from murmurfl.privacy import (
    ConfigurationError,
    MemoryLedger,
    PrivacyPolicy,
    Privatizer,
    RefusedError,
    SimulatedKeys,
    SQLiteLedger,
    SumAssumption,
    SystemKeys,
    protocol,
    row_bytes,
)
from murmurfl.privacy.sums import masking as masking_module
from murmurfl.privacy.sums.masking import Masking, checked_header
from murmurfl.privacy.sums.roster import ClientKey

from tests.harness.clients import DurableLedger, normal_samples, training_config
from tests.harness.errors import raises
from tests.harness.grid import ask
from tests.harness.secure import masking_of, roster_of, sealed_of, unmasked

SIZE = 6
SHAPES = [(2, 2), (2,)]
NAMES = tuple(map(str, range(8)))
ROSTER = roster_of(NAMES)
POINT = [np.zeros(shape) for shape in SHAPES]


class Differences:
    """The gradient of |x - z|^2 / 2."""

    shapes = SHAPES

    def __call__(self, parameters, samples):
        point = np.concatenate([values.ravel() for values in parameters])
        return point - samples


def policy(**changes):
    fields = {"clip_norm": 1.0, "batch_size": 2, "max_participations": 5, "mu": 1.0, "trust": "secure-aggregation"}
    return PrivacyPolicy(**{**fields, "sums": SumAssumption(3, 5), **changes})


ALL = {"batch_selection": "full_batch", "batch_size": 1, "mechanism": "independent", "release_rule": "paper"}
KINDS = {
    "mu2": (Mu2Client, policy(), {}),
    "mu2, blt": (Mu2Client, policy(mechanism="blt"), {}),
    "online": (OnlineClient, policy(clip_unit="update"), {"learning_rate": 0.1}),
    "full-batch": (FullBatchClient, policy(**ALL), {}),
    "noisy-sgd": (NoisySGDClient, policy(mechanism="independent"), {}),
    "noisy-sgd, alone": (NoisySGDClient, policy(mechanism="independent", release_rule="paper"), {}),
}


def make_client(kind=Mu2Client, chosen=None, name="1", *, ledger=None, keys=None, masking=masking_of, **options):
    samples = normal_samples(name, 10, SIZE)
    own = masking(name, ROSTER) if masking is not None else None
    keys, ledger = keys or SimulatedKeys(0, name), ledger or MemoryLedger()
    chosen = policy() if chosen is None else chosen
    return kind(Differences(), samples, chosen, ledger, keys, name=name, masking=own, **options)


def points(client):
    return POINT * client.query_points


@pytest.mark.parametrize("kind", KINDS)
def test_a_reply_is_the_recorded_release_under_masks(kind):
    sent, bare = (make_client(*KINDS[kind][:2], **KINDS[kind][2]) for _ in range(2))
    for k in (1, 2):
        ack = 0 if k == 1 else 1
        arrays, num_examples, entries = sent.fit(points(sent), training_config(k, ack))
        request = bare._read(points(bare), training_config(k, ack))
        release = bare.release(request)
        counts, header = unmasked(arrays, entries, ROSTER)
        assert (counts == release.counts).all()
        assert [values.shape for values in arrays] == SHAPES
        assert (header.client, header.release, header.session, header.size) == ("1", k, "s", SIZE)
        assert (header.min_cohort, header.roster) == (5, ROSTER.digest)
        assert header.release_mode == KINDS[kind][1].release_mode
        assert num_examples == (10 if kind == "full-batch" else 2)
        assert (entries[protocol.RELEASE], entries[protocol.ACK]) == (k, ack)


def sealing(release, ack, **changes):
    return {
        **training_config(),
        protocol.ASK: protocol.ASK_SEAL,
        protocol.RELEASE: release,
        protocol.ACK: ack,
        **changes,
    }


@pytest.mark.parametrize("kind", [name for name in KINDS if KINDS[name][1].release_mode == "cumulative"])
def test_a_release_is_sealed_again_under_fresh_masks_and_spends_nothing(kind):
    client = make_client(*KINDS[kind][:2], **KINDS[kind][2])
    client.fit(points(client), training_config(1, 0))
    arrays, samples, entries = client.fit(points(client), training_config(3, 0))
    before = client.statement("s")
    sent = [arrays]
    for _ in range(3):
        again, count, said = client.fit([], sealing(2, 0))
        assert (unmasked(again, said, ROSTER)[0] == unmasked(arrays, entries, ROSTER)[0]).all(), "the same counts"
        assert said[protocol.HEADER] == entries[protocol.HEADER], "under the same name, built on the same release"
        assert count == samples
        assert all((one[0] != other[0]).all() for one, other in zip([again] * len(sent), sent, strict=True))
        sent.append(again)
    assert client.statement("s") == before
    assert client.fit(points(client), training_config(4, 2))[2][protocol.RELEASE] == 3


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    "asked",
    [sealing(1, 0), sealing(3, 0), sealing(2, 1), sealing(2, 0, session="t"), sealing(2, 0, client="2"),
     sealing(2, 0, **{protocol.VERSION: 99}), sealing(2, -1), sealing("2", 0), sealing(2, 0, session="")],
)  # fmt: skip
def test_no_other_release_than_the_last_as_it_was_sent_is_sealed_again(asked):
    client = make_client()
    for k in (1, 2):
        client.fit(points(client), training_config(k, 0))
    with pytest.raises(RefusedError):
        client.fit([], asked)
    assert client.fit([], sealing(2, 0))


def test_releases_that_stand_alone_are_not_kept_and_none_is_sealed_that_was_never_made():
    alone = make_client(NoisySGDClient, policy(mechanism="independent", release_rule="paper"))
    with raises(RefusedError, "refused", code=protocol.BAD_ACKNOWLEDGEMENT, match="not kept"):
        alone.fit([], sealing(1, 0))
    alone.fit(points(alone), training_config())
    with raises(RefusedError, "refused", code=protocol.BAD_ACKNOWLEDGEMENT, match="not kept"):
        alone.fit([], sealing(1, 0))


def test_a_plain_client_seals_nothing_again():
    plain = make_client(chosen=policy(trust="untrusted-server", sums=SumAssumption(1, 1)), masking=None)
    plain.fit(points(plain), training_config())
    with raises(RefusedError, "refused", code=protocol.BAD_ACKNOWLEDGEMENT, match="not kept"):
        plain.fit([], sealing(1, 0))


def test_a_real_node_seals_its_last_release_again_after_a_restart(tmp_path, quick_disk):
    path = tmp_path / "ledger.db"
    SQLiteLedger.create(path, budget_mu=2.0, delta=1e-5, budget_local_mu=9.0)

    def started():
        return Privatizer(
            policy(budget_mu=2.0), SIZE, 10, SQLiteLedger(path), SQLiteLedger(path).keys(),
            data=row_bytes(range(10)), roster=ROSTER.digest
        )  # fmt: skip

    release = started().release("s", 0, lambda samples: np.ones((2, SIZE)))
    before = path.read_bytes()
    again = started().last_release("s", 0, 1)
    assert (again.counts == release.counts).all()
    assert (again.release_id, again.ack_id, again.release, again.ack, again.samples) == (
        release.release_id, release.ack_id, 1, 0, release.samples
    )  # fmt: skip
    assert path.read_bytes() == before


def test_what_is_sent_is_uniform_whatever_the_release_is():
    """Of 4 x 6 words each top byte is 0 or 255 with probability 1/128; unmasked, all are. False alarm below 10^-4."""
    client = make_client()
    words = np.concatenate([
        np.concatenate([values.ravel() for values in client.fit(points(client), training_config(k, k - 1))[0]])
        for k in range(1, 5)
    ])  # fmt: skip
    top = words >> np.uint64(56)
    assert np.isin(top, [0, 255]).sum() <= 4


def test_the_test_above_would_see_a_release_that_was_not_masked(monkeypatch):
    monkeypatch.setattr(masking_module, "add_mask", lambda *_, **__: None)
    client = make_client()
    arrays = client.fit(points(client), training_config())[0]
    top = np.concatenate([values.ravel() for values in arrays]) >> np.uint64(56)
    assert np.isin(top, [0, 255]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_released_without_masks_even_in_a_simulation(kind):
    client = make_client(*KINDS[kind][:2], masking=None, **KINDS[kind][2])
    with raises(ConfigurationError, "missing", "masking"):
        client.fit(points(client), training_config())
    assert client.statement("s")["releases"] == 0, "nothing was spent on a release that could not be sent"


def test_a_client_that_forgot_to_check_still_sends_nothing_bare(monkeypatch):
    monkeypatch.setattr("murmurfl.clients.private_client.check_can_send", lambda *_: None)
    client = make_client(masking=None)
    with raises(ConfigurationError, "missing", "masking", match="without masks"):
        client.fit(points(client), training_config())


def test_a_client_that_sends_without_masks_is_caught(monkeypatch):
    """The planted bug of all planted bugs: what these tests look at would show it."""
    sends_bare = lambda release, shapes, **_: (masked.unflatten(release.values, shapes), {})  # noqa: E731
    monkeypatch.setattr("murmurfl.clients.private_client.outgoing_reply", sends_bare)
    client = make_client()
    arrays, _, entries = client.fit(points(client), training_config())
    with pytest.raises((AssertionError, KeyError)):
        unmasked(arrays, entries, ROSTER)


def test_a_real_client_is_not_even_made_without_masks():
    with raises(ConfigurationError, "missing", "masking", match="Pass masking"):
        Mu2Client(
            Differences(), normal_samples("1", 10, SIZE), policy(), DurableLedger(), SystemKeys.generate(), name="1"
        )


def test_masks_that_belong_to_something_else_are_refused():
    with raises(ConfigurationError, "conflict", "masking"):
        make_client(chosen=PrivacyPolicy(1.0, 2, 5, 1.0))
    with raises(ConfigurationError, "mismatch", "masking", match="'1', got that of '2'"):
        make_client(masking=lambda _, roster: masking_of("2", roster))
    with raises(ConfigurationError, "out-of-range", "min_cohort"):
        make_client(chosen=policy(sums=SumAssumption(3, 9)))
    with raises(ConfigurationError, "mismatch", "key"):
        make_client(masking=lambda name, roster: Masking(name, ClientKey.simulated(1, name), roster))


class Renamed(Mu2Client):
    pass


@pytest.mark.parametrize(
    "kind",
    [
        (DelayedMomentumClient, policy()),
        (IsrlDpClient, policy(mechanism="independent")),
        (Renamed, policy()),
    ],
    ids=lambda pair: pair[0].__name__,
)
def test_only_the_kinds_that_say_so_serve_it(kind):
    with raises(ConfigurationError, "conflict", "trust", match=f"got {kind[0].__name__}"):
        make_client(*kind)


def test_a_failing_mask_leaves_the_release_recorded_and_sends_nothing(monkeypatch):
    ledger = MemoryLedger()
    client, other = make_client(ledger=ledger), make_client()

    def fails(*_):
        raise OSError("no keystream")

    monkeypatch.setattr(masking_module, "add_mask", fails)
    with pytest.raises(OSError, match="no keystream"):
        client.fit(points(client), training_config())
    assert client.statement("s")["releases"] == 1
    monkeypatch.undo()
    # The server never heard of it: its part comes with the next, as after a reply that was lost.
    arrays, _, entries = client.fit(points(client), training_config(2, 0))
    other.release(other._read(points(other), training_config()))
    expected = other.release(other._read(points(other), training_config(2, 0)))
    counts, header = unmasked(arrays, entries, ROSTER)
    assert (counts == expected.counts).all()
    assert (header.release, header.ack_id) == (2, "00" * 16)


def test_what_fails_while_masking_is_answered_with_the_fixed_text(monkeypatch):
    app = masked_app()

    def fails(*_, **__):
        raise ValueError("patient 4711")

    monkeypatch.setattr(Masking, "mask", fails)
    monkeypatch.setattr("murmurfl.clients.messages.in_simulation", lambda: False)  # whose text a server gets
    reply = ask(app, "train", content())
    assert reply.error.code == protocol.INTERNAL_ERROR
    assert "4711" not in reply.error.reason


def masked_app(chosen=None):
    def client_fn(context):
        return make_client(chosen=chosen, name="0", ledger=ContextLedger(context.state, "0"))

    return numpy_client_app(client_fn)


def content(**changes):
    arrays = ArrayRecord([np.zeros(shape) for shape in SHAPES])
    return RecordDict({"arrays": arrays, "previous-arrays": arrays, "config": ConfigRecord(training_config(**changes))})


def test_a_masked_reply_has_these_entries_and_no_others():
    reply = ask(masked_app(), "train", content())
    assert {key: sorted(record) for key, record in reply.content.items()} == {
        "arrays": ["0", "1"],
        "metrics": ["ack", "num-examples", "protocol-version", "release", "sensitivity"],
        "config": ["client", "header", "seals", "signature"],
    }
    arrays = [array.numpy() for array in reply.content["arrays"].values()]
    _, header = unmasked(arrays, dict(reply.content["config"]), ROSTER)
    assert header.helpers == ROSTER.helper_names


def test_entries_of_a_reply_do_not_depend_on_data():
    def other_data(*_):
        return np.full((10, SIZE), 7.0)

    one, other = make_client(), make_client()
    other.samples = other_data()
    first, second = (client.fit(points(client), training_config())[2] for client in (one, other))
    random = {protocol.HEADER, protocol.SEALS, protocol.SIGNATURE}
    assert {key: value for key, value in first.items() if key not in random} == {
        key: value for key, value in second.items() if key not in random
    }
    ours, theirs = (unmasked_header(entries) for entries in (first, second))
    assert {**ours, "release_id": ""} == {**theirs, "release_id": ""}


def unmasked_header(entries):
    return asdict(checked_header(sealed_of(entries), ROSTER))


def test_seeds_are_never_used_twice():
    """The same release, made by two clients with the same keys and ledger state, has other masks each time."""
    sent = [np.concatenate([v.ravel() for v in make_client().fit(POINT * 2, training_config())[0]]) for _ in range(2)]
    assert not (sent[0] == sent[1]).any()


def test_a_real_client_masks_as_a_simulated_one_does():
    samples = normal_samples("1", 10, SIZE)
    client = Mu2Client(
        Differences(),
        samples,
        policy(),
        DurableLedger(),
        SystemKeys.generate(),
        name="1",
        masking=masking_of("1", ROSTER),
    )
    arrays, _, entries = client.fit(points(client), training_config())
    counts, header = unmasked(arrays, entries, ROSTER)
    assert header.release == 1
    assert np.abs(counts).max() < 2**52


def test_a_session_does_not_go_on_under_another_roster():
    """Its helpers may be new ones, which do not know what was opened."""
    ledger, other = MemoryLedger(), roster_of(NAMES, ("helper-0", "another"))
    client = make_client(chosen=policy(budget_mu=3.0), ledger=ledger)
    client.fit(points(client), training_config())
    moved = make_client(chosen=policy(budget_mu=3.0), ledger=ledger, masking=lambda name, _: masking_of(name, other))
    with pytest.raises(RefusedError) as refusal:
        moved.fit(points(moved), training_config(2))
    assert refusal.value.code == protocol.POLICY_CHANGED
    moved.fit(points(moved), training_config(session="another"))
