"""Philox4x32-10 on PyTorch's integers gives the words that its authors published."""

import os

import numpy as np
import pytest
import torch
from murmurfl.app.engines.device import device_noise as philox
from murmurfl.app.engines.device.device_noise import KNOWN_ANSWERS, WORD_MASK, check_known_answers, philox_words
from murmurfl.privacy import ConfigurationError

DEVICE = torch.device(os.environ.get("MURMURFL_TEST_DEVICE", "cpu"))
"""``cuda`` where there is a GPU to test."""


def words(counter, key):
    tensors = [torch.tensor([value], device=DEVICE) for value in (*counter, *key)]
    return tuple(int(word) for word in philox_words(tensors[:4], tensors[4:]))


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_words_are_those_that_were_published(counter, key, expected):
    assert words(counter, key) == expected


def by_hand(counter, key):
    """The definition, in Python's unbounded integers."""
    x, k = list(counter), list(key)
    for _ in range(10):
        low, high = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [(high >> 32) ^ x[1] ^ k[0], high & WORD_MASK, (low >> 32) ^ x[3] ^ k[1], low & WORD_MASK]
        k = [(k[0] + 0x9E3779B9) & WORD_MASK, (k[1] + 0xBB67AE85) & WORD_MASK]
    return tuple(x)


def test_words_of_any_counter_and_key_are_those_of_the_definition():
    inputs = np.random.default_rng(1).integers(0, 2**32, size=(200, 6))
    given = torch.tensor(inputs.T, device=DEVICE)
    made = torch.stack(philox_words(given[:4].unbind(), given[4:].unbind()), dim=1)
    assert made.tolist() == [list(by_hand(row[:4], row[4:])) for row in inputs.tolist()]


def test_counters_and_keys_that_broadcast_give_the_words_of_each_pair():
    numbers, keys = torch.arange(5, device=DEVICE), torch.tensor([[7], [9]], device=DEVICE)
    zero = torch.zeros((2, 1), dtype=torch.int64, device=DEVICE)
    made = philox_words((numbers, zero, zero, keys), (keys, zero))
    assert [tuple(int(word[i, j]) for word in made) for i in range(2) for j in range(5)] == [
        by_hand((j, 0, 0, key), (key, 0)) for key in (7, 9) for j in range(5)
    ]


def test_a_backend_with_the_published_words_is_taken():
    check_known_answers(DEVICE)


@pytest.mark.parametrize(("name", "value"), [("ROUNDS", 9), ("_WEYL", (0x9E3779B9, 0)), ("WORD_BITS", 31)])
def test_a_backend_with_other_words_is_refused(monkeypatch, name, value):
    monkeypatch.setattr(philox, name, value)
    with pytest.raises(ConfigurationError, match="Expected the published words of Philox4x32-10 on device '"):
        check_known_answers(DEVICE)
