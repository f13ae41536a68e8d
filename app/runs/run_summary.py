"""A run in a few lines for people: its figures, what they are true of, what to be warned of; and a picture."""

from __future__ import annotations

import logging
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from ...privacy.accounting.guarantee import plain_meaning, rounded_up
from ...privacy.forecast_text import HELD, shortest
from ...privacy.release.policy import NO_NOISE
from ..reports.figures import empty_figure
from ..settings.registry import registry
from ..settings.run_config import SECURE
from .outcome import Alone, EvaluationFigures, Outcome, Scores, Twin, infinite

logger = logging.getLogger(__name__)

UNTESTED = "none: the server has no records"
"""Text in the place of a test's score where there was no test."""
UNRELEASED = "accuracy and loss were not released"
"""The same for a real fit, whose computer has records."""


def shown(value: float | None) -> str:
    """Return a mu or an epsilon for people, rounded up; None is infinite."""
    return rounded_up(infinite(value))


def noise_note(noise_quality: str) -> str:
    """Return the note that must stand beside an epsilon with noise of this quality."""
    return "" if noise_quality == "exact" else " (fast noise: no guarantee)"


def loss_text(loss: float | None) -> str:
    """Return a loss for people; None is one that is no finite number."""
    return "not a finite number: the model diverged" if loss is None else f"{loss:.4g}"


def shown_accuracy(of: Outcome | Twin | Alone | Scores) -> str:
    """Return a run's accuracy for people, with the AUC where there are two classes; its loss where it has neither."""
    if of.accuracy is None and isinstance(of, Outcome) and not of.tested:
        if registry("task").is_file(str(of.config.get("task", ""))):
            return UNTESTED
        return UNRELEASED if of.private_evaluation is None else shown_evaluation(of.private_evaluation)
    if of.accuracy is None:
        return f"none; loss {loss_text(of.loss)}"
    return f"{100 * of.accuracy:.1f} %{'' if of.auc is None else f', AUC {of.auc:.3f}'}"


def is_better(one: Outcome | Twin | Alone, other: Outcome | Twin | Alone) -> bool:
    """Return True if one has the higher accuracy; of models without accuracy, the smaller loss."""
    if one.accuracy is not None and other.accuracy is not None:
        return one.accuracy > other.accuracy
    if one.accuracy is not None or other.accuracy is not None or one.loss is None:
        return False
    return one.loss < infinite(other.loss)


def shown_evaluation(evaluation: EvaluationFigures) -> str:
    """Return a private evaluation in a few words."""
    if evaluation.accuracy is None:
        return "none: no client answered"
    accuracy = f"{100 * evaluation.accuracy:.1f} %{_interval(evaluation.interval, 100, 1)}"
    return (
        accuracy
        if evaluation.auc is None
        else f"{accuracy}, AUC {evaluation.auc:.3f}{_interval(evaluation.auc_interval, 1, 3)}"
    )


def _interval(interval: Sequence[float] | None, times: int, digits: int) -> str:
    return "" if interval is None else f" ({times * interval[0]:.{digits}f} to {times * interval[1]:.{digits}f})"


def plain_words(outcome: Outcome) -> str:
    """Return the meaning of mu, of all calls if there were several, in plain words; empty if nothing is guaranteed."""
    if (privacy := outcome.privacy) is None:  # of a murmurfl that did not write its parts
        return ""
    if outcome.all_calls is not None:
        return outcome.all_calls.meaning
    return privacy.meaning or plain_meaning(privacy.loss, privacy.unit, privacy.trust, privacy.min_honest)


def meaning_lines(outcome: Outcome) -> list[str]:
    """Return the line that says what its mu means, if anything is guaranteed."""
    meaning, note = plain_words(outcome), noise_note(outcome.config["noise-quality"])
    mu = outcome.mu if outcome.all_calls is None else outcome.all_calls.mu
    return [f"mu = {shown(mu)} means{note}: {meaning[0].lower()}{meaning[1:]}"] if meaning else []


