"""A run configuration is checked before the first round, its trust and its sums among others."""

import inspect
import math
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest
from flwr.common.config import flatten_dict
from murmurfl.app.engines.start import run_cohort
from murmurfl.app.methods import METHODS
from murmurfl.app.methods.mu2_methods import Mu2Method
from murmurfl.app.planning.noise_plans import compare_mechanisms
from murmurfl.app.planning.plan_answers import base_of_run
from murmurfl.app.planning.plan_lines import plan_lines
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.runs.fit_arguments import DEALT
from murmurfl.app.settings.keyword_arguments import FitSettings, RunSettings
from murmurfl.app.settings.layers import (
    DEFAULT_RUN,
    FROM_DEFAULT_RUN,
    flower_config,
    parse_assignments,
    with_defaults,
)
from murmurfl.app.settings.run_config import RunConfig, run_keys
from murmurfl.privacy import ConfigurationError, PrivacyPolicy, SumAssumption
from murmurfl.privacy.mechanisms import MECHANISMS
from murmurfl.privacy.setting import by_key, flat, spelled_out

import murmurfl
from tests.harness.errors import raises

ROOT = Path(__file__).parents[3]


CONFIG = flatten_dict(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"])


def test_pyproject_states_every_key_with_its_default():
    defaults = {name: one.default for name, one in run_keys().items()}
    assert spelled_out({**defaults, **dict.fromkeys(DEFAULT_RUN, FROM_DEFAULT_RUN)}, run_keys()) == CONFIG
    assert flower_config(CONFIG, deployed=True) == flower_config({}) == RunConfig()
    assert flower_config({**CONFIG, "epsilon": 2.0}, deployed=True) == RunConfig(epsilon=2.0)


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"epsilon": 2},
        {"epsilon": 4.0, "num-clients": 50},
        {"mu": 2},
        {"mu": 0.0, "epsilon": 0.0},
        {"task.kind": "synthetic-logistic", "model.kind": "logistic", "num-clients": 10},
        {"strategy.kind": "trusted-sgd"},
        {"strategy.kind": "noisy-sgd", "clients-per-round": 25, "trust.kind": "untrusted-server"},
        {"strategy.kind": "mu2", "trust.kind": "", "partition.kind": "iid"},
        {"trust.min-cohort": 30, "trust.colluders": 2, "run-name": "default"},
        {"preset": "paper"},
    ],
)
def test_flwr_run_starts_the_run_of_murmurfl_run(overrides):
    """Flower merges the overrides into the table of pyproject.toml, which is all that the app sees."""
    settings = flat(overrides, run_keys())
    assert flower_config({**CONFIG, **overrides}) == RunConfig.from_mapping(with_defaults(settings))
    with raises(ConfigurationError, "conflict", "mu"):
        flower_config({**CONFIG, "mu": 1.0, "epsilon": 2.0})


def test_a_configuration_survives_the_way_through_flower():
    config = RunConfig(mu=2.0, num_clients=20, task="mnist", features="oriented-gradients", lost_replies=0.1)
    assert RunConfig.from_mapping(config.to_mapping()) == config


@pytest.mark.parametrize("key", [name for name, one in run_keys().items() if one.kind is str])
def test_a_text_that_is_not_unicode_is_refused_by_its_key(key):
    """Bytes of a command line that are no UTF-8, as Python reads them; pydantic ends on them in words of its own."""
    attribute = run_keys()[key].attribute
    for made in (lambda: RunConfig.from_mapping({key: "\udcff"}), lambda: RunConfig(**{attribute: "\udcff"})):
        with raises(ConfigurationError, "malformed", key):
            made()


