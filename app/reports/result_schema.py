"""What ``result.json`` holds, as a JSON schema: the one place where its keys are described.

The documentation's page is made from it, and a test holds the results of runs against it. ``format`` says which version
of it a document follows (:data:`murmurfl.app.runs.run_files.FORMAT`).
"""

from __future__ import annotations

from typing import Any

from ...privacy import RELATIONS, TRUST_MODELS, UNITS
from ...privacy.accounting.noise_forecast import VERDICTS
from ..runs.machine_statements import MOST_NAMED
from ..runs.run_files import FORMAT
from ..settings.key_reference import key_schema
from ..settings.run_config import run_keys

Schema = dict[str, Any]

_WITHOUT_NOISE = "simulation only, and not private"
_LOCAL = (
    "Under secure aggregation, the mu that holds whatever server, helpers and other machines do; null under another "
    "trust, or where nothing is guaranteed."
)
_HONEST = "Under secure aggregation, h: the honest machines of each sum that mu rests on; null under another trust."


def _value(kind: str, words: str, **more: Any) -> Schema:
    return {"type": kind, "description": words, **more}


def _or_null(kind: str, words: str, **more: Any) -> Schema:
    return {"type": [kind, "null"], "description": words, **more}


def _count(words: str) -> Schema:
    return _value("integer", words, minimum=0)


def _listed(words: str, *kinds: str) -> Schema:
    return _value("array", words, items={"type": list(kinds)})


def _object(words: str, properties: dict[str, Schema], *, null: bool = False, **more: Any) -> Schema:
    kind = ["object", "null"] if null else "object"
    return {"type": kind, "description": words, "properties": properties, "required": list(properties), **more}


def _privacy() -> Schema:
    return _object(
        "The guarantee in its parts.",
        {
            "mu": _or_null("number", "Gaussian-DP parameter; null where nothing is guaranteed."),
            "epsilon": _or_null("number", "At `delta`; null where nothing is guaranteed."),
            "mu_local": _or_null("number", _LOCAL),
            "epsilon_local": _or_null("number", "Of `mu_local`, at `delta`; null likewise."),
            "min_honest": _or_null("integer", _HONEST, minimum=1),
            "epsilon_amplified": _or_null(
                "number", "At `delta`, what a secret order makes of epsilon, or an estimate of it; else null."
            ),
            "amplified_proved": _or_null("boolean", "Whether that is a guarantee; false: an estimate. Null likewise."),
            "delta": _value("number", "Where epsilon is shown."),
            "unit": _value("string", "What is protected as a whole.", enum=list(UNITS)),
            "relation": _value("string", "How neighbouring data sets differ.", enum=list(RELATIONS)),
            "trust": _value("string", "Who is trusted.", enum=list(TRUST_MODELS)),
            "mechanism": _value("string", "Whose noise of which mechanism."),
            "covers": _value("string", "Which releases the figure is true of."),
            "notes": _listed("Sentences about what the figure rests on.", "string"),
            "sentence": _value("string", "All of it in one standard sentence: `guarantee`."),
            "meaning": _value("string", "What mu means in plain words; empty where nothing is guaranteed."),
        },
    )


def _per_round() -> Schema:
    entry = _object(
        "One round.",
        {
            "round": _value("integer", "From 1.", minimum=1),
            "accuracy": _or_null("number", "Of the central evaluation; null in rounds without one."),
            "auc": _or_null("number", "Likewise, the area under the ROC curve; null unless there are two classes."),
            "loss": _or_null("number", "Of the central evaluation; null in rounds without one, or if not finite."),
            "asked": _count("Machines asked."),
            "aggregated": _count("Replies that entered the model."),
            "lost": _count("Machines that were not connected or did not reply in time."),
            "late": _count("Replies dropped: another of that machine was aggregated, or the round was over, before."),
            "malformed": _count("Replies dropped for their shape, values or entries."),
            "refused": _value("object", "Refusals by reason.", additionalProperties={"type": "integer"}),
            "unopened": _count("Replies that came and were carried over, because the round stayed closed."),
            "closed": _value("string", "Why no sum was opened; empty for a round like any other."),
            "overdue": _count("Of the replies that came, those that were asked for in earlier rounds."),
            "awaited": _count("Requests that were open when the round ended."),
            "finished": _count("Machines that have made all releases they can, and are not asked any more."),
        },
    )
    return _value("array", "What became of every round.", items=entry)


