"""What the server does: one file an algorithm, each a pure update rule in a Flower ``Strategy``."""

from ..privacy import flower_version as flower  # noqa: F401 - checks the installed version before Flower is imported
from .baselines import (
    DelayedMomentum,
    DelayedMomentumState,
    IsrlDp,
    IsrlDpState,
    NoisySGD,
    NoisySGDState,
    delayed_momentum_step,
    isrl_dp_step,
    noisy_sgd_step,
)
from .callbacks.callback import Callback
from .callbacks.result_folder import ResultFolder
from .correlated_fedavg import (
    OPTIMIZERS,
    AverageState,
    CorrelatedFedAvg,
    ServerAdam,
    ServerMomentum,
    ServerOptimizer,
    ServerYogi,
    adam_step,
    average_step,
    momentum_step,
    optimizer_step,
    yogi_step,
)
from .correlated_momentum import MOMENTUM_MECHANISMS, CorrelatedMomentum, CorrelatedMomentumState
from .full_batch import (
    AVERAGES,
    FullBatch,
    FullBatchState,
    TrustedFullBatch,
    full_batch_start,
    full_batch_step,
)
from .mu2 import AnytimeMu2, Mu2, Mu2State, TrustedMu2, mu2_start, mu2_step
from .one_shot import OneShot, OneShotState, ridge_scores
from .online import OnlineFedSGD, OnlineState, online_step
from .reduced_tree_momentum import (
    IncompleteRoundError,
    ReducedTreeMomentum,
    ReducedTreeMomentumState,
    reduced_tree_momentum_step,
)
from .rounds.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from .rounds.known_machines import MachineDirectory, NodesUnavailableError
from .rounds.observed import NothingAggregatedError
from .rounds.options import RoundOptions
from .rounds.replies import DirectMachines, Outcome, Refusal, Reply, RoundReport, RoundRequest
from .rounds.sampling import SAMPLINGS, sample_machines
from .rounds.strategy import ReleaseStrategy
from .shuffled import (
    REGULARIZERS,
    VARIANTS,
    PublicEpochs,
    Regularizer,
    ShuffledAvg,
    ShuffledState,
    private_rounds,
    proximal,
)
from .side.mean_of_features import MeanOfFeatures, MeanState, TrustedMeanOfFeatures
from .side.private_evaluation import (
    EvaluationResult,
    EvaluationState,
    NotEvaluatedError,
    PrivateEvaluation,
    TrustedPrivateEvaluation,
)
from .side.table_statistics import (
    ColumnStatistics,
    Estimate,
    Statistics,
    StatisticsState,
    TableStatistics,
    TrustedStatistics,
)
from .sums.secure_aggregation import (
    HelpersDisagreeError,
    HelperUnavailableError,
    OpeningError,
    SecureAggregation,
    WrongSumError,
)
from .tree_momentum import TreeMomentum, TreeMomentumState, node_sum, tree_momentum_start, tree_momentum_step

__all__ = [
    "AVERAGES",
    "MOMENTUM_MECHANISMS",
    "OPTIMIZERS",
    "REGULARIZERS",
    "SAMPLINGS",
    "VARIANTS",
    "AnytimeMu2",
    "AverageState",
    "Callback",
    "CheckpointError",
    "ColumnStatistics",
    "CorrelatedFedAvg",
    "CorrelatedMomentum",
    "CorrelatedMomentumState",
    "DelayedMomentum",
    "DelayedMomentumState",
    "DirectMachines",
    "Estimate",
    "EvaluationResult",
    "EvaluationState",
    "FullBatch",
    "FullBatchState",
    "HelperUnavailableError",
    "HelpersDisagreeError",
    "IncompleteRoundError",
    "IsrlDp",
    "IsrlDpState",
    "MachineDirectory",
    "MeanOfFeatures",
    "MeanState",
    "Mu2",
    "Mu2State",
    "NodesUnavailableError",
    "NoisySGD",
    "NoisySGDState",
    "NotEvaluatedError",
    "NothingAggregatedError",
    "OneShot",
    "OneShotState",
    "OnlineFedSGD",
    "OnlineState",
    "OpeningError",
    "Outcome",
    "PrivateEvaluation",
    "PublicEpochs",
    "ReducedTreeMomentum",
    "ReducedTreeMomentumState",
    "Refusal",
    "Regularizer",
    "ReleaseStrategy",
    "Reply",
    "ResultFolder",
    "RoundOptions",
    "RoundReport",
    "RoundRequest",
    "SecureAggregation",
    "ServerAdam",
    "ServerMomentum",
    "ServerOptimizer",
    "ServerYogi",
    "ShuffledAvg",
    "ShuffledState",
    "Statistics",
    "StatisticsState",
    "TableStatistics",
    "TreeMomentum",
    "TreeMomentumState",
    "TrustedFullBatch",
    "TrustedMeanOfFeatures",
    "TrustedMu2",
    "TrustedPrivateEvaluation",
    "TrustedStatistics",
    "WrongSumError",
    "adam_step",
    "average_step",
    "delayed_momentum_step",
    "full_batch_start",
    "full_batch_step",
    "isrl_dp_step",
    "load_checkpoint",
    "momentum_step",
    "mu2_start",
    "mu2_step",
    "node_sum",
    "noisy_sgd_step",
    "online_step",
    "optimizer_step",
    "private_rounds",
    "proximal",
    "reduced_tree_momentum_step",
    "ridge_scores",
    "sample_machines",
    "save_checkpoint",
    "tree_momentum_start",
    "tree_momentum_step",
    "yogi_step",
]