def test_a_cap_that_no_array_is_made_for_is_refused_by_its_key():
    for cap in (2**31, 2**63, 2**100):
        with raises(ConfigurationError, "out-of-range", "max-participations"):
            RunConfig(strategy="full-batch", max_participations=cap)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"mu": -1}, "mu"),
        ({"mu": float("nan")}, "mu"),
        ({"mu": "4"}, "mu"),
        ({"mu": True}, "mu"),
        ({"delta": 1.0}, "delta"),
        ({"num-clients": 0}, "num-clients"),
        ({"num-clients": 2.5}, "num-clients"),
        ({"clients-per-round": 11}, "clients-per-round"),
        ({"batch-size": 0}, "batch-size"),
        ({"strategy": "fedavg"}, "strategy"),
        ({"mechanism.schedule": "linear"}, "schedule"),
        ({"sampling": "random"}, "sampling"),
        ({"download": "yes"}, "download"),
        ({"seed": -1}, "seed"),
        ({"lost-replies": 1.0}, "lost-replies"),
        ({"features": "oriented-gradients"}, "features"),
        ({"model": "mlp", "preset": "paper"}, "preset"),
        ({"strategy": "delayed-momentum", "strategy.release-rule": "paper"}, "release-rule"),
        ({"strategy": "isrl-dp", "mechanism": "blt"}, "mechanism"),
        ({"epsilon": -3.0}, "epsilon"),
        ({"epsilon": 3.0, "mu": 2.0}, "mu or epsilon"),
        ({"mechanism.bands": 3}, "banded"),
        ({"strategy": "noisy-sgd", "strategy.alpha": 0.2}, "tree-momentum"),
        ({"strategy": "mu22"}, "'mu2'"),
        ({"task": "minst"}, "'mnist'"),
        ({"model": "softmx"}, "'softmax'"),
        ({"mechanism": "bltt"}, "'blt'"),
        ({"task.samples": 100}, "synthetic"),
        ({"feature-bound": 2.0}, "logistic"),
        ({"mechanism": "blt", "mechanism.schedule": "paper"}, "cancelling"),
        ({"mu": [1.0]}, "mu"),
        ({"over-selection": 1e308}, "over-selection"),
    ],
)
def test_bad_settings_are_refused_in_one_line_naming_the_key(values, expected):
    with pytest.raises(ConfigurationError) as refusal:
        RunConfig.from_mapping(values)
    assert expected in str(refusal.value)
    assert "Expected" in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_clients": 2000, "clients_per_round": 1}, "num-clients"),
        ({"batch_size": 2000}, "batch-size"),
        ({"max_participations": 1000}, "max-participations"),
        ({"validation_samples": 5000}, "validation-samples"),
        ({"task": "mnist", "data_root": "/nowhere"}, "/nowhere"),
    ],
)
def test_what_the_data_do_not_allow_is_refused_before_the_first_round(changes, expected):
    with pytest.raises(ConfigurationError) as refusal:
        prepare(replace(RunConfig(), **changes))
    assert expected in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_value_of_another_type_is_refused_after_one_that_equals_it():
    assert RunConfig.from_mapping({"mu": 1, "num-clients": 12}).mu == 1.0
    for values in ({"mu": True, "num-clients": 12}, {"mu": 1, "num-clients": 12.0}):
        with pytest.raises(ConfigurationError):
            RunConfig.from_mapping(values)


def test_mnist_without_a_data_root_says_what_to_do(monkeypatch):
    monkeypatch.delenv("MURMURFL_DATA", raising=False)
    with raises(ConfigurationError, "missing", "data-root"):
        prepare(RunConfig(task="mnist"))


def test_assignments_are_read_as_their_keys_types():
    values = parse_assignments(["mu=2", "num-clients=20", "download=true", "mechanism.schedule=paper", "run-name=3"])
    assert values == {"mu": 2.0, "num-clients": 20, "download": True, "mechanism.schedule": "paper", "run-name": "3"}
    for bad in ("mu", "mu=two", "speed=3", "num-clients=2.5", "download=1"):
        with pytest.raises(ConfigurationError, match="Expected"):
            parse_assignments([bad])


NAME = f"{__name__}:"
SUMS = RunConfig(trust="secure-aggregation", num_clients=6, clients_per_round=6, mu=1.0)


class Mine(Mu2Method):
    """A method of one's own."""

    name = "mine"


@pytest.fixture(autouse=True)
def _importable(monkeypatch, request):
    monkeypatch.setitem(__import__("sys").modules, __name__, request.module)


def refused(**changes):
    with pytest.raises(ConfigurationError) as caught:
        replace(SUMS, **changes)
    return str(caught.value)


def test_four_fifths_of_a_round_make_a_sum_and_half_of_it_is_taken_to_be_honest():
    found = {m: RunConfig(trust="secure-aggregation", num_clients=m, clients_per_round=m) for m in (1, 2, 5, 10, 100)}
    assert {m: (one.sums.min_cohort, one.sums.min_honest) for m, one in found.items()} == {
        1: (1, 1),
        2: (2, 1),
        5: (4, 2),
        10: (8, 5),
        100: (80, 50),
    }
    assert replace(SUMS, min_cohort=4, colluders=1).sums.min_honest == 3
    assert (RunConfig().sums, RunConfig().secure) == (SumAssumption(1, 1), False)


