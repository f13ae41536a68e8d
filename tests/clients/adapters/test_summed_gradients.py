"""Sums of clipped gradients that are never written out: exact arithmetic, strange records, and failures."""

import os
import signal
from fractions import Fraction

import numpy as np
import pytest
from murmurfl.clients import FullBatchClient, Request
from murmurfl.clients.adapters import replay, summed_gradients
from murmurfl.clients.adapters.per_sample_gradients import peak_bytes, programs_of
from murmurfl.clients.adapters.summed_gradients import SummedGradients, has_factors
from murmurfl.clients.full_batch_client import CountedGradients
from murmurfl.privacy import PrivacyPolicy, SimulatedKeys
from murmurfl.privacy.errors import InvalidRecordError
from murmurfl.privacy.release.clipping import RowBound

from tests.harness.clients import DurableLedger, FixedNonces

torch = pytest.importorskip("torch")
from murmurfl.clients.adapters import torch_graph, torch_model  # noqa: E402
from murmurfl.clients.adapters.torch_model import ModuleGradients  # noqa: E402
from torch import nn  # noqa: E402

CROSS_ENTROPY = nn.functional.cross_entropy
WORDS, LENGTH, CLASSES, SAMPLES = 600, 6, 4, 11
CHARGED, LARGEST = 2.0**-17, 2.0**-10
"""What norms are enlarged by, and the share of M that they are not below."""


@pytest.fixture(autouse=True)
def _small_models_have_factors(monkeypatch):
    for module in (torch_graph, torch_model):
        monkeypatch.setattr(module, "LEAST_SUMMED", 1)


class Attention(nn.Module):
    """A small transformer with an embedding, attention, a perceptron and norms."""

    def __init__(self, width=16):
        super().__init__()
        self.words = nn.Embedding(WORDS, width, padding_idx=2)
        self.places = nn.Parameter(0.1 * torch.randn(LENGTH, width))
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix = nn.MultiheadAttention(width, 2, batch_first=True)
        self.up, self.down, self.out = nn.Linear(width, 64), nn.Linear(64, width), nn.Linear(width, CLASSES)

    def forward(self, words):
        values = self.words(words) + self.places
        normed = self.first(values)
        values = values + self.mix(normed, normed, normed, need_weights=False)[0]
        values = values + self.down(nn.functional.gelu(self.up(self.second(values))))
        return self.out(values.mean(1))


class Tied(nn.Module):
    """A model of language with one matrix for words that go in and come out."""

    def __init__(self):
        super().__init__()
        self.words, self.inner = nn.Embedding(WORDS, 16), nn.Linear(16, 16)

    def forward(self, words):
        return (torch.tanh(self.inner(self.words(words))) @ self.words.weight.T).transpose(1, 2)


