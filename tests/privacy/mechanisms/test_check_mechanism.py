"""Mechanisms of other people's: what is registered does what its matrices say, and every lie is found."""

import numpy as np
import pytest
from murmurfl.privacy import (
    MECHANISMS,
    ConfigurationError,
    PrivacyPolicy,
    check_mechanism,
    make_mechanism,
    register_mechanism,
)
from murmurfl.privacy.mechanisms import CancellingNoise, Increment, IndependentNoise, noise_stands_alone


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("releases", [1, 2, 7])
def test_ours_pass(name, releases):
    check_mechanism(make_mechanism(name, releases))


class HalfTheNoise(IndependentNoise):
    name = "half"

    def increment(self, state, release, normals, scale=1.0):
        return Increment(0.5 * scale * normals, None, ())


class ForgetsToCancel(CancellingNoise):
    name = "forgets"

    def increment(self, state, release, normals, scale=1.0):
        increment = super().increment(state, release, normals, scale)
        return increment._replace(removed=None)


class LooksAhead(IndependentNoise):
    name = "ahead"

    def materialize(self, n=None):
        return super().materialize(n)[::-1]

    def decoder(self, n=None):
        return super().decoder(n)[:, ::-1]


class WrongDecoder(IndependentNoise):
    name = "decoder"

    def decoder(self, n=None):
        return np.eye(n or self.num_releases)


class UnderstatesItsRows(IndependentNoise):
    name = "rows"

    def row_std(self, release):
        return 0.1


class UnderstatesItsBound(IndependentNoise):
    name = "bound"

    def increment_bound(self, release):
        return 0.1


class SaysItRemovesTheLast(IndependentNoise):
    """Rounded by itself, a part of a row would make a message depend on more than the noisy prefixes."""

    name = "a-part"
    memory = "state"
    removes_last = True

    def decoder(self, n=None):
        return np.cumsum(self.inverse(n), axis=0)

    def inverse(self, n=None):
        return np.eye(self._check_n(n)) - 0.3 * np.eye(self._check_n(n), k=-1)

    def materialize(self, n=None):
        return np.linalg.inv(self.inverse(n))

    def increment(self, state, release, normals, scale=1.0):
        return Increment(normals * scale, 0.3 * state[0] if state else None, (normals * scale,))

    def row_std(self, release):
        return float(np.linalg.norm(self.decoder()[release - 1]))

    def _sensitivity(self, n, num_participations, min_separation):
        return None


class SaysItStandsAlone(CancellingNoise):
    """Under secure aggregation such releases are opened without looking at what they are built on."""

    name = "stands-alone"
    stands_alone = True


class UnderstatesItsSensitivity(IndependentNoise):
    """Right for one participation; where samples return it takes them for one."""

    name = "sensitivity"

    def _sensitivity(self, n, num_participations, min_separation):
        return 1.0


@pytest.mark.parametrize(
    "kind",
    [
        HalfTheNoise,
        ForgetsToCancel,
        LooksAhead,
        WrongDecoder,
        UnderstatesItsRows,
        UnderstatesItsBound,
        SaysItRemovesTheLast,
        SaysItStandsAlone,
        UnderstatesItsSensitivity,
    ],
)
def test_a_mechanism_that_is_not_what_it_says_is_not_registered(kind):
    with pytest.raises(ConfigurationError, match="Expected of mechanism"):
        register_mechanism(kind)
    assert kind.name not in MECHANISMS


def test_a_name_is_taken_once(monkeypatch):
    monkeypatch.setattr("murmurfl.privacy.mechanisms.MECHANISMS", MECHANISMS)
    with pytest.raises(ConfigurationError, match="not taken"):
        register_mechanism(IndependentNoise)

    class Mine(IndependentNoise):
        name = "mine"

    try:
        assert register_mechanism(Mine) is Mine
        assert isinstance(PrivacyPolicy(1.0, 1, 4, 1.0, mechanism="mine").make_mechanism(), Mine)
    finally:
        del MECHANISMS["mine"]


def test_only_a_mechanism_that_says_so_itself_stands_alone(monkeypatch):
    assert [name for name in MECHANISMS if noise_stands_alone(name)] == ["independent"]
    monkeypatch.setitem(MECHANISMS, "half", HalfTheNoise)
    assert not noise_stands_alone("half"), "its parent says so"
    assert not noise_stands_alone("none of them")
    summed = {"trust": "secure-aggregation", "min_honest": 2, "min_cohort": 3, "release_rule": "paper"}
    PrivacyPolicy(1.0, 1, 4, 1.0, mechanism="independent", **summed)
    with pytest.raises(ConfigurationError, match="acknowledged"):
        PrivacyPolicy(1.0, 1, 4, 1.0, mechanism="half", **summed)