@pytest.mark.parametrize(
    "key", ["helpers", "min_cohort", "colluders", "max_byzantine", "max_failed_aggregations", "max_noise"]
)
@pytest.mark.parametrize("trust", ["", "untrusted-server", "trusted-server"])
def test_a_key_that_no_sum_reads_is_left_at_its_default(key, trust):
    (name,) = by_key({key: 3}, run_keys())
    unset = (
        rf"Expected trust = secure-aggregation beside {re.escape(name)} = 3(?:\.0)?, got no trust: set it too, or leave"
    )
    with pytest.raises(
        ConfigurationError, match=r"which does not read it.*read by trust = secure-aggregation" if trust else unset
    ):
        RunConfig(**{key: 3, "trust": trust})


def test_what_wrong_sums_may_cost_is_the_operators_to_say():
    bounds = {"max_byzantine": 1, "max_failed_aggregations": 5, "max_noise": 2.0}
    for config in (replace(SUMS, **bounds), SUMS):
        option = prepare(config).strategy(deployed=True).aggregator.option
        assert {name: getattr(option, name) == value for name, value in bounds.items()} == dict.fromkeys(
            bounds, config != SUMS
        )
    for name, wrong in (("max_byzantine", 4), ("max_byzantine", 0), ("max_failed_aggregations", 0), ("max_noise", 1.0)):
        assert f"Expected {next(iter(by_key({name: wrong}, run_keys())))} to be " in refused(**{name: wrong})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"min_cohort": 7}, "min-cohort to be at most clients-per-round = 6"),
        ({"colluders": 5}, "below the 5 releases of the smallest sum"),
        (
            {"min_cohort": 2},
            "Expected trust.colluders beside trust.min-cohort = 2, which is below the 3 honest clients",
        ),
        ({"helpers": 0}, "helpers to be an integer >= 1"),
        ({"helpers": 17}, "helpers to be an integer >= 1 and <= 16"),
        ({"num_clients": 3000, "clients_per_round": 2049}, "at most 2048 clients a round"),
        ({"num_clients": 3000, "clients_per_round": 2000, "over_selection": 1.1}, "or sums could wrap, got 2200"),
        ({"num_clients": 2**20 + 1}, "at most 1048576"),
        ({"release_rule": "paper"}, "acknowledged"),
    ],
)
def test_numbers_with_which_nothing_could_be_opened_are_refused(changes, said):
    if "release_rule" in changes:
        with raises(ConfigurationError, "conflict", "release_rule"):
            prepare(replace(SUMS, **changes)).policy()
    else:
        assert said in refused(**changes)


def test_the_bound_is_on_the_clients_of_one_sum_and_not_on_those_of_a_federation():
    """Of 60 clients a round a sum has 60, whoever they are; 2,048 may be in it."""
    for asked in (60, 2048):
        assert (
            replace(SUMS, num_clients=10_000, clients_per_round=asked, min_cohort=40, colluders=0).sums.min_honest == 40
        )


@pytest.mark.parametrize(("clients", "passes", "refused"), [(2048, 2, False), (2049, 2, True), (2049, 1, False)])
def test_more_clients_than_a_sum_may_have_are_refused_where_samples_return_in_a_chain(clients, passes, refused):
    """Each time a sample returns it may meet 2,047 others, and a plan pays for the normals of 2,048 in all."""
    data = {"task": "synthetic", "synthetic_samples": 2 * clients, "synthetic_features": 4, "batch_size": 1}
    config = RunConfig(trust="secure-aggregation", strategy="online", passes=passes, num_clients=clients, **data)
    if refused:
        with raises(
            ConfigurationError,
            "out-of-range",
            "clients",
            match=f"at most 2048 clients .* samples return .* got {clients}",
        ):
            prepare(config).policy()
    else:
        assert prepare(config).policy().participations == passes
    assert prepare(replace(config, trust="")).policy().participations == passes


