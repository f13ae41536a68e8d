"""A real client with a sample that cannot be loaded or computed: what leaves is a release like any other.

Whether a sample fails may depend on the sample, so a server must see nothing of it: no error, no refusal, and a release
that differs from the one without the bad sample by no more than replacing any one sample is charged.
"""

import threading

import numpy as np
import pytest
from flwr.app import ConfigRecord, RecordDict
from murmurfl.clients import (
    DelayedMomentumClient,
    FullBatchClient,
    IsrlDpClient,
    Mu2Client,
    NoisySGDClient,
    OnlineClient,
    ShuffledClient,
    numpy_client_app,
)
from murmurfl.clients.adapters.per_sample_gradients import CarefulGradients
from murmurfl.privacy import PrivacyPolicy, ShuffledPolicy, SimulatedKeys, protocol
from murmurfl.privacy.errors import InvalidRecordError, is_interrupt

from tests.harness.clients import DurableLedger, FixedNonces, training_config
from tests.harness.grid import ask, ask_real_node

D, BATCH, COUNT, BAD, CLIP = 3, 8, 32, 2, 1.0
SECRET = "patient 4711"


class PanicError(BaseException):
    """What an extension written in Rust raises when it panics."""


class Loader:
    """Samples that are all the same, but for one that is special."""

    def __init__(self, special=None):
        self.special = special

    def __len__(self):
        return COUNT

    def __getitem__(self, chosen):
        rows = np.zeros((COUNT, D))
        rows[:, 0] = 1.0
        numbers = np.arange(COUNT)[chosen]
        if self.special is not None and BAD in numbers:
            return self.special(rows[chosen])
        return rows[chosen]


class StandIns(Loader):
    """Such samples in batches in which others stand in for those that do not fit."""

    stands_in = True
    fits = np.arange(COUNT) % 5 != 3

    def __getitem__(self, chosen):
        if chosen.stop - chosen.start == 1 and not self.fits[chosen][0]:
            raise InvalidRecordError("a record that does not fit")
        return super().__getitem__(chosen)


class Linear:
    """A linear loss, whose gradient is the sample; for a row that begins with 777 it is what is planted."""

    shapes, smoothness, gradient_bound, clips_contractively = ((D,),), 1e-3, 2.0, True

    def __init__(self, planted=None):
        self.planted = planted

    def __call__(self, parameters, batch):
        if self.planted is not None and (batch[:, 0] == 777).any():
            return self.planted(batch)
        return np.asarray(batch, dtype=np.float64)


def raising(error):
    def fail(rows):
        raise error

    return fail


LOADERS = {
    "a file that is gone": raising(OSError(SECRET)),
    "a value that is none": raising(ValueError(SECRET)),
    "no memory": raising(MemoryError()),
    "an exit": raising(SystemExit(SECRET)),
    "a panic": raising(PanicError(SECRET)),
    "a closed generator": raising(GeneratorExit()),
    "two rows for one": lambda rows: np.concatenate([rows, rows]),
    "no row": lambda rows: rows[:0],
    "a row of another size": lambda rows: np.ones((len(rows), D + 1)),
    "words": lambda rows: np.full(rows.shape, SECRET),
    "objects": lambda rows: np.full(rows.shape, None),
    "nothing": lambda rows: None,
    "not a number": lambda rows: np.full(rows.shape, np.nan),
}
GRADIENTS = {
    "an exception": raising(ZeroDivisionError(SECRET)),
    "a panic": raising(PanicError(SECRET)),
    "one number": lambda batch: np.full((1, 1), 1e6),
    "a bare number": lambda batch: 1e6,
    "too many values": lambda batch: np.ones((1, D + 1)),
    "too many rows": lambda batch: np.ones((2, D)),
    "no batch axis": lambda batch: np.ones(D),
    "words": lambda batch: np.full((1, D), SECRET),
    "a set": lambda batch: {SECRET},
    "nothing": lambda batch: None,
    "infinities": lambda batch: np.full((1, D), np.inf),
}


def policy(**changes):
    return PrivacyPolicy(**{"clip_norm": CLIP, "batch_size": BATCH, "max_participations": 2, "mu": 1.0, **changes})


