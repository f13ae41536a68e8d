"""A member of a federation: a client or a helper whose keys are made where it runs, and never leave.

``join`` makes the folder from a kit, ``pin`` takes the federation's document once its operator has compared the digest,
and a start makes the ledger, once, from the operator's file.
"""

from __future__ import annotations

import hmac
import math
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import httpx

from ....clients.nodes.roster_files import pinned_digest, read_client_key, read_helper_key
from ....privacy.accounting.gdp import gdp_epsilon
from ....privacy.accounting.guarantee import rounded_up
from ....privacy.errors import ConfigurationError
from ....privacy.files import create_private, replace_durably, write_private
from ....privacy.ledger.sqlite import SQLiteLedger
from ....privacy.release.policy import NO_NOISE
from ....privacy.setting import spelled_out
from ...nodes.connection import tls_context
from ...nodes.node_config import HelperConfig, NodeConfig
from .coordinator import (
    CLIENT,
    HELPER,
    LARGEST_DOCUMENT,
    Federation,
    Invitation,
    JoinRequest,
    Terms,
    parsed,
    toml_lines,
    write_document,
)
from .keys_and_cards import Card, in_fours, make_client, make_helper, make_node_key

KIT_NAME, FEDERATION_NAME = "member.kit", "federation.json"
_NODE_KEY, _ROSTER_KEY, _RECORD, _ROSTER, _LEDGER_MADE = (
    *("node.key", "roster.key", "openings.sqlite", "roster.json", "ledger.made"),
)
_NOT_YET = "0" * 64
_TIMEOUT_S = 10.0
_MOST_RENEWALS = 10_000