def test_a_method_that_needs_more_than_sums_refuses_them_and_says_who_does_not():
    serving = {name for name, method in METHODS.items() if "secure-aggregation" in method.trusts}
    assert serving == {"auto", "full-batch", "mu2", "noisy-sgd", "one-shot", "online"}
    able = [name for name in METHODS if name in serving]
    for name in METHODS:
        if name in serving:
            assert replace(SUMS, strategy=name).trust_model == "secure-aggregation"
            continue
        public = {"task": "synthetic-logistic", "model": "logistic"} if name == "shuffled" else {}
        assert f"served by {', '.join(able)}" in refused(strategy=name, **public)


def test_a_trusted_server_is_asked_for_by_name_or_by_trust():
    assert RunConfig(trust="trusted-server").strategy == "trusted-mu2"
    for name, method in METHODS.items():
        if method.trusted:
            assert RunConfig(strategy=name, trust="trusted-server").strategy == name
            with raises(ConfigurationError, "conflict", "trust", match="trust to be left out or 'trusted-server'"):
                RunConfig(strategy=name, trust="untrusted-server")
    with raises(ConfigurationError, "conflict", "trust", match="served by trusted-mu2"):
        RunConfig(strategy="online", trust="trusted-server")
    again = RunConfig.from_mapping(RunConfig(trust="trusted-server").to_mapping())
    assert again.strategy == "trusted-mu2"


def test_a_method_of_ones_own_is_not_taken_for_its_parents_sister():
    """It may do anything else, and would be replaced by a method that its author never saw."""
    with raises(ConfigurationError, "conflict", "trust", match="trust to be"):
        RunConfig(strategy=NAME + "Mine", trust="trusted-server")
    assert RunConfig(strategy=NAME + "Mine").trust_model == "untrusted-server"
    assert run_cohort(replace(SUMS, strategy=NAME + "Mine", num_rounds=2)).mu_local == pytest.approx(math.sqrt(3))


@pytest.mark.parametrize("partition", ["dirichlet", "power-law"])
def test_clients_that_share_sums_have_one_policy_whatever_their_sizes(partition):
    config = replace(SUMS, partition=partition, seed=2)
    experiment = prepare(config)
    assert len(set(experiment.sizes)) > 1
    policies = {experiment.policy(client) for client in range(6)}
    assert len(policies) == 1
    (policy,) = policies
    assert policy.max_participations == experiment.num_rounds > min(experiment.sizes) // config.batch_size
    assert (policy.trust, policy.sums.min_honest, policy.sums.min_cohort) == ("secure-aggregation", 3, 5)
    assert "small ones send fewer samples in each release" in run_cohort(config).guarantee.sentence
    plain = prepare(replace(config, trust=""))
    assert len({plain.policy(client) for client in range(6)}) > 1


def test_samples_that_return_come_back_in_one_order_everywhere():
    experiment = prepare(replace(SUMS, partition="dirichlet", seed=2, passes=2, mechanism="banded"))
    (policy,) = {experiment.policy(client) for client in range(6)}
    assert policy.min_separation > min(experiment.sizes) // experiment.config.batch_size
    assert policy.max_participations == 2 * policy.min_separation == experiment.num_rounds
    assert policy.plan(experiment.model.num_parameters).mu <= 1.0 + 1e-9


@pytest.mark.parametrize("settings", [{}, {"strategy": "noisy-sgd"}, {"preset": "paper"}])
def test_steps_are_for_the_noise_that_the_sum_has(settings):
    """That of mu sqrt(h) on each client."""
    sums = prepare(replace(SUMS, **settings))
    plain = prepare(RunConfig(num_clients=6, clients_per_round=6, mu=math.sqrt(3), **settings))
    assert sums.values == plain.values
    (one,), (other,) = sums.plans(), plain.plans()[:1]
    assert one.noise_std == pytest.approx(other.noise_std, rel=1e-6)


def test_both_figures_are_those_of_the_clients_plan():
    experiment = prepare(SUMS)
    assert experiment.loss().mu == pytest.approx(1.0)
    assert experiment.loss().worst_case.mu == pytest.approx(math.sqrt(3))
    assert not prepare(replace(SUMS, trust="")).loss().conditional
    assert prepare(replace(SUMS, mechanism="none")).loss().worst_case.mu == math.inf


