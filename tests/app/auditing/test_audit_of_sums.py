"""`murmurfl audit` under secure aggregation: both claims stand, and each bug that breaks one of them is found."""

import json
from dataclasses import replace

import pytest
from murmurfl.app.auditing.run_audit import audit_lines, audit_run, opens_without_acks
from murmurfl.app.commands.main import cli
from murmurfl.app.runs.experiment import Experiment, prepare
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import ConfigurationError
from murmurfl.privacy.sums import opening_rule as opening
from typer.testing import CliRunner

from tests.harness.errors import raises

RUNS = 300
"""On each of the data sets; honest runs of other seeds would be accused with probability at most 5 % for each claim."""
HONEST = 4
SUMS = {
    "trust": "secure-aggregation",
    "mu": 1.0,
    "num-clients": 5,
    "clients-per-round": 5,
    "batch-size": 16,
    "trust.min-cohort": 4,
    "trust.colluders": 0,
    "num-rounds": 3,
}
OTHERS = {
    "blt, lost replies": {"mechanism": "blt", "lost-replies": 0.1, "num-rounds": 8, "give-up-after": 0},
    "noisy sgd": {"strategy": "noisy-sgd"},
    "online": {"strategy": "online"},
    "samples that return": {"mechanism": "banded", "passes": 2, "batch-size": 80, "num-rounds": 0},
    "more honest than are simulated": {
        "num-clients": 12,
        "clients-per-round": 12,
        "trust.min-cohort": 10,
        "batch-size": 8,
    },
}


def results(audit):
    """What an audit measured, one after the other."""
    return [one for one in (audit.result, audit.local, audit.unacknowledged) if one is not None]


def audited(**changes):
    return audit_run(RunConfig.from_mapping({**SUMS, **changes}), RUNS)


@pytest.fixture
def a_share_of_a_share(monkeypatch):
    """Noise for mu_local = mu h in the place of mu sqrt(h)."""
    honest = Experiment.client

    def client(*arguments, **options):
        made = honest(*arguments, **options)
        made.privatizer.plan = replace(made.privatizer.plan, noise_std=made.privatizer.plan.noise_std / HONEST**0.5)
        return made

    monkeypatch.setattr(Experiment, "client", client)


@pytest.fixture
def acks_unchecked(monkeypatch):
    monkeypatch.setattr(opening, "_check_follows", lambda header, last: None)


@pytest.mark.long
def test_both_claims_stand_and_both_are_nearly_reached():
    audit = audited(mu=2.0, seed=2)
    assert [one.claimed_mu for one in results(audit)] == [pytest.approx(2.0), pytest.approx(4.0)]
    assert not audit.violated
    assert [one.estimated_mu for one in results(audit)] == [pytest.approx(2.0, rel=0.25), pytest.approx(4.0, rel=0.25)]
    text = "\n".join(audit_lines(audit))
    assert "server and all clients but 4 of each sum" in text
    assert "helpers refuse to open them" in text
    assert "The claim stands" in text


@pytest.mark.long
@pytest.mark.parametrize("name", OTHERS)
def test_claims_stand_with_other_methods_losses_and_samples_that_return(name):
    audit = audited(**OTHERS[name])
    assert not audit.violated, audit_lines(audit)
    assert audit.result.claimed_mu <= audit.local.claimed_mu
    assert audit.local.estimated_mu > 0.6 * audit.canary_mu


@pytest.mark.long
def test_noise_for_mu_h_on_each_client_is_found_out_by_both(a_share_of_a_share):
    result = CliRunner().invoke(cli, ["audit", "--json", "--runs", str(RUNS), *set_all({**SUMS, "num-rounds": 2})])
    assert result.exit_code == 3, result.output
    found = json.loads(result.stdout)
    assert (found["violated"], found["local"]["violated"], found["unacknowledged"]) == (True, True, None)


def set_all(settings):
    return [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]


@pytest.mark.long
def test_noise_that_is_missing_is_found_out(monkeypatch):
    honest = Experiment.client

    def client(*arguments, **options):
        made = honest(*arguments, **options)
        made.privatizer.plan = replace(made.privatizer.plan, noise_std=made.privatizer.plan.noise_std * 1e-6)
        return made

    monkeypatch.setattr(Experiment, "client", client)
    audit = audited()
    assert [one.violated for one in results(audit)] == [True, True]


def test_helpers_refuse_a_sum_with_a_client_that_was_told_nothing_arrived():
    assert not opens_without_acks(prepare(RunConfig.from_mapping(SUMS)))


def test_helpers_that_check_no_acks_open_it(acks_unchecked):
    assert opens_without_acks(prepare(RunConfig.from_mapping(SUMS)))


def test_helpers_that_open_nothing_at_all_are_no_reason_to_be_content(monkeypatch):
    def refuse(header, last):
        raise opening.OpeningRefusedError("nothing is opened here")

    monkeypatch.setattr(opening, "_check_follows", refuse)
    with raises(ConfigurationError, "refused", match="an honest server's sum"):
        opens_without_acks(prepare(RunConfig.from_mapping(SUMS)))


@pytest.mark.long
def test_acks_that_no_helper_checks_are_found_out(acks_unchecked):
    """The two claims of an honest server's sums still stand; that of a server that lies to the client does not."""
    audit = audited(**{"num-rounds": 8})
    assert [one.violated for one in results(audit)] == [False, False, True]
    text = "\n".join(audit_lines(audit))
    assert "HELPERS OPEN THEM" in text
    assert text.endswith("The claim is refuted.")
