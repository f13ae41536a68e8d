"""What a client sends, read off its own code as exact linear algebra.

A message is a linear function of the contributions and of the noise rows Z. Keyed normals are replaced by unit rows
(each row of Z in a coordinate of its own), so a message of a client without data *is* its coefficients of Z;
contributions that are unit vectors, without noise, give its coefficients of the contributions. With V and N these
coefficients, one row a message,

    mu^2 = change' V' (N N')^{-1} V change / noise_std^2

is the squared distance of two neighbouring worlds in everything that was sent, whatever the pages say it should be.
"""

from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
from murmurfl.privacy import MemoryLedger, PrivacyPolicy, Privatizer, SimulatedKeys
from murmurfl.privacy.release import prefix_sums as noise_stream

# A unit row is many grid spacings long, so that rounding is in the twelfth digit; below the 2^51 of the grid.
UNIT = 2.0**20
SIZE = 32  # parameters of the clients, and the most rows of Z


@dataclass
class Sent:
    """Everything a client sent: V, N, and the samples each message was made from."""

    signal: np.ndarray
    noise: np.ndarray
    samples: list
    plan: object

    def distances(self):
        """M with change' M change the squared distance, in units of the change charged for one release."""
        covariance = self.noise @ self.noise.T
        if np.linalg.matrix_rank(covariance, tol=1e-6) < len(covariance):
            return np.full((len(covariance), len(covariance)), np.inf)  # noise that repeats can be taken out
        return (self.plan.sensitivity / self.plan.noise_std) ** 2 * (
            self.signal.T @ np.linalg.solve(covariance, self.signal)
        )

    def mu(self, messages):
        """The mu of a sample that moves the contributions to just these messages, with the worst signs."""
        block = self.distances()[np.ix_(messages, messages)]
        if np.isinf(block).any():
            return np.inf
        signs = np.array(list(product([1.0, -1.0], repeat=len(messages))))
        return float(np.sqrt(np.einsum("ki,ij,kj->k", signs, block, signs).max()))

    def worst(self):
        """The largest mu of any sample, in the messages it really took part in."""
        last = max(chosen.stop for chosen in self.samples)
        taken = [[k for k, s in enumerate(self.samples) if s.start <= sample < s.stop] for sample in range(last)]
        return max(self.mu(messages) for messages in taken if messages)


class Reader:
    """Runs a client twice on the same requests, once for each half of :class:`Sent`."""

    def __init__(self, monkeypatch):
        self._patch = monkeypatch

    @staticmethod
    def policy(**changes):
        options = {name: changes.pop(name) for name in ("bands", "decoder") if name in changes}
        common = {"clip_norm": 1.0, "batch_size": 1, "max_participations": 4, "mu": 2.0}
        return PrivacyPolicy(**{**common, "mechanism_options": options, **changes})

    def normals(self, rows):
        """Let every keyed normal come from ``rows(key, size)``."""
        self._patch.setattr(noise_stream, "standard_normals", lambda key, size, quality: rows(key, size))
        self._patch.setattr(
            noise_stream,
            "standard_normal_rows",
            lambda keys, size, quality: np.stack([rows(key, size) for key in keys]),
        )

    def unit_rows(self):
        """Row i of Z is UNIT in coordinate i: the same row whenever its key comes back."""
        begins, drawn = {}, [0]

        def rows(key, total):
            draws = total // SIZE
            if key not in begins:
                begins[key] = drawn[0]
                drawn[0] += draws
            values = np.zeros((draws, SIZE))
            values[np.arange(draws), begins[key] + np.arange(draws)] = UNIT
            return values.ravel()

        self.normals(rows)

    def no_noise(self):
        self.normals(lambda key, size: np.zeros(size))

    def sent(self, policy, requests, *, num_samples=64, kind=Privatizer, keys=SimulatedKeys, rewound_before=None):
        """Everything a client sends in answer to (session, ack) requests.

        Before request ``rewound_before`` its ledger is put back to what it was before the first.
        """
        parts = policy, requests, num_samples, kind, keys, rewound_before
        self.unit_rows()
        noise, samples, plan = self._messages(0.0, *parts)
        self.no_noise()
        signal, _, _ = self._messages(policy.clip_norm, *parts)
        share = policy.clip_norm / policy.rows_per_release
        return Sent(signal[:, : len(requests)] / share, noise / (plan.noise_std * UNIT), samples, plan)

    def _messages(self, length, policy, requests, num_samples, kind, keys, rewound_before):
        def client():
            return kind(policy, SIZE, num_samples, MemoryLedger(), keys(1, "m"))

        subject, messages, asked = client(), [], []
        for number, (session, ack) in enumerate(requests):
            subject = client() if number == rewound_before else subject

            def rows(samples, number=number):
                asked.append(samples)
                values = np.zeros((policy.rows_per_release, SIZE))
                values[0, number] = length
                return values

            messages.append(subject.release(session, ack, rows).values)
        return np.array(messages), asked, subject.plan


@pytest.fixture
def reader(monkeypatch):
    return Reader(monkeypatch)