def test_a_simulations_roster_has_its_clients_and_helpers_and_only_sums_have_one():
    experiment = prepare(SUMS)
    assert list(experiment.roster.clients) == [str(i) for i in range(6)]
    assert experiment.roster.helper_names == ("helper-0", "helper-1")
    assert experiment.masking(3).roster.digest == experiment.roster.digest
    assert prepare(replace(SUMS, seed=2)).roster.digest != experiment.roster.digest
    with raises(ConfigurationError, "conflict", "trust"):
        _ = prepare(RunConfig()).roster


def test_a_policy_for_real_clients_takes_only_a_trust_that_the_method_serves():
    fields = {"clip_norm": 1.0, "batch_size": 4, "max_participations": 8, "mu": 1.0}
    policy = METHODS["mu2"].client_policy(trust="secure-aggregation", sums=SumAssumption(3, 4), **fields)
    assert isinstance(policy, PrivacyPolicy)
    assert policy.trust == "secure-aggregation"
    assert METHODS["mu2"].client_policy(**fields).trust == "untrusted-server"
    with raises(ConfigurationError, "conflict", "trust", match="trust to be one of 'untrusted-server'"):
        METHODS["isrl-dp"].client_policy(trust="secure-aggregation", **fields)


def test_so_many_losses_that_most_rounds_stay_closed_are_refused_with_what_would_do():
    said = refused(num_clients=10, clients_per_round=10, lost_replies=0.3)
    assert "lost-replies may be at most 0.2, or trust.min-cohort at most 7" in said
    assert replace(SUMS, num_clients=10, clients_per_round=10, lost_replies=0.2).sums.min_cohort == 8
    assert replace(SUMS, num_clients=10, clients_per_round=10, lost_replies=0.3, min_cohort=7).sums.min_cohort == 7


LOSSY = replace(SUMS, num_clients=10, clients_per_round=10, lost_replies=0.2, min_cohort=7, colluders=2)


def test_which_rounds_stay_closed_is_known_before_the_first_one():
    config = replace(LOSSY, give_up_after=0)
    result = run_cohort(config)
    history = result.strategy.history
    left = result.experiment.replies_left
    assert [report.asked - report.lost for report in history] == left
    assert [bool(report.closed) for report in history] == [replies < 7 for replies in left]
    assert 0 < sum(bool(report.closed) for report in history) < len(history)
    assert all(report.unopened == replies for report, replies in zip(history, left, strict=True) if report.closed)


def test_a_run_that_would_be_given_up_is_refused_with_the_largest_cohort_that_would_not():
    for seed in range(40):
        config = replace(LOSSY, seed=seed, min_cohort=8)
        try:
            prepare(config).check_rounds()
        except ConfigurationError as error:
            possible = int(re.search(r"min-cohort may be at most (\d+)", str(error))[1])
            break
    assert possible < 8
    with raises(
        ConfigurationError,
        "conflict",
        "trust.min-cohort",
        match=r"3 rounds in a row with fewer than trust\.min-cohort = 8",
    ):
        run_cohort(config)
    assert run_cohort(replace(config, min_cohort=possible, colluders=0)).accuracy > 0.1
    with raises(ConfigurationError, "conflict", "trust.min-cohort", match="3 rounds in a row"):
        prepare(replace(config, min_cohort=possible + 1, colluders=0)).check_rounds()
    prepare(replace(config, give_up_after=0)).check_rounds()


@pytest.mark.parametrize(("colluders", "warned"), [(4, True), (3, False)])
def test_a_run_that_takes_one_client_of_a_sum_to_be_honest_is_told_that_masks_save_no_noise(
    colluders, warned, monkeypatch
):
    said = []
    monkeypatch.setattr(
        "murmurfl.app.runs.training_run.log", lambda level, text, *arguments: said.append(text % arguments)
    )
    config = replace(SUMS, min_cohort=5, colluders=colluders, num_rounds=1)
    run_cohort(config)
    assert any("saves no noise here" in one for one in said) is warned
    after = plan_lines(compare_mechanisms(base_of_run(config)))[1]
    assert any("saves no noise here" in one for one in after) is warned


def test_the_warning_says_how_many_rounds_stay_closed(caplog, monkeypatch):
    said = []
    monkeypatch.setattr(
        "murmurfl.app.runs.training_run.log", lambda level, text, *arguments: said.append(text % arguments)
    )
    left = run_cohort(replace(LOSSY, give_up_after=0)).experiment.replies_left
    assert any(
        f"{int(np.sum(np.array(left) < 7))} of {len(left)} rounds will have fewer replies" in one for one in said
    )


