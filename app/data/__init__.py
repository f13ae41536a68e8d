"""Tasks: data sets, their features, and how they are split among clients."""

from ..settings.registry import Registry
from .built_in_tasks import Cifar10, CreditDefault, Digits, Mnist, MnistParity, Recidivism, Synthetic, SyntheticLogistic
from .public_samples import PUBLIC_TASKS
from .table_task import SchemaTask
from .task import Task, own_task

__all__ = ["TASKS"]

_BUILT_IN = (
    Digits(),
    Mnist(),
    MnistParity(),
    Cifar10(),
    Synthetic(),
    SyntheticLogistic(),
    CreditDefault(),
    Recidivism(),
    *PUBLIC_TASKS,
)

TASKS = Registry("task", Task, _BUILT_IN, adapt=own_task, suffix=".toml", of_file=SchemaTask.of_file)
"""The built-in tasks by name, a user's own as ``package.module:make_task``, and the file of a schema."""