def summary_lines(outcome: Outcome, folder: Path) -> list[str]:
    """Return a short summary for people, which ends with the guarantee."""
    note = noise_note(outcome.config["noise-quality"])
    at_delta = f"at delta = {outcome.delta:g}{note}"
    rows = [("test accuracy", shown_accuracy(outcome))]
    if (alone := outcome.alone) is not None and alone.clients:
        rows.append(("one alone", f"{shown_accuracy(alone)}: without the others and noise; simulated, not private"))
    rows += _own_mix_rows(outcome)
    if (training := outcome.training) is not None and training.worrying:
        rows.append(("training", training.sentence))
    rows += [("warning", words) for words in outcome.warnings]
    rows += [*_forecast_rows(outcome), *_private_accuracy_rows(outcome)]
    rows += [("mu", shown(outcome.mu)), ("epsilon", f"{shown(outcome.epsilon)} {at_delta}")]
    if (honest := outcome.min_honest) is not None:
        helpers = outcome.helpers or 0
        closed = f"; {outcome.closed_rounds} rounds stayed closed" if outcome.closed_rounds else ""
        assumed = f"1 of {helpers} helper{'s' * (helpers != 1)} and {honest} client{'s' * (honest != 1)} of each sum"
        rows += [
            ("if honest", assumed),
            ("mu local", f"{shown(outcome.mu_local)} in the worst case"),
            ("epsilon local", f"{shown(outcome.epsilon_local)} {at_delta}"),
            ("sums", f"of at least {outcome.min_cohort} clients{closed}"),
        ]
    if (mean := outcome.centring) is not None:
        part = "" if mean.mu is None else f", {100 * mean.share:.4g} % of mu^2 (mu = {shown(mean.mu)})"
        rows.append(("centring", f"the mean of the features of {mean.aggregated} clients{part}"))
    rows += [(name, shown_query(found)) for name, found in (outcome.queries or {}).items()]
    rows += [
        ("rounds", str(outcome.rounds)),
        ("clients", str(outcome.num_clients)),
        ("releases", f"{outcome.releases} made, {outcome.aggregated} aggregated"),
        ("refusals", str(outcome.refusals)),
        ("lost replies", str(outcome.lost_replies)),
        ("files", str(folder)),
    ]
    width = max(len(name) for name, _ in rows)
    return [f"  {name:<{width}}  {value}" for name, value in rows] + ["", f"  {outcome.guarantee}"]


def shown_query(found: Mapping[str, Any]) -> str:
    """Return the answer to a query in a few words, with its part of mu^2."""
    answer = found.get("answer")
    if answer is None:
        return f"no answer: {found.get('failure')}"
    values = answer.items() if isinstance(answer, Mapping) else [("", answer)]
    values_text = ", ".join(f"{name} {value:.4g}".strip() for name, value in values if isinstance(value, int | float))
    part = "" if found.get("mu") is None else f", {100 * found['share']:.4g} % of mu^2 (mu = {shown(found['mu'])})"
    return f"{values_text or 'in result.json'}{part}"


def _forecast_rows(outcome: Outcome) -> list[tuple[str, str]]:
    """Return the row of the forecast, if there is one."""
    if (forecast := outcome.forecast) is None:
        return []
    longest, typical = shortest(forecast.noise_over_longest), shortest(forecast.noise_over_typical)
    sentence = f"noise {longest} times the longest update, {typical} times a typical one (estimate)"
    if forecast.kept_range is not None:
        low, high = (100 * share for share in forecast.kept_range)
        sentence = f"keeps {low:.0f} to {high:.0f} % of what can be learnt from all samples together without noise, "
        sentence += f"a range around two usual kinds of made-up data, {HELD}"
    return [("forecast", f"{forecast.verdict}: {sentence}")]