def shuffled(**changes):
    return ShuffledPolicy(clip_norm=CLIP, batch_size=COUNT, max_participations=2, mu=1.0, **changes)


PUBLIC = np.ones((COUNT, D)) / 2
ALL = {"batch_selection": "full_batch", "batch_size": 1, "mechanism": "independent", "release_rule": "paper"}
KINDS = {
    "mu2": (Mu2Client, policy(), {}),
    "full-batch": (FullBatchClient, policy(**ALL), {}),
    "noisy-sgd": (NoisySGDClient, policy(mechanism="independent"), {}),
    "isrl-dp": (
        IsrlDpClient,
        policy(mechanism="independent", sample_participations=2, min_separation=1, release_rule="paper"),
        {},
    ),
    "delayed-momentum": (DelayedMomentumClient, policy(), {}),
    "online, update": (OnlineClient, policy(clip_unit="update"), {"learning_rate": 0.5}),
    "online, contractive": (OnlineClient, policy(clip_unit="contractive"), {"learning_rate": 0.5}),
    "shuffled": (ShuffledClient, shuffled(), {"learning_rate": 0.5, "order": "IG"}),
    "shuffled, amplified": (
        ShuffledClient,
        shuffled(private_steps=8, public_steps=24),
        {"learning_rate": 0.5, "order": "IG", "public": PUBLIC},
    ),
}


def replies(kind, loader=None, gradient=None, keys=None):
    """Both replies of a client's session, and how far a replaced sample may move the first of them."""
    make, terms, options = KINDS[kind]
    special = loader
    if gradient is not None:

        def special(rows):
            marked = rows.copy()
            marked[:, 0] = 777
            return marked

    client = make(Linear(gradient), Loader(special), terms, DurableLedger(), keys or FixedNonces(), name="7", **options)
    made = []
    for t in (1, 2):
        ack = t - 1 if client.privatizer.policy.release_rule == "acknowledged" else 0
        made.append(client.fit([np.zeros(D)] * client.query_points, training_config(t, ack)))
    charge = 2.0 * CLIP * 1.0001 if make is ShuffledClient else client.privatizer.plan.sensitivity
    return made, charge


