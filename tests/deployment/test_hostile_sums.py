"""A server that wants single releases under secure aggregation, and what it can tell after a thousand requests.

Real clients with ledgers and real helpers with records on SQLite, of which one works with the server: so do two of
the clients. What the other helper opened is all that the server learns, and the exact mu of every sample follows from
it by linear algebra (tests/harness/transcripts.py): there is no chance in it, and so no false alarm.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from murmurfl.app.engines.loopback import toml_document
from murmurfl.app.fleet.federation.keys_and_cards import Card, make_client, make_helper, roster_of
from murmurfl.app.nodes.node_app import client_of
from murmurfl.app.nodes.node_config import HelperConfig, NodeConfig
from murmurfl.clients.nodes.roster_files import read_client_key, write_roster
from murmurfl.clients.sums_helper import helper_app
from murmurfl.privacy import Masking, MemoryOpeningRecord, Opener, SQLiteLedger, protocol, read_ledger
from murmurfl.privacy.sums import opening_rule as opening

from tests.deployment.sums_attack import SESSIONS, SumsAttack
from tests.harness.schemas import write_samples
from tests.harness.transcripts import Stream, Transcript, opened_sets

CLIENTS, COLLUDERS, HONEST, RELEASES, BATCH, FEATURES = 7, 2, 3, 12, 2, 3
MU = 0.7
NAMES = [f"clinic-{i}" for i in range(CLIENTS)]
HELPERS = ["auditor", "ward"]


@pytest.fixture
def folder(tmp_path):
    """In memory where there is such a place: thousands of commits would wait for a disk, and nobody pulls a plug."""
    if not Path("/dev/shm").is_dir():
        yield tmp_path
        return
    with TemporaryDirectory(dir="/dev/shm", prefix="murmurfl-test-") as made:
        yield Path(made)


def federation(folder):
    """Operators' files of clients and helpers, with all they name."""
    cards = []
    for name in NAMES:
        (folder / name).mkdir(parents=True)
        cards.append(make_client(folder / name / "signing.key", name).card)
    for name in HELPERS:
        (folder / name).mkdir()
        cards.append(make_helper(folder / name / "helper.key", name, folder / name / "record.sqlite").card)
    roster = roster_of(cards)
    write_roster(folder / "roster.json", roster)
    pinned = {"roster": "../roster.json", "roster-digest": roster.digest}
    sums = {"trust": "secure-aggregation", "trust.min-honest": HONEST, "trust.min-cohort": HONEST + COLLUDERS}
    generator = np.random.Generator(np.random.Philox(key=3))
    clients, helpers = [], []
    for name in NAMES:
        count = len(SESSIONS) * RELEASES * BATCH
        features = generator.standard_normal((count, FEATURES)).astype(np.float32)
        samples = write_samples(folder / name, features, generator.integers(0, 2, count))
        budget = MU * len(SESSIONS) ** 0.5
        budgets = {"budget_mu": budget, "budget_local_mu": 2 * budget}
        SQLiteLedger.create(folder / name / "ledger.sqlite", **budgets, delta=1e-5)
        own = {"client": name, "ledger": "ledger.sqlite", **samples, "mu": MU}
        own |= {"clip-norm": 1.0, "batch-size": BATCH, "max-participations": RELEASES, "signing-key": "signing.key"}
        (folder / name / "node.toml").write_text(toml_document({**own, **sums, **pinned}))
        clients.append(NodeConfig.read(folder / name / "node.toml"))
    for name in HELPERS:
        own = {"helper": name, "record": "record.sqlite", "key": "helper.key"}
        (folder / name / "helper.toml").write_text(toml_document({**own, **pinned}))
        helpers.append(HelperConfig.read(folder / name / "helper.toml"))
    return clients, helpers, roster


def attacked(folder, requests, seed=1, opener=HelperConfig.opener):
    """A server's attack on a whole federation, and the plan of its clients."""
    configs, helpers, roster = federation(folder)
    clients = {config.client: client_of(config)[0] for config in configs}
    openers = {config.helper: helper_app(opener(config)) for config in helpers}
    colluders = {
        name: Masking(name, read_client_key(folder / name / "signing.key"), roster) for name in NAMES[-COLLUDERS:]
    }
    policy = configs[0].make_client().privatizer.policy
    attack = SumsAttack(clients, openers, policy, colluders, FEATURES, seed)
    attack.on(requests)
    return attack, policy.plan(2 * FEATURES + 2)