def _training() -> Schema:
    return _object(
        f"What clipping did: {_WITHOUT_NOISE}; null on real machines.",
        {
            "note": _value("string", "That these figures are not private."),
            "rows": _count("Contributions that were clipped: gradients, local steps or updates."),
            "not_finite": _count("Those that were not finite, and count as zero."),
            "clipped": _count("Those longer than the clip norm."),
            "median_ratio": _or_null("number", "Their length over the clip norm, in the median."),
            "largest_ratio": _or_null("number", "The largest of them."),
            "sentence": _value("string", "The figures in words."),
            "worrying": _value("boolean", "Whether such training comes to little."),
            "rounds": _listed("The rounds of the lists that follow.", "integer"),
            "not_finite_per_round": _listed("By round.", "integer"),
            "clipped_per_round": _listed("By round.", "integer"),
            "median_ratio_per_round": _listed("By round.", "number", "null"),
            "largest_ratio_per_round": _listed("By round.", "number", "null"),
        },
        null=True,
    )


def _clip() -> Schema:
    return _object(
        "With a `quantile`, the clip that followed the gradients; else null.",
        {
            "quantile": _value("number", "Which share of gradients was not to be clipped."),
            "share": _value("number", "Of mu^2 of the releases, for how many were."),
            "first": _value("number", "Of the first round."),
            "last": _value("number", "After the last one."),
        },
        null=True,
    )


def _centring() -> Schema:
    return _object(
        "With `centring = private`, what became of the mean of the features, which machines release before the first "
        "round; else null. `model.npz` then has `centring.centre`, the mean m, and `centring.constant`, c, beside the "
        "model's arrays: the model's inputs are unit([unit(phi - m), c]) of a sample's features phi "
        "(`murmurfl.privacy.centred`).",
        {
            "mu": _or_null("number", "Of its release, a part of `mu`; null where nothing is guaranteed."),
            "share": _value("number", "Of mu^2 that it was given, by the run configuration."),
            "constant": _value("number", "What is appended to features seen from it: `centring.constant`."),
            "asked": _count("Machines asked for it."),
            "aggregated": _count("Replies that are in it."),
            "samples": _count("Samples that it is the mean of, by their words."),
        },
        null=True,
    )


def _evaluation() -> Schema:
    interval = {"type": ["array", "null"], "items": {"type": "number"}}
    both, alone = "of noise and sampling", "of the noise alone, on these very samples"
    return _object(
        "With `private-evaluation`, how good the model is on the machines' own samples, by a count that they released "
        "with noise; else null. Where no machine answered, figures are null and `failure` says why.",
        {
            "mu": _or_null("number", "Of its release, a part of `mu`; null where nothing is guaranteed, and likewise."),
            "share": _or_null("number", "Of mu^2 that it was given; null in a training of somebody's own project."),
            "accuracy": _or_null("number", "The share of right predictions, with noise."),
            "interval": {**interval, "description": f"95 % interval, {both}: of the accuracy on such samples."},
            "noise_interval": {**interval, "description": f"95 % interval, {alone}."},
            "auc": _or_null("number", "The area under the ROC curve, with noise; null without `score-bins`."),
            "auc_interval": {**interval, "description": f"95 % interval, {both}; null likewise."},
            "auc_noise_interval": {**interval, "description": f"95 % interval, {alone}; null likewise."},
            "samples": _or_null("integer", "Samples that it is of, by the machines' words."),
            "machines": _or_null("integer", "Machines that are in it."),
            "held_out": _or_null("boolean", "Whether nobody trained on these samples."),
            "noise_std": _or_null("number", "Standard deviation of the noise in the accuracy."),
            "sentence": _or_null("string", "The figures in words."),
            "failure": _or_null("string", "Why there are none."),
        },
        null=True,
    )


