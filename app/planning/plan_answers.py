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
from ...privacy.accounting.gdp import gdp_epsilon
from ...privacy.accounting.guarantee import Guarantee
from ...privacy.errors import ConfigurationError
from ...privacy.machine.policy import TRUST_MODELS, PrivacyPolicy
from ...privacy.machine.tables import SHUFFLED
from ...privacy.setting import Value
from ..methods import METHODS
from ..methods.method import AUTO
from ..nodes.flower_internals import without_log
from ..runs.experiment import Experiment, plan_request_of, prepare, worked_out
from ..runs.run_guarantees import configured_figures, run_guarantee
from ..settings.layers import layered, started_with
from ..settings.run_config import RunConfig, run_keys, without_unread
from .deciding import Candidate, PlanRequest, PlanResult, decide, tried
from .noise_plans import NoiseRequest, make_plan, persons_of

TAKEN, DEFAULT, AS_SET = "taken", "the default", "as it is set"
_OF_FILES = ("out-dir", "run-name", "track", "data-root")
_PARTS = (2, 4, 8, 16)
"""Batches are the samples of the smallest machine over these."""
_MORE_ROUNDS = (0.5, 2.0)
_BATCHES = ("mu2", "trusted-mu2", "noisy-sgd", "trusted-sgd")
"""Strategies that go through their samples in batches, those with less noise first."""


def variations_of(result: PlanResult, default: Mapping[str, Value], *, mark: str = DEFAULT) -> list[Candidate]:
    """Return the decision, what would be the default, and other rounds, batches and trust; the best first.

    ``default`` has the keys of the run that would be made if nobody decided, ``mark`` what that one is called.

    Notes
    -----
    Every row has the mu that was asked for, under the trust that it names. In a secret order a row has the epsilon that
    was asked for while nobody learns the order, and a larger mu (:attr:`Candidate.amplification`).
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
    found += [replace(one, varied="order") for one in _in_secret(request)]
    found += [replace(one, varied="trust") for one in _other_trusts(request)]
    kept: dict[Any, Candidate] = {}  # the first of each run; a default that is what was taken says both
    for one in found:
        key = (one.trust, one.strategy, one.batch, one.rounds, one.training_uses, one.features)
        before = kept.setdefault(key, one)
        if one.mark not in before.mark:
            kept[key] = replace(before, mark=" and ".join(filter(None, (before.mark, one.mark))))
    return sorted(kept.values(), key=lambda one: one.score)


def _tried(request: PlanRequest, strategy: str, ways: Iterable[Mapping[str, Value]]) -> Iterator[Candidate]:
    """A strategy in those of several ways that are possible; the decision says of each strategy why it is not."""
    for settings in ways:
        try:
            yield tried(request, strategy, settings)
        except ConfigurationError:
            continue


def _possible(request: PlanRequest, strategy: str, ways: Iterable[Mapping[str, Value]]) -> list[Candidate]:
    """A strategy in those ways that keep to the situation's uses and rounds."""
    uses, rounds = request.most_uses, request.most_rounds
    return [
        one
        for one in _tried(request, strategy, ways)
        if (uses is None or one.uses <= uses) and (rounds is None or one.rounds <= rounds)
    ]


def _as_settings(request: PlanRequest, settings: Mapping[str, Value]) -> Iterator[Candidate]:
    """The run that settings ask for; none where it is of a strategy that is not compared, or impossible."""
    strategy = str(settings.get("strategy", run_keys()["strategy"].default))
    if request.config.trust_model in METHODS[strategy].trusts:
        known = request.config.to_mapping().keys() - {"strategy", "epsilon"}
        yield from _tried(request, strategy, [{name: settings[name] for name in settings if name in known}])


