"""What of a scikit-learn estimator's settings can be kept where machines release private sums of gradients.

A setting that would change the model in a way that gradients of single samples cannot is refused by its name, with what
takes its place. Settings that only say how scikit-learn searches for the same model (``solver``, ``max_iter``, ``tol``,
``random_state`` ...) count for nothing here: rounds and steps are the server's strategy's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...privacy import ConfigurationError
from .linear_losses import Residuals, logistic, one_against_the_rest, slopes, softmax_residuals

_RELEASED = "every look at the data is released"
_WEIGHTS = (
    "class_weight",
    (None,),
    "weights of classes follow from private labels, or change how much a sample may count: leave it out, and move "
    "intercept_ of the fitted model, or where predict_proba is cut, by what is publicly known of the classes",
)
_WARM = (
    "warm_start",
    (False,),
    "set coef_ and intercept_ of the estimator to those of a model of public data, and machines start there",
)
_OF_LOGISTIC = (
    _WEIGHTS,
    _WARM,
    ("dual", (False,), "it is the same model, found in another way"),
    (
        "multi_class",
        ("deprecated", "auto", "warn", "multinomial"),
        "give SGDClassifier(loss='log_loss'), whose classes are each against the rest",
    ),
)
_OF_SGD = (
    _WEIGHTS,
    _WARM,
    (
        "early_stopping",
        (False,),
        f"{_RELEASED}, a validation score too: choose the rounds before the training, and evaluate on public data or "
        "privately",
    ),
    ("average", (False,), "the server averages: FullBatch(average='linear'), or Mu2"),
    (
        "learning_rate",
        ("optimal",),
        "steps are the server's: the strategy's own learning_rate, such as FullBatch(learning_rate=...)",
    ),
)
_PENALTIES = (
    "l2 or no penalty: a penalty with l1 is no sum over samples; to have few features choose them without the data"
)


def closed_form(estimator: Any, num_classes: int, num_samples: int | None) -> tuple[Residuals, float, int]:
    """The residuals of an estimator's loss, how strongly it pulls weights to zero, and how many scores it has.

    Parameters
    ----------
    estimator : sklearn.linear_model.LogisticRegression or SGDClassifier
    num_classes : int
    num_samples : int, optional
        Of all machines together.

    Raises
    ------
    ConfigurationError
        If it is another estimator, or has a setting that cannot be kept.

    Notes
    -----
    Losses are means over samples, with pull / 2 ||W||^2 beside them; intercepts are not pulled, as in scikit-learn.
    """
    from sklearn.linear_model import LogisticRegression, SGDClassifier

    if type(estimator) is LogisticRegression:
        residuals = one_against_the_rest(logistic) if num_classes == 2 else softmax_residuals
        return residuals, _pull_of_logistic(estimator, num_samples), _scores(num_classes)
    if type(estimator) is SGDClassifier:
        _refuse(estimator, _OF_SGD)
        settings = estimator.get_params()
        known = slopes(float(settings["epsilon"]))
        if settings["loss"] not in known:
            raise ConfigurationError(f"Expected loss one of {', '.join(known)}, got {settings['loss']!r}.")
        penalised = _is_l2(estimator, settings["penalty"], settings)
        return one_against_the_rest(known[settings["loss"]]), settings["alpha"] * penalised, _scores(num_classes)
    raise ConfigurationError(_other(estimator))


def _scores(num_classes: int) -> int:
    return num_classes if num_classes > 2 else 1


def _pull_of_logistic(estimator: Any, num_samples: int | None) -> float:
    _refuse(estimator, _OF_LOGISTIC)
    settings = estimator.get_params()
    if settings["solver"] == "liblinear":
        raise ConfigurationError(
            "Expected a solver that puts no penalty on the intercept, got LogisticRegression(solver='liblinear'): "
            "leave solver out, which is otherwise not looked at."
        )
    penalty = settings.get("penalty", "deprecated")  # until scikit-learn 1.7 it is said here, and since 1.8 by l1_ratio
    if penalty == "deprecated":
        penalty = "elasticnet" if settings["l1_ratio"] else "l2"
    if not _is_l2(estimator, penalty, settings) or settings["C"] == float("inf"):
        return 0.0
    if num_samples is None:
        raise ConfigurationError(
            f"Expected num_samples with LogisticRegression(C={settings['C']:g}), got none: C weighs against the sum of "
            "all losses, so say how many samples all machines have together, or give C=numpy.inf and no penalty."
        )
    return 1.0 / (settings["C"] * num_samples)


def _is_l2(estimator: Any, penalty: Any, settings: Mapping[str, Any]) -> bool:
    """Whether there is a penalty, which is then l2.

    Raises
    ------
    ConfigurationError
        If it is another.
    """
    if penalty is None:
        return False
    ratio = settings.get("l1_ratio") or 0.0
    if penalty == "l2" or (penalty == "elasticnet" and ratio == 0.0):
        return True
    raise ConfigurationError(
        f"Expected {_PENALTIES}; got {type(estimator).__name__} with penalty {penalty!r} and l1_ratio {ratio:g}."
    )


def _refuse(estimator: Any, kept: tuple[tuple[str, tuple[Any, ...], str], ...]) -> None:
    settings = estimator.get_params()
    for name, allowed, instead in kept:
        value = settings.get(name, allowed[0])
        if not any(value is one or (type(value) is type(one) and value == one) for one in allowed):
            raise ConfigurationError(
                f"Expected {type(estimator).__name__} without {name} = {value!r}, which cannot be kept: {instead}."
            )


def _other(estimator: Any) -> str:
    name = type(estimator).__name__
    expected = f"Expected LogisticRegression or SGDClassifier of scikit-learn, got {name}: "
    if hasattr(estimator, "steps"):
        return (
            f"{expected}give the last step alone, and apply the others where samples are made, with constants that do "
            "not come from private data (a scaler's mean would be of them)"
        )
    if name == "LogisticRegressionCV" or hasattr(estimator, "cv"):
        return f"{expected}{_RELEASED}, so every value that is tried costs privacy: choose C before, on public data."
    if hasattr(estimator, "feature_importances_") or "Tree" in name or "Forest" in name or "Boost" in name:
        return f"{expected}trees have no gradient to add noise to. A linear model of more features may come near."
    return (
        f"{expected}only of those a sample's gradient is known in closed form. A PyTorch module can be anything else."
    )