def worst(attack, plan, helper):
    """The largest mu of a sample by what a helper opened, were all other helpers and the colluders the server's."""
    honest = [
        [header for header in headers if header.client not in attack.colluders] for headers in attack.opened[helper]
    ]
    # The same set twice is the same sum: it is the helper's to see that it is the same to the bit.
    distinct = list({tuple(header.release_id for header in headers): headers for headers in honest}.values())
    made = [
        opening.Header.from_bytes(sealed.header)
        for releases in attack.pool.values()
        for of_one in releases.values()
        for sealed in of_one
    ]
    return Transcript(Stream.of_plan(plan), opened_sets(distinct, made)).worst()


def assert_nobody_is_seen_beyond_mu(attack, plan):
    for helper in attack.helpers:
        found = worst(attack, plan, helper)
        assert found.mu <= MU * (1 + 1e-9), f"what {helper} opened shows a sample of {found.client}: mu = {found.mu:g}"


def assert_everything_was_tried(attack, *further):
    refused = {protocol.OPENING_REFUSED, protocol.BAD_ACKNOWLEDGEMENT, protocol.EVALUATION_BLOCKED, *further}
    assert refused <= set(attack.codes)
    assert not set(attack.codes) & {protocol.INTERNAL_ERROR, protocol.LEDGER_UNUSABLE, protocol.NOT_CONFIGURED}


def test_hostile_requests_to_clients_and_helpers_show_nobody_beyond_mu(folder):
    attack, plan = attacked(folder, 300)
    assert_nobody_is_seen_beyond_mu(attack, plan)
    assert_everything_was_tried(attack)
    assert sum(map(len, attack.opened.values())) > 20


@pytest.mark.deployment
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_thousand_hostile_requests_get_all_there_is_to_get_and_no_more(folder, seed):
    attack, plan = attacked(folder, 1000, seed)
    assert_nobody_is_seen_beyond_mu(attack, plan)
    assert_everything_was_tried(attack, protocol.MALFORMED_REQUEST, protocol.CAP_REACHED)
    assert max(worst(attack, plan, helper).mu for helper in HELPERS) > 0.9 * MU
    for helper in HELPERS:
        assert len(attack.opened[helper]) > 10
    for name in NAMES:
        ledger = read_ledger(folder / name / "ledger.sqlite")
        assert 3 < len(ledger.sessions) <= len(SESSIONS)
        assert all(session.releases <= RELEASES for session in ledger.sessions)


class Forgetful(MemoryOpeningRecord):
    """A planted bug: a helper that was started again with an empty record, each time."""

    durable = True

    def last_opened(self, session, clients):
        return {}

    def commit(self, opened):
        pass


def forgetful(config):
    from murmurfl.clients.nodes.roster_files import read_roster

    return Opener(config.helper, config.keys(), read_roster(Path(config.roster), None), Forgetful())


@pytest.mark.deployment
def test_a_helper_that_forgets_is_caught(folder):
    attack, plan = attacked(folder, 600, opener=forgetful)
    with pytest.raises(AssertionError, match="shows a sample of"):
        assert_nobody_is_seen_beyond_mu(attack, plan)


@pytest.mark.deployment
def test_a_helper_that_lets_the_server_check_acknowledgements_is_caught(folder, monkeypatch):
    monkeypatch.setattr(opening, "_check_follows", lambda header, last: None)
    monkeypatch.setattr("murmurfl.privacy.sums.opening_file.check_forward", lambda page, opened: None)
    attack, plan = attacked(folder, 600)
    with pytest.raises(AssertionError, match="shows a sample of"):
        assert_nobody_is_seen_beyond_mu(attack, plan)


def test_a_helper_that_takes_any_cohort_is_caught(folder, monkeypatch):
    """One that believes the first release's word on how few there may be: a colluder's is modest."""
    monkeypatch.setattr(opening, "max", lambda headers, key: headers[0], raising=False)
    attack, plan = attacked(folder, 300)
    with pytest.raises(AssertionError, match="shows a sample of"):
        assert_nobody_is_seen_beyond_mu(attack, plan)


def test_cards_of_the_federation_are_those_of_its_keys(folder):
    federation(folder)
    card = Card.read(folder / NAMES[0] / "signing.card")
    assert card == Card.of_client(NAMES[0], read_client_key(folder / NAMES[0] / "signing.key"))