def _without_noise() -> Schema:
    return _object(
        f"Where the same run ended without noise: {_WITHOUT_NOISE}; null where it was not made.",
        {
            "note": _value("string", "That these figures are not private."),
            "accuracy": _or_null("number", "On the test set; null where the model has none."),
            "auc": _or_null("number", "Likewise; null unless there are two classes."),
            "loss": _or_null("number", "Likewise; null if it is not finite."),
            "rounds": _count("Rounds that were made."),
            "seconds": _value("number", "Wall-clock time of the rounds.", minimum=0),
        },
        null=True,
    )


def _online() -> Schema:
    regret = {"type": ["array", "null"], "items": {"type": ["number", "null"]}}
    return _object(
        f"What online learning cost so far: {_WITHOUT_NOISE}; null where it was not computed.",
        {
            "rounds": _listed("The rounds of the lists that follow.", "integer"),
            "cumulative-loss": {**regret, "description": "Of the global models, summed."},
            "dynamic-regret": {**regret, "description": "Against every round's own optimum; null if it is not known."},
            "static-regret": {**regret, "description": "Against the best fixed model; null if it is not known."},
        },
        null=True,
    )


def _norms() -> Schema:
    return _object(
        f"Norms of the training loss's gradient: {_WITHOUT_NOISE}; null unless `gradient-norm` is set.",
        {
            "rounds": _listed("Rounds that were evaluated; 0 is the start.", "integer"),
            "values": _listed("The norms.", "number", "null"),
        },
        null=True,
    )


def _forecast() -> Schema:
    change = _object(
        "Something that would lessen the noise.",
        {
            "words": _value("string", "What."),
            "ratio": _value("number", "What `noise_over_typical` would be."),
        },
    )
    return _object(
        "How much of the model was likely to be noise, as it was said before the first round from what machines state; "
        "null without noise. The ratio to the longest update is arithmetic, all else an estimate.",
        {
            "verdict": _value("string", "What to expect of the model.", enum=list(VERDICTS)),
            "warning": _value("boolean", "Whether there was a warning: above a ratio of 1, or if it is useless."),
            "noise_over_longest": _value("number", "Noise in the average of all releases over the longest it can be."),
            "noise_over_typical": _value("number", "The same over a typical one: an estimate."),
            "typical": _value("number", "Which part of the longest a typical one is taken to be."),
            "kept": _value("number", "Which part of what is learnt without noise is likely to be left: an estimate."),
            "machines_needed": _count("Machines like these at which it would be useful."),
            "parameters_needed": _count("Values of a model that would be useful; 0 if one is too many."),
            "epsilon_needed": _or_null("number", "Epsilon, at `delta`, at which it would be useful."),
            "sentence": _value("string", "The figures in words."),
            "changes": _value("array", "What would help; empty where it is useful.", items=change),
        },
        null=True,
    )


def _about() -> dict[str, Schema]:
    """What made the document."""
    return {
        "format": _value("integer", f"Version of this document; now {FORMAT}.", minimum=1),
        "date": _value("string", "When it was written: ISO 8601, UTC.", format="date-time"),
        "engine": _or_null(
            "string",
            "What carried the messages; null for a program of one's own.",
            enum=["cohort", "inprocess", "ray", "real-nodes", None],
        ),
        "device": _or_null(
            "string",
            "Which of PyTorch's devices computed gradients and noise, whose bits are other ones then; null for NumPy.",
        ),
        "chosen_by": _or_null(
            "string",
            "`auto` where the strategy was chosen for the run's sizes; null where it was set.",
            enum=["auto", None],
        ),
        "chosen_because": _or_null("string", "Why it was chosen, in a sentence; null likewise."),
        "versions": _value(
            "object", "Of murmurfl, Python and the packages that were used.", additionalProperties={"type": "string"}
        ),
    }


