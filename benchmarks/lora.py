"""A small transformer that was pretrained in public, adapted by LoRA in private: ``python -m benchmarks.lora``.

Writes docs/results/lora.json, in about an hour on one core. All text is documentation of installed packages, which is
public: nothing is fetched. The transformer learns to fill in masked words of the docstrings of the standard library and
of :data:`CHOSEN_BY`. Then 100 clients adapt it to tell which package a paragraph comes from. They train the low-rank
matrices of LoRA and the last layer; everything else stays as it is. Clip, step and rounds were chosen on
:data:`CHOSEN_BY` as well (:func:`choose`), packages that play no part in the figures. Noise is of ``fast`` quality: the
same law, and no guarantee.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import re
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from murmurfl.app.engines.start import run_cohort
from murmurfl.app.settings.layers import with_defaults
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import derived_seed
from numpy.typing import NDArray
from sklearn.feature_extraction.text import HashingVectorizer
from sklearn.linear_model import LogisticRegressionCV
from torch.nn.functional import cross_entropy, layer_norm

ROOT = Path(__file__).resolve().parents[1]
DEFAULT, MADE = ROOT / "docs" / "results" / "lora.json", ROOT / "build" / "lora"
WEIGHTS = MADE / "weights.pt"
JUDGED_BY, CHOSEN_BY = ("numpy", "scipy", "sklearn", "torch"), ("matplotlib", "networkx", "pandas", "sympy")
"""Packages whose paragraphs are told apart: for the figures, and for the choice of clip, step and rounds."""
CLIENTS, OF_A_CLIENT, TESTED = 100, 40, 2000
EPSILONS, SEEDS = (1.0, 4.0), range(1, 3)
WORDS, LENGTH, WIDTH, HEADS, LAYERS, RANK = 4096, 32, 64, 4, 2, 4
"""Buckets of words, words of a paragraph, and the transformer's sizes."""
_MASK, _NONE, _FEWEST = 1, 0, 8
_SCALE = 0.2  # of the low-rank parts: a larger one leaves less of a clipped gradient to the last layer
_STEPS, _BATCH = 6000, 64


# ------------------------------------------------------------------------------------------------------------- text
def _paragraphs(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the file and the text of every paragraph of the docstrings below a folder."""
    for path in sorted(folder.rglob("*.py")):
        if "site-packages" in path.relative_to(folder).parts or "test" in str(path.relative_to(folder)):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                yield from ((str(path), part) for part in text.split("\n\n"))


def _tokens(text: str, without: Sequence[str]) -> NDArray[np.int64] | None:
    """Return the buckets of a paragraph's words, names of packages left out; None for a short one."""
    words = [word for word in re.findall(r"[a-z]+|[0-9]|[^\sa-z0-9]", text.lower()) if word not in without]
    if len(words) < _FEWEST:
        return None
    found = [2 + zlib.crc32(word.encode()) % (WORDS - 2) for word in words[:LENGTH]]
    return np.array(found + [_NONE] * (LENGTH - len(found)))


@cache
def texts(packages: tuple[str, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64], list[str], list[str]]:
    """Return paragraphs as words, their packages, their files and their texts, each paragraph once."""
    kept = MADE / f"{'-'.join(packages)}.npz"
    if kept.exists():  # a minute's work
        with np.load(kept) as found:
            return found["rows"], found["labels"], found["files"].tolist(), found["plain"].tolist()
    rows, labels, files, plain, seen = [], [], [], [], set()
    names = {*packages, "np", "sp", "plt", "nx", "pd", "tensor", "sklearn", "scikit", "pytorch"}
    for label, package in enumerate(packages):
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise SystemExit(f"Expected the package {package}, which the development environment has: make install.")
        for file, text in _paragraphs(Path(spec.origin).parent):
            row = _tokens(text, sorted(names))
            if row is not None and (key := row.tobytes()) not in seen:
                seen.add(key)
                rows.append(row)
                labels.append(label)
                files.append(file)
                plain.append(text)
    MADE.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        kept, rows=np.stack(rows), labels=np.array(labels), files=np.array(files), plain=np.array(plain)
    )
    return np.stack(rows), np.array(labels), files, plain


