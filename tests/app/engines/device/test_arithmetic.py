"""Releases of a block on a device: prefix sums, exact in integers, whatever is lost and acknowledged."""

import numpy as np
import pytest
import torch
from murmurfl.app.engines.device.device_block import DeviceBlocks
from murmurfl.app.engines.device.device_gradients import DeviceRows, clipped_counts
from murmurfl.app.engines.device.device_noise import standard_normal_rows
from murmurfl.privacy import ConfigurationError, PrivacyPolicy, PrivateMachine, SimulatedKeys, row_key
from murmurfl.privacy.ledger.ledger_records import BlockLedger
from murmurfl.privacy.machine.clipping import DenseContributions
from murmurfl.privacy.machine.machine_block import MachineBlock

CPU = torch.device("cpu")
D, MACHINES, RELEASES = 23, 4, 7


def keys(row):
    return SimulatedKeys(1, str(row))


def block_of(mechanism, arithmetic=None):
    policy = PrivacyPolicy(
        mu=1.0, clip_norm=1.0, batch_size=1, max_participations=RELEASES, mechanism=mechanism, noise_quality="fast"
    )
    ledgers = BlockLedger(MACHINES)
    machine = PrivateMachine(policy, D, RELEASES, ledgers.ledger(0), keys(0))
    return MachineBlock(machine, ledgers, np.full(MACHINES, RELEASES), keys, arithmetic=arithmetic)


def contributions(release):
    generator = np.random.Generator(np.random.Philox(key=release))
    return torch.tensor(generator.normal(size=(MACHINES, D)))


def made_of(block, mechanism_acks):
    """Every release of a block, and what was acknowledged before each, by a list of acks for each release."""
    made = []
    for k, acks in enumerate(mechanism_acks, start=1):
        answer = block.release("s", range(MACHINES), acks, lambda *_, k=k: DeviceRows(contributions(k)))
        assert not answer.refused
        made.append(np.stack([block.made(answer, i, i).counts for i in range(MACHINES)]))
    return made


def last_row(block, release):
    """What is left of cancelling noise, as NumPy rounds it."""
    plan = block.plan
    rows = [row_key(keys(i).secret_key, keys(i).nonce("s", release)) for i in range(MACHINES)]
    normals = standard_normal_rows(rows, D, CPU).double().numpy()
    return plan.grid.counts(normals * (plan.mechanism.sigmas[release - 1] * plan.noise_std))


def contributed(block, releases):
    policy, grid = block.policy, block.plan.grid
    return sum(clipped_counts(DeviceRows(contributions(k)), policy.bound, grid, 1).numpy() for k in releases)


# What each machine was told before each of its releases: nothing is lost; each machine loses others.
ALL = [[k] * MACHINES for k in range(RELEASES)]
LOST = [
    [0, 0, 0, 0],
    [1, 0, 0, 0],
    [2, 2, 0, 0],
    [2, 2, 3, 0],
    [2, 4, 3, 1],
    [5, 5, 3, 1],
    [5, 6, 6, 1],
]


@pytest.mark.parametrize("own_rows", [False, True])
@pytest.mark.parametrize("limit", [0, 1 << 20])
@pytest.mark.parametrize("acks", [ALL, LOST], ids=["all arrive", "some are lost"])
def test_the_sum_of_what_was_aggregated_is_all_contributions_and_the_last_noise(acks, limit, own_rows):
    """Exactly, in integers: what is lost costs delay and leaves no noise behind."""
    block = block_of("cancelling", DeviceBlocks(CPU, limit, own_rows=own_rows))
    made = made_of(block, acks)
    for i in range(MACHINES):
        chain = {*(told[i] for told in acks), RELEASES} - {0}
        total = sum(made[k - 1][i] for k in chain)
        assert (total == (contributed(block, range(1, RELEASES + 1)) + last_row(block, RELEASES))[i]).all()


def test_a_machine_that_forgets_what_was_lost_is_caught():
    """The sibling: sums of single increments lack the lost ones."""
    made = made_of(block_of("cancelling", DeviceBlocks(CPU)), ALL)
    whole = contributed(block_of("cancelling"), range(1, RELEASES + 1)) + last_row(block_of("cancelling"), RELEASES)
    assert (sum(made[k - 1][3] for k in (1, RELEASES)) != whole[3]).any()


@pytest.mark.parametrize("mechanism", ["decay", "bisr", "independent"])
def test_sums_of_releases_do_not_depend_on_what_was_lost(mechanism):
    """For mechanisms that never take all noise out: the noise of the last prefix sum is the same."""
    sums = []
    for acks in (ALL, LOST):
        made = made_of(block_of(mechanism, DeviceBlocks(CPU)), acks)
        chains = [{*(told[i] for told in acks), RELEASES} - {0} for i in range(MACHINES)]
        sums.append([sum(made[k - 1][i] for k in chain) for i, chain in enumerate(chains)])
    assert (np.stack(sums[0]) == np.stack(sums[1])).all()


def test_the_noise_is_remembered_by_the_same_nonces_as_numpys():
    for mechanism in ("cancelling", "decay", "bisr", "independent", "none"):
        theirs, ours = block_of(mechanism), block_of(mechanism, DeviceBlocks(CPU))
        for k in range(1, 4):
            answers = [
                block.release("s", range(MACHINES), [k - 1] * MACHINES, lambda *_, made=made: made)
                for block, made in (
                    (theirs, DenseContributions(contributions(k).numpy())),
                    (ours, DeviceRows(contributions(k))),
                )
            ]
            assert answers[0].streams.nonces == answers[1].streams.nonces
            assert answers[0].streams.noise_state == answers[1].streams.noise_state


def test_sums_are_those_of_the_releases():
    for own_rows in (False, True):
        block = block_of("cancelling", DeviceBlocks(CPU, own_rows=own_rows))
        answer = block.release("s", range(MACHINES), [0] * MACHINES, lambda *_: DeviceRows(contributions(1)))
        each = np.stack([block.made(answer, i, i).counts for i in range(MACHINES)])
        for places in ([0, 1, 2, 3], [2], [3, 1]):
            total = block.total(answer, places)
            assert isinstance(total, np.ndarray)
            assert (total == each[places].sum(axis=0)).all()


def test_contributions_that_are_not_on_the_device_are_refused():
    block = block_of("cancelling", DeviceBlocks(CPU))
    rows = DenseContributions(np.zeros((MACHINES, D)))
    with pytest.raises(ConfigurationError, match="Expected contributions on the device, got DenseContributions"):
        block.release("s", range(MACHINES), [0] * MACHINES, lambda *_: rows)
    assert block.release("s", [0], [0], lambda *_: DeviceRows(contributions(1)[:1])).streams.release.tolist() == [1]
