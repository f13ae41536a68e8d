"""A run in a few lines for people, and the figures in them as people read them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...privacy import rounded_up
from ...privacy.accounting.noise_forecast import shortest
from ...privacy.accounting.guarantee import plain_meaning


def shown(value: float | None) -> str:
    """A mu or an epsilon for people, rounded up; None is infinite."""
    return rounded_up(math.inf if value is None else value)


def noise_note(noise_quality: str) -> str:
    """What must stand beside an epsilon that rests on noise of this quality."""
    return "" if noise_quality == "exact" else " (fast noise: no guarantee)"


def plain_words(document: Mapping[str, Any]) -> str:
    """What a result's mu means in plain words; empty where nothing is guaranteed, or nothing is said of mu."""
    privacy = document.get("privacy")
    if not privacy:  # of a murmurfl that did not write its parts
        return ""
    parts = {name: privacy.get(name) for name in ("unit", "trust", "mu_local", "min_honest")}
    return privacy.get("meaning") or plain_meaning(math.inf if privacy["mu"] is None else privacy["mu"], **parts)


def meaning_lines(document: Mapping[str, Any]) -> list[str]:
    """What its mu means to whoever wants to know of a sample."""
    said = plain_words(document)
    note = noise_note(document["config"]["noise-quality"])
    return [f"mu = {shown(document['mu'])} means{note}: {said[0].lower()}{said[1:]}"] if said else []


def loss_text(loss: float | None) -> str:
    """A loss for people; None is one that is no finite number."""
    return "not a finite number: the model diverged" if loss is None else f"{loss:.4g}"


def shown_accuracy(document: Mapping[str, Any]) -> str:
    """A run's accuracy for people, with the AUC where there are two classes; its loss where it has neither."""
    if document["accuracy"] is None:
        return f"none; loss {loss_text(document['loss'])}"
    auc = document.get("auc")
    return f"{100 * document['accuracy']:.1f} %{'' if auc is None else f', AUC {auc:.3f}'}"


def summary_lines(document: dict[str, Any], folder: Path) -> list[str]:
    """A short summary for people."""
    note = noise_note(document["config"]["noise-quality"])
    rows = [
        ("test accuracy", shown_accuracy(document)),
        *_evaluated(document),
        ("mu", shown(document["mu"])),
        ("epsilon", f"{shown(document['epsilon'])} at delta = {document['delta']:g}{note}"),
        *_whatever_happens(document, note),
        *_centring(document),
        ("rounds", str(document["rounds"])),
        ("machines", str(document["num_clients"])),
        ("releases", f"{document['releases']} made, {document['aggregated']} aggregated"),
        ("refusals", str(document["refusals"])),
        ("lost replies", str(document["lost_replies"])),
        ("files", str(folder)),
    ]
    if forecast := document.get("forecast"):
        rows.insert(1, ("forecast", forecast_text(forecast)))
    training = document.get("training")
    if training and training["worrying"]:
        rows.insert(1, ("training", training["sentence"]))
    width = max(len(name) for name, _ in rows)
    return [f"  {name:<{width}}  {value}" for name, value in rows] + ["", f"  {document['guarantee']}"]


def forecast_text(forecast: Mapping[str, Any]) -> str:
    """What was expected before the first round, for people."""
    longest, typical = shortest(forecast["noise_over_longest"]), shortest(forecast["noise_over_typical"])
    return f"{forecast['verdict']}: noise {longest} times the longest update, {typical} times a typical one (estimate)"


def _centring(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What went before the rounds: the mean of the features, and its share."""
    mean = document.get("centring")
    if not mean:
        return []
    part = "" if mean["mu"] is None else f", {100 * mean['share']:.4g} % of mu^2 (mu = {shown(mean['mu'])})"
    return [("centring", f"the mean of the features of {mean['aggregated']} machines{part}")]


def shown_evaluation(evaluation: Mapping[str, Any]) -> str:
    """A private evaluation in a few words."""
    if evaluation["accuracy"] is None:
        return "none: no machine answered"
    auc = (
        "" if evaluation["auc"] is None else f", AUC {evaluation['auc']:.3f} {_interval(evaluation['auc_interval'], 1)}"
    )
    return f"{100 * evaluation['accuracy']:.1f} % {_interval(evaluation['interval'], 100)}{auc}"


def _interval(interval: Sequence[float], times: int) -> str:
    digits = 1 if times == 100 else 3
    return f"({times * interval[0]:.{digits}f} to {times * interval[1]:.{digits}f})"


def _evaluated(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """How good machines say the model is, by noised counts of their own samples."""
    evaluation = document.get("private_evaluation")
    if not evaluation:
        return []
    part = "" if evaluation["mu"] is None else f", {100 * evaluation['share']:.4g} % of mu^2"
    of = "" if evaluation["accuracy"] is None else " held-out" if evaluation["held_out"] else " trained-on"
    samples = "" if evaluation["accuracy"] is None else f", {evaluation['samples']:,}{of} samples{part}"
    return [("private accuracy", f"{shown_evaluation(evaluation)}{samples}")]


def is_summed(document: Mapping[str, Any]) -> bool:
    """Whether a result is of a run whose server saw only sums; one of an earlier murmurfl does not say."""
    return document.get("min_honest") is not None


def _whatever_happens(document: Mapping[str, Any], note: str) -> list[tuple[str, str]]:
    """Under secure aggregation: what mu rests on, and what holds without."""
    if not is_summed(document):
        return []
    closed = document["closed_rounds"]
    helpers, honest = document["helpers"], document["min_honest"]
    assumed = f"1 of {helpers} helper{'s' * (helpers != 1)} and {honest} machine{'s' * (honest != 1)} of each sum"
    return [
        ("if honest", assumed),
        ("mu local", f"{shown(document['mu_local'])} whatever happens"),
        ("epsilon local", f"{shown(document['epsilon_local'])} at delta = {document['delta']:g}{note}"),
        (
            "sums",
            f"of at least {document['min_cohort']} machines{f'; {closed} rounds stayed closed' if closed else ''}",
        ),
    ]
