"""Results of a run, declared once: ``result.json``.

Its JSON schema and the documentation's table follow from the declarations below. Summary, report, list of runs and
trackers are functions of an :class:`Outcome`, made from a run that has just ended or read from its file. A key that is
added keeps :data:`FORMAT`; one that goes, or means something else, counts it up.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema, model_validator

from ...privacy.accounting.guarantee import RELATIONS, UNITS, Guarantee
from ...privacy.accounting.loss import Loss
from ...privacy.accounting.noise_forecast import VERDICTS
from ...privacy.errors import MurmurflError
from ...privacy.release.policy import TRUST_MODELS
from ...strategies.rounds.replies import RoundReport
from ..settings.catalogue import key_schema
from ..settings.registry import registry
from ..settings.run_config import run_keys
from ..version import __version__
from .client_statements import MOST_NAMED

FORMAT = 1
"""The version of ``result.json``."""

MEASURES = ("accuracy", "auc", "loss")
"""Measures of a central evaluation."""

RESULT_NAME, FAILURE_NAME, CHECKPOINT_NAME = "result.json", "failure.json", "checkpoint.npz"

_PACKAGES = ("flwr", "numpy", "scipy", "scikit-learn", "torch", "ray")
"""Packages that a result may depend on; only installed ones are recorded."""

_LOCAL = (
    "Under secure aggregation, the mu that holds whatever server, helpers and other clients do; null under another "
    "trust, or where nothing is guaranteed."
)
_HONEST = "Under secure aggregation, h: the honest clients of each sum that mu rests on; null under another trust."
_BOTH, _ALONE = "of noise and sampling", "of the noise alone, on these very samples"
_PRIVATE = "Says that these figures are not private."

_SAID = {"type": "object", "additionalProperties": {"type": ["number", "string", "boolean", "null"]}}
Statement = Annotated[dict[str, Any], WithJsonSchema(_SAID)]


class ReportError(MurmurflError):
    """A folder holds no run that a report could be made of."""

    kind = "unreadable"


def _said(words: str, **more: Any) -> Any:
    """Return a field that every file has."""
    schema = {name: more.pop(name) for name in ("enum", "format") if name in more}
    return Field(description=words, json_schema_extra=schema, **more)


def _or_null(words: str, **more: Any) -> Any:
    """Return a field that may be null, or absent from a file of an earlier murmurfl."""
    return _said(words, default=None, **more)


def _count(words: str) -> Any:
    return _said(words, default=0, ge=0)


class _Part(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="allow",  # keys of a later version with the same format
        json_schema_serialization_defaults_required=True,
    )


class Privacy(_Part):
    """The guarantee in its parts."""

    mu: float | None = _or_null("Gaussian-DP parameter; null where nothing is guaranteed.")
    epsilon: float | None = _or_null("At `delta`; null where nothing is guaranteed.")
    delta: float = _said("Delta at which epsilon is shown.")
    unit: str = _said("What is protected as a whole.", enum=list(UNITS))
    relation: str = _said("How neighbouring data sets differ.", enum=list(RELATIONS))
    trust: str = _said("Who is trusted.", enum=list(TRUST_MODELS))
    mu_local: float | None = _or_null(_LOCAL)
    epsilon_local: float | None = _or_null("Epsilon of `mu_local` at `delta`; null wherever `mu_local` is.")
    min_honest: int | None = _or_null(_HONEST, ge=1)
    epsilon_amplified: float | None = _or_null(
        "Epsilon at `delta` under a secret order, or an estimate of it; null without a secret order."
    )
    amplified_proved: bool | None = _or_null(
        "True if `epsilon_amplified` is a guarantee, false if it is an estimate; null without one."
    )
    mechanism: str = _said("Whose noise of which mechanism.")
    covers: str = _said("Which releases the figure is true of.")
    notes: list[str] = _said("Sentences about what the figure rests on.", default=())
    sentence: str = _said("All of it in one standard sentence: `guarantee`.", default="")
    meaning: str = _said("What mu means in plain words; empty where nothing is guaranteed.", default="")

    @property
    def loss(self) -> Loss:
        """Privacy loss of what was released, as the document has it; infinite where nothing is guaranteed."""
        return Loss.of(infinite(self.mu), None if self.min_honest is None else infinite(self.mu_local))


class AllCalls(_Part):
    """Loss of all calls with the ledger of a real fit; absent where this call was the only one."""

    mu: float = _said("Gaussian-DP parameter of all of it.")
    added_delta: float = _said("Added delta of schemas that named values.", default=0.0)
    meaning: str = _said("What this mu means in plain words.")

    @property
    def loss(self) -> Loss:
        """Privacy loss of all calls."""
        return Loss.of(self.mu).with_added(self.added_delta)


class Round(_Part):
    """One round."""

    round: int = _said("From 1.", ge=1)
    accuracy: float | None = _or_null("Accuracy of the central evaluation; null in rounds without one.")
    auc: float | None = _or_null(
        "Area under the ROC curve of the central evaluation; null unless there are two classes."
    )
    loss: float | None = _or_null("Loss of the central evaluation; null in rounds without one, or if not finite.")
    asked: int = _count("Clients asked.")
    aggregated: int = _count("Replies that entered the model.")
    lost: int = _count("Clients that were not connected or did not reply in time.")
    late: int = _count("Replies dropped: another of that client was aggregated, or the round was over, before.")
    malformed: int = _count("Replies dropped for their shape, values or entries.")
    refused: dict[str, int] = _said("Refusals by reason.", default={})
    samples: int = _count("Samples that the aggregated replies say they count for.")
    unopened: int = _count("Replies that came and were carried over, because the round stayed closed.")
    skipped: int = _count("Replies in a sum that came out wrong: nothing of it is in the model.")
    closed: str = _said("Why no sum entered the model; empty for a round like any other.", default="")
    overdue: int = _count("Of the replies that came, those that were asked for in earlier rounds.")
    awaited: int = _count("Requests that were open when the round ended.")
    finished: int = _count("Clients that have made all releases they can, and are not asked any more.")


class Training(_Part):
    """Effects of clipping: simulation only, and not private; null on real clients."""

    note: str = _said(_PRIVATE)
    rows: int = _count("Contributions that were clipped: gradients, local steps or updates.")
    not_finite: int = _count("Contributions with a NaN or infinity, which count as zero.")
    clipped: int = _count("Contributions longer than the clip norm.")
    median_ratio: float | None = _or_null("Median of a contribution's length over the clip norm.")
    largest_ratio: float | None = _or_null("Largest of these ratios.")
    sentence: str = _said("The figures in words.")
    worrying: bool = _said("Whether such training comes to little.")
    rounds: list[int] = _said("The rounds of the lists that follow.")
    not_finite_per_round: list[int] = _said("`not_finite` of each round.")
    clipped_per_round: list[int] = _said("`clipped` of each round.")
    median_ratio_per_round: list[float | None] = _said("`median_ratio` of each round.")
    largest_ratio_per_round: list[float | None] = _said("`largest_ratio` of each round.")


class Clip(_Part):
    """Clip that followed the gradients, with a `quantile`; otherwise null."""

    quantile: float = _said("Share of gradients that should stay unclipped.")
    share: float = _said("Share of mu^2 of the releases that counting the clipped gradients takes.")
    first: float = _said("Clip norm of the first round.")
    last: float = _said("Clip norm after the last round.")


class MeanFigures(_Part):
    """Outcome of the mean of the features, with `centring = private`, which clients release before the first
    round; else null. `model.npz` then has `centring.centre`, the mean m, and `centring.constant`, c, beside the
    model's arrays: the model's inputs are unit([unit(phi - m), c]) of a sample's features phi
    (`murmurfl.privacy.centred`).
    """

    mu: float | None = _or_null("Mu of its release, a part of `mu`; null where nothing is guaranteed.")
    share: float = _said("Share of mu^2 that the run configuration gave it.")
    constant: float = _said("Constant appended to centred features: `centring.constant`.")
    asked: int = _count("Clients asked for the mean.")
    aggregated: int = _count("Replies that the mean is made of.")
    samples: int = _count("Samples behind these replies, as clients say.")


class EvaluationFigures(_Part):
    """Score of the model on the clients' own samples, with `evaluation.share`, by a count that they released
    with noise; else null. Where no client answered, figures are null and `failure` says why.
    """

    mu: float | None = _or_null("Mu of its release, a part of `mu`; null where nothing is guaranteed.")
    share: float | None = _or_null("Share of mu^2 that it was given; null in a training of somebody's own project.")
    accuracy: float | None = _or_null("The share of right predictions, with noise.")
    interval: list[float] | None = _or_null(f"95 % interval of the accuracy on such samples, {_BOTH}.")
    noise_interval: list[float] | None = _or_null(f"95 % interval of the accuracy, {_ALONE}.")
    auc: float | None = _or_null("The area under the ROC curve, with noise; null without `evaluation.score-bins`.")
    auc_interval: list[float] | None = _or_null(
        f"95 % interval of the area, {_BOTH}; null without `evaluation.score-bins`."
    )
    auc_noise_interval: list[float] | None = _or_null(f"95 % interval of the area, {_ALONE}; null without bins.")
    samples: int | None = _or_null("Samples that were evaluated, or places for owners, as clients say.")
    owners: float | None = _or_null("Owners that were evaluated, with noise; null where samples count.")
    clients: int | None = _or_null("Clients whose replies are counted.")
    held_out: bool | None = _or_null("Whether nobody trained on these samples.")
    noise_std: float | None = _or_null("Standard deviation of the noise in the accuracy.")
    sentence: str | None = _or_null("The figures in words.")
    failure: str | None = _or_null("Why there are no figures.")


class Twin(_Part):
    """Result of the same run without noise: simulation only, and not private; null where it was not made."""

    note: str = _said(_PRIVATE)
    accuracy: float | None = _or_null("Accuracy on the test set; null where the model has none.")
    auc: float | None = _or_null("Area under the ROC curve on the test set; null unless there are two classes.")
    loss: float | None = _or_null("Loss on the test set; null if it is not finite.")
    rounds: int = _count("Rounds that were made.")
    seconds: float = _said("Wall-clock time of the rounds.", ge=0)


class Alone(_Part):
    """Score of one client alone, without noise: the same linear model of the same features, trained by
    scikit-learn on its own samples; the mean over clients. Simulation only, and not private: of real clients nothing
    of it is computed. Null where it was not made.
    """

    note: str = _said(_PRIVATE)
    accuracy: float | None = _or_null("Accuracy on the test set; null where the model has none.")
    own_mix: float | None = _or_null(
        "Accuracy on test samples in the proportions of classes that each one has, with the penalty that is best for "
        "it; null where the model has none."
    )
    own_worst: float | None = _or_null("The least of these accuracies.")
    own_best: float | None = _or_null("The largest of these accuracies.")
    auc: float | None = _or_null("Area under the ROC curve on the test set; null unless there are two classes.")
    loss: float | None = _or_null("The mean squared error, where the model has no accuracy; else null.")
    clients: int = _count("Clients that were tried, spread evenly over all.")
    samples: float = _said("Samples of one of them, on average.", default=0.0, ge=0)
    reason: str | None = _or_null("Why there are no figures.")


class OwnMixes(_Part):
    """Accuracy of the model on the test set in each client's proportions of classes. Simulation only, and not
    private: of real clients nothing of it is computed. Null where it was not made, or the model has no classes.
    """

    note: str = _said(_PRIVATE)
    mean: float = _said("Mean over clients.")
    worst: float = _said("The client with the least accuracy.")
    best: float = _said("The client with the largest accuracy.")
    clients: int = _count("Clients of whose classes the test set has samples.")


class Scores(_Part):
    """Scores of a model on held-out rows: of a rehearsal, and not private."""

    accuracy: float | None = _or_null("Accuracy; null where the model has none.")
    auc: float | None = _or_null(
        "Area under the ROC curve of two classes, and of more the mean over classes of one against all others; null "
        "without classes, or where no class has rows on both sides."
    )
    loss: float | None = _or_null("Mean squared error of scaled numbers; null of classes.")
    r2: float | None = _or_null("R^2 on these rows; null of classes, and where they do not differ.")
    rows: int = _count("Held-out rows behind it.")


class Baselines(_Part):
    """Models without privacy, trained to convergence: of a rehearsal, and not private. They depend on the rows, their
    split and the schema alone, not on epsilon or trust.
    """

    note: str = _said(_PRIVATE)
    rows: int = _count("Rows that they were trained on: all, or some of a large table.")
    linear: Scores | None = None
    additive: Scores | None = None
    boosted: Scores | None = None


class SeveralSeeds(_Part):
    """Rehearsals that differ in their seed alone: each has its own rows held out, start and noise. Not private."""

    seeds: list[int] = _said("Their seeds.")
    figures: list[float | None] = _said("What the model of each is judged by: `measure`.")
    mean: float | None = _or_null("Mean of the figures.")
    standard_error: float | None = _or_null("Standard error of the mean: it is too small, because they share rows.")


class ReliabilityBin(_Part):
    """Held-out rows of a rehearsal with probabilities from one tenth to the next: not private."""

    predicted: float = _said("Mean of their probabilities.")
    observed: float = _said("Share of them for which what had this probability is true.")
    rows: int = _count("Number of these rows.")


class Rehearsal(_Part):
    """Further figures of a rehearsal of `murmurfl fit`, from rows that it saw: not private. Left out of other runs."""

    note: str = _said(_PRIVATE)
    measure: str = _said("What the model is judged by.", enum=["auc", "accuracy", "r2"])
    baselines: Baselines | None = None
    alone_on_own: Scores | None = None
    sites_alone: dict[str, Scores] = _said(
        "Scores of each site's own model on its own held-out rows, by the site's name.", default={}
    )
    alone_skewed: Alone | None = None
    alternatives: dict[str, Scores] = _said("Other options that were rehearsed on the same rows.", default={})
    seeds: SeveralSeeds | None = None
    sites: dict[str, Scores] = _said("Scores of the model on each site's held-out rows, by its name.", default={})
    confusion: list[list[int]] | None = _or_null(
        "Held-out rows by class (lists) and predicted class (entries), as `classes` orders them; null of numbers."
    )
    classes: list[str] = _said("Names of the classes; empty of numbers.", default=[])
    macro_auc: float | None = _or_null(
        "Of more than two classes, the mean over classes of the AUC of one against all others; else null."
    )
    reliability: list[ReliabilityBin] = _said(
        "Held-out rows by the probability of the second of two classes, or of the class that is predicted of several; "
        "empty of numbers.",
        default=[],
    )
    log_loss: float | None = _or_null("Mean of -log of the probability of a held-out row's class; null of numbers.")


class Online(_Part):
    """Cost of online learning so far: simulation only, and not private; null where it was not computed."""

    rounds: list[int] = _said("The rounds of the lists that follow.")
    cumulative_loss: list[float | None] | None = _or_null("Sum of the global models' losses.", alias="cumulative-loss")
    dynamic_regret: list[float | None] | None = _or_null(
        "Regret against every round's own optimum; null if that is not known.", alias="dynamic-regret"
    )
    static_regret: list[float | None] | None = _or_null(
        "Regret against the best fixed model; null if that is not known.", alias="static-regret"
    )


class Norms(_Part):
    """Norms of the training loss's gradient: simulation only, and not private; null unless `gradient-norm` is set."""

    rounds: list[int] = _said("Rounds that were evaluated; 0 is the start.")
    values: list[float | None] = _said("The norms.")


