"""Methods: one object for each ``strategy`` that a run configuration can name."""

from ..registry import Registry
from .auto import AutoMethod
from .base import Method
from .full_batch import FullBatchMethod, TrustedFullBatchMethod
from .momentum import CorrelatedMomentumMethod, ReducedTreeMomentumMethod, TreeMomentumMethod, TrustedSgdMethod
from .mu2 import DelayedMomentumMethod, Mu2Method, TrustedMu2Method
from .one_shot import OneShotMethod
from .online import OnlineMethod
from .problem import Hyperparameters, Problem
from .sgd import AcceleratedIsrlDpMethod, IsrlDpMethod, NoisySgdMethod
from .shuffled import ShuffledMethod

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
