"""Every answer of ``murmurfl plan`` for people: a few lines, and tables of the values of :mod:`.plan_document`."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from ...clients.algorithms import ALGORITHMS, APP_METHODS
from ...privacy.accounting.gdp import gdp_epsilon
from ...privacy.accounting.guarantee import Guarantee, rounded_up
from ...privacy.accounting.loss import Loss
from ...privacy.errors import ConfigurationError
from ...privacy.forecast_text import forecast_lines, rounded_count, shortest
from ..methods import METHODS
from ..reports.table import Column, Table
from ..settings.run_config import SECURE, RunConfig, nothing_gained
from .deciding import FEW_POINTS, Candidate, PlanRequest, PlanResult
from .noise_plans import guarantee_of_updates, noise_guarantee, update_forecast, update_policy
from .plan_answers import (
    TAKEN,
    command_of_candidate,
    command_of_result,
    guarantee_for_persons,
    guarantee_of,
    protects_owners,
    secret_ways,
)
from .plan_document import (
    assumed_of,
    mechanism_document,
    persons_document,
    trust_document,
    update_document,
    way_document,
)
from .rehearsal import FAMILY, LocalBaseline, judged


def _percent(digits: int) -> Callable[[float], str]:
    return lambda share: f"{100 * share:.{digits}f} %"


_TRIED = "accuracy of one simulated run on the test set; choosing by it is private only where that is public"
_WAYS = (
    Column("#", "rank on made-up data", "number", label=True),
    Column("strategy", "N x computes N times the gradients of a pass", "named", label=True),
    Column(
        "trust", "what a client trusts: nobody, sums, the server, or that the order stays secret", "who", label=True
    ),
    Column("uses", "releases that a sample is in", "sample_uses"),
    Column("batch", "samples of a client in a release"),
    Column("rounds", "number of rounds"),
    Column("noise", "noise to signal, in the mean gradient of the last step", "noise_to_signal", ".2f"),
    Column("keeps", "share of what can be learnt, on average over six kinds of made-up data", "kept", _percent(0)),
    Column("acc.", _TRIED, "accuracy", _percent(1)),
)
_WORTH = (
    Column("sites", "how clients differ", "words", label=True),
    Column("federation", "on everybody's data, and as much on the clients' own mixes of classes", form=_percent(0)),
    Column("one alone", "on everybody's data, without noise", "alone", _percent(0)),
)
_TRUSTS = {"untrusted-server": "nobody", SECURE: "sums", "trusted-server": "server"}
_MECHANISMS = (
    Column("mechanism", "mechanism and option", "name", label=True),
    Column("noise std", "standard deviation in front of the mechanism's rows", "noise_std", ".4g"),
    Column("prefix sums", "noise of a client's prefix sums, root mean square over its releases", "prefix_rmse", ".4g"),
    Column("last one", "noise of the last prefix sum", "prefix_last", ".4g"),
    Column("their sums", "noise of the sums of the prefix sums, which move DP-mu^2-FL's model", "mu2_rmse", ".4g"),
    Column("at the server", "noise of the prefix sums of the server's averages", "server_prefix_rmse", ".4g"),
    Column("their sums there", "noise of the sums of those", "server_mu2_rmse", ".4g"),
    Column("bytes kept", "what a client remembers between releases", "memory_bytes"),
    Column("in a secret order", "epsilon if nobody learns which release a sample is in", "secret"),
)
_TRUST_MODELS = (
    Column("trust", "the run-config key", label=True),
    Column("mu rests on", "what is assumed", "assumes"),
    Column("worst-case mu", "against the server", "mu_local", rounded_up, missing="none"),
    Column("epsilon then", "of that mu", "epsilon_local", rounded_up, missing="none"),
    Column("noise std", "on each client, in front of the mechanism's rows", "noise_std", ".4g"),
    Column("at the server", "noise of the prefix sums of the server's averages", "server_prefix_rmse", ".4g"),
)
_UPDATES = (
    Column("epsilon", "for all data of a client", form=".4g", label=True),
    Column("noise / longest", "noise in the average over the longest it can be", "longest", shortest),
    Column("noise / typical", "the same over a typical one, an estimate", "typical", shortest),
    Column("model", "what to expect of it", "verdict"),
    Column("clients needed", "for a useful one", "clients_needed", rounded_count),
    Column("under sums", "secure aggregation, half honest: noise over a typical one", "summed", shortest),
    Column("one sample protected", "per-sample gradients: likewise", "sample", shortest),
)
_PERSONS = (
    Column("clients", "clients that have samples of one person", form=",", label=True),
    Column("samples on each", "samples of that person on each of them", "held", label=True),
    Column("mu", "of all of them together", "mu", rounded_up, missing="not vouched for"),
    Column("epsilon", "of that mu", "epsilon", rounded_up, missing="not vouched for"),
    Column("worst-case mu", "against the server", "mu_local", rounded_up, missing="not vouched for"),
    Column("epsilon then", "of that mu", "epsilon_local", rounded_up, missing="not vouched for"),
)


def ways_table(ways: Sequence[Candidate]) -> Table:
    """Return a row for each way to run it, the best first."""
    rows = []
    for number, way in enumerate(ways, 1):
        row = {"number": number, **way_document(way), "named": way.strategy, "who": _TRUSTS[way.trust]}
        if way.amplification is not None:
            row["named"] = f"{way.strategy}, {way.amplification.slots} x"
            row["who"] = _TRUSTS[way.trust] if way.amplification.rate else "secrecy"
        rows.append(row)
    return Table("Ways to run it, the best first on made-up data of this shape", _WAYS, rows)


def plan_table(plan: PlanResult) -> Table:
    """Return a row for each mechanism, least error of prefix sums first."""
    rows = [mechanism_document(one) for one in sorted(plan.mechanisms, key=lambda one: one.prefix_rmse)]
    for row in rows:
        estimated = "" if row["amplified_proved"] else ", estimated"
        known = "not known" if row["epsilon_amplified"] is None else rounded_up(row["epsilon_amplified"]) + estimated
        row["secret"] = known if plan.chosen.config.shuffled_batches else ""
    return Table("Noise of one value", _MECHANISMS, rows, noise_guarantee(plan).sentence)


def compared_table(plan: PlanResult) -> Table:
    """Return the noise of the same mu under each trust model."""
    rows = [trust_document(*one) for one in plan.trusts.items()]
    title = f"The same mu, by who is trusted ({plan.chosen.mark})"
    return Table(title, _TRUST_MODELS, rows, noise_guarantee(plan).sentence)


def persons_table(guarantee: Guarantee, losses: Mapping[tuple[int, int], Loss]) -> Table:
    """Return the loss of all samples of one person together, by clients and samples on each of them."""
    rows = persons_document(guarantee, losses)
    for row in rows:
        row["held"] = "all" if guarantee.unit == "owner" else f"{row['samples']:,}"
    columns = _PERSONS if guarantee.loss.conditional else _PERSONS[:4]
    return Table("All samples of one person together", columns, rows, guarantee.sentence)


def answer_parts(result: PlanResult, *, details: bool, code: bool = False) -> Iterator[str | Table]:
    """Yield what to take, what it keeps, guarantees and costs, and the command; with details all that was compared.

    With ``code`` the lines of a project of one's own are in the place of the command.
    """
    chosen, guarantee = result.chosen, guarantee_of(result, of_code=code)
    often = "every sample in each" if chosen.uses == chosen.rounds else f"each sample in {chosen.uses} releases"
    worth = worth_lines(chosen)
    clip = "from the schema" if code else f"{chosen.problem.values.clip_norm:.4g}"
    yield f"Take {chosen.strategy}: {chosen.rounds} rounds, {often}, clip norm {clip}."
    yield from worth
    yield from [worth_table(chosen)] if worth and details else []
    if details or not worth:
        yield f"Because {result.reason.partition(';')[0]}."
    yield from (*longer_lines(result), f"Guarantee: {guarantee.sentence}", *late_lines(chosen.config))
    if details and guarantee.meaning:
        yield f"In plain words: {guarantee.meaning}"
    if details and protects_owners(result):
        yield "What to take was decided for samples by themselves; the table of mechanisms is of owners."
    yield from [persons_table(guarantee_for_persons(result), result.persons)] if result.persons else []
    if code:
        yield from ("In a project of your own (docs/private-client-app.md):", *code_lines(result))
    else:
        yield from ("Run it:", f"    {command_of_result(result)}")
    if result.made_up and not code:
        yield "It has made-up data of these sizes; --set task=package.module:make_task has yours."
        yield "For a PyTorch or Flower project of your own, --code prints the lines of Python."
    if not details:
        yield from secret_lines(result)
        yield "More, with --details: other ways to run it, every mechanism, other trust."
        return
    yield from (f"Not {one.strategy}: {result.why_not(one)}." for one in result.others)
    yield from (f"Not {name}: {why.rstrip('.')}." for name, why in result.impossible.items())
    yield from ("", ways_table(result.ways), *ways_lines(result.ways, made_up=result.made_up))
    if result.noise is not None:
        before, after = plan_lines(result.noise)
        yield from ("", *before, plan_table(result.noise), *after, compared_table(result.noise))


def code_lines(result: PlanResult) -> list[str]:
    """Return the lines of a project of one's own with the chosen settings: its ClientApp, its strategy and the start.

    Raises
    ------
    ConfigurationError
        If neither the choice nor any other candidate is a method of :func:`~murmurfl.clients.private_client_app`.
    """
    taken = next((one for one in (result.chosen, *result.others) if one.strategy in APP_METHODS), None)
    if taken is None:
        raise ConfigurationError(
            f"Expected a strategy for private_client_app, one of {', '.join(APP_METHODS)}, got {result.chosen.strategy}"
            ", for which there is none: leave --code out.",
            kind="unsupported",
            setting="strategy",
            got=result.chosen.strategy,
        )
    config, method = taken.config, ALGORITHMS[taken.strategy]
    helpers = config.to_mapping()["trust.helpers"]
    epsilon = result.asked.get("epsilon")
    spent = f"epsilon={epsilon!r}" if epsilon else f"mu={config.mu!r}"
    app = [f"method={taken.strategy!r}", spent, f"delta={config.delta!r}", f"rounds={taken.rounds}"]
    app += [] if taken.whole else [f"batch_size={taken.batch}"]
    server = [f"num_clients={config.num_clients}", f"clients_per_round={config.asked_per_round}"]
    if config.trust_model == SECURE:
        app += [f"trust={SECURE!r}", f"sums={config.sums}", f"helpers={helpers}"]
        masked = f"SecureAggregation(min_cohort={config.sums.min_cohort}, helpers={helpers})"
        server.append(f"secure_aggregation={masked}")
    strategies = ", ".join([method.strategy, *(["SecureAggregation"] if config.trust_model == SECURE else [])])
    note = [] if taken is result.chosen else [f"# {result.chosen.strategy} is for runs of murmurfl alone."]
    note += ["# All of mu is for gradients: the clip norm follows from the schema."] if config.quantile else []
    return [
        *note,
        "from murmurfl.clients import private_client_app, trainable_arrays",
        *(["from murmurfl.privacy import SumAssumption"] if config.trust_model == SECURE else []),
        f"from murmurfl.strategies import {strategies}",
        "",
        "# make_model, loss, samples and schema are the project's own.",
        f"app = private_client_app(make_model, loss, samples, schema=schema, {', '.join(app)})",
        f"strategy = {method.strategy}({', '.join(server)}, **app.steps())",
        f"result = strategy.start(grid, trainable_arrays(make_model()), num_rounds={taken.rounds})",
    ]


def worth_lines(chosen: Candidate) -> list[str]:
    """Return whether federating is worth it, by rehearsal, and if that depends on how sites differ.

    Empty where nothing was rehearsed.
    """
    baselines = chosen.local_baselines
    if not baselines:
        return []
    alike, mix = baselines[0], baselines[-1]
    nearer, is_declared, depends = judged(alike, mix), chosen.request.declares_mix, alike.is_worth != mix.is_worth
    is_worth = nearer.is_worth if is_declared else mix.is_worth
    if depends and not is_declared:
        differ, same = ("likely", "not") if is_worth else ("not", "likely")
        lines = [f"Worth federating? It depends: {differ} if sites' labels differ, {same} if alike."]
    else:
        where = f", where sites {mix.sites.words}" if is_declared else ""
        between = "" if is_worth == mix.is_worth else " if they differ a little less,"
        kept = "more" if is_worth else "no more"
        other = f" Were sites alike, it would{'' if alike.is_worth else ' not'} be worth it." if depends else ""
        verdict = f"{'Worth' if is_worth else 'Not worth'} federating, {'perhaps' if between else 'likely'}{where}"
        lines = [f"{verdict}:{between} on everybody's data it keeps {kept} than one client alone.{other}"]
    if not is_worth:
        sums = "" if chosen.config.trust_model == SECURE else ", sums (--trust secure-aggregation)"
        lines.append(f"More clients{sums} or a larger epsilon would change that.")
    elif not mix.sites.is_alike:
        better = "one client alone is likely better" if nearer.own_lead > 0 else "the federation is likely better, too"
        is_clear = (nearer.own_lead > 0) == (mix.own_lead > 0)
        by = f", by {100 * abs(mix.own_lead):.0f} points" if is_clear else ""
        lines.append(f"On its own mix of classes {better}{by}.")
    return [*lines[:1], _kept_line(chosen, baselines), *lines[1:]]


def _kept_line(chosen: Candidate, baselines: Sequence[LocalBaseline]) -> str:
    """Return the figures of a verdict in a sentence."""
    alike, mix = baselines[0], baselines[-1]
    alone = f"{100 * max(alike.alone, 0.0):.0f} %"
    if mix is not alike:
        alone += f" if sites are alike, {100 * max(mix.alone, 0.0):.0f} % if their labels differ"
    return (
        f"On made-up data it keeps {100 * mix.federation:.0f} % of what all samples teach without noise"
        f"{chosen.measure}, one client alone {alone}."
    )


def worth_table(chosen: Candidate) -> Table:
    """Return what the federation and one client alone keep, by how sites differ."""
    title = f"Kept of what all samples teach without noise{chosen.measure}, on {len(FAMILY)} kinds of made-up data"
    rows = [{**one._asdict(), "words": one.sites.words.removeprefix("are ")} for one in chosen.local_baselines]
    return Table(title, _WORTH, rows)


def secret_lines(result: PlanResult) -> list[str]:
    """Return what noisy SGD with shuffled batches keeps, and its price, where that is as much as the choice keeps."""
    chosen = result.chosen
    if not chosen.retained_utility or chosen.trust == "trusted-server":  # nothing was rehearsed; no order is secret
        return []
    found = [way for way in secret_ways(result.request) if way.retained_utility > chosen.retained_utility - FEW_POINTS]
    return [
        f"Where order and time stay secret, {way.strategy} with shuffled batches keeps "
        f"{100 * way.retained_utility:.0f} %, {chosen.strategy} {100 * chosen.retained_utility:.0f} %, for "
        f"{gain.slots} times the gradients of a pass. If the order leaks, epsilon is "
        f"{rounded_up(gdp_epsilon(way.config.mu, way.config.delta))}."
        for way in found
        if (gain := way.amplification) is not None
    ]


def longer_lines(result: PlanResult) -> list[str]:
    """Return whether twice as many rounds would learn more, by rehearsal; empty where they cannot be had."""
    chosen, longer = result.chosen, result.longer
    if longer is None or not longer.retained_utility:
        return []
    gained = longer.retained_utility - chosen.retained_utility
    more = "learn more" if gained > FEW_POINTS else "learn less" if gained < -FEW_POINTS else "gain little"
    return [f"More rounds would {more}, likely: twice as many keep {100 * longer.retained_utility:.0f} % of it."]


def late_lines(config: RunConfig) -> list[str]:
    """Return the use and cost of late answers; empty where rounds wait for all."""
    asked, needed = config.asked_per_round, config.answers_needed
    if config.quorum == 1 and config.over_selection == 1:
        return []
    method = METHODS[config.strategy]
    if method.strategy_type.late_answers == "dropped":
        late = (
            f"Later answers are dropped, and no other release carries them: of up to {asked - needed} clients a round "
            f"({100 * (asked - needed) / asked:.0f} %) the budget of a release is spent for nothing."
        )
    elif (method.release_rule or config.release_rule) == "paper":
        late = "Later answers count when they come; one that never comes is lost, and its budget with it."
    else:
        late = "Later answers count when they come, and what is lost comes with the client's next: no budget is."
    return [f"A round asks {asked} clients and ends when {needed} have answered. {late}"]


def ways_lines(ways: Sequence[Candidate], *, made_up: bool) -> list[str]:
    """Return the lines below the table of ways: its headings, the row that is taken, and commands of other rows."""
    taken = next(way for way in ways if TAKEN in way.mark)
    tried = any(way.accuracy is not None for way in ways)
    marks = [f"Row {number} is {way.mark}." for number, way in enumerate(ways, 1) if way.mark]
    if any(way.trust == taken.trust and way.score < taken.score for way in ways):
        marks.append("Rows above the one taken were not among those compared; on your data it may be otherwise.")
    lines = [" ".join(f"{one.name}: {one.meaning}." for one in _WAYS if tried or one.name != "acc."), " ".join(marks)]
    for number, way in enumerate(ways, 1):
        config, found = way.config, way.amplification
        known = (
            f"epsilon = {rounded_up(gdp_epsilon(config.mu, config.delta))}, which the ledger counts, for anybody who"
        )
        if found is not None and found.rate:
            lines.append(
                f"Row {number} is DP-SGD: each sample is in each of {found.slots} rounds with probability "
                f"{found.rate:.3g}. It has epsilon = {rounded_up(found.epsilon)} while nobody but the server learns "
                f"which, nor how long a client takes, and {known} does. Run it:"
            )
        elif found is not None:
            lines.append(
                f"Row {number} has epsilon = {rounded_up(found.epsilon)} while nobody learns which of {found.slots} "
                f"releases a sample is in, nor how long a client takes for one, and {known} does. "
                "It is never taken unasked, because nobody can check that order and time stay secret. Run it:"
            )
        elif way.varied == "trust":
            lines.append(f"Row {number} assumes: {assumed_of(way.trust, config.sums)}. Run it:")
        else:
            continue
        lines.append(f"    {command_of_candidate(way)}")
    untried = "What they come to on your data: --try 5 trains the first five and says their accuracy."
    return lines if tried or made_up else [*lines, untried]


def plan_lines(plan: PlanResult) -> tuple[list[str], list[str]]:
    """Return the lines above the table of mechanisms, and those below it."""
    policy, config, guarantee = plan.chosen.policy, plan.chosen.config, noise_guarantee(plan)
    sensitivity = max(0.0, *(one.noise.sensitivity for one in plan.mechanisms))
    before = [
        f"Cap: {policy.max_participations} releases a client, every sample in at most {policy.sample_participations} "
        f"of them; a release changes by at most {sensitivity:.6g} when one {guarantee.unit} does."
    ]
    if config.asked_per_round < config.num_clients:
        asked = plan.chosen.rounds * config.asked_per_round / config.num_clients
        before.append(
            f"Asked: each client for {asked:.4g} releases on average. With sampling = uniform some are asked for more "
            "(`murmurfl run` says how many rounds that leaves), with balanced all equally often."
        )
    after = [f"Least noise on prefix sums: {plan.chosen.mark}."]
    if config.shuffled_batches:
        after.insert(
            0,
            "In a secret order: epsilon at the same delta while nobody learns which release a sample is in. An "
            "estimate guarantees nothing; the guarantee above holds whoever knows.",
        )
    if plan.best_for_mu2 is not None:
        after.append(f"Least noise on their sums, which move DP-mu^2-FL's model: {plan.best_for_mu2}.")
    if policy.trust == SECURE and (why := nothing_gained(policy.sums.min_honest)):
        after.append(why)
    return [*before, f"Guarantee: {guarantee.sentence}"], [
        *after,
        *(f"Left out: {name}, {why}." for name, why in plan.impossible.items()),
    ]


def update_parts(request: PlanRequest) -> Iterator[str | Table]:
    """Yield the forecast of a project's own updates, the policy for them, and the noise at other epsilons."""
    policy, guarantee, document = update_policy(request), guarantee_of_updates(request), update_document(request)
    epsilon = gdp_epsilon(policy.mu, policy.delta)
    # The epsilon as it was typed, or mu rounded down, so that no more is spent.
    typed = math.isclose(epsilon, round(epsilon, 2), rel_tol=1e-6)
    wanted = f"epsilon={round(epsilon, 2):g}" if typed else f"mu={math.floor(policy.mu * 1e6) / 1e6}"
    sums = f", trust={policy.trust!r}, sums={policy.sums}" if policy.trust == SECURE else ""
    given = f"clip_norm={policy.clip_norm:g}, {wanted}, max_participations={policy.max_participations}{sums}"
    yield from (*forecast_lines(update_forecast(request), sys.maxsize), f"Guarantee: {guarantee.sentence}")
    yield from ("Run it:", f"    CorrelatedNoiseMod(simulation=UpdatePolicy({given}))")
    yield Table("Updates, all data of a client protected", _UPDATES, document["table"], guarantee.sentence)
