"""Methods: one object for each ``strategy`` that a run configuration can name."""

from ..settings.registry import Registry
from .full_batch_method import FullBatchMethod, OneShotMethod, TrustedFullBatchMethod
from .gradient_methods import (
    AcceleratedIsrlDpMethod,
    CorrelatedMomentumMethod,
    IsrlDpMethod,
    NoisySgdMethod,
    OnlineMethod,
    ReducedTreeMomentumMethod,
    ShuffledMethod,
    TreeMomentumMethod,
    TrustedSgdMethod,
)
from .method import AutoMethod, Method
from .mu2_methods import DelayedMomentumMethod, Mu2Method, TrustedMu2Method
from .presets import Hyperparameters, Problem

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