def _private_accuracy_rows(outcome: Outcome) -> list[tuple[str, str]]:
    """Return the row of the private evaluation, if there was one."""
    if (evaluation := outcome.private_evaluation) is None:
        return []
    samples = ""
    if evaluation.accuracy is not None:
        part = "" if evaluation.mu is None else f", {100 * evaluation.share:.4g} % of mu^2"  # type: ignore[operator]
        kind, owners = "held-out" if evaluation.held_out else "trained-on", evaluation.owners
        counted = f"{evaluation.samples:,} {kind} samples" if owners is None else f"about {owners:,.0f} {kind} owners"
        samples = f", {counted}{part}"
    return [("private accuracy", f"{shown_evaluation(evaluation)}{samples}")]


def short_lines(outcome: Outcome, folder: Path) -> list[str]:
    """Return the summary that a command ends with: ten to fifteen lines on a terminal, the guarantee once."""
    beside = []
    if (twin := outcome.without_noise) is not None and outcome.config.get("mechanism") != NO_NOISE:
        beside.append(f"without noise {shown_accuracy(twin)}")
    if (alone := outcome.alone) is not None and alone.clients:
        beside.append(f"one client alone {shown_accuracy(alone)}")
    rows = [("accuracy" if outcome.accuracy is not None else "test loss", shown_measure(outcome))]
    rows += [("compare", f"{', '.join(beside)}: simulated, not private")] if beside else []
    rows += _own_mix_rows(outcome)
    rows += [("privately", shown_evaluation(one))] if (one := outcome.private_evaluation) is not None else []
    counts = {"refused": outcome.refusals, "lost": outcome.lost_replies, "rounds closed": outcome.closed_rounds}
    lost = "".join(f", {count} {name}" for name, count in counts.items() if count)
    rows.append(("releases", f"{outcome.aggregated} of {outcome.num_clients} clients in {outcome.rounds} rounds{lost}"))
    rows.append(("files", str(folder)))
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:<{width}}  {value}" for name, value in rows]
    return [*lines, "", outcome.guarantee, *_guess(outcome), *warning_lines(outcome)[:1]]


def _own_mix_rows(outcome: Outcome) -> list[tuple[str, str]]:
    """Return the row of accuracies in each client's mix of classes, of the model and of one client alone."""
    known = []
    if (own := outcome.own_mixes) is not None:
        known.append(f"{100 * own.mean:.1f} % ({100 * own.worst:.1f} to {100 * own.best:.1f})")
    alone = outcome.alone
    if alone is not None and alone.own_mix is not None:
        worst, best = 100 * (alone.own_worst or 0.0), 100 * (alone.own_best or 0.0)
        known.append(f"one client alone {100 * alone.own_mix:.1f} % ({worst:.1f} to {best:.1f})")
    return [("own mix", f"{', '.join(known)}: in each client's classes, worst to best")] if known else []


def shown_measure(outcome: Outcome) -> str:
    """Return a run's accuracy, or its loss where it has none, without its name."""
    measured = outcome.accuracy is not None or not outcome.tested
    return shown_accuracy(outcome) if measured else loss_text(outcome.loss)


def _guess(outcome: Outcome) -> list[str]:
    """Return what mu means, short where the guarantee above says against whom and rests on nobody's honesty."""
    meaning = plain_words(outcome)
    short = meaning.partition("; tossing")[0]
    return [f"{short} (a coin: 50 %)." if outcome.min_honest is None else meaning] if meaning else []


def warning_lines(outcome: Outcome) -> list[str]:
    """Return what to be warned of, the gravest first."""
    worrying = [one.sentence for one in (outcome.training,) if one is not None and one.worrying]
    useless = [one.sentence for one in (outcome.forecast,) if one is not None and one.warning]
    return [*outcome.warnings, *worrying, *compared_lines(outcome), *useless]


def compared_lines(outcome: Outcome) -> list[str]:
    """Return what it means that the same run without noise, or one client alone, ends on the other side of the run."""
    lines, twin = [], outcome.without_noise
    if twin is not None and is_better(outcome, twin):
        lines.append(
            "Without noise it ends below the private run: the settings do not fit these data. Try other steps or "
            "rounds (learning-rate, clip-norm, num-rounds), or other features."
        )
    if outcome.alone is not None and is_better(outcome.alone, outcome):
        lines.append(
            f"One client alone does better than this federation: add clients, {_SUMS if _seen(outcome) else ''}allow a "
            "larger epsilon, or train alone."
        )
    elif twin is not None and _seen(outcome) and _far_below(outcome, twin):
        lines.append(
            "The noise costs much of the accuracy, since the server sees every release: secure aggregation "
            "(trust=secure-aggregation) needs far less noise for the same epsilon."
        )
    return lines


