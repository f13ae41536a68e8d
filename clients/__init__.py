"""The machine's half: one file an algorithm, the release rule in common, and the bridge to Flower's Message API."""

from ..privacy import flower_version as flower  # noqa: F401 - checks the installed version before Flower is imported
from .adapters.convex import ConvexSmoothGradients
from .adapters.noise_mod import CorrelatedNoiseMod
from .adapters.numpy_app import numpy_client_app
from .adapters.per_sample_gradients import PerSampleGradients, Samples
from .adapters.private_app import private_client_app
from .adapters.sklearn_model import LinearEstimator, fitted
from .adapters.torch_model import TorchGradients, load_trainable, trainable_arrays
from .adapters.update_policy import UpdatePolicy
from .delayed_momentum_client import DelayedMomentumClient
from .full_batch_client import CountedGradients, FullBatchClient
from .isrl_dp_client import IsrlDpClient
from .messages.requests import Request
from .messages.sums_helper import ContextOpeningRecord, answer_helper, helper_app
from .mu2_client import Mu2Client
from .nodes.update_node import UpdateNode
from .noisy_sgd_client import NoisySGDClient
from .one_shot_client import LabelledFeatures, OneShotClient
from .online_client import OnlineClient, local_updates
from .private_client import PrivateClient
from .records.machine_records import file_records
from .records.owner_rows import OwnedSamples, OwnerGradients
from .records.schema import Column, Label, Part, Schema
from .shuffled_client import ShuffledClient
from .side.centring_client import Centring
from .side.evaluation_client import Evaluation, EvaluationShare
from .side.statistics_client import Counting, TableRows, statistics_columns
from .simulation.cohort_machines import Cohort
from .simulation.context_ledger import ContextLedger
from .simulation.foreign_sums import simulated_machine
from .table_statistics_client import StatisticsClient

__all__ = [
    "Centring",
    "Cohort",
    "Column",
    "ContextLedger",
    "ContextOpeningRecord",
    "ConvexSmoothGradients",
    "CorrelatedNoiseMod",
    "CountedGradients",
    "Counting",
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
    "StatisticsClient",
    "TableRows",
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
    "statistics_columns",
    "trainable_arrays",
]