class Remedy(_Part):
    """Something that would lessen the noise."""

    words: str = _said("What to change.")
    ratio: float = _said("`noise_over_typical` after that change.")


class Foreseen(_Part):
    """Share of the model that was likely to be noise, as forecast before the first round from what clients state;
    null without noise. The ratio to the longest update is arithmetic, all else an estimate.
    """

    verdict: str = _said("What to expect of the model.", enum=list(VERDICTS))
    warning: bool = _said("Whether there was a warning: above a ratio of 1, or if it is useless.")
    noise_over_longest: float = _said("Noise in the average of all releases over the longest it can be.")
    noise_over_typical: float = _said("Noise over a typical update: an estimate.")
    typical: float = _said("Length of a typical update over the longest: an assumption.")
    kept: float = _said("Share of what is learnt without noise that is likely to be left: an estimate.")
    kept_range: tuple[float, float] | None = _or_null("Bounds of `kept` by rehearsals on made-up data; null without.")
    clients_needed: int = _count("Clients like these at which it would be useful.")
    parameters_needed: int = _count("Values of a model that would be useful; 0 if one is too many.")
    epsilon_needed: float | None = _or_null("Epsilon, at `delta`, at which it would be useful.")
    sentence: str = _said("The figures in words.")
    changes: list[Remedy] = _said("Changes that would help; empty where the model is useful.", default=())


