"""Make the folders of three clinics: samples, what a record is, and an operator's file. Real operators bring their own.

``python -m edge_deployment.clinics FOLDER``
"""

import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer

CLINICS, PUBLIC_SAMPLES = 3, 119

FILE = """\
client = "clinic-{number}"  # its name in the federation: public
ledger = "ledger.sqlite"
samples = "samples.npz"
schema = "schema.toml"       # what a record is, in public
num-records = {rows}            # how many records there are: public
model = "softmax"
strategy = "mu2"
clip-norm = 1.0
batch-size = 25
max-participations = 6       # some above a run's rounds: what a crash or a loss wastes also counts
mu = 2.0                     # of one run; what all runs ever may spend is fixed in the ledger
"""

SCHEMA = """\
reviewed = true              # a person has read this, and nothing in it is private

[label]
classes = 2

[[inputs]]
shape = [30]
bounds = [-4, 4]             # what lies outside is moved to them
"""


def scaled() -> tuple[np.ndarray, np.ndarray]:
    """Scikit-learn's 569 breast tumours, scaled by the mean and deviation of the public ones."""
    data = load_breast_cancer()
    order = np.random.default_rng(7).permutation(len(data.target))
    values = data.data[order]
    public = values[:PUBLIC_SAMPLES]
    return (values - public.mean(axis=0)) / public.std(axis=0) / np.sqrt(values.shape[1]), data.target[order]


def public_samples() -> tuple[np.ndarray, np.ndarray]:
    """Return what the server tests on."""
    features, labels = scaled()
    return features[:PUBLIC_SAMPLES], labels[:PUBLIC_SAMPLES]


def make_clinics(folder: Path) -> list[Path]:
    """One folder a clinic; returns the operators' files."""
    features, labels = (part[PUBLIC_SAMPLES:] for part in scaled())
    files = []
    for number in range(CLINICS):
        clinic = folder / f"clinic-{number}"
        clinic.mkdir(parents=True)
        own = slice(number, None, CLINICS)
        np.savez(clinic / "samples.npz", features=features[own].astype(np.float32), labels=labels[own])
        (clinic / "samples.npz").chmod(0o600)  # `--check` warns of data that others may read
        (clinic / "schema.toml").write_text(SCHEMA)
        (clinic / "schema.toml").chmod(0o644)  # the same for all of them; others may read it and not change it
        files.append(clinic / "node.toml")
        files[-1].write_text(FILE.format(number=number, rows=len(labels[own])))
        files[-1].chmod(0o600)  # a node refuses a file that others could have changed
    return files


if __name__ == "__main__":
    make_clinics(Path(sys.argv[1]))