@cache
def dealt(packages: tuple[str, ...], seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return which paragraphs are for training and for the test, as many of each package; no file is in both."""
    _, labels, files, _ = texts(packages)
    generator = np.random.default_rng(derived_seed("lora", seed))
    tested = {file for file in sorted(set(files)) if generator.random() < 0.3}
    is_test = np.array([file in tested for file in files])
    parts = []
    for chosen, count in ((~is_test, CLIENTS * OF_A_CLIENT), (is_test, TESTED)):
        each = [np.flatnonzero(chosen & (labels == label)) for label in range(len(packages))]
        picked = [generator.choice(one, count // len(packages), replace=False) for one in each]
        parts.append(generator.permutation(np.concatenate(picked)))
    return parts[0], parts[1]


def make_task(config: RunConfig) -> tuple[NDArray[Any], ...]:
    """Return paragraphs of the judged packages."""
    return _task(JUDGED_BY, config)


def make_other_task(config: RunConfig) -> tuple[NDArray[Any], ...]:
    """Return paragraphs of the packages that settings were chosen by."""
    return _task(CHOSEN_BY, config)


def _task(packages: tuple[str, ...], config: RunConfig) -> tuple[NDArray[Any], ...]:
    rows, labels, _, _ = texts(packages)
    train, test = dealt(packages, config.seed)
    return rows[train].astype(np.float32), labels[train], rows[test].astype(np.float32), labels[test]


# ------------------------------------------------------------------------------------------------------ transformer
class Encoder(torch.nn.Module):
    """A transformer of two layers over hashed words; with ``rank`` each projection has a low-rank part to train."""

    def __init__(self, weights: dict[str, torch.Tensor], rank: int = 0) -> None:
        super().__init__()
        self.frozen = weights
        self.low = torch.nn.ParameterDict()
        for layer in range(LAYERS if rank else 0):
            for name in ("q", "v"):
                self.low[f"{name}{layer}_in"] = torch.nn.Parameter(torch.randn(rank, WIDTH) / math.sqrt(WIDTH))
                self.low[f"{name}{layer}_out"] = torch.nn.Parameter(torch.zeros(WIDTH, rank))

    def _low(self, name: str, values: torch.Tensor) -> torch.Tensor | float:
        if f"{name}_in" not in self.low:
            return 0.0
        return _SCALE * values @ self.low[f"{name}_in"].T @ self.low[f"{name}_out"].T

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return a vector for each word, shape (samples, words, width)."""
        given = self.frozen
        there = words != _NONE
        values = given["words"][words] + given["places"]
        for layer in range(LAYERS):
            normal = layer_norm(values, (WIDTH,))
            parts = [normal @ given[f"{name}{layer}"] + self._low(f"{name}{layer}", normal) for name in "qkv"]
            split = [part.unflatten(-1, (HEADS, -1)).transpose(-3, -2) for part in parts]
            q, k, v = split
            closeness = (q @ k.transpose(-1, -2)) / math.sqrt(WIDTH / HEADS)
            seen = torch.softmax(torch.where(there[:, None, None, :], closeness, -1e9), -1) @ v
            values = values + seen.transpose(-3, -2).flatten(-2) @ given[f"o{layer}"]
            inner = torch.nn.functional.gelu(layer_norm(values, (WIDTH,)) @ given[f"up{layer}"])
            values = values + inner @ given[f"down{layer}"]
        return layer_norm(values, (WIDTH,))


def _first_weights(generator: torch.Generator) -> dict[str, torch.Tensor]:
    def drawn(*shape: int, scale: float) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).requires_grad_()

    weights = {"words": drawn(WORDS, WIDTH, scale=0.05), "places": drawn(LENGTH, WIDTH, scale=0.02)}
    for layer in range(LAYERS):
        weights |= {f"{name}{layer}": drawn(WIDTH, WIDTH, scale=WIDTH**-0.5) for name in "qkvo"}
        weights[f"up{layer}"] = drawn(WIDTH, 2 * WIDTH, scale=WIDTH**-0.5)
        weights[f"down{layer}"] = drawn(2 * WIDTH, WIDTH, scale=(2 * WIDTH) ** -0.5)
    return weights


