"""Tasks: data sets, their features, and how they are split among machines."""

from ..registry import Registry
from .base import Task
from .digits import Digits
from .mnist import Mnist, MnistParity
from .own import own_task
from .public import PUBLIC_TASKS
from .synthetic import Synthetic, SyntheticLogistic
from .tabular import CreditDefault, Recidivism

__all__ = ["TASKS"]

_BUILT_IN = (
    Digits(),
    Mnist(),
    MnistParity(),
    Synthetic(),
    SyntheticLogistic(),
    CreditDefault(),
    Recidivism(),
    *PUBLIC_TASKS,
)

TASKS = Registry("task", Task, _BUILT_IN, adapt=own_task)
"""The built-in tasks by name, and a user's own as ``package.module:make_task``."""
