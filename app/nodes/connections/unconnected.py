"""Why no connection came about, from what Flower's HTTP client says of it."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator

import httpx

from .causes import Diagnosis, Target
from .presented import Presented, presented_by, utc

_NOT_YET, _EXPIRED, _OTHER_NAME, _OTHER_ADDRESS = 9, 10, 62, 64  # of OpenSSL's X509_V_ERR
_CAUSES_OF_CERTIFICATES = {
    _NOT_YET: "certificate-not-yet-valid",
    _EXPIRED: "certificate-expired",
    _OTHER_NAME: "certificate-name",
    _OTHER_ADDRESS: "certificate-name",
}


def why_unconnected(target: Target, error: httpx.HTTPError, timeout_s: float, now: float) -> Diagnosis:
    """Why a request got no answer.

    Parameters
    ----------
    target : Target
    error : httpx.HTTPError
        What the client said.
    timeout_s : float
        For each step of looking again.
    now : float
        What this machine takes for the time, in seconds since 1970.
    """
    chain = list(_chain(error))
    for one in chain:
        if isinstance(one, ssl.SSLCertVerificationError):
            return _not_believed(target, one.verify_code, timeout_s, now)
    if isinstance(error, httpx.ProxyError):
        got = "a proxy that makes none"
        return Diagnosis("unreachable", target.sentence("a connection", got, "ask who runs the proxy"))
    if isinstance(error, httpx.TimeoutException):
        return target.timed_out(timeout_s)
    return _no_way(target, chain) or _other_words(target, error, chain, timeout_s)


def _no_way(target: Target, chain: list[BaseException]) -> Diagnosis | None:
    """What names, addresses and ports have to do with."""
    for one in chain:
        if isinstance(one, socket.gaierror):
            return Diagnosis(
                "name-not-found",
                f"Expected a name that can be looked up, got {target.where}, which cannot: correct the SuperLink's "
                "name, or mend this machine's DNS.",
            )
        if isinstance(one, ConnectionRefusedError):
            advice = "have the SuperLink started, or correct the port"
            got = "a refusal, for nobody listens there"
            return Diagnosis("refused", target.sentence("a SuperLink", got, advice))
    return None


def _other_words(target: Target, error: httpx.HTTPError, chain: list[BaseException], timeout_s: float) -> Diagnosis:
    """What comes when somebody listens and speaks something else."""
    insecure = target.connection.insecure
    if not insecure and any(isinstance(one, ssl.SSLError) for one in chain):
        advice = "the SuperLink was started with --insecure, or another service listens on that port"
        return Diagnosis("no-tls", target.sentence("TLS", "an answer that is none", advice))
    cut = any(isinstance(one, ConnectionResetError | BrokenPipeError) for one in chain)
    if isinstance(error, httpx.ConnectError) and not cut:
        advice = "look at this machine's network, and at the address"
        return Diagnosis("unreachable", target.sentence("a way to the SuperLink", "none", advice))
    if insecure and not target.proxied and presented_by(target.host, target.port, timeout_s) is not None:
        advice = "leave insecure out and name the server's root certificates"
        return Diagnosis("wants-tls", target.sentence("plain HTTP", "a server that wants TLS", advice))
    return target.no_superlink("an end of the connection without an answer")


def _not_believed(target: Target, code: int, timeout_s: float, now: float) -> Diagnosis:
    came = None if target.proxied else presented_by(target.host, target.port, timeout_s)
    cause = _CAUSES_OF_CERTIFICATES.get(code, "certificate-unknown")
    if cause == "certificate-name":
        sentence = _of_name(target, came)
    elif cause == "certificate-unknown":
        sentence = _of_authority(target, came)
    else:
        sentence = _of_time(target, came, now, begins=code == _NOT_YET)
    return Diagnosis(cause, sentence, certificate_ends=came.ends if came else None)


def _of_time(target: Target, came: Presented | None, now: float, *, begins: bool) -> str:
    limit = None if came is None else came.begins if begins else came.ends
    its_own = limit is not None and (now < limit) == begins  # else one above it: an authority's
    verb = "begins" if begins else "ended"
    got = (
        f"one that {verb} {utc(limit)}"
        if limit is not None and its_own
        else f"one whose authority's {verb} at another time"
    )
    return target.sentence(
        f"a certificate that is valid now, {utc(now)} by this machine's clock,",
        got,
        "its operator makes a new one; if this machine's clock is wrong, set it",
    )


def _of_name(target: Target, came: Presented | None) -> str:
    names = ", ".join(came.names) if came and came.names else "other names"
    advice = (
        "name the SuperLink as its certificate does, or have its operator make one with this subject alternative name"
    )
    return target.sentence(f"a certificate for {target.host}", f"one for {names}", advice)


def _of_authority(target: Target, came: Presented | None) -> str:
    roots = target.connection.root_certificates
    expected = f"a certificate of an authority in {roots}" if roots else "a certificate of a public authority"
    got = f"one of another ({came.issuer})" if came else "one of another"
    name = "compare" if roots else "name the root certificates of the SuperLink; compare"
    advice = f"{name} them with its operator by other means, for whoever is in between could show one of its own"
    return target.sentence(expected, got, advice)


def _chain(error: BaseException) -> Iterator[BaseException]:
    one: BaseException | None = error
    while one is not None:
        yield one
        one = one.__cause__ or one.__context__
