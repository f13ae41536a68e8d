"""What runs where PyTorch is not installed, and what says that it needs it."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from murmurfl.privacy import errors
from murmurfl.privacy.errors import install_command

BLOCKED = """
import logging
import sys


class Missing:
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in ("torch", "torchvision", "flwr_datasets", "datasets"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Missing())
import murmurfl.clients, murmurfl.privacy, murmurfl.strategies
from murmurfl.app import client_app, server_app
from murmurfl.app.commands import main
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.app.engines.start import run_cohort, run_in_process
from murmurfl.clients import TorchGradients
from murmurfl.privacy import ConfigurationError
logging.getLogger("flwr").setLevel(logging.ERROR)
small = dict(num_clients=3, clients_per_round=3, num_rounds=4, checkpoint=False)
for run in (run_cohort, run_in_process):
    assert run(RunConfig(**small)).accuracy > 0.2
fetched = {"task": "mnist", "data_root": "/nowhere", "download": True}
for changes in ({"model": "mlp"}, {"task": "synthetic", "model": "cnn"}, fetched, {"partition": "dirichlet"}):
    try:
        run_cohort(RunConfig(**small, **changes))
    except ConfigurationError as error:
        print(error)
try:
    run_cohort(RunConfig(**small, noise_quality="fast"), device="cuda")
except ConfigurationError as error:
    print(error)
try:
    TorchGradients(None, None)
except ConfigurationError as error:
    print(error)
"""


def test_only_what_needs_torch_asks_for_its_extra():
    ran = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    said = [line for line in ran.stdout.splitlines() if line.startswith("Expected")]
    extras = ["torch", "torch", "torch", "partitions", "torch", "torch"]
    needed = ["model = 'mlp'", "model = 'cnn'", "task = 'mnist'", "partition = 'dirichlet'", "device 'cuda'"]
    needed.append("TorchGradients")
    assert len(said) == len(needed)
    for line, what, extra in zip(said, needed, extras, strict=True):
        assert f" for {what}, got: " in line
        assert install_command(extra) in line


def test_a_checkout_is_where_its_extras_are_installed_from(monkeypatch, tmp_path):
    root = Path(errors.__file__).resolve().parents[1]
    for folder, place in ((root, "."), (tmp_path, root)):
        monkeypatch.chdir(folder)
        assert install_command("reports") == f"pip install '{place}[reports]'"
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "murmurfl" / "privacy" / "errors.py"))
    for url, place in ((root.as_uri(), root), (f"{root.as_uri()}/murmurfl.whl", "murmurfl"), (None, "murmurfl")):
        text = None if url is None else json.dumps({"url": url})
        monkeypatch.setattr(
            errors.metadata, "distribution", lambda _, text=text: SimpleNamespace(read_text=lambda _: text)
        )
        assert install_command("reports") == f"pip install '{place}[reports]'"
