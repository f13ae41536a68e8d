"""Servers on the loopback interface that are not what a node expects, and certificates for them."""

import datetime
import ipaddress
import re
import socket
import ssl
import threading
from contextlib import contextmanager, suppress

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


class Authority:
    """Signs certificates for whatever name and time a test asks for."""

    def __init__(self, folder, name="an authority", begins=-DAY, ends=3650 * DAY):
        self.folder, self._key = folder, ec.generate_private_key(ec.SECP256R1())
        folder.mkdir(exist_ok=True)
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.path = folder / "authority.crt"
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        builder = self._builder(self._name, self._key.public_key(), begins, ends)
        certificate = builder.add_extension(constraints, critical=True).sign(self._key, hashes.SHA256())
        self.path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def _builder(self, subject, key, begins, ends):
        now = datetime.datetime.now(datetime.UTC)
        named = x509.CertificateBuilder().subject_name(subject).issuer_name(self._name).public_key(key)
        return (
            named.serial_number(x509.random_serial_number()).not_valid_before(now + begins).not_valid_after(now + ends)
        )

    def context(self, address="127.0.0.1", begins=-DAY, ends=365 * DAY):
        """What a server with a certificate for an address or a name speaks TLS by."""
        key = ec.generate_private_key(ec.SECP256R1())
        try:
            name = x509.IPAddress(ipaddress.ip_address(address))
        except ValueError:
            name = x509.DNSName(address)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a server")])
        builder = self._builder(subject, key.public_key(), begins, ends)
        builder = builder.add_extension(x509.SubjectAlternativeName([name]), critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        private = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        path = self.folder / f"server-{certificate.serial_number}.pem"
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM) + key.private_bytes(*private))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(path)
        return context


@contextmanager
def serving(answer=b"", context=None):
    """Whoever connects gets this answer, after TLS where there is a context; ``None`` keeps everybody waiting.

    A list comes part by part, a tenth of a second apart.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ended = threading.Event()

        def serve():
            while not ended.is_set():
                with suppress(OSError):
                    connection, _ = listener.accept()
                    with connection:
                        connection.settimeout(2.0)
                        secured = connection if context is None else context.wrap_socket(connection, server_side=True)
                        with secured:
                            _read_request(secured)
                            if answer is None:
                                ended.wait(5.0)
                            for part in [answer] if isinstance(answer, bytes) else answer or []:
                                secured.sendall(part)
                                ended.wait(0.1 if part is not answer else 0.0)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            ended.set()
            with suppress(OSError):
                socket.create_connection(listener.getsockname(), 1.0).close()
            thread.join(2.0)


def _read_request(connection):
    """All of it: a connection that is closed with something unread takes the answer along."""
    read = connection.recv(65536)
    if read[:4] != b"POST":
        return  # as a client begins that speaks TLS
    while b"\r\n\r\n" not in read:
        if not (part := connection.recv(65536)):
            return
        read += part
    head, _, body = read.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head.lower())
    missing = int(length[1]) - len(body) if length else 0
    while missing > 0 and (part := connection.recv(65536)):
        missing -= len(part)


def http_answer(status, body=b"{}", **headers):
    lines = [f"HTTP/1.1 {status} Status", f"content-length: {len(body)}", "content-type: application/json"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "connection: close", "", ""]).encode() + body