def _outcome() -> dict[str, Schema]:
    """What came out, and what it guarantees."""
    return {
        "accuracy": _or_null("number", "On the test set, after the last round; null where the model has none."),
        "auc": _or_null("number", "Likewise, the area under the ROC curve; null unless there are two classes."),
        "loss": _or_null("number", "On the test set, after the last round; null if it is not finite."),
        "mu": _or_null("number", "Gaussian-DP parameter of everything that was released; null: nothing is guaranteed."),
        "epsilon": _or_null("number", "The same at `delta`; it means what `guarantee` says, and nothing else."),
        "mu_local": _or_null("number", _LOCAL),
        "epsilon_local": _or_null("number", "Of `mu_local`, at `delta`; null likewise."),
        "min_honest": _or_null("integer", _HONEST, minimum=1),
        "min_cohort": _or_null(
            "integer", "Under secure aggregation, the fewest releases of a sum; else null.", minimum=1
        ),
        "helpers": _or_null("integer", "Under secure aggregation, how many must open every sum; else null.", minimum=1),
        "delta": _value("number", "Where epsilon is shown."),
        "guarantee": _value("string", "What mu and epsilon are true of, in one sentence."),
        "privacy": _privacy(),
        "forecast": _forecast(),
    }


def _counts() -> dict[str, Schema]:
    """How much of it there was."""
    return {
        "rounds": _count("Rounds that were made."),
        "num_clients": _count("Machines in all."),
        "releases": _count("Releases that the machines say they made."),
        "aggregated": _count("Releases that entered the model."),
        "refusals": _count("Requests that machines refused."),
        "lost_replies": _count("Replies that did not come."),
        "late_replies": _count("Replies that came too late to count."),
        "malformed_replies": _count("Replies that could not be read."),
        "closed_rounds": _count("Rounds under secure aggregation in which no sum was opened."),
        "num_parameters": _count("Values of the model, d."),
        "seconds": _or_null("number", "Wall-clock time of the rounds; null where it was not measured.", minimum=0),
    }


def _parts() -> dict[str, Schema]:
    """What was asked for, and what became of each part."""
    config = {name: key_schema(one) for name, one in run_keys().items()}
    machine = {"type": "object", "additionalProperties": {"type": ["number", "string", "boolean", "null"]}}
    return {
        "config": _value(
            "object",
            "The run configuration, with what the preset and the data made of rounds, clip, step, ball, schedule and "
            "sampling; its keys are those of `murmurfl keys`.",
            properties=config,
        ),
        "asked": _value(
            "object",
            "What the run configuration said where `config` has what became of it; 0 and empty: the preset's choice.",
        ),
        "without_noise": _without_noise(),
        "centring": _centring(),
        "private_evaluation": _evaluation(),
        "clip": _clip(),
        "online": _online(),
        "gradient_norms": _norms(),
        "training": _training(),
        "machines": _or_null(
            "object",
            f"What each machine says of itself, by name: releases, mu, samples used, policy; null of more than "
            f"{MOST_NAMED:,} machines, which are in `machine_groups`.",
            additionalProperties=machine,
        ),
        "machine_groups": _or_null(
            "array",
            f"Of more than {MOST_NAMED:,} machines: those that say the same of themselves, together; else null.",
            items=_object(
                "Machines that say the same.",
                {
                    "machines": _count("How many."),
                    "first": _value("string", "The name of the first of them."),
                    "statement": {"description": "What each of them says.", **machine},
                },
            ),
        ),
        "per_round": _per_round(),
    }


def result_schema() -> Schema:
    """The JSON schema of ``result.json``: every key with its type and a sentence."""
    made = _object("What a run leaves: `result.json`.", {**_about(), **_outcome(), **_counts(), **_parts()})
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "A result of murmurfl", **made}
