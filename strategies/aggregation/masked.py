"""Secure aggregation from round to round: the releases that were opened, and the set that is next."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from flwr.serverapp import Grid as FlowerGrid

from ...privacy.accounting.loss import MOST_SUMMED
from ...privacy.errors import ConfigurationError
from ...privacy.noise import Grid
from ..rounds.client_registry import Awaited, ClientRegistry
from ..rounds.replies import Outcome, RoundReport, RoundRequest, Vector, vector_size
from ..sums.exclusion_policy import ExclusionPolicy
from ..sums.lost_noise import LostNoise
from ..sums.secure_aggregation import Helpers, SecureAggregation, SkippedSumError, WrongSumError
from ..sums.summation import CohortSet, CohortSum, ReplyScreen, Terms, plain_terms, read_terms
from .agreement import CohortAgreement
from .plain import Aggregator, Closed, Count, Opened, RoundContext, RoundOutcome, Skipped

logger = logging.getLogger("flwr")

_LARGEST_COUNT = 2.0**52  # of an honest release


class Masked(Aggregator):
    """The trust of clients that release under masks.

    Each helper opens by its own rule. The state kept here lets an honest server ask for what they open, and for the
    same set again after it was killed.

    Parameters
    ----------
    option : SecureAggregation
        The strategy's option.
    helpers : Helpers
        The helpers of the training.
    largest_value : float
        Largest magnitude of a value in an honest release.
    """

    masked: ClassVar[bool] = True

    def __init__(self, option: SecureAggregation, helpers: Helpers, largest_value: float) -> None:
        self.option = option
        self.helpers = helpers
        self.pending_cohort: CohortSet | None = None
        """The set to be opened, until its round is over."""
        self.exclusion_policy = ExclusionPolicy(option.max_byzantine)
        self.noise = LostNoise()
        """Noise that skipped sums left behind."""
        self._agreement = CohortAgreement(option, helpers)
        self._most = 0  # until it is settled
        self._largest_value = largest_value
        self._ids: dict[str, str] = {}
        self._terms: Terms | None = None
        self._pause = ""

    @property
    def fewest_releases(self) -> int:
        return self.option.min_cohort

    def settings(self) -> dict[str, Any]:
        return {"secure_aggregation": self.option.settled}

    def wait_for_clients(self, clients: ClientRegistry, grid: FlowerGrid, awaited: Awaited) -> None:
        """Wait for clients, and the first time for the helpers."""
        self.helpers.meet(grid, awaited)

    def settle(self, asked: int, needed: int) -> None:
        if self.option.min_cohort > asked:
            raise ConfigurationError(
                f"Expected min_cohort of at most clients_per_round = {asked}, got {self.option.min_cohort}: no round "
                "could ever be opened.",
                kind="out-of-range",
                setting="min_cohort",
                got=self.option.min_cohort,
            )
        if asked > MOST_SUMMED:
            raise ConfigurationError(
                f"Expected rounds that ask at most {MOST_SUMMED} clients under secure aggregation, got {asked}: "
                "larger sums could wrap around. Lower clients_per_round or over_selection.",
                kind="out-of-range",
                setting="clients_per_round",
                got=asked,
            )
        self._most = asked
        if self.option.min_cohort > needed:
            raise ConfigurationError(
                f"Expected rounds that wait for at least min_cohort = {self.option.min_cohort} clients, got "
                f"{needed}: raise quorum, or lower min_cohort.",
                kind="out-of-range",
                setting="quorum",
                got=needed,
            )

    @property
    def pending(self) -> bool:
        return self.pending_cohort is not None

    @property
    def excluded(self) -> Collection[str]:
        return self.exclusion_policy.left_out

    def annotate(self, request: RoundRequest, save: Callable[[], None]) -> RoundRequest:
        """Say which clients were in a sum that was skipped: their next releases may mend the noise."""
        return replace(request, skipped=self.noise.skipped.keys())

    def add(self, outcomes: Iterable[Outcome], count: Count, context: RoundContext) -> RoundOutcome:
        """Add masked releases that can stand in one sum (:class:`.ReplyScreen`), and have the set opened."""
        size = vector_size(context.layout)
        roster = None if context.grid is None else self.helpers.roster
        known = {"opened": self._ids, "terms": self._terms, "is_late": context.is_late}
        seen = {"warned": self._agreement.warned, "left_out": self.exclusion_policy.left_out}
        screen, cohort = ReplyScreen(context.session, size, self._most, roster, **known, **seen), CohortSum(size)
        report, _ = count(screen.screened(outcomes), cohort)
        self.pending_cohort = self._agreement.hold(cohort, report, context.asked)
        return self._open_cohort(self.pending_cohort, context, cohort)

    def open_pending(self, context: RoundContext) -> RoundOutcome:
        """Open the very set that an interrupted server had saved, and for which it may have asked helpers."""
        if context.grid is None:
            raise ConfigurationError(
                "Expected the nodes of the interrupted training, got clients without messages.", kind="mismatch"
            )
        if self.pending_cohort is None:
            raise ConfigurationError("Expected a set of releases before it is opened.", kind="wrong-order")
        self.helpers.meet(context.grid, Awaited(0))
        return self._open_cohort(self.pending_cohort, context, None)

    # A set is saved before helpers are asked, locked at every helper, and then opened: a commit in two phases.

    def _open_cohort(self, held: CohortSet, context: RoundContext, cohort: CohortSum | None) -> RoundOutcome:
        """Have a set opened; ``cohort`` has its releases, None if the set is from a checkpoint."""
        held, closed = self._prepare(held, context, cohort)
        outcome = self._closed(held, closed) if closed else self._commit(held, context)
        self.pending_cohort = None
        return outcome

    def _prepare(self, held: CohortSet, context: RoundContext, cohort: CohortSum | None) -> tuple[CohortSet, str]:
        """Agree with helpers on the set to open, save it and lock it; return it, and why the round is closed, or ""."""
        agreement = self._agreement
        closed = agreement.too_few(held)
        if closed:
            return held, closed
        if cohort is None:  # it may be open at a helper already
            closed = agreement.agree_again(context, held)
            return held, closed or agreement.lock(context, held)
        if held.sealed:
            # Before any helper is asked: once it may be open, there must never be another one in its place.
            context.save()
        if closed := agreement.ping(context.grid, held):
            return held, closed
        agreed, closed = agreement.agree(context, held, cohort)
        self.pending_cohort = agreed
        if agreed is not held and not closed:
            context.save()  # as above: what was saved before is never opened
        return agreed, closed or agreement.lock(context, agreed)

    def _commit(self, held: CohortSet, context: RoundContext) -> RoundOutcome:
        """Open a set that is locked."""
        report = RoundReport(**held.report)
        try:
            total = self._opened(held, context)
        except SkippedSumError as error:
            skipped = replace(report, aggregated=0, samples=0, skipped=report.aggregated, closed=error.closed)
            self.noise.skip(held, context.acks)
            self._suspect(held, skipped, [*context.askable(), *sorted(self.excluded)], error)
            self._build_on(held)
            return Skipped(skipped, held.asked, held.releases)
        self.noise.opened(held, context.acks)
        self.exclusion_policy.lets_in = self.noise.is_none(self.option.max_byzantine)
        self.exclusion_policy.correct()
        self._build_on(held)
        return Opened(report, held.asked, total, held.releases, is_memoryless=held.terms[0] != "cumulative")

    def _closed(self, held: CohortSet, why: str) -> Closed:
        """Note a round of which nothing was opened."""
        report = RoundReport(**held.report)
        report = replace(report, aggregated=0, samples=0, unopened=report.aggregated + report.unopened, closed=why)
        if self._agreement.too_few(held):
            self.exclusion_policy.too_few()
        logger.warning("Round %d is closed: %s. Clients carry over what they released.", held.server_round, why)
        return Closed(report, held.asked)

    def _opened(self, held: CohortSet, context: RoundContext) -> Vector:
        """Return the sum of a set, shape (d,).

        Raises
        ------
        SkippedSumError
            If it is no sum of releases, or void at a helper; the round is over all the same.
        """
        unmasked = held.total
        if held.sealed and context.grid is not None:
            unmasked = self.helpers.open(context.grid, context.session, held, context.timeout)
        counts, spacing = unmasked.view(np.int64), held.terms[2]
        # A wrong mask makes counts uniform over all 2^64.
        most = len(held.releases) * min(self._largest_value / spacing, _LARGEST_COUNT)
        found = max(int(counts.max(initial=0)), -int(counts.min(initial=0)))
        if found > most:
            raise WrongSumError(
                f"Expected the sum of {len(held.releases)} releases to stay below {most * spacing:g}, got "
                f"{found * spacing:g}: a client or a helper did not mask as it says. Which, nobody can tell."
            )
        return Grid(spacing).values(counts)

    def _build_on(self, held: CohortSet) -> None:
        """Note that a set was opened, right or wrong: clients build on it from now on."""
        self._ids.update(held.ids)
        self._terms = held.terms

    def _suspect(self, held: CohortSet, report: RoundReport, names: Sequence[str], why: SkippedSumError) -> None:
        """Choose whom the next rounds leave out, if a sum was wrong."""
        if not isinstance(why, WrongSumError):
            logger.warning("Round %d is skipped. %s", held.server_round, why)
            return
        self.exclusion_policy.lets_in = self.noise.is_none(self.option.max_byzantine)
        needed = self._agreement.fewest_releases(held)
        room = len(names) - needed - max(report.asked - len(held.releases), 0)
        if self.exclusion_policy.wrong(held.releases, names, room):
            left = ", ".join(map(repr, self.exclusion_policy.left_out)) or f"nobody, since sums need {needed} releases"
            logger.warning(
                "Round %d is skipped. %s Left out of the next rounds, in turns and without blame: %s.",
                *(held.server_round, why, left),
            )
        elif held.sealed:
            listed = " or ".join(f"helper {name!r}" for name in self.helpers.roster.helper_names)
            self._pause = (
                f"Expected wrong sums to end once suspects were left out, got another in round {held.server_round}: "
                f"either more than {self.option.max_byzantine} clients lie, or {listed} does. Have their operators "
                "look, then resume from the checkpoint: the round is recorded as skipped, and the next one will be "
                "asked."
            )

    def skipped_noise(self, statements: Mapping[str, Mapping[str, Any]], acks: Mapping[str, int]) -> float | None:
        return self.noise.variance("" if self._terms is None else self._terms[0], statements.values(), acks)

    def check_pause(self) -> None:
        """Raise if a person must look before the next round; a run that is resumed goes on."""
        if self._pause:
            raise WrongSumError(self._pause)

    def should_stop(self, history: Sequence[RoundReport], noise: float | None) -> str:
        """Return why the training ends now with the model it has, or an empty string."""
        skipped = sum(bool(report.skipped) for report in history)
        if skipped >= self.option.max_failed_aggregations:
            return f"{skipped} sums were skipped, as many as max_failed_aggregations allows"
        if noise is not None and noise > self.option.max_noise and any(report.aggregated for report in history):
            return (
                f"sums that were skipped left {noise:.3g} times the variance of the noise in the sum of all, which "
                f"clients with cancelling or decay would mend, and max_noise is {self.option.max_noise:g}"
            )
        return ""

    def state(self) -> dict[str, Any]:
        terms = None if self._terms is None else plain_terms(self._terms)
        opened = {"ids": self._ids, "terms": terms, **self.noise.plain(), "suspects": self.exclusion_policy.plain()}
        kept: dict[str, Any] = {"opened": opened, "held": None}
        if self.pending_cohort is not None:
            kept |= {"held": self.pending_cohort.plain(), "held.total": self.pending_cohort.total}
        return kept

    def load(self, saved: Mapping[str, Any] | None, clients: Collection[str]) -> None:
        if saved is None:
            return
        opened, held = saved["opened"], saved["held"]
        self._ids = {str(name): str(one) for name, one in opened["ids"].items()}
        terms = opened["terms"]
        self._terms = None if terms is None else read_terms(terms)
        if "suspects" in opened:  # else it is older
            self.exclusion_policy.restore(opened["suspects"])
            self.noise.restore(opened)
        self.pending_cohort = None if held is None else CohortSet.from_plain(held, saved["held.total"])