_SUMS = "let the server see sums only (trust=secure-aggregation), "
_MUCH = 0.1
"""Accuracy that noise costs, from which a summary says how it would cost less."""


def _seen(outcome: Outcome) -> bool:
    """Return True if the server sees every release, and a strategy of sums could serve."""
    methods, name = registry("strategy"), str(outcome.config.get("strategy", ""))
    serves = name in methods and SECURE in methods[name].trusts
    return getattr(outcome.privacy, "trust", "") == "untrusted-server" and serves


def _far_below(outcome: Outcome, twin: Twin) -> bool:
    if outcome.accuracy is None or twin.accuracy is None:
        return False
    return outcome.accuracy < twin.accuracy - _MUCH


def closing_lines(outcome: Outcome) -> list[str]:
    """Return the end of a simulated run's summary.

    Notes
    -----
    The first line says what the outcome's mu is worth (:attr:`~murmurfl.privacy.Guarantee.meaning`). The figure
    without noise is of simulated data, and not private.
    """
    if outcome.mu is None:
        return []
    lines, twin, config = meaning_lines(outcome), outcome.without_noise, outcome.config
    if twin is not None and config.get("mechanism") != NO_NOISE:
        rounds = "" if twin.rounds == outcome.rounds else f" in {twin.rounds} rounds"
        reached = f"{shown_accuracy(twin)}{rounds}"
        lines.append(f"Without noise the same run reaches {reached}: just measured, and not private.")
    lines += compared_lines(outcome)
    return ["", *(f"  {line}" for line in lines)]


def plot_accuracy(outcome: Outcome, path: Path | BinaryIO) -> None:
    """Accuracy against rounds, with the epsilon of the run, as PNG."""
    measure, percent = ("loss", 1) if outcome.accuracy is None else ("accuracy", 100)
    curve = [(one.round, percent * value) for one in outcome.per_round if (value := getattr(one, measure)) is not None]
    config, epsilon = outcome.config, outcome.epsilon
    figure = empty_figure(7, 4.2)
    axes = figure.add_subplot()
    marker = "o" if len(curve) <= 40 else None
    axes.plot([at for at, _ in curve], [value for _, value in curve], marker=marker, color="#1f6f8b", linewidth=2)
    twin = None if outcome.without_noise is None else getattr(outcome.without_noise, measure)
    if twin is not None:
        label = "without noise, not private"
        axes.axhline(percent * twin, color="#444444", linestyle=":", linewidth=1.6, label=label)
        axes.legend(loc="lower left", fontsize=8)
    axes.set_xlabel("round")
    figure.supxlabel(textwrap.fill(outcome.guarantee, 120), fontsize=6.5, color="#444444")
    axes.set_ylabel("test accuracy [%]" if measure == "accuracy" else "loss")
    if measure == "accuracy":
        axes.set_ylim(0, 100)
    axes.grid(alpha=0.3)
    axes.set_title(f"{config['strategy']} on {config['task']}: {shown_accuracy(outcome)}")
    spent = f"whole run: μ = {shown(outcome.mu)}, ε = {shown(epsilon)} at δ = {outcome.delta:g}"
    axes.text(
        0.98,
        0.05,
        f"{'NOT PRIVATE: ε is infinite' if epsilon is None else spent}\n"
        f"{outcome.num_clients} clients, {outcome.releases} releases{noise_note(config['noise-quality'])}",
        transform=axes.transAxes,
        horizontalalignment="right",
        bbox={"facecolor": "white", "edgecolor": "#cccccc"},
    )
    figure.savefig(path, dpi=150)