@cache
def pretrained() -> dict[str, torch.Tensor]:
    """Return weights that fill in masked words of public docstrings; made once."""
    if WEIGHTS.exists():
        return torch.load(WEIGHTS, weights_only=True)
    folder = Path(sysconfig.get_paths()["stdlib"])
    every = [row for _, text in _paragraphs(folder) if (row := _tokens(text, ())) is not None]
    rows = torch.from_numpy(np.concatenate([np.stack(every), texts(CHOSEN_BY)[0]]))
    generator = torch.Generator().manual_seed(1)
    weights = _first_weights(generator)
    encoder, optimiser = Encoder(weights), torch.optim.AdamW(list(weights.values()), 1e-3, weight_decay=0.01)
    for step in range(_STEPS):
        for group in optimiser.param_groups:
            group["lr"] = 2e-3 * min(1.0, step / 100) * (1 - step / _STEPS)
        words = rows[torch.randint(len(rows), (_BATCH,), generator=generator)]
        hidden = (torch.rand(words.shape, generator=generator) < 0.15) & (words != _NONE)
        seen = encoder(torch.where(hidden, _MASK, words))
        loss = cross_entropy(seen[hidden] @ weights["words"].T, words[hidden])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 250 == 0:
            print(f"pretraining, step {step}: loss {loss.item():.2f}, {len(rows)} paragraphs", flush=True)
    made = {name: value.detach() for name, value in weights.items()}
    with torch.no_grad():
        drawn = rows[torch.randperm(len(rows), generator=generator)[:10_000]]
        means = torch.cat([_means(Encoder(made), part) for part in drawn.split(500)])
    spread = torch.cov(means.T) + 1e-4 * torch.eye(2 * WIDTH)
    values, axes = torch.linalg.eigh(spread)
    made |= {"mean": means.mean(0), "whiten": axes / values.sqrt()}
    WEIGHTS.parent.mkdir(parents=True, exist_ok=True)
    torch.save(made, WEIGHTS)
    return made


def _means(encoder: Encoder, words: torch.Tensor) -> torch.Tensor:
    """Return the means of the vectors that come out and go in, shape (samples, 2 width)."""
    there = (words != _NONE).to(torch.float32)[..., None]
    vectors = torch.cat((encoder(words), encoder.frozen["words"][words]), -1)
    return (vectors * there).sum(-2) / there.sum(-2)


class Adapted(torch.nn.Module):
    """The pretrained encoder, its low-rank parts and a last layer over the means of the words' vectors.

    The means are whitened by the public text that the encoder was pretrained on, and scaled to norm 1.
    """

    def __init__(self, num_classes: int, rank: int) -> None:
        super().__init__()
        self.encoder = Encoder(pretrained(), rank)
        self.last = torch.nn.Linear(2 * WIDTH, num_classes)
        torch.nn.init.zeros_(self.last.weight)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        white = (_means(self.encoder, rows.long()) - self.encoder.frozen["mean"]) @ self.encoder.frozen["whiten"]
        return self.last(white / white.norm(dim=-1, keepdim=True))


def adapted(_: int, num_classes: int) -> torch.nn.Module:
    """Return the model that clients train."""
    return Adapted(num_classes, RANK)


def last_layer(_: int, num_classes: int) -> torch.nn.Module:
    """Return the same without low-rank parts."""
    return Adapted(num_classes, 0)


# --------------------------------------------------------------------------------------------------------- measured
MODELS = {"LoRA": "benchmarks.lora:adapted", "last layer": "benchmarks.lora:last_layer"}
SETTINGS: dict[str, dict[str, Any]] = {
    "LoRA": {"clip-norm": 1.0, "learning-rate": 4.0, "num-rounds": 14},
    "last layer": {"clip-norm": 1.0, "learning-rate": 4.0, "num-rounds": 14},
}
"""The best of :func:`choose`, at epsilon 4."""
_WITHOUT = {"mechanism": "none", "trust": "untrusted-server"}
WAYS: dict[str, dict[str, Any]] = {
    "no noise": _WITHOUT,
    **{f"sums, epsilon {epsilon:g}": {"trust": "secure-aggregation", "epsilon": epsilon} for epsilon in EPSILONS},
}


