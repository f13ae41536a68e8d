"""docs/proofs/full-batches.md, step by step."""

import numpy as np
import pytest
from murmurfl.app.engines.start import run_cohort
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import MECHANISMS, PrivacyPolicy, make_mechanism
from murmurfl.strategies.full_batch import full_batch_start, full_batch_step

ROUNDS = 8
# Square encoders: the noise of a weighted sum is a' C^-1 Z.
SQUARE = [name for name in MECHANISMS if name != "tree"]


def weights():
    """What the last iterate may depend on its rounds by."""
    generator = np.random.Generator(np.random.Philox(key=5))
    k = np.arange(1.0, ROUNDS + 1)
    return {
        "equal": np.ones(ROUNDS),
        "rising": k,
        "an average's": ROUNDS * (ROUNDS + 1) - k * (k - 1),
        "of both signs": generator.normal(size=ROUNDS),
        "momentum": 1 - 0.7 ** k[::-1],
    }


def noise_and_cost(encoder, chosen, participations):
    """The noise in a weighted sum, and the sensitivity to the worst sample, both for unit Delta and unit noise."""
    noise = np.linalg.norm(np.linalg.solve(encoder.T, chosen))
    gram = np.abs(encoder.T @ encoder)
    return noise, np.sqrt(gram.sum() if participations > 1 else gram.diagonal().max())


@pytest.mark.parametrize("name", SQUARE)
def test_no_mechanism_beats_the_full_batch_bound(name):
    mechanism = make_mechanism(name, ROUNDS)
    encoder = mechanism.materialize()
    sensitivity = mechanism.sensitivity(ROUNDS, 1)  # what a client charges
    for label, chosen in weights().items():
        noise, _ = noise_and_cost(encoder, chosen, ROUNDS)
        assert noise * sensitivity >= np.abs(chosen).sum() * (1 - 1e-9), label


def test_no_encoder_found_by_climbing_goes_below_the_bound():
    """200 random encoders, each improved 300 times for the true worst sample: the bound holds and is nearly met."""
    generator = np.random.Generator(np.random.Philox(key=6))
    chosen = weights()["of both signs"][:4]
    signs = np.array(np.meshgrid(*[[-1, 1]] * 4)).reshape(4, -1)

    def error(encoder):
        return np.linalg.norm(np.linalg.solve(encoder.T, chosen)) * np.linalg.norm(encoder @ signs, axis=0).max()

    best = np.inf
    for _ in range(20):
        encoder = np.tril(generator.normal(size=(4, 4)))
        encoder[np.diag_indices(4)] = 1 + np.abs(encoder.diagonal())
        value = error(encoder)
        for step in np.geomspace(0.5, 0.01, 300):
            tried = encoder + step * np.tril(generator.normal(size=(4, 4)))
            if np.abs(tried.diagonal()).min() > 1e-3 and error(tried) < value:
                encoder, value = tried, error(tried)
        best = min(best, value)
    assert np.abs(chosen).sum() * (1 - 1e-9) <= best <= 1.1 * np.abs(chosen).sum()


def test_noise_for_one_participation_would_be_below_the_bound_and_is_noticed():
    """The planted bug: a stream charged as if each sample were in one release, and is in all."""
    for name in ("independent", "cancelling", "decay", "sqrt_toeplitz"):
        mechanism = make_mechanism(name, ROUNDS)
        noise, cost = noise_and_cost(mechanism.materialize(), np.ones(ROUNDS), 1)
        assert cost == pytest.approx(mechanism.sensitivity(1, ROUNDS))
        assert noise * cost < ROUNDS


@pytest.mark.parametrize("shares", ["uniform", "early", "linear", "late", "average"])
def test_independent_noise_by_shares_attains_the_bound(shares):
    mechanism = make_mechanism("independent", ROUNDS, shares=shares)
    entries = mechanism.materialize().diagonal()
    chosen = entries**2  # weights in proportion to the shares
    noise = np.linalg.norm(chosen / entries) * mechanism.sensitivity(ROUNDS, 1)
    assert noise == pytest.approx(chosen.sum())
    uniform = make_mechanism("independent", ROUNDS)
    price = np.linalg.norm(chosen) * uniform.sensitivity(ROUNDS, 1) / chosen.sum()
    assert price == pytest.approx(np.sqrt(ROUNDS * (chosen**2).sum()) / chosen.sum())
    assert price >= 1 - 1e-12


