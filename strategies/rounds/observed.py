"""Observations of a training by its server in addition to the model: what it refuses and says.

Before the first round, while nothing is spent: do clients last for all rounds, and evaluate; what does their noise
leave of the model? Afterwards: does anything come from them, and does clipping leave anything of it?
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.special import betaincinv

from ...privacy import protocol
from ...privacy.accounting.noise_forecast import Forecast
from ...privacy.errors import ConfigurationError, MurmurflError
from ...privacy.forecast_text import forecast_banner, forecast_lines
from ...privacy.release.clipping import FAR_BEYOND, TrainingFigures, times
from .replies import RoundReport, Vector

logger = logging.getLogger("flwr")

PATIENCE = 3
"""Rounds from which nothing came but refusals, after which a training that never had anything is given up."""

_MOST_NAMED = 10
_LEGACY = " In place of ClientApp(client_fn, mods=[...]) write app = numpy_client_app(client_fn, mods=[...])."


class NothingAggregatedError(MurmurflError):
    """No client's release ever came into the model.

    Examples
    --------
    >>> try:
    ...     raise NothingAggregatedError("Expected a release of at least one client, got none in 3 rounds.")
    ... except NothingAggregatedError as error:
    ...     error.kind
    'missing'
    """

    kind = "missing"


def check_masks(statements: Mapping[str, Mapping[str, Any]], *, masked: bool) -> None:
    """Refuse a training if server (``masked``) and all clients disagree about masks: no reply could be read."""
    unlike = [name for name, statement in statements.items() if (protocol.MIN_COHORT in statement) != masked]
    if not unlike or len(unlike) < len(statements):
        return
    if masked:
        raise ConfigurationError(
            f"Expected clients that release under masks, got {len(unlike)} that do not, and secure_aggregation has "
            "sums of masked releases only. Set trust='secure-aggregation' and sums=SumAssumption(...) in their "
            "policies, or leave secure_aggregation out.",
            kind="mismatch",
            setting="trust",
        )
    raise ConfigurationError(
        f"Expected clients that release without masks, got {len(unlike)} with trust='secure-aggregation', whose masks "
        "this server cannot take off. Give the strategy secure_aggregation=SecureAggregation(min_cohort=..., "
        "helpers=...).",
        kind="mismatch",
        setting="trust",
    )


def log_simulated_records(statements: Mapping[str, Mapping[str, Any]]) -> None:
    """Warn of what the records of simulated clients show: many do not fit, or they change from reading to reading.

    Real clients state nothing of the kind: it depends on their records.
    """
    invalid = {name: one for name, one in statements.items() if isinstance(one.get(protocol.INVALID_RECORDS), int)}
    if invalid:
        name, worst = max(invalid.items(), key=lambda item: item[1][protocol.INVALID_RECORDS])
        count = sum(one[protocol.INVALID_RECORDS] for one in invalid.values())
        logger.warning(
            "In simulation: %d records of %d clients do not fit their schema and count as zero; of client %s %d of %s, "
            "most with: %s. Give all records one shape (pad texts to one length, crop images), or a schema that they "
            "fit. A real client says so in its own log and `--check` alone.",
            *(count, len(invalid), name, worst[protocol.INVALID_RECORDS], worst.get(protocol.RECORDS, "its records")),
            worst.get(protocol.INVALID_REASON, "no reason given"),
        )
    if any(one.get(protocol.CHANGING) == 1 for one in statements.values()):
        logger.warning(
            "In simulation: samples(context) gives other records when it is asked again, as random crops or a stream "
            "do. They are read once, and every round uses that reading; the ledger of a real client refuses records "
            "that change. Give the same records every time."
        )


def check_evaluations(statements: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse to ask clients for evaluations if none of them allows any; warn if some do not."""
    claims = {name: statement.get("evaluation-allowed") for name, statement in statements.items()}
    known = {name: bool(allowed) for name, allowed in claims.items() if isinstance(allowed, bool | int)}
    refusing = [name for name, allowed in known.items() if not allowed]
    if not refusing:
        return
    how = (
        "A client evaluates only where its own configuration says so: allow_evaluation=True in its UpdatePolicy, "
        "allow-evaluation = true in its operator's file. The results have no noise."
    )
    if len(refusing) == len(known):
        raise ConfigurationError(
            f"Expected clients that evaluate, for evaluate_on_clients=True, got {len(known)} that do not. {how} Or "
            "leave evaluate_on_clients out and give start(..., evaluate_fn=...), on public data.",
            kind="mismatch",
            setting="evaluate_on_clients",
        )
    named = ", ".join(refusing[:_MOST_NAMED]) + (", ..." if len(refusing) > _MOST_NAMED else "")
    logger.warning("%d of %d clients do not evaluate (%s). %s", len(refusing), len(known), named, how)