def check(kind, **planted):
    honest, charge = replies(kind)
    spoilt, _ = replies(kind, **planted)
    for (arrays, examples, metrics), (others, same_examples, same_metrics) in zip(honest, spoilt, strict=True):
        assert (examples, metrics) == (same_examples, same_metrics)
        assert [values.shape for values in arrays] == [values.shape for values in others]
    assert np.linalg.norm(honest[0][0][0] - spoilt[0][0][0]) <= charge, "one sample's worth, not the batch's"


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("loader", LOADERS.values(), ids=LOADERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_that_cannot_be_loaded_shows_no_more_than_any_other(kind, loader):
    check(kind, loader=loader)


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("gradient", GRADIENTS.values(), ids=GRADIENTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_cannot_be_computed_shows_no_more_than_any_other(kind, gradient):
    check(kind, gradient=gradient)


def test_a_bad_sample_that_zeroes_the_update_is_caught():
    """The bug that the tests above are for, planted: if a sample fails, the whole contractive update is zero."""

    class Careless(CarefulGradients):
        def at_points(self, points, samples):
            whole = self._source[0:BATCH]
            return np.asarray(self._gradients([points[0]], whole[:1]))

    made, charge = replies("online, contractive")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("murmurfl.clients.online_client.CarefulGradients", Careless)
        spoilt, _ = replies("online, contractive", loader=LOADERS["a value that is none"])
    assert np.linalg.norm(made[0][0][0] - spoilt[0][0][0]) > 3.0 * charge


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("kind", KINDS)
def test_in_simulation_the_failure_of_a_sample_is_said_aloud(kind):
    with pytest.raises(ValueError, match=SECRET):
        replies(kind, loader=LOADERS["a value that is none"], keys=SimulatedKeys(1, "7"))


def test_a_length_that_changes_or_fails_later_changes_nothing():
    class Forgetful(Loader):
        asked = 0

        def __len__(self):
            self.asked += 1
            if self.asked > 2:
                raise OSError(SECRET)
            return COUNT

    make, terms, options = KINDS["shuffled"]
    client = make(Linear(), Forgetful(), terms, DurableLedger(), FixedNonces(), name="7", **options)
    arrays, _, _ = client.fit([np.zeros(D)], training_config())
    assert arrays[0] == pytest.approx(replies("shuffled")[0][0][0][0])


def test_a_gradient_that_writes_to_its_parameters_moves_no_later_step():
    class Writing(Linear):
        def __call__(self, parameters, batch):
            row = np.asarray(batch) + np.asarray(parameters[0])
            parameters[0][:] = 1e9
            return row

    seen = CarefulGradients(Writing(), np.ones((4, D)))
    points = np.zeros((1, D))
    assert seen.at_points(points, np.array([0])) == pytest.approx(np.ones((1, D)))
    assert (points == 0).all()


def test_ctrl_c_still_ends_a_client():
    with pytest.raises(KeyboardInterrupt):
        replies("mu2", loader=raising(KeyboardInterrupt()))
    seen = []
    thread = threading.Thread(target=lambda: seen.append(is_interrupt(KeyboardInterrupt())))
    thread.start()
    thread.join()
    assert seen == [False], "Ctrl-C reaches the main thread alone: elsewhere it is somebody's code"


@pytest.mark.parametrize("error", [SystemExit(SECRET), PanicError(SECRET), GeneratorExit()])
def test_whatever_a_client_raises_its_app_answers_with_one_fixed_sentence(error):
    reply = ask_real_node(numpy_client_app(raising(error)), RecordDict({"config": ConfigRecord()}), "query")
    assert reply.error.code == protocol.INTERNAL_ERROR
    assert reply.error.reason == "internal error; the client's own log says more"


def test_a_simulated_client_says_where_it_failed():
    """The planted bug, for the test above."""
    app = numpy_client_app(raising(SystemExit(SECRET)))
    reason = ask(app, "query", RecordDict({"config": ConfigRecord()})).error.reason
    assert SECRET in reason
    assert "Traceback" in reason


class Vouched(Linear):
    """Gradients that say that no sample touches another's row, and in how large batches they were asked."""

    rows_unmixed = True

    def __init__(self, planted=None):
        super().__init__(planted)
        self.asked = []

    def __call__(self, parameters, batch):
        self.asked.append(len(batch))
        return super().__call__(parameters, batch)


class Heir(Vouched):
    """What an ancestor says of its rows is not said of these."""


def full_batch(gradients, samples):
    make, terms, _ = KINDS["full-batch"]
    client = make(gradients, samples, terms, DurableLedger(), FixedNonces(), name="7")
    return client.fit([np.zeros(D)], training_config(1, 0))[0][0], client.privatizer.plan


def test_rows_that_do_not_mix_are_computed_together_and_say_what_they_say_alone():
    together, alone = Vouched(), Heir()
    one, plan = full_batch(together, StandIns())
    other, _ = full_batch(alone, StandIns())
    assert together.asked == [COUNT]
    assert alone.asked == [1] * int(StandIns.fits.sum())
    assert np.abs(one - other).max() <= 1e-9 * plan.sensitivity


def test_samples_without_stand_ins_are_computed_one_by_one():
    gradients = Vouched()
    full_batch(gradients, Loader())
    assert gradients.asked == [1] * COUNT


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("gradient", GRADIENTS.values(), ids=GRADIENTS)
def test_rows_together_lose_no_more_than_the_one_that_fails(gradient):
    class Marked(StandIns):
        fits = np.ones(COUNT, np.bool_)

        def __getitem__(self, chosen):
            rows = super().__getitem__(chosen).copy()
            rows[np.arange(COUNT)[chosen] == BAD] = 777
            return rows

    honest, plan = full_batch(Vouched(), type("Whole", (StandIns,), {"fits": np.ones(COUNT, np.bool_)})())
    spoilt, _ = full_batch(Vouched(gradient), Marked())
    assert np.linalg.norm(honest - spoilt) <= plan.sensitivity
