"""The permit of a run: which parts it must name, which session each is in, and that no result has it."""

import time

from murmurfl.app.methods.queries import check_permit
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.runs.training_run import check_deployed
from murmurfl.app.settings.catalogue import key_toml
from murmurfl.app.settings.run_config import RunConfig, run_keys
from murmurfl.privacy import ConfigurationError
from murmurfl.privacy.permits import OwnerKey
from murmurfl.privacy.setting import by_key

from tests.harness.errors import raises

OWNER = OwnerKey(bytes(range(32)))


def permit(*sessions):
    return OWNER.permit(sessions, not_before=0, until=int(time.time()) + 600)


def configuration(text, **changes):
    settings = by_key(changes, run_keys())
    return RunConfig.from_mapping({"num-clients": 2, "clients-per-round": 2, "permit": text, **settings})


def test_real_runs_use_the_permits_session_and_simulations_their_own():
    experiment = prepare(configuration(permit("night")))
    deployed, simulated = experiment.strategy(deployed=True), experiment.strategy()
    assert deployed.session == "night"
    assert dict(deployed.clients.entries) == {"permit": experiment.config.permit}
    assert simulated.session == experiment.session
    assert not simulated.clients.entries
    assert prepare(configuration("")).strategy(deployed=True).session not in ("night", experiment.session)


def test_each_part_has_a_session_of_its_own_that_the_permit_must_name():
    parts = {"private_evaluation": 0.1, "centring": "private"}
    config = configuration(permit("night", "nightmean", "nightevaluation"), **parts)
    check_deployed(config)
    experiment = prepare(config)
    strategies = [experiment.strategy, *[query.strategy for query in experiment.queries]]
    assert [make(deployed=True).session for make in strategies] == ["night", "nightmean", "nightevaluation"]
    with raises(ConfigurationError, "missing", "permit", match="evaluation.*--session night --mean"):
        check_deployed(configuration(permit("night", "nightmean"), **parts))
    check_permit(configuration(permit("night")))
    check_permit(configuration("", **parts))
    with raises(ConfigurationError, "malformed", match="Expected a permit, one line"):
        check_deployed(configuration("night.permit"))


def test_what_is_written_down_has_the_digest_of_a_permit_alone():
    config = configuration(permit("night"))
    assert config.shown().keys() == config.to_mapping().keys()
    assert config.shown()["permit"].startswith("sha256:")
    assert config.permit not in str(config.shown())
    assert config.shown() != configuration(permit("other")).shown()
    assert RunConfig().shown() == RunConfig().to_mapping()
    assert 'permit = ""' in key_toml()