def no_progress(history: Sequence[RoundReport], patience: int) -> bool:
    """Whether all of at least ``patience`` rounds had nothing but refusals; lost replies and closed rounds may mend."""
    return len(history) >= patience and all(
        report.asked and report.refusals + report.malformed >= report.asked for report in history
    )


def require_progress(history: Sequence[RoundReport], why: Sequence[str] = ()) -> None:
    """Refuse a result of rounds that asked for releases and aggregated none; ``why`` has the texts of refusals."""
    asked = [report for report in history if report.asked]
    if not asked or any(report.aggregated for report in asked):
        return
    rounds = "round" if len(asked) == 1 else "rounds"
    legacy = any(protocol.REFUSAL_NAMES[protocol.LEGACY_CLIENT_APP] in report.refused for report in asked)
    raise NothingAggregatedError(
        f"Expected releases to aggregate, got none in {len(asked)} {rounds}: {'; '.join(_what_came(asked, why))}; see "
        f"the clients' logs.{_LEGACY if legacy else ''}"
    )


def _what_came(asked: Sequence[RoundReport], why: Sequence[str]) -> list[str]:
    """Return what came in the place of releases in some rounds."""
    reasons = sorted({reason for report in asked for reason in report.refused})
    texts = f" ({'; '.join(why)})" if why else ""
    came = [f"clients refused with {', '.join(reasons)}{texts}"] if reasons else []
    came += sorted({f"a round was closed ({report.closed})" for report in asked if report.closed})
    came += [f"{count} replies were malformed"] if (count := sum(report.malformed for report in asked)) else []
    came += [f"{count} replies were lost"] if (count := sum(report.lost for report in asked)) else []
    return came


_WIDTH = 64
"""Width of a line beside Flower's `WARNING :` on a terminal of 80 columns."""


def log_forecast(forecast: Forecast | None, failed_sums: int = 0) -> None:
    """Log a forecast, in lines for 80 columns: as a banner where the model will be noise.

    Under secure aggregation a training ends after ``failed_sums`` wrong sums.
    """
    if forecast is None:
        return
    # A record for each line: `murmurfl run` and others who read this log look for warnings line by line.
    if forecast.is_warning:
        level, lines = logging.WARNING, forecast_banner(forecast, _WIDTH)
    else:
        level, lines = logging.INFO, forecast_lines(forecast, _WIDTH)
    for line in lines:
        logger.log(level, "%s", line)
    if failed_sums and not forecast.alone:
        logger.info(
            "A wrong sum is skipped, and clients mend the noise where their mechanism can. After %d the training "
            "ends with the model it has.",
            failed_sums,
        )


ALL_CLIENTS = ""
"""A client's name for the figures of all clients of a round together."""


_LOWER = "lower learning_rate, to a third say."
_NOISE_DROVE = (
    "The noise drove the model away, as the forecast before the first round warned; see there what would help."
)


def _is_useless(forecast: Forecast | None) -> bool:
    return forecast is not None and forecast.verdict == "useless"


_FAR_BEYOND_OF_GRADIENTS = 100.0
"""Ratio beyond which gradients of single samples are so long that a step may have been chosen for another clip."""