class LowRank(nn.Module):
    """Frozen layers with low-rank matrices to train."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.down, self.up = nn.Linear(64, 24, bias=False), nn.Linear(24, 64, bias=False)

    def forward(self, inputs):
        return torch.tanh(self.frozen(inputs) + self.up(self.down(inputs)))[:, :CLASSES]


def convolution():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 48, 3, padding=(1, 2), stride=2, dilation=(2, 1)),
        nn.GroupNorm(4, 48), nn.ReLU(), nn.Flatten(), nn.LazyLinear(CLASSES),
    )  # fmt: skip


def perceptron():
    return nn.Sequential(nn.Linear(30, 50), nn.Tanh(), nn.Linear(50, CLASSES))


def made(name):
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(5)
        module = {"transformer": Attention, "tied": Tied, "lora": LowRank, "cnn": convolution, "mlp": perceptron}[
            name
        ]()
        words = torch.randint(WORDS, (SAMPLES, LENGTH))
        words[3], words[4] = words[3, 0], 2  # one word again and again; nothing but padding
        inputs = {
            "transformer": words, "tied": words, "lora": torch.randn(SAMPLES, 64),
            "cnn": torch.randn(SAMPLES, 1, 13, 13), "mlp": torch.randn(SAMPLES, 30),
        }[name]  # fmt: skip
        targets = torch.randint(CLASSES, (SAMPLES, LENGTH) if name == "tied" else (SAMPLES,))
        module(inputs)
    return module, inputs, targets


def batch_of(name):
    module, inputs, targets = made(name)
    gradients = ModuleGradients(module, CROSS_ENTROPY)
    program = gradients.program(inputs[0], targets[0])
    point = [one.detach() for one in module.parameters() if one.requires_grad]
    rows = np.asarray(gradients([one.numpy() for one in point], (inputs, targets)), dtype=np.float64)
    return program, point, [inputs, targets], rows


# ---------------------------------------------------------------------------------------------------------- models
@pytest.mark.parametrize(
    ("name", "products"),
    [("transformer", {"words.weight", "mix.in_proj_weight", "mix.out_proj.weight", "up.weight", "down.weight",
                      "out.weight"}),
     ("tied", {"words.weight", "inner.weight"}), ("lora", {"down.weight", "up.weight"}),
     ("cnn", {"2.weight", "6.weight"}), ("mlp", {"0.weight", "2.weight"})],
)  # fmt: skip
def test_norms_and_sums_are_those_of_gradients_that_are_written_out(name, products):
    program, point, records, rows = batch_of(name)
    module = made(name)[0]
    kinds = [kind for kind, *_ in program.content["factors"]["gradients"]]
    names = [one for one, values in module.named_parameters() if values.requires_grad]
    found = {one for one, kind in zip(names, kinds, strict=True) if kind == "product"}
    assert found == products
    batch = program.runnable.batch(point, records)
    true, norms = np.linalg.norm(rows, axis=1), batch.norms()
    assert norms == pytest.approx(true * (1.0 + CHARGED), rel=1e-6)
    assert (np.abs(norms / true - 1.0) < 1e-5).all()
    scales = np.linspace(-0.5, 1.0, SAMPLES)
    total = batch.scaled_sum(scales)
    assert np.linalg.norm(total - scales @ rows) < 1e-6 * np.linalg.norm(np.abs(scales) @ np.abs(rows))


def test_products_are_not_multiplied_out_for_each_record():
    program, point, records, _ = batch_of("transformer")
    width = sum(one.numel() for one in point)
    batch = program.runnable.batch
    assert peak_bytes(lambda: batch(point, records).norms()) < 4 * width * SAMPLES
    whole = torch.func.vmap(program.runnable, in_dims=(*[None] * len(point), 0, 0))
    assert peak_bytes(lambda: whole(*point, *records)) > 4 * width * SAMPLES


def test_small_models_and_wide_types_keep_the_program_that_they_had(monkeypatch):
    program = batch_of("mlp")[0]
    monkeypatch.setattr(torch_graph, "LEAST_SUMMED", 10_000)
    small = batch_of("mlp")[0]
    assert has_factors(program)
    assert not has_factors(small)
    assert program.digest != small.digest
    content = {name: part for name, part in program.content.items() if name != "factors"}
    assert content == small.content
    monkeypatch.setattr(torch_graph, "LEAST_SUMMED", 1)
    module = perceptron().double()
    wide = ModuleGradients(module, CROSS_ENTROPY)
    assert not has_factors(wide.program(torch.zeros(30, dtype=torch.float64), torch.tensor(0)))
    assert not wide.sums_unwritten


# ------------------------------------------------------------------------------------------------ exact arithmetic
def exact_gradient(lefts, rights, indices, values):
    """The sum of outer products and of rows added at indices, as fractions."""
    size = (len(lefts[0]), len(rights[0]))
    total = [[Fraction(0)] * size[1] for _ in range(size[0])]
    for left, right in zip(lefts, rights, strict=True):
        for i, one in enumerate(left):
            for j, other in enumerate(right):
                total[i][j] += Fraction(float(one)) * Fraction(float(other))
    for index, row in zip(indices, values, strict=True):
        for j, other in enumerate(row):
            total[index][j] += Fraction(float(other))
    return total


def squared(matrix):
    return sum((one * one for row in matrix for one in row), Fraction(0))


TINY, HUGE = float(np.float32(1e-45)), float(np.finfo(np.float32).max)
VALUES = [0.0, 1.0, -1.0, 1.0 + 2.0**-23, -1.0 + 2.0**-24, HUGE, -HUGE, TINY, -TINY, 1e20, -3e-20]


def strange_factors(generator, records, rows, high, wide):
    """Factors of records: normal ones, extreme ones, and rows that cancel each other up to the last places."""
    left, right = generator.normal(size=(records, rows, high)), generator.normal(size=(records, rows, wide))
    for i in range(records):
        kind = i % 4
        if kind == 1:
            left[i], right[i] = generator.choice(VALUES, (rows, high)), generator.choice(VALUES, (rows, wide))
        if kind >= 2:
            size = float(generator.choice([1.0, 1e15, 1e-18]))
            left[i, 1::2], right[i, 1::2] = -left[i, 0], right[i, 0] * (1.0 + (kind - 2) * 1e-7)
            left[i, ::2], right[i, ::2] = left[i, 0], right[i, 0]
            left[i] *= size
    left, right = left.astype(np.float32), right.astype(np.float32)
    values = generator.normal(size=(records, 2, wide)).astype(np.float32)
    values[1::2] = -values[1::2, :1]
    return left, right, generator.integers(high, size=(records, 2)), values


def strange_batch(seed, *, tied):
    generator = np.random.Generator(np.random.Philox(key=seed))
    high, wide = (int(one) for one in generator.integers(1, 5, size=2))
    parts = strange_factors(generator, 8, 4, high, wide)
    left, right, indices, values = parts
    terms = [["matrix", 0, False, 1, False]] + ([["indices", 2, 3, -1]] if tied else [])
    gradients = [["product", [high, wide], terms], ["written", 4]]
    written = right[:, 0]
    tensors = [torch.from_numpy(one) for one in (*parts, written)]
    exact = []
    for i in range(8):
        own = (indices[i], values[i]) if tied else ((), ())
        exact.append([*exact_gradient(left[i], right[i], *own), [Fraction(float(one)) for one in written[i]]])
    return replay.SummedBatch(gradients, tensors, torch.ones(8, dtype=torch.bool)), exact


def root_below(square, bound):
    """Whether the root of an exact square is at most a bound."""
    return square <= Fraction(float(bound)) ** 2


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_no_record_is_longer_than_its_bound_and_no_sum_further_off_than_charged(seed, tied):
    """In exact arithmetic, with factors that are huge, tiny, or cancel each other but for their last places."""
    batch, exact = strange_batch(seed, tied=tied)
    norms, clip = batch.norms(), 1.5
    enlarged = Fraction(1) + Fraction(2) ** -17 - Fraction(2) ** -45
    assert np.isfinite(norms).all()
    assert all(squared(one) * enlarged**2 <= Fraction(float(norm)) ** 2 for one, norm in zip(exact, norms, strict=True))
    scales = RowBound(clip).scales(norms)
    total = batch.scaled_sum(scales)
    wanted = [Fraction(0)] * len(total)
    for one, scale in zip(exact, scales.tolist(), strict=True):
        flat = [value * Fraction(scale) for row in one for value in row]
        assert root_below(sum(value * value for value in flat), clip / (1.0 + CHARGED))
        wanted = [a + b for a, b in zip(wanted, flat, strict=True)]
    off = sum(((Fraction(float(a)) - b) ** 2 for a, b in zip(total, wanted, strict=True)), Fraction(0))
    assert root_below(off, 2.0**-18 * clip)


def check_all_seeds():
    for seed in range(12):
        test_no_record_is_longer_than_its_bound_and_no_sum_further_off_than_charged(seed, False)


def test_a_norm_without_the_products_of_different_rows_would_be_caught(monkeypatch):
    monkeypatch.setattr(replay, "_products", lambda left, other: torch.diag_embed((left * other).sum(2)))
    with pytest.raises(AssertionError):
        check_all_seeds()


def test_a_norm_that_cancels_below_what_rounding_leaves_would_be_caught(monkeypatch):
    """Then rounding of a sum, which is as large as the factors are, would be longer than the clip."""
    monkeypatch.setattr(replay, "_MOST_CANCELLED", 2.0**80)
    monkeypatch.setattr(replay, "_UNIT", 0.0)
    with pytest.raises(AssertionError):
        check_all_seeds()


def test_no_norm_is_far_below_the_lengths_of_the_factors():
    """Rounding of a sum is as large as these, however much of them cancels."""
    generator = np.random.Generator(np.random.Philox(key=3))
    left, right, _, _ = strange_factors(generator, 8, 4, 3, 3)
    tensors = [torch.from_numpy(one) for one in (left, right)]
    batch = replay.SummedBatch([["product", [3, 3], [["matrix", 0, False, 1, False]]]], tensors, torch.ones(8) > 0)
    lengths = (np.linalg.norm(left.astype(float), axis=2) * np.linalg.norm(right.astype(float), axis=2)).sum(1)
    assert (batch.norms() >= lengths * LARGEST * (1.0 - 1e-9)).all()
    exact = [squared(exact_gradient(one, other, (), ())) for one, other in zip(left, right, strict=True)]
    assert any(float(one) < (LARGEST * length) ** 2 / 4.0 for one, length in zip(exact, lengths, strict=True))


# ------------------------------------------------------------------------------------------------- strange records
@pytest.mark.parametrize("strange", [np.nan, np.inf, 3e38, -1e30, 1e-45])
@pytest.mark.parametrize("name", ["mlp", "cnn", "lora"])
def test_strange_record_changes_no_bit_of_another_records_norm_or_part_of_a_sum(name, strange):
    program, point, (inputs, targets), _ = batch_of(name)
    changed = inputs.clone()
    changed[2] = strange
    before, after = (program.runnable.batch(point, [given, targets]) for given in (inputs, changed))
    others = np.arange(SAMPLES) != 2
    assert (before.norms()[others] == after.norms()[others]).all()
    scales = np.where(others, 0.3, 0.0)
    assert before.scaled_sum(scales).tobytes() == after.scaled_sum(scales).tobytes()
    if not np.isfinite(strange):
        assert np.isnan(after.norms()[2])


def test_word_out_of_range_has_no_norm_and_changes_no_other():
    program, point, (words, targets), _ = batch_of("transformer")
    changed = words.clone()
    changed[5, 1] = WORDS
    before, after = (program.runnable.batch(point, [given, targets]).norms() for given in (words, changed))
    assert np.flatnonzero(np.isnan(after)).tolist() == [5]
    assert (np.delete(before, 5) == np.delete(after, 5)).all()


# --------------------------------------------------------------------------------------------------------- clients
POLICY = PrivacyPolicy(
    clip_norm=0.8, batch_size=1, max_participations=3, mu=1.0, mechanism="independent", release_rule="paper",
    batch_selection="full_batch",
)  # fmt: skip
COUNTED = PrivacyPolicy(
    clip_norm=1.0, batch_size=1, max_participations=3, mu=1.0, mechanism="independent", release_rule="paper",
    batch_selection="full_batch",
)  # fmt: skip


class Words:
    """Records, of which some do not fit."""

    def __init__(self, words, targets, unfit=()):
        self.words, self.targets, self.unfit = words.numpy(), targets.numpy(), unfit

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, chosen):
        if any(chosen.start <= one < chosen.stop for one in self.unfit):
            raise InvalidRecordError("a record")
        return self.words[chosen], self.targets[chosen]


class Shifted(Attention):
    """A transformer whose words are looked up by an index that is computed: no range is known beforehand."""

    def forward(self, words):
        return super().forward(words * 2 - 5)


def client_of(samples, *, real, module=None, counted=False):
    module = made("transformer")[0] if module is None else module
    gradients = ModuleGradients(module, CROSS_ENTROPY)
    gradients.program(torch.from_numpy(samples.words[0]), torch.from_numpy(samples.targets)[0])
    given = CountedGradients(gradients) if counted else gradients
    keys = FixedNonces() if real else SimulatedKeys(1, "3")
    return FullBatchClient(given, samples, COUNTED if counted else POLICY, DurableLedger(), keys, name="3")


def sum_of(client, **changes):
    point = [one.detach().numpy() for one in made("transformer")[0].parameters()]
    if isinstance(client.gradients, CountedGradients):
        point.append(np.array([0.8]))
    request = Request(server_round=1, session="s", ack=0, query_points=(point,))
    for name, value in changes.items():
        setattr(client.privatizer, name, value)
    count = len(client.samples)
    return client.privatizer._block_sum(lambda chosen: client._contribution_of(request, chosen), slice(0, count), None)


@pytest.fixture(autouse=True)
def _a_few_records_together(monkeypatch):
    monkeypatch.setattr(summed_gradients, "_ROWS_TOGETHER", 4 * LENGTH)


@pytest.mark.parametrize(("counted", "unfit"), [(False, ()), (True, (0, 7))])
def test_real_and_simulated_clients_have_the_sums_of_rows_written_out(counted, unfit):
    _, words, targets = made("transformer")
    samples = Words(words, targets, unfit)
    real = client_of(samples, real=True, counted=counted)
    assert real.privatizer.unwritten
    assert "(with factors, for sums)" in programs_of(real.gradients)
    found = sum_of(real)
    expected = sum_of(client_of(samples, real=True, counted=counted), unwritten=False)
    assert np.linalg.norm(found - expected) < 2e-5 * np.linalg.norm(expected)
    assert np.linalg.norm(found - expected) > 0.0
    if not unfit:
        simulated = sum_of(client_of(samples, real=False, counted=counted))
        assert simulated.tobytes() == found.tobytes()


@pytest.mark.parametrize("real", [False, True])
def test_record_that_fails_a_batch_counts_as_zero_and_changes_nothing_else(real):
    """An index that is computed is out of range: the whole batch fails."""
    _, words, targets = made("transformer")
    words = words.clamp(3, WORDS // 2)
    strange = words.clone()
    strange[6] = 0
    module = Shifted()
    module.load_state_dict(made("transformer")[0].state_dict())
    with_unfit = client_of(Words(strange, targets), real=real, module=module)
    without = client_of(Words(words, targets, (6,)), real=True, module=module)
    found, expected = sum_of(with_unfit), sum_of(without)
    assert np.linalg.norm(found - expected) < 1e-12 * np.linalg.norm(expected)


def test_process_that_ends_in_the_middle_of_a_batch_loses_no_record():
    _, words, targets = made("transformer")
    client = client_of(Words(words, targets), real=True)
    expected = sum_of(client)
    process = client.gradients.process
    ended = []

    def end_once(program, parameters, records, scales_of):
        def scales(norms):
            if not ended:
                ended.append(process.pid)
                os.kill(process.pid, signal.SIGKILL)
            return scales_of(norms)

        return type(process).sum_of_batch(process, program, parameters, records, scales)

    process.sum_of_batch = end_once
    assert np.linalg.norm(sum_of(client) - expected) < 1e-12 * np.linalg.norm(expected)
    assert ended


def test_records_and_norms_that_are_not_finite_are_no_part_of_a_sum():
    """Whatever a program makes of a record that stands in for one that does not fit."""
    rows = np.array([[1.0, 0.0], [0.0, 4.0], [np.nan, 1.0], [7.0, 7.0]])

    def compute(records, scales_of):
        own = rows[records[0]]
        scales = scales_of(np.sqrt((own * own).sum(1)))
        return np.where(scales[:, None] != 0.0, scales[:, None] * own, 0.0).sum(0)

    def read(place):
        if place == 3:
            raise InvalidRecordError("a record")
        return [np.array(place)]

    summed = SummedGradients(compute, read, rows.__getitem__, count=4, together=2, width=2, weight=-2.0)
    total, norms = summed.clipped_sum(RowBound(1.0).scales, np.array([1.0, 0.5, 1.0, 1.0]))
    assert total == pytest.approx([-1.0, -0.5])
    assert norms[:2].tolist() == [2.0, 8.0]
    assert np.isnan(norms[2:]).all()
    assert summed.norms()[:2].tolist() == [2.0, 8.0]
    assert summed.scaled_sum(np.array([1.0, 0.0, 0.0, 0.0])).tolist() == [-2.0, 0.0]
