"""Adding up what came back."""

import numpy as np
import pytest
from murmurfl.privacy import Release
from murmurfl.strategies import Reply
from murmurfl.strategies.rounds.replies import SummedReplies
from murmurfl.strategies.sums.summation import ReleaseSum

SIZE = 5


def reply(contents):
    return Reply("0", 1, 0, contents, {})


def releases(count, spacings):
    generator = np.random.Generator(np.random.Philox(key=8))
    for i in range(count):
        counts = generator.integers(-(2**25), 2**25, size=SIZE)
        yield Release(counts, spacings[i % len(spacings)], 1, 0)


@pytest.mark.parametrize("spacings", [(2.0**-20,), (2.0**-20, 2.0**-3)])
def test_the_sum_of_releases_is_that_of_what_they_would_send(spacings):
    total, sent, expected = ReleaseSum(SIZE), ReleaseSum(SIZE), np.zeros(SIZE)
    for i, release in enumerate(releases(1500, spacings)):
        total.add(reply(release if i % 5 else release.values))  # some were sent, some were not
        sent.add(reply(release.values))
        expected += release.values
        assert (reply(release).values == release.values).all()
    assert (total.total() == expected).all()
    assert (sent.total() == expected).all()


def test_as_many_large_counts_as_are_added_together_do_not_overflow():
    total = ReleaseSum(SIZE)
    largest = np.full(SIZE, 2**53 - 1)
    for _ in range(2048):
        total.add(reply(Release(largest, 1.0, 1, 0)))
    assert total.total() == pytest.approx(2048.0 * (2.0**53 - 1), rel=1e-12)


def test_releases_that_were_added_up_where_they_were_made_are_the_same_sum():
    made = list(releases(7, (2.0**-20,)))
    one_by_one, together = ReleaseSum(SIZE), ReleaseSum(SIZE)
    for release in made:
        one_by_one.add(reply(release))
    for part in (made[:3], made[3:]):
        counts, ones = np.sum([release.counts for release in part], axis=0), (1,) * len(part)
        together.add_sum(
            SummedReplies(tuple(map(str, range(len(part)))), ones, (0,) * len(part), ones, counts, 2.0**-20)
        )
    assert (together.total() == one_by_one.total()).all()