class ClippingWatch:
    """Effects of clipping in every round, with warnings; not private, so only simulated clients report them."""

    def __init__(self) -> None:
        self.rounds: dict[int, TrainingFigures] = {}
        self._warned_of_not_finite = False
        self._warned_of_ratio = 0.0

    def take(
        self,
        server_round: int,
        figures: Mapping[str, TrainingFigures],
        forecast: Forecast | None = None,
        *,
        of_updates: bool = True,
    ) -> None:
        """Keep the figures of a round, by client, and warn where they are bad.

        ``forecast`` is that of the noise in the model: where it was useless, the model is noise and no step size helps.
        Whole updates that are far longer than the clip lose what they learnt. Gradients of single samples
        (``of_updates=False``) do not: a small clip leaves their directions, and less noise. Only their growth is bad.
        """
        if not figures:
            return
        of_round = TrainingFigures.together(figures.values())
        self.rounds[server_round] = of_round
        if of_round.not_finite and not self._warned_of_not_finite:
            self._warned_of_not_finite = True
            cause = f" {_NOISE_DROVE}" if _is_useless(forecast) and len(self.rounds) > 1 else ""
            logger.warning("Round %d, in simulation: %s%s", server_round, of_round.sentence, cause)
        # A warning each time the ratio has doubled: one is too few where a training diverges, one a round too many.
        grown = of_round.median_ratio > FAR_BEYOND * next(iter(self.rounds.values())).median_ratio
        enough = FAR_BEYOND if of_updates or grown else _FAR_BEYOND_OF_GRADIENTS
        if of_round.median_ratio > max(enough, 2 * self._warned_of_ratio):
            self._warned_of_ratio = of_round.median_ratio
            name, worst = max(figures.items(), key=lambda item: item[1].largest_ratio)
            first = next(iter(self.rounds.values())).median_ratio
            if not grown and not of_updates:
                remedy = "That is no mistake if learning_rate was chosen for this clip (app.steps()); or else raise it."
            elif not grown:
                remedy = "Scale the model or its inputs, train less at a time, or raise clip_norm."
            elif _is_useless(forecast):
                remedy = f"In the first round it was {times(first)}. {_NOISE_DROVE}"
            else:
                remedy = f"In the first round it was {times(first)}, so the model diverges: {_LOWER}"
            logger.warning(
                "Round %d, in simulation: half of the contributions were over %s the clip norm%s: %s left of them. %s",
                *(server_round, times(of_round.median_ratio)),
                ""
                if name == ALL_CLIENTS
                else f", the update of client {name} was {times(worst.largest_ratio)} the clip",
                "next to nothing is" if of_updates else "their directions are",
                remedy,
            )


_GROWN_MODEL, _GROWN_UPDATES = 3.0, 2.0
_ROUNDS_LOOKED_AT = 3
_FALSE_ALARMS = 1e-6
"""Probability of a warning from one round of updates of noise alone."""


class DivergenceWatch:
    """Warns once of a training that diverges, from the model and the noised sums of its rounds.

    A model that moves far away should leave less to learn. It diverges if it is three times as long as the initial
    one while the updates are twice as long as the first, in the mean of three rounds. Their noise has the same length
    in all rounds.

    It reads the model and releases, whose noise is in them already, so it costs no privacy.
    """

    def __init__(self, remedy: str) -> None:
        self._remedy = remedy
        self._start = math.nan
        self._squares: list[float] = []
        self._warned = False

    def begin(self, start: Vector) -> None:
        """Note the model before the first step."""
        if math.isnan(self._start):
            self._start = float(np.linalg.norm(start))

    def take(
        self, server_round: int, total: Vector, aggregated: int, model: Vector, forecast: Forecast | None = None
    ) -> None:
        """Look at a round's noised sum of ``aggregated`` releases and the model after its step."""
        if self._warned or not aggregated:
            return
        with np.errstate(over="ignore", invalid="ignore"):
            square, length = float(np.dot(total, total)) / aggregated, float(np.linalg.norm(model))
        if not square > 0.0:  # zeros of a client that adds no noise, or NaN: nothing is compared with these
            return
        self._squares.append(square)
        first, last = self._squares[0], self._squares[1:][-_ROUNDS_LOOKED_AT:]
        if len(last) < _ROUNDS_LOOKED_AT or length <= _GROWN_MODEL * self._start:
            return
        # Of noise alone the ratio has the F distribution, which is wide for a small model.
        below = float(betaincinv(_ROUNDS_LOOKED_AT * len(total) / 2, len(total) / 2, 1 - _FALSE_ALARMS))
        chance = below / (1 - below) / _ROUNDS_LOOKED_AT
        grown = float(np.mean(last)) / first
        if grown > max(_GROWN_UPDATES**2, chance):
            self._warned = True
            logger.warning(
                "Round %d: the model diverges. It is %s as long as the initial one, and the updates, noise included, "
                "are %s as long as the first. %s",
                *(server_round, times(length / self._start) if self._start else "infinitely", times(math.sqrt(grown))),
                _NOISE_DROVE if _is_useless(forecast) else self._remedy,
            )