class ClientGroup(_Part):
    """Clients that say the same."""

    clients: int = _count("Number of clients.")
    first: str = _said("The name of the first of them.")
    statement: Statement = _said("What each of them says.")


class Outcome(_Part):
    """Results of a run: `result.json`."""

    format: int = _said(f"Version of this document; now {FORMAT}.", ge=1)
    date: str = _said("When it was written: ISO 8601, UTC.", format="date-time")
    engine: str | None = _or_null(
        "What carried the messages; null for a program of one's own.",
        enum=["cohort", "inprocess", "ray", "real-nodes", None],
    )
    device: str | None = _or_null(
        "PyTorch's device that computed gradients and noise, with other bits than NumPy; null for NumPy."
    )
    chosen_by: str | None = _or_null(
        "`auto` where the strategy was chosen for the run's sizes; null where it was set.", enum=["auto", None]
    )
    chosen_because: str | None = _or_null("Why the strategy was chosen, in a sentence; null where it was set.")
    versions: dict[str, str] = _said("Versions of murmurfl, Python and the packages that were used.", default={})
    accuracy: float | None = _or_null("Accuracy on the test set after the last round; null where the model has none.")
    auc: float | None = _or_null("Area under the ROC curve on the test set; null unless there are two classes.")
    loss: float | None = _or_null("Loss on the test set after the last round; null if it is not finite.")
    mu: float | None = _or_null("Gaussian-DP parameter of everything that was released; null: nothing is guaranteed.")
    epsilon: float | None = _or_null("Epsilon at `delta`; it means what `guarantee` says, and nothing else.")
    mu_local: float | None = _or_null(_LOCAL)
    epsilon_local: float | None = _or_null("Epsilon of `mu_local` at `delta`; null wherever `mu_local` is.")
    min_honest: int | None = _or_null(_HONEST, ge=1)
    min_cohort: int | None = _or_null("Under secure aggregation, the fewest releases of a sum; else null.", ge=1)
    helpers: int | None = _or_null("Under secure aggregation, how many must open every sum; else null.", ge=1)
    delta: float = _said("Delta at which epsilon is shown.")
    guarantee: str = _said("What mu and epsilon are true of, in one sentence.")
    privacy: Privacy | None = None
    all_calls: AllCalls | None = None
    forecast: Foreseen | None = None
    rounds: int = _count("Rounds that were made.")
    num_clients: int = _count("Clients in all.")
    releases: int = _count("Releases that the clients say they made.")
    aggregated: int = _count("Releases that entered the model.")
    refusals: int = _count("Requests that clients refused.")
    lost_replies: int = _count("Replies that did not come.")
    late_replies: int = _count("Replies that came too late to count.")
    malformed_replies: int = _count("Replies that could not be read.")
    closed_rounds: int = _count("Rounds under secure aggregation in which no sum was opened.")
    skipped_rounds: int = _count(
        "Rounds under secure aggregation whose sum is not in the model: it was wrong, or a helper did not answer."
    )
    skipped_noise: float | None = _or_null(
        "Variance of the model's noise over what it would be without skipped rounds; null without any.", ge=0
    )
    ended: str = _said("Why the run ended before its last round with the model it had; else empty.", default="")
    num_parameters: int = _count("Values of the model, d.")
    seconds: float | None = _or_null("Wall-clock time of the rounds; null where it was not measured.", ge=0)
    config: dict[str, Any] = _said(
        "The run configuration, with what the preset and the data made of rounds, clip, step, ball, schedule and "
        "sampling; its keys are those of `murmurfl keys`."
    )
    asked: dict[str, Any] = _said(
        "What the run configuration said where `config` has what became of it; 0 and empty: the preset's choice.",
        default={},
    )
    without_noise: Twin | None = None
    alone: Alone | None = None
    own_mixes: OwnMixes | None = None
    rehearsal: Rehearsal | None = None
    centring: MeanFigures | None = None
    private_evaluation: EvaluationFigures | None = None
    queries: dict[str, dict[str, Any]] | None = _or_null(
        "What became of further queries beside the training, by name: mu, share, answer and counts; left out without "
        "any."
    )
    warnings: list[str] = _said(
        "What is odd about the data or the model, in sentences. Of a simulation's data, which is not private: how many "
        "are far longer than was declared.",
        default=[],
    )
    clip: Clip | None = None
    online: Online | None = None
    gradient_norms: Norms | None = None
    training: Training | None = None
    clients: dict[str, Statement] | None = _or_null(
        f"What each client says of itself, by name: releases, mu, samples used, policy; null of more than "
        f"{MOST_NAMED:,} clients, which are in `client_groups`."
    )
    client_groups: list[ClientGroup] | None = _or_null(
        f"Of more than {MOST_NAMED:,} clients: those that say the same of themselves, together; else null."
    )
    per_round: list[Round] = _said("What became of every round.")

    @model_validator(mode="before")
    @classmethod
    def _with_nulls(cls, values: Any) -> Any:
        return with_nulls(values)

    @classmethod
    def made(
        cls,
        guarantee: Guarantee,
        history: Sequence[RoundReport],
        measured: Mapping[int, Mapping[str, Any]],
        **more: Any,
    ) -> Self:
        """Return the outcome of a training that has just ended.

        ``measured`` is what central evaluations gave, by round.
        """
        privacy = guarantee.document()
        rounds = []
        for report in history:
            found, counts = measured.get(report.server_round, {}), asdict(report)
            rounds.append(
                {"round": counts.pop("server_round"), **{name: found.get(name) for name in MEASURES}, **counts}
            )
        last = {name: [one[name] for one in measured.values() if one.get(name) is not None] for name in MEASURES}
        figures = {
            name: privacy[name] for name in ("mu", "epsilon", "mu_local", "epsilon_local", "min_honest", "delta")
        }
        made = {
            "format": FORMAT,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": _versions(),
            **{name: values[-1] if values else None for name, values in last.items()},
            **figures,
            "guarantee": privacy["sentence"],
            "privacy": privacy,
            **_totals(history),
            "per_round": rounds,
        }
        return cls.model_validate({**made, **more})

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Return the outcome in the folder of a run; raises ReportError if it holds no finished run of this format."""
        path = folder / RESULT_NAME
        if not path.is_file():
            raise ReportError(
                f"Expected the folder of a finished run, got {folder}: {what_is_there(folder)}.", kind="not-found"
            )
        document = read_json(path)
        if missing := [key for key in _NEEDED if key not in document]:
            raise ReportError(
                f"Expected the result of a run in {path}, got a document without {', '.join(missing)}: is it the "
                "result.json of `murmurfl run`?"
            )
        if (found := document.get("format")) != FORMAT:
            raise ReportError(
                f"Expected the result of a run of format {FORMAT} in {path}, got one of format {found!r}. Report it "
                "with the version of murmurfl that wrote it.",
                kind="other-format",
            )
        try:
            return cls.model_validate(document)
        except ValidationError as error:
            wrong = error.errors()[0]
            where = ".".join(map(str, wrong["loc"]))
            raise ReportError(f"Expected the result of a run in {path}, got {where}: {wrong['msg']}.") from error

    def document(self) -> dict[str, Any]:
        """Return the contents of ``result.json``: plain values."""
        absent = {name for name in ("queries", "rehearsal", "all_calls") if not getattr(self, name)}
        return self.model_dump(by_alias=True, exclude=absent or None)

    @property
    def tested(self) -> bool:
        """Whether there was a test set: records of a schema have none, nor has a real fit of a table."""
        if self.of_table and self.engine == "real-nodes":
            return False
        return not registry("task").is_file(str(self.config.get("task", "")))

    @property
    def of_table(self) -> bool:
        """Whether the run was on a table in this process: a rehearsal or a real fit of `murmurfl fit`."""
        return str(self.config.get("task", "")).startswith("table:")

    @property
    def has_curve(self) -> bool:
        """Whether a round has an accuracy or a loss."""
        return any(one.accuracy is not None or one.loss is not None for one in self.per_round)

    @property
    def terms(self) -> Guarantee | None:
        """Guarantee of the run, put together from its parts; None for a file that does not have them."""
        if (parts := self.privacy) is None:
            return None
        return Guarantee(
            parts.loss,
            *(parts.delta, parts.mechanism, parts.trust, parts.unit, parts.relation, parts.covers),  # type: ignore[arg-type]
            min_honest=parts.min_honest,
        )


_NEEDED = ("accuracy", "loss", "mu", "epsilon", "delta", "guarantee", "rounds", "num_clients", "config", "per_round")


def _totals(history: Sequence[RoundReport]) -> dict[str, int]:
    """Return what became of all requests, and how many rounds were closed or skipped."""
    return {
        "rounds": len(history),
        "aggregated": sum(report.aggregated for report in history),
        "refusals": sum(report.refusals for report in history),
        "lost_replies": sum(report.lost for report in history),
        "late_replies": sum(report.late for report in history),
        "malformed_replies": sum(report.malformed for report in history),
        "closed_rounds": sum(bool(report.closed) and not report.skipped for report in history),
        "skipped_rounds": sum(bool(report.skipped) for report in history),
    }


def infinite(figure: float | None) -> float:
    """Return a mu or an epsilon of a file, where JSON has no word for infinity but null."""
    return math.inf if figure is None else figure


def with_nulls(value: Any) -> Any:
    """Return a document with null for every infinity and NaN, for which JSON has no word."""
    if isinstance(value, dict):
        return {key: with_nulls(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [with_nulls(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ReportError(f"Expected JSON in {path}, got: {error}.") from error
    if not isinstance(document, dict):
        raise ReportError(f"Expected a JSON object in {path}, got {type(document).__name__}.")
    return document


def what_is_there(folder: Path) -> str:
    """Return why a folder is no finished run, in words."""
    if not folder.exists():
        return "there is nothing"
    if (folder / FAILURE_NAME).is_file():
        return f"its run failed ({read_json(folder / FAILURE_NAME).get('reason', 'no reason given')})"
    if (folder / CHECKPOINT_NAME).is_file():
        return "its run has not ended, there is only a checkpoint"
    return f"there is no {RESULT_NAME}"


def _versions() -> dict[str, str]:
    """Return the version of murmurfl, of Python and of the packages a result may depend on."""
    found = {"murmurfl": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def result_schema() -> dict[str, Any]:
    """Return the JSON schema of ``result.json``: every key with its type and a sentence."""
    made = Outcome.model_json_schema(mode="serialization")
    schema = _plain(made, made.pop("$defs"))
    schema["properties"]["privacy"]["type"] = "object"  # null only of what an earlier murmurfl left
    for name in ("queries", "rehearsal", "all_calls"):  # left out and not null
        schema["properties"][name]["type"] = "object"
        schema["required"].remove(name)
    keys = {name: key_schema(one) for name, one in run_keys().items()}
    radius = "strategy.projection-radius"
    keys[radius] = {**keys[radius], "type": ["number", "null"]}  # null: the model is not projected
    schema["properties"]["config"]["properties"] = keys
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "A result of murmurfl",
    }


def _plain(part: dict[str, Any], parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema without references, titles and defaults; what may be null says so in its type."""
    made = {key: value for key, value in part.items() if key not in ("title", "default", "anyOf", "$ref")}
    if "$ref" in part:
        made = {**_plain(parts[part["$ref"].rpartition("/")[2]], parts), **made}
    if "anyOf" in part:
        (one,) = (each for each in part["anyOf"] if each != {"type": "null"})
        inner = _plain(one, parts)
        made = {**inner, **made, "type": [inner["type"], "null"]}
    if "description" in made:
        made["description"] = " ".join(made["description"].split())
    if made.get("additionalProperties") is True:
        del made["additionalProperties"]
    for key in ("items", "additionalProperties"):
        if key in made:
            made[key] = _plain(made[key], parts)
    if "properties" in made:
        made["properties"] = {name: _plain(one, parts) for name, one in made["properties"].items()}
    return made
