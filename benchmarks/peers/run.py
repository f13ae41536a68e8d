"""Time and memory of the same locally private work in pfl, and in Flower as it comes (FedAvg, LocalDpMod, Ray).

Run with ``python -m benchmarks.peers.run --json OUT``, from the project's folder. The work is that of
:mod:`benchmarks.engines` with noisy SGD: softmax regression on the synthetic task, 100 clients of 60 samples, 50 a
round, each with one clipped gradient of one sample and noise of its own. Data, clip norm, noise and step are this
project's; the default number of rounds is one pass over the data. pfl gets an environment of its own in
``build/bench-pfl``, made when it is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from murmurfl.app.engines.superlink import run_flower_app
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.settings.run_config import RunConfig

from .memory import PeakMemory

CLIENTS, PER_ROUND = 100, 50
REPEATS = 3

_HERE = Path(__file__).resolve().parent
_ENVIRONMENT = _HERE.parents[1] / "build" / "bench-pfl"
_PFL = "pfl>=0.6,<0.7"
# What pfl imports beside NumPy, SciPy and PyTorch, and what that imports: installed where this environment has none.
_PFL_DEPENDENCIES = (
    "absl-py",
    "attrs",
    "dill",
    "dp-accounting",
    "multiprocess",
    "packaging",
    "prv-accountant",
)
# One thread each, like the project's own engines; the accelerator, where there is one, is left out.
_SINGLE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_TIMEOUT_S = 3600.0

Measurement = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """What every framework is asked for.

    Parameters
    ----------
    rounds, clients, per_round : int
    clip_norm, noise_std : float
        Of one client's gradient: L2 bound, and standard deviation of every coordinate's noise.
    learning_rate : float
        Of the averaged gradients.
    """

    rounds: int
    clients: int
    per_round: int
    clip_norm: float
    noise_std: float
    learning_rate: float


def configuration(rounds: int) -> RunConfig:
    """Return the work as this project's run configuration; zero rounds for one pass over the data."""
    return RunConfig(
        task="synthetic",
        strategy="noisy-sgd",
        num_clients=CLIENTS,
        clients_per_round=PER_ROUND,
        batch_size=1,
        num_rounds=rounds,
        sampling="balanced",
        noise_quality="fast",
        checkpoint=False,
    )


def make_work(rounds: int = 0, *, noise: bool = True) -> Work:
    """Return the work, with this project's clip norm, noise and step.

    Parameters
    ----------
    rounds : int
        Zero for one pass over the data.
    noise : bool
        Without, to see that frameworks agree.
    """
    experiment = prepare(configuration(rounds))
    return Work(
        rounds=experiment.num_rounds,
        clients=CLIENTS,
        per_round=PER_ROUND,
        clip_norm=experiment.values.clip_norm,
        noise_std=experiment.policy().plan(experiment.model.num_parameters).noise_std if noise else 0.0,
        learning_rate=experiment.values.learning_rate,
    )


def write_data(path: Path, work: Work) -> None:
    """Write every client's samples, in the order it uses them, and the test data."""
    experiment = prepare(configuration(work.rounds))
    samples = min(len(shard) for shard in experiment.shards)
    parts = [shard[:samples] for shard in experiment.shards]
    np.savez(
        path,
        features=np.stack([features for features, _ in parts]),
        labels=np.stack([labels for _, labels in parts]),
        test_features=experiment.data.test_features,
        test_labels=experiment.data.test_labels,
    )


@lru_cache(maxsize=1)
def pfl_python() -> Path:
    """Return the interpreter of pfl's environment, which is made when it is missing.

    PyTorch, NumPy and SciPy come from the running environment, behind the new one's own packages on its path.
    """
    python = _ENVIRONMENT / ("Scripts" if os.name == "nt" else "bin") / "python"
    if python.exists() and _imports(python, "pfl.model.pytorch", "pfl.privacy.gaussian_mechanism"):
        return python
    venv.create(_ENVIRONMENT, clear=True, with_pip=True)
    places = _printed(python, "import sysconfig; print(sysconfig.get_path('purelib'))")
    shared = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
    (Path(places) / "running-environment.pth").write_text("".join(f"{path}\n" for path in shared), encoding="utf-8")
    present = _printed(
        python, "import importlib.metadata as m; print(*(d.metadata['Name'].lower() for d in m.distributions()))"
    ).split()
    missing = [name for name in _PFL_DEPENDENCIES if name not in present and name.replace("-", "_") not in present]
    _checked([str(python), "-m", "pip", "install", "--quiet", "--no-deps", _PFL, *missing])
    return python


def measure_pfl(rounds: int = 0, repeats: int = REPEATS, *, noise: bool = True) -> Measurement:
    """Measure pfl; zero rounds for one pass over the data."""
    work = make_work(rounds, noise=noise)
    pfl_python()  # made before anything is measured
    return _repeat(lambda data, seed: train_with_pfl(work, data, seed), work, repeats)


