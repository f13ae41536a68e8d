"""The data: 569 breast tumours with 30 measurements each, of which 119 are public."""

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer

DATA = load_breast_cancer()
ORDER = np.random.default_rng(7).permutation(len(DATA.target))
VALUES, BENIGN = DATA.data[ORDER], DATA.target[ORDER]
# By mean and deviation of the public ones: those of private samples would be a release of their own.
FEATURES = torch.tensor((VALUES - VALUES[:119].mean(axis=0)) / VALUES[:119].std(axis=0) / np.sqrt(30)).float()
LABELS = torch.tensor(2.0 * BENIGN - 1.0).float()  # +1 benign, -1 malignant
PUBLIC, PRIVATE = (FEATURES[:119], LABELS[:119]), (FEATURES[119:], LABELS[119:])
