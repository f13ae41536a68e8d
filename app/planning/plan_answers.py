"""The answer of ``murmurfl plan`` as data: a decision, ways to run it, mechanisms, persons (:mod:`.plan_lines`).

Ways are compared by their score (:attr:`~murmurfl.app.planning.Candidate.score`). What one comes to on data is known
only when it is tried (:func:`tried_out`).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from ...privacy.accounting.amplification import allocation_mu
from ...privacy.accounting.gdp import gdp_epsilon, gdp_mu
from ...privacy.accounting.guarantee import Guarantee
from ...privacy.errors import ConfigurationError
from ...privacy.release.policy import TRUST_MODELS, PrivacyPolicy
from ...privacy.release.tables import POISSON, SHUFFLED
from ...privacy.setting import Value
from ..methods import METHODS
from ..methods.method import AUTO
from ..methods.queries import trained_samples
from ..nodes.flower_internals import without_log
from ..runs.experiment import Experiment, plan_request_of, prepare, resolve
from ..runs.run_guarantees import configured_figures, included_notes, run_guarantee
from ..settings.layers import DEFAULT_RUN, layered, with_defaults
from ..settings.registry import registry
from ..settings.run_config import USUAL_MU, RunConfig, run_keys, without_unread
from .deciding import Candidate, PlanRequest, PlanResult, chosen_features, decide, tried
from .noise_plans import (
    check_batch,
    check_rounds,
    compare_mechanisms,
    losses_of_persons,
    mechanism_base,
    noise_guarantee,
)

TAKEN, DEFAULT, AS_SET = "taken", "the default", "as it is set"
_OF_FILES = ("out-dir", "run-name", "track", "data-root")
_PARTS = (2, 4, 8, 16)
"""Batches are the samples of the smallest client over these."""
_MORE_ROUNDS = (0.5, 2.0)
_BATCHES = ("mu2", "trusted-mu2", "noisy-sgd", "trusted-sgd")
"""Strategies that go through their samples in batches, those with less noise first."""


def variations_of(result: PlanResult, default: Mapping[str, Value], *, mark: str = DEFAULT) -> list[Candidate]:
    """Return the decision, what would be the default, and other rounds, batches and trust; the best first.

    ``default`` has the keys of the run that would be made if nobody decided, ``mark`` what that one is called.

    Notes
    -----
    Every row has the mu that was asked for, under the trust that it names. With secret batches a row has the epsilon
    that was asked for while nobody learns them, and a larger mu (:attr:`Candidate.amplification`).
    """
    request, chosen = result.request, result.chosen
    found = [replace(chosen, varied="taken", mark=TAKEN)]
    found += [replace(one, varied="default", mark=mark) for one in _as_settings(request, default)]
    found += [replace(one, varied="strategy") for one in result.others]
    if chosen.whole:
        rounds = [max(round(chosen.rounds * times), 1) for times in _MORE_ROUNDS]
        more = [{**chosen.settings, "num-rounds": number} for number in rounds]
        found += [replace(one, varied="rounds") for one in _possible(request, chosen.strategy, more)]
    found += _batches(request, [chosen, *result.others])
    found += [replace(one, varied="order") for one in secret_ways(request)]
    found += [replace(one, varied="trust") for one in _other_trusts(request)]
    kept: dict[Any, Candidate] = {}  # the first of each run; a default that is what was taken says both
    for one in found:
        key = (one.trust, one.strategy, one.batch, one.rounds, one.training_uses, one.features)
        before = kept.setdefault(key, one)
        if one.mark not in before.mark:
            kept[key] = replace(before, mark=" and ".join(filter(None, (before.mark, one.mark))))
    return sorted(kept.values(), key=lambda one: one.score)


def _tried(request: PlanRequest, strategy: str, ways: Iterable[Mapping[str, Value]]) -> Iterator[Candidate]:
    """Yield a strategy in those of several ways that are possible; the decision says of each strategy why it is not."""
    for settings in ways:
        try:
            yield tried(request, strategy, settings)
        except ConfigurationError:
            continue


def _possible(request: PlanRequest, strategy: str, ways: Iterable[Mapping[str, Value]]) -> list[Candidate]:
    """Return a strategy in those ways that keep to the situation's uses and rounds."""
    uses, rounds = request.most_uses, request.most_rounds
    return [
        one
        for one in _tried(request, strategy, ways)
        if (uses is None or one.uses <= uses) and (rounds is None or one.rounds <= rounds)
    ]


