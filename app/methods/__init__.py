"""Methods: one object for each ``strategy`` that a run configuration can name."""

from ..settings.registry import Registry
from .auto_method import AutoMethod
from .full_batch_method import FullBatchMethod, TrustedFullBatchMethod
from .method import Method
from .momentum_methods import CorrelatedMomentumMethod, ReducedTreeMomentumMethod, TreeMomentumMethod, TrustedSgdMethod
from .mu2_methods import DelayedMomentumMethod, Mu2Method, TrustedMu2Method
from .one_shot_method import OneShotMethod
from .online_method import OnlineMethod
from .problem import Hyperparameters, Problem
from .sgd_methods import AcceleratedIsrlDpMethod, IsrlDpMethod, NoisySgdMethod
from .shuffled_method import ShuffledMethod

METHODS: Registry[Method] = Registry(
    "strategy",
    Method,
    (
        Mu2Method(),
        TrustedMu2Method(),
        DelayedMomentumMethod(),
        FullBatchMethod(),
        TrustedFullBatchMethod(),
        NoisySgdMethod(),
        IsrlDpMethod(),
        AcceleratedIsrlDpMethod(),
        TreeMomentumMethod(),
        ReducedTreeMomentumMethod(),
        CorrelatedMomentumMethod(),
        TrustedSgdMethod(),
        OneShotMethod(),
        OnlineMethod(),
        ShuffledMethod(),
        AutoMethod(),
    ),
)

__all__ = ["METHODS", "Hyperparameters", "Method", "Problem"]
