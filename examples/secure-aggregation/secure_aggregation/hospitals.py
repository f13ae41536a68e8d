"""Make what three hospitals and an auditor have of their own: samples, then operators' files. Real ones bring theirs.

``python -m secure_aggregation.hospitals samples FOLDER``, and, once a roster was made and its digest compared,
``python -m secure_aggregation.hospitals files FOLDER DIGEST``.
"""

import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer

HOSPITALS, PUBLIC_SAMPLES = 3, 119
HELPERS = {"auditor": "auditor", "hospital-0-helper": "hospital-0"}
"""Each helper, and in whose folder it is."""

CLIENT = """\
client = "hospital-{number}"  # its name in the federation: public
ledger = "ledger.sqlite"
samples = "samples.npz"
schema = "schema.toml"       # what a record is, in public
num-records = {rows}            # how many records there are: public
model = "softmax"
strategy = "mu2"
clip-norm = 1.0
batch-size = 25
max-participations = 6       # some above a run's rounds: what a crash or a loss wastes also counts
mu = 2.0                     # of one run, if one helper and two hospitals are honest; 2.83 in the worst case
trust.kind = "secure-aggregation"
trust.min-cohort = 3         # no sum without all three
trust.min-honest = 2         # of the three, one may work with the server
roster = "../roster.json"
roster-digest = "{digest}"
signing-key = "signing.key"
"""
SCHEMA = """\
reviewed = true              # a person has read this, and nothing in it is private

[label]
classes = 2

[[inputs]]
shape = [30]
bounds = [-4, 4]             # what lies outside is moved to them
"""
HELPER = """\
helper = "{name}"
record = "openings.sqlite"
roster = "../roster.json"
roster-digest = "{digest}"
key = "helper.key"
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


def make_samples(folder: Path) -> None:
    """One folder a hospital with its samples in it, and an empty one for the auditor."""
    features, labels = (part[PUBLIC_SAMPLES:] for part in scaled())
    for number in range(HOSPITALS):
        hospital = folder / f"hospital-{number}"
        hospital.mkdir(parents=True)
        own = slice(number, None, HOSPITALS)
        np.savez(hospital / "samples.npz", features=features[own].astype(np.float32), labels=labels[own])
        (hospital / "samples.npz").chmod(0o600)  # `--check` warns of data that others may read
        (hospital / "schema.toml").write_text(SCHEMA)
        (hospital / "schema.toml").chmod(0o644)  # the same for all of them; others may read it and not change it
    (folder / "auditor").mkdir()


def make_files(folder: Path, digest: str) -> list[Path]:
    """Return the file of every hospital's client and of every helper; returns them."""
    files, private = {}, len(scaled()[1]) - PUBLIC_SAMPLES
    for number in range(HOSPITALS):
        rows = len(range(number, private, HOSPITALS))
        files[folder / f"hospital-{number}" / "node.toml"] = CLIENT.format(number=number, rows=rows, digest=digest)
    for name, where in HELPERS.items():
        files[folder / where / "helper.toml"] = HELPER.format(name=name, digest=digest)
    for path, content in files.items():
        path.write_text(content)
        path.chmod(0o600)  # a file that others could have changed is refused
    return list(files)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["samples", where]:
            make_samples(Path(where))
        case ["files", where, pinned]:
            make_files(Path(where), pinned)
        case _:
            sys.exit(__doc__)