def test_more_helpers_than_a_roster_has_room_for_are_refused_before_anything_else():
    assert len(prepare(replace(SUMS, helpers=16)).roster.helpers) == 16
    assert "helpers" in refused(helpers=17)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("wait-for", "quorum"),
        ("ask", "over-selection"),
        ("run-dry", "allow-exhaustion"),
        ("bands", "mechanism.bands"),
        ("privacy.mu", "mu"),
        ("min-cohort", "trust.min-cohort"),
        ("culprits", "trust.max-byzantine"),
        ("most-skipped", "trust.max-failed-aggregations"),
        ("most-noise", "trust.max-noise"),
        ("private-evaluation", "evaluation.share"),
        ("diameter", "strategy.projection-radius', half of what it was"),
        ("secret-order", "batch-selection', `shuffled` for true"),
    ],
)
def test_keys_under_their_names_of_before_are_refused_with_the_new_one(before, now):
    with pytest.raises(ConfigurationError, match=f"got '{before}'; it is called '{now}"):
        RunConfig.from_mapping({before: 1.0})


def test_a_choice_with_options_is_a_table_or_dotted_keys():
    expected = RunConfig(mechanism="banded", bands=8)
    for values in (
        {"mechanism": {"kind": "banded", "bands": 8}},
        {"mechanism.kind": "banded", "mechanism.bands": 8},
        {"mechanism": "banded", "mechanism.bands": 8},
        parse_assignments(["mechanism.kind=banded", "mechanism.bands=8"]),
    ):
        assert RunConfig.from_mapping(values) == expected


def test_fewest_connected_clients_are_no_more_than_there_are():
    with raises(
        ConfigurationError,
        "out-of-range",
        "min-available-nodes",
        match="min-available-nodes to be at most num-clients = 10, got 11",
    ):
        RunConfig(min_available_nodes=11)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("cancelling", {"schedule": "harmonic"}),
        ("decay", {"decay": 0.3, "workload": "prefix-sum"}),
        ("tree", {"decoder": "dyadic"}),
        ("banded", {"bands": 3}),
        ("bisr", {"bands": 3}),
        ("blt", {"buffers": 2}),
        ("optimal", {"workload": "mu2"}),
    ],
)
def test_mechanism_reads_the_options_of_its_kind_and_no_others(kind, options):
    every = {name: one for name, one in run_keys().items() if one.table == "mechanism" and one.kinds}
    assert {one.attribute for one in every.values() if one.read_with(kind)} == set(options)
    config = RunConfig(mechanism=kind, **options)
    assert (config.mechanism.kind, config.mechanism.options()) == (kind, options)
    assert RunConfig.from_mapping(config.to_mapping()) == config
    values = {"schedule": "paper", "decay": 0.5, "workload": "mu2", "decoder": "dyadic", "bands": 2, "buffers": 2}
    for name, one in every.items():
        if one.attribute not in options:
            with raises(ConfigurationError, "conflict", name):
                RunConfig(mechanism=kind, **{one.attribute: values[one.attribute]})


def test_declared_options_are_those_that_the_mechanisms_take():
    options = {one.attribute for one in run_keys().values() if one.table == "mechanism" and one.kinds}
    for name, kind in MECHANISMS.items():
        taken = options & set(inspect.signature(kind.__init__).parameters)
        assert taken == {one.attribute for one in run_keys().values() if one.kinds and name in one.kinds}, name


def test_replaced_option_keeps_the_others_of_its_kind():
    config = RunConfig(mechanism="decay", decay=0.3, workload="mu2")
    assert replace(config, decay=0.4).mechanism.options() == {"decay": 0.4, "workload": "mu2"}
    assert replace(config, decay=0.0).mechanism.options() == {"workload": "mu2"}
    assert replace(config, mechanism="tree").mechanism.options() == {}


def test_keyword_arguments_for_type_checkers_are_the_declared_keys():
    declared = {one.attribute: object if one.names else one.kind for one in run_keys().values()}
    assert get_type_hints(RunSettings) == declared
    own = {*inspect.signature(murmurfl.fit).parameters, *(run_keys()[name].attribute for name in DEALT)}
    assert get_type_hints(FitSettings) == {name: kind for name, kind in declared.items() if name not in own}
