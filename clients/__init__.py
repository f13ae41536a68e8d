"""What a machine does: one file an algorithm, the release rule in common, and the bridge to Flower's Message API."""

from ..privacy import flower  # noqa: F401 - checks the installed version before Flower is imported
from .base import PrivateClient
from .centring import Centring
from .cohort import Cohort
from .context_ledger import ContextLedger
from .convex import ConvexSmoothGradients
from .delayed_momentum import DelayedMomentumClient
from .evaluation import Evaluation, EvaluationShare
from .foreign_machine import simulated_machine
from .full_batch import CountedGradients, FullBatchClient
from .gradients import PerSampleGradients, Samples
from .helper import ContextOpeningRecord, answer_helper, helper_app
from .isrl_dp import IsrlDpClient
from .mu2 import Mu2Client
from .noise_mod import CorrelatedNoiseMod
from .noisy_sgd import NoisySGDClient
from .numpy_app import numpy_client_app
from .one_shot import LabelledFeatures, OneShotClient
from .online import OnlineClient, local_updates
from .owners import OwnedSamples, OwnerGradients
from .private_app import private_client_app
from .records.records import file_records
from .records.schema import Column, Label, Part, Schema
from .requests import Request
from .shuffled import ShuffledClient
from .sklearn_model import LinearEstimator, fitted
from .torch_gradients import TorchGradients
from .torch_model import load_trainable, trainable_arrays
from .update_node import UpdateNode
from .update_policy import UpdatePolicy

__all__ = [
    "Centring",
    "Cohort",
    "Column",
    "ContextLedger",
    "ContextOpeningRecord",
    "ConvexSmoothGradients",
    "CorrelatedNoiseMod",
    "CountedGradients",
    "DelayedMomentumClient",
    "Evaluation",
    "EvaluationShare",
    "FullBatchClient",
    "IsrlDpClient",
    "Label",
    "LabelledFeatures",
    "LinearEstimator",
    "Mu2Client",
    "NoisySGDClient",
    "OneShotClient",
    "OnlineClient",
    "OwnedSamples",
    "OwnerGradients",
    "Part",
    "PerSampleGradients",
    "PrivateClient",
    "Request",
    "Samples",
    "Schema",
    "ShuffledClient",
    "TorchGradients",
    "UpdateNode",
    "UpdatePolicy",
    "answer_helper",
    "file_records",
    "fitted",
    "helper_app",
    "load_trainable",
    "local_updates",
    "numpy_client_app",
    "private_client_app",
    "simulated_machine",
    "trainable_arrays",
]
