"""Ten small Flower projects in the shapes of Flower's examples, on data that are made up or come with scikit-learn."""

import numpy as np


def partition(features, labels, context, share=0.8):
    """Return the training and test samples of a client."""
    number, parts = (int(context.node_config[key]) for key in ("partition-id", "num-partitions"))
    order = np.random.Generator(np.random.Philox(key=5)).permutation(len(features))
    own = order[number::parts]
    cut = int(share * len(own))
    return (features[own[:cut]], labels[own[:cut]]), (features[own[cut:]], labels[own[cut:]])


def two_classes(count=6000, width=8):
    """Return features and labels of a table that a linear model learns to about nine in ten."""
    random = np.random.Generator(np.random.Philox(key=7))
    features = random.normal(size=(count, width)).astype(np.float32)
    weights = np.linspace(2, -1, width)
    labels = (features @ weights + random.normal(size=count) > 0).astype(np.int64)
    return features, labels
