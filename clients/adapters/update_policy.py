"""A client's policy for the noise on its model updates, and their guarantee."""

from __future__ import annotations

from dataclasses import KW_ONLY, InitVar, dataclass

from ...privacy.accounting.gdp import asked_mu, check_count
from ...privacy.accounting.guarantee import SIMULATED, Guarantee, Unit, policy_guarantee
from ...privacy.accounting.loss import NOTHING_ASSUMED, Loss, SumAssumption, as_loss
from ...privacy.errors import ConfigurationError, formerly
from ...privacy.mechanisms import noise_is_memoryless
from ...privacy.release.policy import NO_NOISE, OF_SUMS, PrivacyPolicy, Trust, check_own_noise


@formerly(min_honest=OF_SUMS, min_cohort=OF_SUMS)
@dataclass(frozen=True)
class UpdatePolicy:
    """A client's decisions about the model updates it releases; none of them ever comes from a message.

    Parameters
    ----------
    clip_norm : float
        S, the L2 bound on an update: the difference between the trained and the received model.
    mu : float
        Gaussian-DP parameter of all releases of one session together; or ``epsilon`` in its place.
    max_participations : int
        K, the most releases of one session.
    budget_mu : float, optional
        Budget of everything this client ever releases, over all sessions (mus add in squares). Default ``mu``: one
        session. On a real node the ledger's.
    delta : float
        Where epsilon is shown. On a real node the ledger's.
    mechanism : str
        How the noise is correlated over the releases; empty for ``independent`` where data return in every release
        (nothing has less noise then) and ``blt`` where they do not.
    releases_per_pass : int
        Disjoint, fixed parts into which the ClientApp divides its data. For every release it uses the one whose number,
        from 0, it finds as ``part`` in the request's config: the client's own count, not the server's round. Only the
        ClientApp's operator can promise this. 1, the default, promises nothing. With K or more no sample is used twice
        in a session.
    allow_evaluation : bool
        Whether results of the ClientApp's ``evaluate`` may leave, **without noise**: no epsilon here covers them.
    trust : {"untrusted-server", "secure-aggregation"}
        Under ``secure-aggregation`` the client adds its share of the noise, and hides each release under masks that
        only a sum of ``sums.min_cohort`` releases loses. Where data return and the noise is ``independent``, releases
        then stand alone: what a lost reply carried is lost.
    sums : SumAssumption
        h and the fewest releases of a sum, under ``secure-aggregation``.
    budget_local_mu : float, optional
        Budget of the worst case under ``secure-aggregation``. On a real node that of the
        ledger.
    epsilon : float, optional
        In place of ``mu``: the largest mu that implies this epsilon at ``delta``, which is kept.

    Notes
    -----
    **Formal guarantees.** The update is clipped as a whole, whatever is computed inside, so one release moves by at
    most 2 S. With ``releases_per_pass = 1`` that is charged in every one of the K releases: all releases of a session
    together are mu-GDP for replacement of *all data of the client* (client-level), and with that of any one sample.
    With more, a sample is charged in ceil(K / releases_per_pass) releases, that many apart: they are mu-GDP for
    replacement of *one sample* (sample-level), provided the ClientApp keeps the promise whatever the server sends
    along, and carries nothing learned from a sample into another release (no optimiser state or local layers kept
    between rounds). All sessions together are budget_mu-GDP likewise. Against a server that chooses models, rounds,
    acknowledgements and stopping adaptively. With ``allow_evaluation`` this is true of the updates alone. Under
    ``secure-aggregation`` mu holds if one helper and ``sums.min_honest`` clients of each sum are honest; whatever
    happens, the plan's ``loss.worst_case`` does.
    Proof: docs/proofs/returning-samples.md.

    Examples
    --------
    >>> UpdatePolicy(clip_norm=1.0, epsilon=2.0, max_participations=5).max_participations
    5
    """

    clip_norm: float
    mu: float = 0.0
    _: KW_ONLY
    max_participations: int
    budget_mu: float | None = None
    delta: float = 1e-5
    mechanism: str = ""
    releases_per_pass: int = 1
    allow_evaluation: bool = False
    trust: Trust = "untrusted-server"
    sums: SumAssumption = NOTHING_ASSUMED
    budget_local_mu: float | None = None
    epsilon: InitVar[float | None] = None

    def __post_init__(self, epsilon: float | None) -> None:
        object.__setattr__(self, "mu", asked_mu(self.mu, epsilon, self.delta))
        check_count("releases_per_pass", self.releases_per_pass)
        if not isinstance(self.allow_evaluation, bool):
            raise ConfigurationError(
                f"Expected allow_evaluation to be true or false, got {self.allow_evaluation!r}.",
                kind="wrong-type",
                setting="allow_evaluation",
                got=self.allow_evaluation,
            )
        if self.mechanism == NO_NOISE:
            raise ConfigurationError(
                f"Expected a noise mechanism, got {self.mechanism!r}: to see what noise costs, leave the mod out.",
                kind="conflict",
                setting="mechanism",
                got=self.mechanism,
            )
        check_own_noise(self.privacy_policy())

    @property
    def unit(self) -> Unit:
        """Unit that may be replaced: ``client`` (all of its data) or ``sample``."""
        return "client" if self.releases_per_pass == 1 else "sample"

    def privacy_policy(self) -> PrivacyPolicy:
        """Return the policy of a :class:`~murmurfl.privacy.Privatizer`.

        It has the acknowledged release rule, or where releases stand alone under secure aggregation the ``paper`` rule,
        which carries nothing over.
        """
        releases = self.max_participations  # checked with the rest of the policy
        passes = -(-releases // self.releases_per_pass) if isinstance(releases, int) and releases > 0 else 1
        mechanism = self.mechanism or ("independent" if self.releases_per_pass == 1 else "blt")
        # In sums, releases that build on each other add up what each of a sample's turns costs; alone they compose, and
        # with independent noise that is sqrt(turns) times less.
        alone = self.trust == "secure-aggregation" and noise_is_memoryless(mechanism) and passes > 1
        return PrivacyPolicy(
            clip_norm=self.clip_norm,
            batch_size=1,
            max_participations=self.max_participations,
            mu=self.mu,
            budget_mu=self.budget_mu,
            delta=self.delta,
            mechanism=mechanism,
            clip_unit="update",
            # At least two: only where samples may return does a client count its parts by session. A second use that
            # does not happen is not charged.
            sample_participations=max(2, passes),
            min_separation=self.releases_per_pass,
            release_rule="paper" if alone else "acknowledged",
            trust=self.trust,
            sums=self.sums,
            budget_local_mu=self.budget_local_mu,
        )


def update_guarantee(policy: UpdatePolicy, loss: Loss | float, *, simulated: bool = False) -> Guarantee:
    """Return the guarantee of all updates of one session of a client with this policy.

    Parameters
    ----------
    loss : Loss or float
        Of all releases of the session. A number is a mu: then the worst case under secure aggregation is that of a
        model of one value, which no larger model of this policy exceeds in any digit that is shown.

    Notes
    -----
    **Formal guarantees.** Says what :class:`UpdatePolicy` guarantees, and names what rests on the operator's word or is
    not covered.
    """
    notes = []
    if policy.unit == "sample":
        notes.append("Which sample is in which release is as the client's operator declared.")
    if policy.allow_evaluation:
        notes.append("Results of evaluations leave without noise and are NOT covered.")
    if simulated:
        notes.append(SIMULATED)
    private, loss = policy.privacy_policy(), as_loss(loss)
    if policy.trust == "secure-aggregation" and not loss.conditional:
        loss = Loss(loss.assumed, private.plan(1).loss.worst_case)
    return policy_guarantee(private, loss, unit=policy.unit, notes=notes)