def train_with_pfl(work: Work, data: Path, seed: int) -> Measurement:
    """One training by pfl, in a process of its own: what ``pfl_work.py`` prints."""
    names = ("rounds", "clients", "per_round", "clip_norm", "noise_std", "learning_rate")
    options = [f"--{name.replace('_', '-')}={getattr(work, name)!r}" for name in names] + [f"--seed={seed}"]
    environment = {**os.environ, **_SINGLE_THREAD, "PFL_PYTORCH_DEVICE": "cpu"}
    output = _checked([str(pfl_python()), str(_HERE / "pfl_work.py"), *options, str(data)], env=environment)
    return json.loads(output.splitlines()[-1])


def measure_flower(rounds: int = 0, repeats: int = REPEATS, *, noise: bool = True) -> Measurement:
    """Measure Flower's FedAvg with LocalDpMod on its Ray simulation; zero rounds for one pass over the data."""
    work = make_work(rounds, noise=noise)

    def once(data: Path, seed: int) -> Measurement:  # noqa: ARG001 - Flower takes none
        result = data.with_name("result.json")
        run_flower_app(
            _HERE / "flower_app",
            run_config={
                "data-path": str(data),
                "result-path": str(result),
                "rounds": work.rounds,
                "clients": work.clients,
                "per-round": work.per_round,
                "clip-norm": work.clip_norm,
                "noise-std": work.noise_std,
                "learning-rate": work.learning_rate,
            },
            num_supernodes=work.clients,
            timeout_s=_TIMEOUT_S,
            environment=_SINGLE_THREAD,
            on_line=lambda line: None,  # noqa: ARG005 - nobody reads along
        )
        return json.loads(result.read_text(encoding="utf-8"))

    return _repeat(once, work, repeats)


def _repeat(once: Callable[[Path, int], Measurement], work: Work, repeats: int) -> Measurement:
    """Measure with seeds 1, 2, ...: seconds of the training, and the memory of all processes that were started."""
    measured = nothing_measured()
    for seed in range(1, repeats + 1):
        with tempfile.TemporaryDirectory() as folder:
            data = Path(folder).resolve() / "data.npz"
            write_data(data, work)
            measure_once(measured, lambda data=data, seed=seed: once(data, seed))
    return measured


def nothing_measured() -> Measurement:
    """Return a measurement before the first repeat."""
    names = ("seconds_per_1000", "peak_mib", "peak_pss_mib", "final_loss", "client_updates")
    return {name: [] for name in names}


def measure_once(measured: Measurement, once: Callable[[], Measurement]) -> Measurement:
    """One more repeat, added to what was measured; what it says of itself."""
    with PeakMemory() as memory:
        result = once()
    measured["seconds_per_1000"].append(1000 * result["seconds"] / result["client_updates"])
    measured["peak_mib"].append(memory.peak_mib)
    measured["peak_pss_mib"].append(memory.peak_pss_mib)
    measured["final_loss"].append(result["final_loss"])
    measured["client_updates"].append(result["client_updates"])
    measured["version"] = result["version"]
    return result


def table(measured: dict[str, Measurement]) -> str:
    """Medians over the repeats, as a Markdown table."""
    lines = [
        "| framework | version | s per 1,000 updates | peak MiB | final loss |",
        "|---|---|---|---|---|",
    ]
    for name, values in measured.items():
        seconds, peak, loss = (statistics.median(values[key]) for key in ("seconds_per_1000", "peak_mib", "final_loss"))
        lines.append(f"| {name} | {values['version']} | {seconds:.2f} | {peak:,.0f} | {loss:.4f} |")
    return "\n".join(lines)


def _imports(python: Path, *modules: str) -> bool:
    command = [str(python), "-c", f"import {', '.join(modules)}"]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def _printed(python: Path, code: str) -> str:
    return _checked([str(python), "-c", code]).strip()


def _checked(command: list[str], env: dict[str, str] | None = None) -> str:
    """Return standard output of a command; standard error is shown if it fails."""
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=env, timeout=_TIMEOUT_S)
    if done.returncode:
        sys.stderr.write(done.stderr)
        done.check_returncode()
    return done.stdout


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--rounds", type=int, default=0, help="0: one pass over the data")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--without-noise", action="store_true", help="to see that the frameworks agree")
    arguments = parser.parse_args()
    noise = not arguments.without_noise
    work = make_work(arguments.rounds, noise=noise)
    measured = {
        "pfl": measure_pfl(arguments.rounds, arguments.repeats, noise=noise),
        "flower-localdp": measure_flower(arguments.rounds, arguments.repeats, noise=noise),
    }
    print(f"{work}; medians of {arguments.repeats}")
    print(table(measured))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
