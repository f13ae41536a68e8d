"""The machine's half: one file an algorithm, the release rule in common, and the bridge to Flower's Message API."""

from ..privacy import flower_version as flower  # noqa: F401 - checks the installed version before Flower is imported
from .adapters.noise_mod import CorrelatedNoiseMod
from .adapters.per_sample_gradients import PerSampleGradients, Samples
from .adapters.private_app import private_client_app
from .adapters.sklearn_model import LinearEstimator, fitted
from .adapters.torch_model import TorchGradients, load_trainable, trainable_arrays
from .adapters.update_policy import UpdatePolicy
from .baseline_clients import DelayedMomentumClient, IsrlDpClient, NoisySGDClient
from .full_batch_client import CountedGradients, FullBatchClient
from .messages import Request
from .mu2_client import Mu2Client
from .nodes.machine_file import UpdateNode
from .one_shot_client import LabelledFeatures, OneShotClient, StatisticsClient
from .online_client import ConvexSmoothGradients, OnlineClient, local_updates
from .private_client import PrivateClient, numpy_client_app
from .records.machine_records import OwnedSamples, OwnerGradients, file_records
from .records.schema import Column, Label, Part, Schema
from .shuffled_client import ShuffledClient
from .side.centring_client import Centring
from .side.evaluation_client import Evaluation, EvaluationShare
from .side.statistics_client import Counting, TableRows, statistics_columns
from .simulation.cohort_machines import Cohort
from .simulation.simulated_machines import ContextLedger, ContextOpeningRecord, simulated_machine
from .sums_helper import answer_helper, helper_app

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