@dataclass(frozen=True)
class Member:
    """A member's folder."""

    folder: Path
    kit: Invitation

    @classmethod
    def open(cls, folder: Path) -> Member:
        """Return the member of a folder; ConfigurationError if it is none's."""
        return cls(folder, Invitation.read(folder / KIT_NAME))

    @property
    def terms(self) -> Terms:
        """The terms that its operator was proposed."""
        return self.kit.terms

    @property
    def file(self) -> Path:
        """The operator's file, for ``murmurfl node`` or ``murmurfl helper``."""
        return self.folder / ("node.toml" if self.kit.role == CLIENT else "helper.toml")

    @property
    def answer(self) -> Path:
        """The file for the coordinator: public keys only."""
        return self.folder / f"{self.kit.member}.answer"

    def card(self) -> Card:
        """Return the public half of this member's own key, read from its private file."""
        if self.kit.role == CLIENT:
            return Card.of_client(self.kit.member, read_client_key(self.folder / _ROSTER_KEY))
        name, key = read_helper_key(self.folder / _ROSTER_KEY)
        return Card.of_helper(name, key)

    def joining(self) -> JoinRequest:
        """Return the public halves of this member's own keys, read from its private files and its node's public one."""
        path = self.folder / f"{_NODE_KEY}.pub"
        try:
            node = path.read_text(encoding="ascii").strip()
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"Expected this member's public node key at {path}, got none that can be read: put it back, or make "
                "new keys with `murmurfl federation renew`.",
                kind="not-found",
            ) from error
        return JoinRequest(self.terms.name, self.terms.digest, node, self.card())

    @property
    def pinned(self) -> Federation | None:
        """The federation that its operator compared; None before."""
        path = self.folder / FEDERATION_NAME
        return Federation.read(path) if path.exists() else None

    def published(self) -> Federation:
        """Return what the server publishes now, which nobody need believe; its certificate must be the kit's."""
        url = f"https://{self.terms.address}/federation/{self.terms.digest}"
        content = b""
        try:
            context = tls_context(self.folder / "ca.crt")
            with httpx.stream("GET", url, verify=context, timeout=_TIMEOUT_S, trust_env=False) as answer:
                if answer.status_code == httpx.codes.OK:
                    for piece in answer.iter_bytes():
                        content += piece
                        if len(content) > LARGEST_DOCUMENT:
                            break
        except httpx.HTTPError as error:
            raise ConfigurationError(
                f"Expected the federation's server at {self.terms.address}, got none ({error}): start it with "
                "`murmurfl federation start`, and see that this computer reaches it.",
                kind="unreachable",
            ) from error
        if not content:
            raise ConfigurationError(
                f"Expected the federation's document from {self.terms.address}, got HTTP {answer.status_code}: the "
                "server there is another federation's.",
                kind="mismatch",
            )
        where = f"from {self.terms.address}"
        return Federation.from_document(parsed(content, Federation.KIND, set(Federation.PARTS), where), where)

    def check(self, federation: Federation) -> None:
        """Refuse a federation that is not the kit's, or in which this member's own key does not stand.

        It shows that nobody has exchanged *this* member's key, server, schema or settings. Once every operator has read
        the same digest, the same holds of all members.
        """
        if federation.terms.digest != self.terms.digest:
            raise ConfigurationError(
                f"Expected the terms of this member's kit, {self.terms.digest[:16]}..., got others, "
                f"{federation.terms.digest[:16]}...: somebody changed one of the two. Ask the coordinator, by your own "
                "means, for a kit, and join again in another folder.",
                kind="mismatch",
            )
        own = self.joining()
        name, kind = own.card.name, own.card.kind
        known = next((one for one in federation.members if one.card.name == name), None)
        if known is None:
            raise ConfigurationError(
                f"Expected {kind} {name!r} among the federation's members, got a document without it: send "
                f"{self.answer.name} to the coordinator, who runs `murmurfl federation accept`.",
                kind="missing",
            )
        if known != own:
            raise ConfigurationError(
                f"Expected {kind} {name!r} in the federation with its own keys, {own.fingerprint}, got "
                f"{known.fingerprint}: an old answer was accepted, or somebody exchanged it. Tell the other operators, "
                f"and send {self.answer.name} again by your own means.",
                kind="mismatch",
            )
        if self.terms.sums and federation.roster is None:
            raise ConfigurationError(
                "Expected a client and a helper among the federation's members, got one kind alone: start again once "
                "the coordinator has accepted both.",
                kind="missing",
            )

    def pin(self, federation: Federation, digest: str) -> None:
        """Take part by this federation, whose digest its operator has compared; if refused, nothing is changed."""
        compared = pinned_digest(digest)
        if not hmac.compare_digest(federation.digest, compared):
            raise ConfigurationError(
                f"Expected the federation with digest {in_fours(compared)}, which this operator compared, got "
                f"{in_fours(federation.digest)}: compare again, by telephone say, and start once all read the same.",
                kind="mismatch",
                setting="digest",
            )
        self.check(federation)
        if federation.roster is not None:
            text = self.file.read_text(encoding="utf-8")
            line = f'roster-digest = "{federation.roster.digest}"'
            found, count = re.subn(r"(?m)^roster-digest *=.*?(?= *#|$)", line, text)
            if count != 1:
                raise ConfigurationError(
                    f"Expected one line roster-digest = ... in {self.file}, got {count}: write there {line}.",
                    kind="malformed",
                )
            document = federation.roster.document
            write_document(self.folder / _ROSTER, document)
            replace_durably(self.file, found.encode(), error=ConfigurationError)
        write_document(self.folder / FEDERATION_NAME, federation.document)

    def operators(self) -> NodeConfig | HelperConfig:
        """Return the operator's file."""
        if self.kit.role == HELPER:
            return HelperConfig.read(self.file, runs_kept=True)
        return NodeConfig.read(self.file, runs_kept=True)

    def make_ledger(self) -> bool:
        """Make the ledger at the first start, from the budgets in the operator's file; whether one was made.

        A ledger that was made before and is gone is refused: the data may have spent it.
        """
        node, made = self.operators(), self.folder / _LEDGER_MADE
        if isinstance(node, HelperConfig):
            return False
        ledger = Path(node.ledger)
        if made.exists() or ledger.exists():
            if not ledger.exists():
                raise ConfigurationError(
                    f"Expected the ledger at {ledger}, which was made here before, got no file: what these data have "
                    "spent stands in it. Find it; if it is lost, the data are retired.",
                    kind="not-found",
                    setting="ledger",
                )
            return False
        wanted = {"budget-mu": node.budget_mu, **({"budget-local-mu": node.budget_local_mu} if node.secure else {})}
        if missing := [name for name, value in wanted.items() if not value]:
            raise ConfigurationError(
                f"Expected {' and '.join(missing)} in {self.file}, got 0: write down, once for these data, what all "
                "runs together may spend; `murmurfl federation join` said what one takes.",
                kind="missing",
            )
        # First: a start that is cut off here leaves no ledger and a sentence, never a second ledger.
        create_private(made, "a note that the ledger was made", error=ConfigurationError)
        budgets = {"budget_mu": node.budget_mu, "budget_local_mu": node.budget_local_mu or None}
        SQLiteLedger.create(ledger, **budgets, delta=node.delta, data=self.kit.member)
        return True

    def renew(self) -> list[Path]:
        """Make new keys, and a helper's new record; return the old files, for their operator to destroy."""
        names = [_NODE_KEY, f"{_NODE_KEY}.pub", _ROSTER_KEY, "roster.card", self.answer.name]
        names += [f"{_RECORD}{ending}" for ending in ("", "-wal", "-shm", ".mark")]
        number = next(i for i in range(1, _MOST_RENEWALS) if not (self.folder / f"old-{i}").exists())
        old = self.folder / f"old-{number}"
        old.mkdir(mode=0o700)
        kept = [self.folder / name for name in names if (self.folder / name).exists()]
        for path in kept:
            path.rename(old / path.name)
        (self.folder / FEDERATION_NAME).unlink(missing_ok=True)
        self.make_keys()
        return [old / path.name for path in kept]

    def make_keys(self) -> None:
        """Make this member's keys here, and the answer with their public halves."""
        name, key = self.kit.member, self.folder / _ROSTER_KEY
        if self.kit.role == CLIENT:
            make_client(key, name)
        else:
            make_helper(key, name, self.folder / _RECORD)
        make_node_key(self.folder / _NODE_KEY)
        write_document(self.answer, self.joining().document)