def response(momentum, average):
    """How much a gradient of each round moves what is published, by the strategy's own steps."""
    found = []
    for chosen in range(ROUNDS):
        state = full_batch_start(np.zeros(1))
        for s in range(ROUNDS):
            state = full_batch_step(state, np.full(1, float(s == chosen)), learning_rate=1.0, momentum=momentum)
        found.append(-float((state.average if average else state.w)[0]))
    return np.array(found)


def test_average_shares_are_the_strategys_round_weights():
    assert response(0.0, average=False) == pytest.approx(np.ones(ROUNDS))
    entries = make_mechanism("independent", ROUNDS, shares="average").materialize().diagonal()
    shares = entries**2 / (entries**2).sum()
    assert response(0.0, average=True) / response(0.0, average=True).sum() == pytest.approx(shares)
    nesterov = response(0.7, average=False)
    assert nesterov == pytest.approx((1 - 0.7 ** np.arange(ROUNDS, 0, -1.0)) / 0.3)


@pytest.mark.parametrize("releases", [2, 8, 20])
def test_one_pass_has_the_noise_of_as_many_full_batches(releases):
    samples, size = 40 * releases, 5
    shared = {"clip_norm": 1.5, "max_participations": releases, "mu": 0.5, "delta": 1e-5}
    one_pass = PrivacyPolicy(batch_size=samples // releases, mechanism="cancelling", **shared).plan(size)
    estimate = one_pass.noise_std * one_pass.mechanism.row_std(releases) / releases  # of q_T / T
    full = PrivacyPolicy(batch_size=1, mechanism="independent", batch_selection="full_batch", **shared).plan(size)
    assert estimate == pytest.approx(full.noise_std / samples, rel=1e-4)
    assert estimate == pytest.approx(2 * 1.5 * np.sqrt(releases) / (samples * 0.5), rel=1e-4)


def test_with_one_participation_correlated_noise_beats_independent_noise_on_streams():
    """Root mean square over all sums of prefix sums, by which mu^2 moves its model; and never below the bound."""
    sums = np.cumsum(np.tri(64), axis=0)

    def error(name):
        mechanism = make_mechanism(name, 64)
        noise = np.linalg.norm(np.linalg.solve(mechanism.materialize().T, sums.T), axis=0) * mechanism.sensitivity()
        assert (noise >= sums.max(axis=1) * (1 - 1e-9)).all()
        return np.sqrt((noise**2).mean())

    assert error("decay") < error("cancelling") < 0.5 * error("independent")


def trained(partition, **changes):
    config = RunConfig(
        **{
            "partition": partition,
            **({"classes_per_client": 1} if partition == "classes" else {}),
            "features": "soft-gradients",
            "strategy": "full-batch",
            "trust": "secure-aggregation",
            "epsilon": 4.0,
            "num_rounds": 4,
            "checkpoint": False,
            **changes,
        }
    )
    return np.concatenate([np.ravel(part) for part in run_cohort(config).parameters])


@pytest.mark.parametrize("partition", ["classes", "power-law", "dirichlet"])
def test_full_batches_of_all_clients_do_not_depend_on_how_samples_are_dealt(partition):
    """With the noise of the same keys, to far less than the noise."""
    alike, skewed = trained("iid"), trained(partition)
    noise = np.linalg.norm(alike - trained("iid", seed=2))
    assert np.linalg.norm(alike - skewed) < 1e-4 * noise


def test_where_some_clients_are_absent_it_shows_how_samples_are_dealt():
    absent = {"lost_replies": 0.3, "min_cohort": 3, "colluders": 1, "give_up_after": 0}
    alike, skewed = trained("iid", **absent), trained("classes", **absent)
    assert np.linalg.norm(alike - skewed) > 1e-2 * np.linalg.norm(alike)