def _as_settings(request: PlanRequest, settings: Mapping[str, Value]) -> Iterator[Candidate]:
    """Yield the run that settings ask for; none where it is of a strategy that is not compared, or impossible."""
    strategy = str(settings.get("strategy", run_keys()["strategy"].default))
    if request.config.trust_model in METHODS[strategy].trusts:
        known = request.config.to_mapping().keys() - {"strategy", "epsilon"}
        yield from _tried(request, strategy, [{name: settings[name] for name in settings if name in known}])


def _batches(request: PlanRequest, options: Sequence[Candidate]) -> list[Candidate]:
    """Return the best strategy with batches, in one pass with each batch."""
    known = [one for name in _BATCHES for one in options if one.strategy == name]
    if not known:
        return []
    base, sizes = known[0], sorted({max(request.fewest // part, 1) for part in _PARTS}, reverse=True)
    made = _possible(request, base.strategy, [{"features": base.features, "batch-size": size} for size in sizes])
    return [replace(one, varied="batch") for one in made]


_RELEASES = (6, 12, 24)
"""Numbers of releases that a sample hides in, of which the best is shown; each costs as many times the gradients."""
_PARTS_OF_ALL = (16, 8, 4)
"""A Poisson batch has the samples of a client over one of these on average; the best is shown."""


def secret_ways(request: PlanRequest) -> list[Candidate]:
    """Return noisy SGD with secret batches, at the epsilon that was asked for while nobody learns the batches.

    Without a trusted server batches are shuffled, with one they are Poisson batches: DP-SGD. No decision takes them:
    nobody can check that order and time of a release stay secret, and on real images full batches with centred features
    were as good or better than made-up data say (docs/accuracy.md). There are none for a stream, where not all samples
    are there from the first release on, and no Poisson batches where each sample is used once.
    """
    config = request.config
    if config.stream or not config.private:
        return []
    if config.trust_model == "trusted-server":
        strategy, found = "trusted-sgd", _poisson_ways(request)
    else:
        strategy, found = "noisy-sgd", _shuffled_ways(request)
    features = chosen_features(request, strategy, centred=False)
    ways = [{**way, "features": features, "centring": "none"} for way in found]
    return sorted(_possible(request, strategy, ways), key=lambda candidate: candidate.score)[:1]


def _shuffled_ways(request: PlanRequest) -> Iterator[Mapping[str, Value]]:
    """Yield batches for every number of releases that a sample hides in."""
    config, fewest = request.config, request.fewest
    epsilon = gdp_epsilon(config.mu, config.delta)
    for batch in sorted({-(-fewest // min(releases, fewest)) for releases in _RELEASES}):
        # The mu is for noise without resolution; what resolution shows is left room for.
        mu = allocation_mu(0.999 * epsilon, fewest // batch, 0.99 * config.delta)
        yield {"batch-size": batch, "mu": mu, "epsilon": 0.0, "batch-selection": SHUFFLED}


def _poisson_ways(request: PlanRequest) -> Iterator[Mapping[str, Value]]:
    """Yield batches for every rate at which a sample is drawn; rounds, and with them mu, are worked out."""
    config = request.config
    mean = sum(trained_samples(config, size) for size in request.sizes) / request.clients
    epsilon = config.epsilon or gdp_epsilon(config.mu, config.delta)
    for batch in sorted({max(int(mean / parts), 1) for parts in _PARTS_OF_ALL}):
        yield {"batch-size": batch, "mu": 0.0, "epsilon": epsilon, "batch-selection": POISSON}


def _other_trusts(request: PlanRequest) -> Iterator[Candidate]:
    """Yield the best way under each other kind of trust."""
    for trust in TRUST_MODELS:
        if trust == request.config.trust_model:
            continue
        try:
            config = replace(request.config, trust=trust)
            yield decide(replace(request, config=config)).chosen
        except ConfigurationError:
            continue


def tried_out(rows: Sequence[Candidate], most: int) -> list[Candidate]:
    """Return the rows with the accuracy that the best of them, the decision and the default have in simulation.

    Tried are the first ``most`` rows, and those that are marked.

    Notes
    -----
    Whoever chooses by accuracy chooses by the samples that it is measured on, which should be public.
    """
    from ..engines.start import run_cohort

    def accuracy(one: Candidate) -> float | None:
        return run_cohort(replace(one.config, evaluate_every=1_000_000)).accuracy

    with without_log():
        return [
            replace(one, accuracy=accuracy(one)) if number < most or one.mark else one
            for number, one in enumerate(rows)
        ]


def command_of(settings: Mapping[str, Value]) -> str:
    """Return the command that runs settings in simulation; what it would set by itself is left out."""
    plain = {name: one.default for name, one in run_keys().items()}
    whole = {**plain, **settings}
    if not whole["trust"]:
        whole["trust"] = registry("strategy")[str(whole["strategy"])].own_trust
    whole["mu"] = 0.0 if whole["epsilon"] else whole["mu"] or USUAL_MU
    usual = {"mu": 0.0, "epsilon": DEFAULT_RUN["epsilon"]}
    if whole["mu"] == gdp_mu(float(usual["epsilon"]), float(whole["delta"])):
        whole |= usual
    if whole["clients-per-round"] == whole["num-clients"]:
        whole["clients-per-round"] = 0
    needed: dict[str, Value] = {}
    for first in (_DECISIVE, whole):  # what decides about the defaults of others stands first
        default = {**plain, **with_defaults(needed)}
        needed |= {name: whole[name] for name in first if whole[name] != default[name]}
        if needed.get("mu"):  # in the place of an epsilon
            needed.pop("epsilon", None)
    read = without_unread(with_defaults(needed))
    texts = [f"{name}={_typed(value)}" for name, value in needed.items() if name in read]
    return " ".join(["murmurfl run", *(f"--set {shlex.quote(text)}" for text in texts)])


_DECISIVE = ("task", "preset", "strategy")


def _typed(value: Value) -> str:
    """Return a value as it is typed on a command line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.12g}" if isinstance(value, float) else str(value)


_CLASSES = 10
"""Classes of the made-up data that stand in where no task is named: ten clouds."""
_OF_A_STRATEGY = ("passes", "max-participations", "mechanism", "clip-norm", "learning-rate", "clip-unit", "preset")
"""Keys that were set for another strategy and mean nothing to the one that is chosen."""
_LEFT_OUT = (
    "out-dir",
    "run-name",
    "track",
    "data-root",
    "strategy",
    "strategy.sample-uses",
    "strategy.stream",
    "num-rounds",
)
"""Keys that the command has no need of, or that the decision settles."""


def experiment_of(result: PlanResult) -> Experiment:
    """Return the chosen run."""
    return cast(Experiment, result.chosen.problem)  # resolve makes no other problems


def command_of_result(result: PlanResult) -> str:
    """Return the command that runs the choice in simulation."""
    asked = {name: value for name, value in result.asked.items() if name not in _LEFT_OUT}
    return command_of(asked | result.settings)


def command_of_candidate(candidate: Candidate) -> str:
    """Return the command that runs a candidate in simulation."""
    settings = {name: value for name, value in candidate.config.to_mapping().items() if name not in _OF_FILES}
    if candidate.config.poisson_batches:  # whose mu follows from epsilon, batches and rounds
        settings |= {name: candidate.settings.get(name, settings[name]) for name in ("mu", "epsilon")}
        settings["epsilon"] = settings["epsilon"] or candidate.request.config.epsilon
    return command_of({**settings, "strategy": candidate.strategy})


def guarantee_of(result: PlanResult, *, of_code: bool = False) -> Guarantee:
    """Return the guarantee of the chosen run, or ``of_code``, in which all of mu is for gradients.

    Notes
    -----
    **Formal guarantees.** It is what clients that keep to these settings would guarantee for replacement of one sample;
    nothing was released. A ClientApp of the printed code spends the same mu, and has no other query.
    """
    experiment = experiment_of(result)
    guarantee = run_guarantee(experiment, configured_figures(experiment))
    if not of_code:
        return guarantee
    included = set(included_notes(experiment))
    return replace(guarantee, notes=tuple(note for note in guarantee.notes if note not in included))


def protects_owners(result: PlanResult) -> bool:
    """Return True if the mechanisms are compared for a run whose samples have owners."""
    return result.noise is not None and result.noise.chosen.policy.samples_per_owner > 0


def guarantee_for_persons(result: PlanResult) -> Guarantee:
    """Return the guarantee that persons' losses are for: of the chosen run, or of owners where it has some.

    Notes
    -----
    **Formal guarantees.** A run that is made as the plan says has this guarantee; a plan releases nothing.
    """
    if result.noise is not None and protects_owners(result):
        return noise_guarantee(result.noise)
    return guarantee_of(result)


def policy_of(result: PlanResult) -> PrivacyPolicy:
    """Return the training policy of the client with the most samples.

    Notes
    -----
    **Formal guarantees.** A client under this policy guarantees the policy's mu for replacement of one sample; nothing
    was released.
    """
    experiment = experiment_of(result)
    return experiment.method.policy(experiment.trained, max(experiment.sizes))


def _noise_values(result: PlanResult) -> int:
    """Return the number of noise values in all releases of a client, or of a trusted server."""
    experiment = experiment_of(result)
    rows = max(policy_of(result).normals_per_parameter, experiment.num_rounds)
    return experiment.method.release_size(experiment) * rows


def base_of_run(config: RunConfig, *, samples: int = 0, num_values: int = 0) -> Candidate:
    """Return a run whose mechanisms are compared, with other numbers of samples and values where these are not 0."""
    experiment = prepare(config)
    policy = experiment.policy()
    if not policy.adds_noise or "batch-size" not in experiment.method.keys:
        got = f"strategy = {config.strategy!r}" + ("" if config.private else f", mechanism = {config.mechanism.kind!r}")
        raise ConfigurationError(
            f"Expected clients that add noise to a stream of releases, each of a batch, got {got}: a plan compares "
            "mechanisms for such noise.",
            kind="conflict",
        )
    if not samples:
        experiment.check_rounds()
    base = mechanism_base(
        plan_request_of(config),
        experiment,
        samples=samples,
        num_values=num_values,
        # With centring what is left for the stream, after the mean of the features.
        epsilon=gdp_epsilon(policy.mu, config.delta),
        cap=config.max_participations,
    )
    if samples or num_values:
        check_rounds(base)
    return base


def base_of_decided(result: PlanResult) -> Candidate | None:
    """Return the chosen run, to compare its mechanisms; None where its clients release no stream with noise."""
    experiment = experiment_of(result)
    policy = experiment.policy()
    if not policy.adds_noise or policy.clip_unit == "moments":
        return None
    return mechanism_base(result.request, experiment, cap=policy.max_participations)


def base_of_numbers(samples: int, parameters: int, settings: Mapping[str, Any]) -> Candidate:
    """Return a run of a few numbers whose mechanisms are compared: releases of a batch, clipped to 1 by default."""
    clients, batch, passes = settings["num-clients"], settings["batch-size"], settings.get("passes", 1)
    per_round = settings.get("clients-per-round") or clients
    check_batch(batch, samples)
    rounds = settings.get("num-rounds") or passes * clients * (samples // max(batch, 1)) // per_round
    asked = {"clip-norm": 1.0, **settings, "clients-per-round": per_round, "num-rounds": rounds}
    request = _request_of_numbers(samples, parameters, asked)
    problem = request.problem({})
    base = mechanism_base(request, problem, num_values=parameters, epsilon=settings.get("epsilon", 0.0))
    check_rounds(base)
    return base


def answer(
    result: PlanResult,
    base: Candidate | None,
    settings: Mapping[str, Value],
    *,
    tries: int = 0,
    person: tuple[int | None, int | None] = (None, None),
    details: bool = True,
) -> PlanResult:
    """Return the result with variations of its choice, the noise of its mechanisms, and persons.

    ``settings`` are those of the run that was asked about, empty for numbers alone; ``tries`` ways are trained in
    simulation. ``person`` has on how many clients somebody has samples, and how many on each; None where nobody asks.
    Without ``details`` no ways and mechanisms are worked out.
    """
    guarantee, values = guarantee_of(result), _noise_values(result)
    if not details:
        return replace(result, persons=losses_of_persons(guarantee, values, *person)) if any(person) else result
    strategy = settings.get("strategy", AUTO)
    is_chosen_by_user = strategy not in (AUTO, DEFAULT_RUN["strategy"])
    left = {"strategy": DEFAULT_RUN["strategy"] if strategy == AUTO else strategy}  # where nobody decides
    default = result.asked if result.made_up else with_defaults({**result.asked, **settings, **left})
    ways = variations_of(result, default, mark=AS_SET if is_chosen_by_user else DEFAULT)
    noise = None if base is None else compare_mechanisms(base)
    result = replace(result, noise=noise)
    if noise is not None and protects_owners(result):
        values = noise.chosen.num_values * noise.chosen.policy.max_participations
    persons = losses_of_persons(guarantee_for_persons(result), values, *person)
    return replace(result, ways=tried_out(ways, tries) if tries else ways, persons=persons)


def choice_of_run(settings: Mapping[str, Value]) -> PlanResult:
    """Return the decision for a run's settings, on the sizes of its data."""
    wanted = with_defaults(settings)
    if wanted.get("strategy") != AUTO:
        noiseless = {"mechanism": "none"} if wanted.get("mechanism") == "none" else {}
        wanted = {name: value for name, value in wanted.items() if name not in _OF_A_STRATEGY} | noiseless
        if "features" not in settings:  # the default run's are for its own strategy
            wanted.pop("features", None)
    wanted = without_unread({**wanted, "strategy": AUTO})
    request = plan_request_of(RunConfig.from_mapping(wanted))
    return replace(decide(replace(request, declares_mix="partition" in wanted)), asked=wanted)


def _request_of_numbers(samples: int, parameters: int, settings: Mapping[str, Any]) -> PlanRequest:
    """Return the request of a few numbers, on made-up data that stand in for the user's."""
    for name, value in (("samples", samples), ("parameters", parameters)):
        if value < 1:
            raise ConfigurationError(
                f"Expected {name} >= 1, got {value}.", kind="out-of-range", setting=name, got=value
            )
    made_up = _made_up(samples, parameters, settings)
    clients = int(settings["num-clients"])
    config = RunConfig.from_mapping({**made_up, **settings})
    return PlanRequest(config, (samples,) * clients, int(made_up["task.features"]), _CLASSES, resolve)


def _made_up(samples: int, parameters: int, settings: Mapping[str, Any]) -> dict[str, Value]:
    """Return the settings of made-up data of these sizes."""
    features = max(round(parameters / _CLASSES) - 1, 1)
    return {"task": "synthetic", "task.samples": settings["num-clients"] * samples, "task.features": features}


def choice_of_numbers(samples: int, parameters: int, settings: Mapping[str, Value]) -> PlanResult:
    """Return the decision for a few numbers.

    ``samples`` are those of each client, ``parameters`` is d, and ``settings`` say clients, mu and trust.
    """
    request = _request_of_numbers(samples, parameters, {**settings, "strategy": AUTO})
    request = replace(request, declares_mix="partition" in settings)
    asked = {**_made_up(samples, parameters, settings), **settings}
    return replace(decide(request), asked=asked, made_up=True)


def asked_of_numbers(
    samples: int, parameters: int, settings: Mapping[str, Any], of_batches: Mapping[str, Any]
) -> tuple[PlanResult, Candidate | None]:
    """Return the choice for a few numbers, and what mechanisms are compared for.

    The chosen run, or releases of a batch.

    ``of_batches`` has ``batch-size`` if it is given, and beside it ``passes`` and ``batch-selection``: they settle the
    comparison, and not the decision.
    """
    base = None
    if "batch-size" in of_batches:
        base = base_of_numbers(samples, parameters, {**_without(settings, _NOT_OF_A_BATCH), **of_batches})
    per_round = settings.get("clients-per-round") or settings["num-clients"]
    choice = choice_of_numbers(samples, parameters, {**settings, "clients-per-round": per_round})
    return choice, base or base_of_decided(choice)


def request_of_updates(samples: int, parameters: int, settings: Mapping[str, Value]) -> PlanRequest:
    """Return the request of a project's own updates, of clients with so many samples each; 0 where it is not known."""
    rounds = int(settings.get("num-rounds", 1))
    for name, value, least in (("samples", samples, 0), ("parameters", parameters, 1), ("rounds", rounds, 1)):
        if value < least:
            raise ConfigurationError(
                f"Expected {name} >= {least}, got {value}.", kind="out-of-range", setting=name, got=value
            )
    per_round = settings.get("clients-per-round") or settings["num-clients"]
    config = RunConfig.from_mapping({**settings, "clients-per-round": per_round})
    return PlanRequest(config, (samples,) * config.num_clients if samples else (), num_parameters=parameters)


_NOT_OF_A_BATCH = ("trust", "trust.colluders", "strategy.sample-uses", "strategy.stream")
"""Keys that settle the decision alone where mechanisms are compared for releases of a batch."""


def _without(settings: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in names}


def asked_of_run(
    settings: Mapping[str, Value], changes: Mapping[str, Value], sizes: Mapping[str, int]
) -> tuple[PlanResult, Candidate | None]:
    """Return the choice for a run, and what mechanisms are compared for.

    That run, or the chosen one where it is open.
    """
    merged = layered(settings, changes)
    if merged.get("strategy") == AUTO:
        choice = choice_of_run(merged)
        return choice, base_of_decided(choice)
    config = RunConfig.from_mapping(_without(merged, _OF_DECISIONS))
    base = base_of_run(config, samples=sizes.get("samples", 0), num_values=sizes.get("parameters", 0))
    return choice_of_run(merged), base


_OF_DECISIONS = ("strategy.sample-uses", "strategy.stream")
"""Keys that settle the decision alone."""