def _batches(request: PlanRequest, options: Sequence[Candidate]) -> list[Candidate]:
    """The best strategy with batches, in one pass with each batch."""
    known = [one for name in _BATCHES for one in options if one.strategy == name]
    if not known:
        return []
    base, sizes = known[0], sorted({max(request.fewest // part, 1) for part in _PARTS}, reverse=True)
    made = _possible(request, base.strategy, [{"features": base.features, "batch-size": size} for size in sizes])
    return [replace(one, varied="batch") for one in made]


_RELEASES = (6, 12, 24)
"""Numbers of releases that a sample hides in, of which the best is shown; each costs as many times the gradients."""


def _in_secret(request: PlanRequest) -> list[Candidate]:
    """Noisy SGD in a secret order, whose epsilon is the one that was asked for while nobody learns the order.

    No decision takes it: nobody can check that the order and the time of a release stay secret. There is none for a
    stream, where not all samples are there from the first release on, and none for a trusted server.
    """
    config, fewest = request.config, request.fewest
    if config.stream or not config.private:
        return []
    epsilon, ways = gdp_epsilon(config.mu, config.delta), []
    for batch in sorted({-(-fewest // min(releases, fewest)) for releases in _RELEASES}):
        # The mu is for noise without resolution; what resolution shows is left room for.
        mu = allocation_mu(0.999 * epsilon, fewest // batch, 0.99 * config.delta)
        known: Mapping[str, Value] = {"batch-size": batch, "mu": mu, "epsilon": 0.0}
        ways.append({**known, "batch-selection": "shuffled", "centring": "none"})
    return sorted(_possible(request, "noisy-sgd", ways), key=lambda candidate: candidate.score)[:1]


def _other_trusts(request: PlanRequest) -> Iterator[Candidate]:
    """The best way under each other kind of trust."""
    plain = {one.attribute: one.default for one in run_keys().values() if one.read_by == "trust"}
    for trust in TRUST_MODELS:
        if trust == request.config.trust_model:
            continue
        try:
            config = replace(request.config, **{**plain, "trust": trust})
            yield decide(replace(request, config=config)).chosen
        except ConfigurationError:
            continue


def tried_out(rows: Sequence[Candidate], most: int) -> list[Candidate]:
    """The rows with the accuracy that the best of them, the decision and the default have in simulation.

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
    """The command that runs settings in simulation; keys with their default are left out."""
    keys = run_keys()
    needed = {name: value for name, value in settings.items() if value != keys[name].default}
    if needed.get("epsilon"):  # of which a mu beside it was made
        needed.pop("mu", None)
    for name in [name for name in started_with(needed) if name not in needed]:  # what the command would set by itself
        own = settings.get(name, keys[name].default)
        if name == "mechanism" and not own:
            config = RunConfig.from_mapping(needed)
            own = METHODS[config.strategy].mechanism(config)
        if name not in ("mu", "epsilon") or not {"mu", "epsilon"} & needed.keys():
            needed[name] = own
    texts = [f"{name}={_typed(value)}" for name, value in needed.items()]
    return " ".join(["murmurfl run --engine cohort", *(f"--set {shlex.quote(text)}" for text in texts)])


def _typed(value: Value) -> str:
    """A value as it is typed on a command line."""
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
    return cast(Experiment, result.chosen.problem)  # worked_out makes no other problems


def command_of_result(result: PlanResult) -> str:
    """Return the command that runs the choice in simulation."""
    asked = {name: value for name, value in result.asked.items() if name not in _LEFT_OUT}
    return command_of(asked | result.settings)


def command_of_candidate(candidate: Candidate) -> str:
    """Return the command that runs a candidate in simulation."""
    settings = {name: value for name, value in candidate.config.to_mapping().items() if name not in _OF_FILES}
    return command_of({**settings, "strategy": candidate.strategy})


def guarantee_of(result: PlanResult) -> Guarantee:
    """Return the guarantee of the chosen run.

    Notes
    -----
    **Formal guarantees.** It is what clients that keep to these settings would guarantee for replacement of one sample;
    nothing was released.
    """
    experiment = experiment_of(result)
    return run_guarantee(experiment, configured_figures(experiment))


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
    """Return the number of noise values in all releases of a machine, or of a trusted server."""
    experiment = experiment_of(result)
    rows = max(policy_of(result).normals_per_parameter, experiment.num_rounds)
    return experiment.method.release_size(experiment) * rows


def request_of(config: RunConfig, *, check_rounds: bool = True) -> NoiseRequest:
    """The request of a run: its machine with the most samples, its clip norm and its model, on its data."""
    experiment = prepare(config)
    policy = experiment.policy()
    if not policy.adds_noise or "batch-size" not in experiment.method.keys:
        got = f"strategy = {config.strategy!r}" + ("" if config.private else f", mechanism = {config.mechanism.kind!r}")
        raise ConfigurationError(
            f"Expected machines that add noise to a stream of releases, each of a batch, got {got}: a plan compares "
            "mechanisms for such noise.",
            kind="conflict",
        )
    if check_rounds:
        experiment.check_rounds()
    # With centring what is left for the stream, after the mean of the features.
    return _request(experiment, epsilon=gdp_epsilon(policy.mu, config.delta), cap=config.max_participations)


def request_of_decided(experiment: Experiment) -> NoiseRequest | None:
    """The request of a run that was decided; None where its machines release no stream with noise."""
    policy = experiment.policy()
    if not policy.adds_noise or policy.clip_unit == "moments":
        return None
    return _request(experiment, epsilon=0.0, cap=policy.max_participations)


def _request(experiment: Experiment, *, epsilon: float, cap: int) -> NoiseRequest:
    config, policy = experiment.config, experiment.policy()
    # Machines that share sums all have the cap of the one with the fewest samples.
    samples = min(experiment.sizes) if config.secure else max(experiment.sizes)
    return NoiseRequest(
        machines=config.num_clients,
        samples=samples,
        rounds=experiment.num_rounds,
        batch_size=config.batch_size if "batch-size" in experiment.method.keys else samples,
        epsilon=epsilon,
        delta=config.delta,
        per_round=config.asked_per_round,
        passes=policy.participations,
        clip_norm=policy.clip_norm,
        parameters=experiment.method.release_size(experiment),
        mu=policy.mu,
        cap=cap,
        clip_unit=policy.clip_unit,
        release_rule=policy.release_rule,
        trust=policy.trust,
        sums=policy.sums,
        secret_order=config.secret_order,
        after_mean=experiment.is_centred,
        samples_per_owner=policy.samples_per_owner,
    )


def answer(
    result: PlanResult,
    request: NoiseRequest | None,
    settings: Mapping[str, Value],
    *,
    tries: int = 0,
    person: tuple[int | None, int | None] = (None, None),
    details: bool = True,
) -> PlanResult:
    """Return the result with variations of its choice, the noise of its mechanisms, and persons.

    ``settings`` are those of the run that was asked about, empty for numbers alone; ``tries`` ways are trained in
    simulation. ``person`` has on how many machines somebody has samples, and how many on each; None where nobody asks.
    Without ``details`` no ways and mechanisms are worked out.
    """
    guarantee, values = guarantee_of(result), _noise_values(result)
    if not details:
        return replace(result, persons=persons_of(guarantee, values, *person) if any(person) else ())
    strategy = settings.get("strategy", AUTO)
    named = strategy not in (AUTO, RunConfig.strategy)
    left = {"strategy": RunConfig.strategy if strategy == AUTO else strategy}  # where nobody decides
    default = result.asked if result.made_up else started_with({**result.asked, **settings, **left})
    ways = variations_of(result, default, mark=AS_SET if named else DEFAULT)
    noise = None if request is None else make_plan(request)
    if noise is not None and noise.guarantee.unit == "owner":
        guarantee, values = noise.guarantee, noise.noise_values
    persons = persons_of(guarantee, values, *person)
    return replace(result, ways=tried_out(ways, tries) if tries else ways, noise=noise, persons=persons)


def choice_of_run(settings: Mapping[str, Value]) -> PlanResult:
    """The decision for a run's settings, on the sizes of its data."""
    wanted = dict(settings)
    if wanted.get("strategy") != AUTO:
        noiseless = {"mechanism": "none"} if wanted.get("mechanism") == "none" else {}
        wanted = {name: value for name, value in wanted.items() if name not in _OF_A_STRATEGY} | noiseless
    wanted = without_unread({**wanted, "strategy": AUTO})
    return replace(decide(plan_request_of(RunConfig.from_mapping(wanted))), asked=wanted)


def choice_of_numbers(samples: int, parameters: int, settings: Mapping[str, Value]) -> PlanResult:
    """The decision for a few numbers.

    ``samples`` are those of each machine, ``parameters`` is d, and ``settings`` say machines, mu and trust.
    """
    for name, value in (("samples", samples), ("parameters", parameters)):
        if value < 1:
            raise ConfigurationError(
                f"Expected {name} >= 1, got {value}.", kind="out-of-range", setting=name, got=value
            )
    features = max(round(parameters / _CLASSES) - 1, 1)
    machines = int(settings["num-clients"])
    made_up = {"task": "synthetic", "task.samples": machines * samples, "task.features": features}
    asked: dict[str, Value] = {**made_up, **settings}
    config = RunConfig.from_mapping({**asked, "strategy": AUTO})
    request = PlanRequest(config, (samples,) * machines, features, _CLASSES, worked_out)
    return replace(decide(request), asked=asked, made_up=True)


def asked_of_numbers(
    samples: int, parameters: int, settings: Mapping[str, Any], of_batches: Mapping[str, Any]
) -> tuple[PlanResult, NoiseRequest | None]:
    """The choice for a few numbers, and what mechanisms are compared for: the chosen run, or releases of a batch.

    ``of_batches`` has ``batch-size`` if it is given, and beside it ``passes`` and ``batch-selection``: they settle the
    comparison, and not the decision.
    """
    request, machines = None, settings["num-clients"]
    per_round = settings.get("clients-per-round") or machines
    if "batch-size" in of_batches:
        batch, passes = of_batches["batch-size"], of_batches.get("passes", 1)
        request = NoiseRequest(
            machines=machines,
            samples=samples,
            rounds=settings.get("num-rounds") or passes * machines * (samples // max(batch, 1)) // per_round,
            batch_size=batch,
            epsilon=settings.get("epsilon", 0.0),
            mu=settings.get("mu", 0.0),
            delta=settings.get("delta", 1e-5),
            per_round=per_round,
            passes=passes,
            clip_norm=settings.get("clip-norm", 1.0),
            parameters=parameters,
            secret_order=of_batches.get("batch-selection") == SHUFFLED,
        )
        request.check_rounds()
    choice = choice_of_numbers(samples, parameters, {**settings, "clients-per-round": per_round})
    return choice, request or request_of_decided(experiment_of(choice))


def asked_of_run(
    settings: Mapping[str, Value], changes: Mapping[str, Value], sizes: Mapping[str, int]
) -> tuple[PlanResult, NoiseRequest | None]:
    """The choice for a run, and what mechanisms are compared for: that run, or the chosen one where it is open."""
    merged = layered(settings, changes)
    if merged.get("strategy") == AUTO:
        choice = choice_of_run(merged)
        return choice, request_of_decided(experiment_of(choice))
    plain = {name: value for name, value in merged.items() if name not in _OF_DECISIONS}
    request = request_of(RunConfig.from_mapping(plain), check_rounds="samples" not in sizes)
    if sizes:
        request = replace(request, **sizes)
        request.check_rounds()
    return choice_of_run(merged), request


_OF_DECISIONS = ("strategy.sample-uses", "strategy.stream")
"""Keys that settle the decision alone."""