def accuracy(model: str, seed: int, settings: dict[str, Any], task: str = "benchmarks.lora:make_task") -> float:
    """Return the test accuracy of a federation, in percent."""
    given = {
        "strategy": "full-batch",
        "task": task,
        "model": MODELS[model],
        "num-clients": CLIENTS,
        "seed": seed,
        "noise-quality": "fast",
        "checkpoint": False,
        "evaluate-every": 1_000_000,
        **settings,
    }
    return 100 * float(run_cohort(RunConfig.from_mapping(with_defaults(given))).accuracy or 0.0)


def choose() -> None:
    """Print accuracies on the packages that settings are chosen by, of steps and rounds, at epsilon 4."""
    for model in MODELS:
        for step, rounds in ((4.0, 14), (8.0, 8), (12.0, 8)):
            made = {"clip-norm": 1.0, "learning-rate": step, "num-rounds": rounds}
            ways = (WAYS["sums, epsilon 4"], _WITHOUT)
            found = [accuracy(model, 1, {**made, **way}, "benchmarks.lora:make_other_task") for way in ways]
            print(model, made, *(f"{one:.1f}" for one in found), flush=True)


def without_transformer(seed: int) -> dict[str, float]:
    """Return the accuracies of logistic regression on hashed n-grams: of all texts in one place, and of one client."""
    _, labels, _, plain = texts(JUDGED_BY)
    train, test = dealt(JUDGED_BY, seed)
    names = re.compile("|".join((*JUDGED_BY, "np", "sp", "tensor", "scikit", "pytorch")))
    rows = HashingVectorizer(ngram_range=(1, 2), n_features=2**15)
    made = rows.transform([names.sub(" ", plain[one].lower()) for one in (*train, *test)])
    truth = np.concatenate((labels[train], labels[test]))
    found = {}
    for name, count in (("n-grams, all texts", len(train)), ("n-grams, one client", OF_A_CLIENT)):
        fitted = LogisticRegressionCV(
            Cs=[1.0, 10.0, 100.0], cv=3, l1_ratios=(0.0,), scoring="accuracy", max_iter=300, use_legacy_attributes=False
        )
        fitted.fit(made[:count], truth[:count])
        found[name] = 100 * float((fitted.predict(made[len(train) :]) == truth[len(train) :]).mean())
    return found


def measure(path: Path) -> dict[str, Any]:
    """Measure every row and write the document."""
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in pretrained().values())).hexdigest()[:16]
    rows: dict[str, list[float]] = {}
    for seed in SEEDS:
        for name, value in without_transformer(seed).items():
            rows.setdefault(name, []).append(round(value, 2))
        for model in MODELS:
            for way, settings in WAYS.items():
                found = accuracy(model, seed, {**SETTINGS[model], **settings})
                rows.setdefault(f"{model}, {way}", []).append(round(found, 2))
        distributions = {"sklearn": "scikit-learn"}
        document = {
            "rows": rows,
            "settings": SETTINGS,
            "versions": {one: importlib.metadata.version(distributions.get(one, one)) for one in JUDGED_BY},
            "weights": digest,
            "clients": CLIENTS,
            "samples": OF_A_CLIENT,
        }
        path.write_text(json.dumps(document, indent=1) + "\n")
    for name, runs in rows.items():
        error = stdev(runs) / math.sqrt(len(runs)) if len(runs) > 1 else 0.0
        print(f"{name}: {fmean(runs):.1f} ± {error:.1f}")
    return document


def main() -> None:
    """Measure, or choose."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lora", description=__doc__)
    parser.add_argument("--json", type=Path, default=DEFAULT)
    parser.add_argument("--choose", action="store_true", help="print what settings are chosen from")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    choose() if arguments.choose else measure(arguments.json)


if __name__ == "__main__":
    from benchmarks import lora  # its tasks are found by the module's name, which `python -m` does not give it

    lora.main()
