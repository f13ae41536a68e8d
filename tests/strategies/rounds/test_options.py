"""Options of strategies and clients are typed: a checker finds one that is misspelt, missing or of another type."""

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Required, get_origin, get_type_hints

import pytest
from murmurfl.clients import PrivateClient
from murmurfl.clients.private_client import ClientOptions
from murmurfl.strategies import TrustedMu2

ROOT = Path(__file__).parents[3]

TEXT = """
from murmurfl.clients import Mu2Client, NoisySGDClient, OnlineClient, ShuffledClient
from murmurfl.privacy import PrivacyPolicy, ShuffledPolicy
from murmurfl.strategies import *
from murmurfl.strategies import TreeMomentum

def strategies(policy: PrivacyPolicy) -> None:
    Mu2(num_clients=4, clients_per_round=2, learning_rate=0.1, diameter=1.0, seed=1, run_dry=True)
    CorrelatedFedAvg(num_clients=4, session="s")
    CorrelatedFedAvg(fraction_train=0.5, min_available_nodes=10, optimizer="adam")
    TrustedMu2(num_clients=4, clients_per_round=2, learning_rate=0.1, policy=policy, num_rounds=3, sampling="balanced")
    TreeMomentum(num_clients=4, clients_per_round=4, learning_rate=0.1, alpha=0.1, policy=policy, num_rounds=3)
    Mu2(num_clients=4, clients_per_round=2, learning_rate=0.1, diametre=1.0)  # misspelt
    NoisySGD(num_clients=4, clients_per_round=2, learning_rate=0.1, sed=1)  # misspelt
    DelayedMomentum(num_clients=4, clients_per_round=2, learning_rate=0.1, run_dri=True)  # misspelt
    IsrlDp(num_clients=4, clients_per_round=2, learning_rate=0.1, varient="minibatch")  # misspelt
    OnlineFedSGD(num_clients=4, clients_per_round=2, learning_rate=0.1, local_steps=1, sesion="s")  # misspelt
    ShuffledAvg(num_clients=4, clients_per_round=2, learning_rate=0.1, steps_per_epoch=1, sesion="s")  # misspelt
    CorrelatedFedAvg(num_clients=4, sesion="s")  # misspelt
    TrustedMu2(num_clients=4, clients_per_round=2, learning_rate=0.1, policy=policy, num_round=3)  # misspelt, missing
    TreeMomentum(num_clients=4, clients_per_round=4, learning_rate=0.1, alfa=0.1, policy=policy, num_rounds=3)  # both
    CorrelatedMomentum(num_clients=4, clients_per_round=4, learning_rate=1.0, alpha=1.0, policy=policy)  # missing
    Mu2(clients_per_round=2)  # missing
    Mu2(num_clients=4, clients_per_round=2, learning_rate=0.1, sampling="uniformly")  # another type

def clients(gradients, samples, ledger, keys, policy: PrivacyPolicy, shuffled: ShuffledPolicy) -> None:
    Mu2Client(gradients, samples, policy, ledger, keys, name="1", rows=None)
    OnlineClient(gradients, samples, policy, ledger, keys, name="1", learning_rate=0.1)
    NoisySGDClient(gradients, samples, policy, ledger, keys, nam="1")  # misspelt
    OnlineClient(gradients, samples, policy, ledger, keys, name="1", learning_rat=0.1)  # misspelt
    ShuffledClient(gradients, samples, shuffled, ledger, keys, name="1", learning_rate=0.1, oder="RR")  # misspelt
"""


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    """The lines of the text that a type checker complains about."""
    folder = tmp_path_factory.mktemp("typed")
    (folder / "murmurfl").mkdir()
    for package in ("clients", "privacy", "strategies"):
        (folder / "murmurfl" / package).symlink_to(ROOT / package)
    (folder / "text.py").write_text(TEXT)
    command = [Path(sys.executable).parent / "basedpyright", "--outputjson", "--pythonpath", sys.executable, "text.py"]
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    report = json.loads(found.stdout)
    wrong = [entry for entry in report["generalDiagnostics"] if entry["severity"] == "error"]
    return {TEXT.splitlines()[entry["range"]["start"]["line"]] for entry in wrong}


def test_a_type_checker_complains_about_every_wrong_option_and_about_nothing_else(errors):
    wrong = {line for line in TEXT.splitlines() if "#" in line}
    assert len(wrong) == 15
    assert errors == wrong


def test_the_typed_options_are_those_that_the_constructor_takes():
    parameters = inspect.signature(PrivateClient).parameters.values()
    keywords = {parameter for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY}
    typed = get_type_hints(ClientOptions, include_extras=True)
    assert typed.keys() == {parameter.name for parameter in keywords}
    required = {name for name, hint in typed.items() if get_origin(hint) is Required}
    assert required == {parameter.name for parameter in keywords if parameter.default is inspect.Parameter.empty}


def test_a_strategys_constructor_is_its_options():
    parameters = inspect.signature(TrustedMu2).parameters
    assert {"num_clients", "sampling", "learning_rate", "diameter", "policy", "noise_keys"} <= parameters.keys()
    assert {one.kind for one in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}
    missing = {name for name, one in parameters.items() if one.default is inspect.Parameter.empty}
    assert missing == {"learning_rate", "policy", "num_rounds"}
