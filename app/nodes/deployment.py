"""A whole deployment on this computer: a SuperLink with TLS and node keys, nodes with ledgers, helpers with records.

:mod:`.demo` shows it and the tests drive it; docs/deployment.md does the same on several computers. Certificates and
node keys lie in a scratch folder and are thrown away with the deployment; real ones come from the operators.
Configurations, ledgers, records, keys of secure aggregation and logs stay in the run's folder.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ...clients.nodes.roster_files import write_roster
from ...privacy import ConfigurationError, SQLiteLedger
from ...privacy.files import write_private
from ..engines.loopback import LaunchError, Scalar, executable, interrupts_as_keyboard_interrupt, toml_document
from ..engines.start import app_folder
from ..engines.superlink import CONNECTION_NAME, Launch
from .cards import make_helper, make_machine, roster_of
from .node_config import NodeConfig

_LIFETIME = datetime.timedelta(days=1)
_CLOCK_SKEW = datetime.timedelta(hours=1)
_LONGEST_COMMON_NAME = 64


@dataclass(frozen=True)
class ServerCertificates:
    """Files of a SuperLink's certificates."""

    authority: Path  # the public certificate that nodes and users check against
    certificate: Path
    key: Path  # private


def make_server_certificates(
    folder: Path, host: str = "localhost", *, lifetime: datetime.timedelta = _LIFETIME, keep_authority: bool = False
) -> ServerCertificates:
    """Make a certificate for a host, 127.0.0.1 and localhost.

    Parameters
    ----------
    keep_authority : bool
        Whether the authority's key is kept, as ``ca.key``, for ten years. An authority and a server's key that lie in
        the folder are then used again: nodes and logins go on with a renewed certificate.
    """
    paths = ServerCertificates(folder / "ca.crt", folder / "server.pem", folder / "server.key")
    kept = folder / "ca.key"
    authority_key, key = (_key(path if keep_authority else None) for path in (kept, paths.key))
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "murmurfl authority")])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host[:_LONGEST_COMMON_NAME])])
    names = [_general_name(name) for name in dict.fromkeys(("127.0.0.1", "localhost", host))]
    ca_usage = _usage(key_cert_sign=True, crl_sign=True)
    ten_years = datetime.timedelta(days=3650)
    authority = (
        _certificate(issuer, issuer, authority_key.public_key(), ten_years if keep_authority else lifetime)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(ca_usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    certificate = (
        _certificate(subject, issuer, key.public_key(), lifetime)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    if not (keep_authority and kept.exists()):
        paths.authority.write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    paths.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    private = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    for path, one in ((kept, authority_key), (paths.key, key)) if keep_authority else ((paths.key, key),):
        write_private(path, one.private_bytes(*private).decode())
    return paths


def _key(path: Path | None) -> ec.EllipticCurvePrivateKey:
    """The private key in a file, or a new one."""
    if path is None or not path.exists():
        return ec.generate_private_key(ec.SECP384R1())
    found = serialization.load_pem_private_key(path.read_bytes(), password=None)
    if not isinstance(found, ec.EllipticCurvePrivateKey):
        raise ConfigurationError(f"Expected a private key of an elliptic curve at {path}, got another kind.")
    return found


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def make_node_key(path: Path) -> Path:
    """Make a node's private key as ``ssh-keygen -t ecdsa -b 384`` does; return the path of its public key."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = (serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption())
    write_private(path, key.private_bytes(*private).decode())
    public = path.with_name(path.name + ".pub")
    openssh = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    public.write_bytes(key.public_key().public_bytes(*openssh))
    return public


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, lifetime: datetime.timedelta
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + lifetime)
    )


def _usage(**allowed: bool) -> x509.KeyUsage:
    names = (
        *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
        *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
    )
    return x509.KeyUsage(**{name: allowed.get(name, False) for name in names})


_NODES, _ROSTER = "nodes", "roster.json"
_SIGNING_KEY, _HELPER_KEY, _RECORD = "signing.key", "helper.key", "record.sqlite"
_REGISTER_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class NodeFiles:
    """Files of one node or helper of a deployment."""

    config: Path  # the operator's file
    log: Path
    private_key: Path  # registered with the SuperLink
    command: str = "node"  # of ``murmurfl``


class Deployment(Launch):
    """Real processes on the loopback interface; :func:`deployment` starts and stops one.

    Parameters
    ----------
    folder : Path
        For node configurations, ledgers and logs.
    timeout_s : float
        For everything but the stopping.
    on_line : callable
        Receives the lines of the runs' logs.
    """

    def __init__(self, folder: Path, timeout_s: float, on_line: Callable[[str], None]) -> None:
        super().__init__(app_folder(), time.monotonic() + timeout_s, timeout_s, on_line)
        self.folder = folder
        self.nodes: dict[str, NodeFiles] = {}
        self.helpers: dict[str, NodeFiles] = {}
        self.running: dict[str, subprocess.Popen[Any]] = {}
        self._certificates: ServerCertificates | None = None

    def prepare(self, overrides: str, environment: Mapping[str, str]) -> None:
        super().prepare(overrides, environment)
        self.environment["TMPDIR"] = str(self.scratch())  # removed in the end, with what killed processes left there

    @property
    def certificates(self) -> ServerCertificates:
        """The SuperLink's certificates, made when first needed."""
        if self._certificates is None:
            self._certificates = make_server_certificates(self.scratch())
        return self._certificates

    def superlink_options(self) -> list[str]:
        """TLS, node keys, and a database, so that a restarted SuperLink knows its nodes and runs."""
        paths = self.certificates
        options = ["--ssl-ca-certfile", str(paths.authority), "--ssl-certfile", str(paths.certificate)]
        options += ["--ssl-keyfile", str(paths.key), "--enable-supernode-auth"]
        return [*options, "--database", str(self.scratch() / "superlink.db")]

    def connection(self) -> str:
        return f"root-certificates = {json.dumps(str(self.certificates.authority))}"

    def certificate(self) -> Path | None:
        return self.certificates.certificate

    def tls(self) -> ssl.SSLContext | None:
        return ssl.create_default_context(cafile=str(self.certificates.authority))

    def add_nodes(self, configs: Mapping[str, Mapping[str, Scalar]], helpers: Sequence[str] = ()) -> None:
        """Give each node its file, its ledger and its key, and register the keys with the SuperLink.

        Parameters
        ----------
        configs : mapping
            Each node's configuration by name, with budget and delta, but without machine, ledger, roster and keys.
        helpers : sequence of str
            Names of helpers. With any, they get keys and records, and they and all nodes one roster.
        """
        shared = self._make_roster(list(configs), helpers)
        for name, values in configs.items():
            own = {**shared, "signing-key": _SIGNING_KEY} if helpers else {}
            files = self._files(name, {"machine": name, "ledger": "ledger.sqlite", **values, **own}, "node")
            node = NodeConfig.read(files.config)
            budgets = {"budget_mu": node.budget_mu, "budget_local_mu": node.budget_local_mu or None}
            SQLiteLedger.create(node.ledger, **budgets, delta=node.delta, data=name)
            self.nodes[name] = files
        for name in helpers:
            own = {"helper": name, "record": _RECORD, **shared, "key": _HELPER_KEY}
            self.helpers[name] = self._files(name, own, "helper")
        self._register({name: self.files_of(name) for name in (*configs, *helpers)})

    def _make_roster(self, machines: Sequence[str], helpers: Sequence[str]) -> dict[str, Scalar]:
        """Make everybody's keys and cards and one roster; return its keys for everybody's configuration."""
        if not helpers:
            return {}
        cards = []
        for name in (*machines, *helpers):
            folder = self.folder / _NODES / name
            folder.mkdir(parents=True)
            if name in machines:
                cards.append(make_machine(folder / _SIGNING_KEY, name).card)
            else:
                cards.append(make_helper(folder / _HELPER_KEY, name, folder / _RECORD).card)
        roster = roster_of(cards)
        write_roster(self.folder / _NODES / _ROSTER, roster)
        return {"roster": f"../{_ROSTER}", "roster-digest": roster.digest}

    def _files(self, name: str, values: Mapping[str, Scalar], command: str) -> NodeFiles:
        """Make a node's folder with the operator's file."""
        folder, keys = self.folder / _NODES / name, self.scratch() / "keys"
        folder.mkdir(parents=True, exist_ok=True)
        keys.mkdir(mode=0o700, exist_ok=True)
        files = NodeFiles(folder / f"{command}.toml", folder / f"{command}.log", keys / name, command)
        write_private(files.config, toml_document(values))
        return files

    def files_of(self, name: str) -> NodeFiles:
        return self.nodes.get(name) or self.helpers[name]

    def _register(self, nodes: Mapping[str, NodeFiles]) -> None:
        """Make nodes' keys and register them with the SuperLink."""
        registering = []
        for name, files in nodes.items():
            public = make_node_key(files.private_key)
            registering.append((name, self._flwr("supernode", "register", str(public), CONNECTION_NAME)))
        for name, process in registering:
            try:
                output, _ = process.communicate(timeout=_REGISTER_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                raise LaunchError(f"The SuperLink did not take the key of node {name} in time.") from None
            if process.returncode:
                raise LaunchError(f"The SuperLink refused the key of node {name}.", output)

    def start_node(self, name: str, program: Sequence[str] = ()) -> subprocess.Popen[Any]:
        """Start a node or a helper, or start it again: ``murmurfl``, or another program that takes its arguments."""
        files = self.files_of(name)
        program = program or (sys.executable, "-m", "murmurfl.app")
        command = [*program, files.command, str(files.config), "--superlink", f"127.0.0.1:{self.port}"]
        command += ["--auth-private-key", str(files.private_key)]
        command += ["--root-certificates", str(self.certificates.authority), "--verbose"]
        with files.log.open("ab") as log:
            self.running[name] = self.start_process(command, stdout=log)
        return self.running[name]

    def submit(self, run_config: Mapping[str, Scalar], app_dir: Path | None = None) -> tuple[int, str]:
        """Complete a run of an app over the nodes; return its id and status.

        Raises
        ------
        LaunchError
            If the run was refused or did not complete.
        """
        self.app_dir = self.app_dir if app_dir is None else app_dir
        (self.scratch() / "run-config.toml").write_text(toml_document(run_config), encoding="utf-8")
        return self.run("", has_overrides=bool(run_config))

    def _flwr(self, *arguments: str) -> subprocess.Popen[Any]:
        options: dict[str, Any] = {"cwd": self.scratch(), "text": True, "encoding": "utf-8", "errors": "replace"}
        return self.start_process([executable("flwr"), *arguments], stdout=subprocess.PIPE, **options)


@contextmanager
def deployment(
    folder: Path,
    *,
    timeout_s: float = 900.0,
    on_line: Callable[[str], None] = lambda line: None,  # noqa: ARG005 - nobody reads along
    environment: Mapping[str, str] | None = None,
) -> Iterator[Deployment]:
    """A SuperLink that answers; whatever was started is stopped when the block ends.

    Parameters
    ----------
    folder : Path
        For node configurations, ledgers and logs.
    timeout_s : float
        For everything but the stopping, in seconds.
    on_line : callable
        Receives the lines of the runs' logs.
    environment : mapping, optional
        Further environment variables of all processes.

    Raises
    ------
    LaunchError
        If the SuperLink does not start, or a process could not be stopped.
    """
    deployed = Deployment(folder, timeout_s, on_line)
    with interrupts_as_keyboard_interrupt() as protect:
        left: list[int] = []
        try:
            deployed.prepare("", environment or {})
            deployed.start_superlink()
            yield deployed
        finally:
            protect()
            left = deployed.stop()
        if left:
            raise LaunchError(f"These processes of the deployment could not be stopped: {left}.", deployed.log)
