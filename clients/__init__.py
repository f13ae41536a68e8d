"""The client's half: one file an algorithm, the release rule in common, and the bridge to Flower's Message API."""

from typing import TYPE_CHECKING

from ..privacy import flower_version as flower  # noqa: F401 - checks the installed version before Flower is imported
from ..privacy.lazy import lazy_exports

if TYPE_CHECKING:
    from .adapters.jax_model import JaxModel as JaxModel
    from .adapters.noise_mod import CorrelatedNoiseMod as CorrelatedNoiseMod
    from .adapters.per_sample_gradients import PerSampleGradients as PerSampleGradients
    from .adapters.per_sample_gradients import Samples as Samples
    from .adapters.private_app import private_client_app as private_client_app
    from .adapters.sklearn_mlp import MLPEstimator as MLPEstimator
    from .adapters.sklearn_model import LinearEstimator as LinearEstimator
    from .adapters.sklearn_model import fitted as fitted
    from .adapters.torch_model import TorchGradients as TorchGradients
    from .adapters.torch_model import load_trainable as load_trainable
    from .adapters.torch_model import trainable_arrays as trainable_arrays
    from .adapters.update_policy import UpdatePolicy as UpdatePolicy
    from .baseline_clients import DelayedMomentumClient as DelayedMomentumClient
    from .baseline_clients import IsrlDpClient as IsrlDpClient
    from .baseline_clients import NoisySGDClient as NoisySGDClient
    from .full_batch_client import CountedGradients as CountedGradients
    from .full_batch_client import FullBatchClient as FullBatchClient
    from .messages import Request as Request
    from .mu2_client import Mu2Client as Mu2Client
    from .nodes.client_file import UpdateNode as UpdateNode
    from .one_shot_client import LabelledFeatures as LabelledFeatures
    from .one_shot_client import OneShotClient as OneShotClient
    from .one_shot_client import StatisticsClient as StatisticsClient
    from .online_client import ConvexSmoothGradients as ConvexSmoothGradients
    from .online_client import OnlineClient as OnlineClient
    from .online_client import local_updates as local_updates
    from .personal_head import PersonalHead as PersonalHead
    from .private_client import PrivateClient as PrivateClient
    from .private_client import numpy_client_app as numpy_client_app
    from .queries import Centring as Centring
    from .queries import ClientQuery as ClientQuery
    from .queries import Counting as Counting
    from .queries import Evaluation as Evaluation
    from .queries import EvaluationShare as EvaluationShare
    from .queries import Knots as Knots
    from .queries import RecordQuery as RecordQuery
    from .records.client_records import OwnedSamples as OwnedSamples
    from .records.client_records import OwnerGradients as OwnerGradients
    from .records.client_records import file_records as file_records
    from .records.encoders import register_encoder as register_encoder
    from .records.places import TableRows as TableRows
    from .records.places import statistics_columns as statistics_columns
    from .records.schema import Column as Column
    from .records.schema import Label as Label
    from .records.schema import Part as Part
    from .records.schema import Schema as Schema
    from .shuffled_client import ShuffledClient as ShuffledClient
    from .simulation.cohort_clients import Cohort as Cohort
    from .simulation.simulated_clients import ContextLedger as ContextLedger
    from .simulation.simulated_clients import ContextOpeningRecord as ContextOpeningRecord
    from .simulation.simulated_clients import simulated_client as simulated_client
    from .sums_helper import answer_helper as answer_helper
    from .sums_helper import helper_app as helper_app

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
