"""A partition of our own."""

import numpy as np
from murmurfl.app.data.partition import Partition


class Uneven(Partition):
    """The second client has twice as many samples as the first, the third three times as many, and so on."""

    name = "uneven"
    sentence = "client i with i times as many samples as the first"

    def parts(self, dataset, config):
        order = np.random.default_rng(config.seed).permutation(len(dataset.train_labels))
        shares = np.cumsum(np.arange(1, config.num_clients))
        whole = config.num_clients * (config.num_clients + 1) // 2
        return np.split(order, shares * len(order) // whole)