_NO_USE = 0.999
"""Chance of a best guess about a record, right so often, from which on noise counts as none."""


def without_noise(kit: Invitation) -> str:
    """Return what a member would send without noise that protects, by its kit, in a sentence; "" if nothing.

    Notes
    -----
    The policy of the client decides, which is made as its node makes it from the same settings: what adds no noise, by
    whatever setting, is found. Noise by which a best guess about one record is right in 99.9 of 100 cases counts as
    none.
    """
    if kit.role != CLIENT:
        return ""
    terms = kit.terms
    node = NodeConfig.from_mapping(terms.node_values(kit.member, _NOT_YET))
    policy = node.proposed_policy(terms.records)
    if policy.trust == "trusted-server" or policy.mechanism == NO_NOISE:
        return (
            "NO NOISE: by this kit the client sends the server what it computes from its records without noise. "
            "Whoever runs the server, or breaks into it, may learn single records."
        )
    # The client's own noise: of a sum's, the part that is there whoever else is honest.
    mu = node.mu * math.sqrt(policy.sums.min_honest) if terms.sums else node.mu
    right = NormalDist().cdf(mu / 2)
    if policy.noise_quality != "exact" or right >= _NO_USE:
        who = (
            f"If no helper is honest, or fewer than {policy.sums.min_honest} clients of a sum are, the server"
            if terms.sums
            else "Whoever runs the server"
        )
        return (
            f"HARDLY ANY NOISE: by this kit a run takes mu = {rounded_up(mu)} of the client's own noise, at which a "
            f"best guess about a record is right in up to {100 * right:.4g} % of cases. {who} may learn single records."
        )
    return ""


def join(kit: Invitation, folder: Path, *, accept_no_noise: bool = False) -> Member:
    """Make a member's new folder: its keys, its operator's file, and the answer for the coordinator.

    ``accept_no_noise`` is the operator's own word, which no kit can give: without it, a kit by which anything would
    leave without noise (:func:`without_noise`) is refused.
    """
    if (words := without_noise(kit)) and not accept_no_noise:
        raise ConfigurationError(
            f"Expected a kit by which everything leaves with noise, or --accept-no-noise, got another kit. {words}",
            kind="conflict",
            setting="accept_no_noise",
        )
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise ConfigurationError(
            f"Expected to make the folder {folder}, got: {error.strerror}. Join in another --folder; new keys of a "
            "member that is there are made by `murmurfl federation renew`.",
            kind="exists",
        ) from error
    member = Member(folder, kit)
    try:
        write_document(folder / KIT_NAME, kit.document)
        (folder / "ca.crt").write_text(kit.terms.authority, encoding="ascii")
        member.make_keys()
        if kit.role == CLIENT:
            write_private(folder / "schema.toml", kit.terms.schema)
        write_private(member.file, _operators_text(kit))
    except BaseException:
        shutil.rmtree(folder)
        raise
    return member


def cost_of_a_run(terms: Terms) -> str:
    """Return what a run takes of a client's budgets by the proposed settings, in words."""
    mu, delta = float(terms.settings["mu"]), float(terms.settings["delta"])

    def shown(mu: float) -> str:
        return f"mu = {rounded_up(mu)} (epsilon = {rounded_up(gdp_epsilon(mu, delta))} at delta = {delta:g})"

    if terms.settings.get("trust") == "trusted-server":
        return f"{shown(mu)} towards all but the server, which sees everything"
    if not terms.sums:
        return shown(mu)
    honest = int(terms.settings["trust.min-honest"])
    return (
        f"{shown(mu)} if one helper and {honest} clients of each sum are honest, and {shown(mu * math.sqrt(honest))} "
        "in the worst case"
    )


def _operators_text(kit: Invitation) -> str:
    connection = {"superlink": kit.terms.address, "root-certificates": "ca.crt", "private-key": _NODE_KEY}
    table = f"\n[connection]\n{toml_lines(connection)}"
    if kit.role == HELPER:
        own = {"helper": kit.member, "record": _RECORD, "roster": _ROSTER, "roster-digest": _NOT_YET}
        return f"{toml_lines({**own, 'key': _ROSTER_KEY})}{table}"
    values = kit.terms.node_values(kit.member, _NOT_YET)
    yours = {"samples": values.pop("samples"), "num-records": 0, "budget-mu": 0.0}
    comments = {
        "samples": "your records: .csv, .csv.gz, .parquet or .npz",
        "num-records": "how many of them count: public, whatever is in the file",
        "budget-mu": "of everything ever released of them; mus add in squares",
    }
    if kit.terms.sums:
        yours["budget-local-mu"] = 0.0
        comments["budget-local-mu"] = "the same in the worst case: if nobody else is honest"
    values.pop("num-records")
    edited = "".join(f"{toml_lines({name: value}).rstrip()}  # {comments[name]}\n" for name, value in yours.items())
    yours_first = f"# Yours to say; a run takes {cost_of_a_run(kit.terms)}:\n{edited}"
    proposed = toml_lines(spelled_out(values, NodeConfig.settings()))
    return f"{yours_first}\n# As proposed; read schema.toml too:\n{proposed}{table}"
