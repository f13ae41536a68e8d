"""Who may command a server: every call of Flower's Control API, on a real SuperLink behind `murmurfl server`."""

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from ssl import create_default_context

import httpx
import pytest
from fastapi.routing import iter_route_contexts
from flwr.common.constant import CONTROL_API_DEFAULT_SERVER_ADDRESS
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.supercore.routers.runtime import create_runtime_router
from flwr.supercore.routers.runtime import responses_router as responses
from flwr.superlink.routers.control import router as control
from murmurfl.app.engines.loopback import executable, free_port, is_healthy, launch_environment, without_proxy
from murmurfl.app.fleet.federation.keys_and_cards import make_node_key, make_server_certificates, write_owner_key
from murmurfl.app.nodes.connection import Connection, server_name
from murmurfl.app.nodes.diagnosis import diagnose
from murmurfl.privacy.permits import OwnerKey

pytestmark = pytest.mark.long

ANA, EVE = OwnerKey(bytes(range(32))), OwnerKey(bytes(range(1, 33)))
CALLS = sorted(route.path for route in control.routes)
READS = ("list-", "get-", "show-", "stream-", "pull-")
PROTOBUF = {"content-type": PROTOBUF_MEDIA_TYPE, "accept": PROTOBUF_MEDIA_TYPE}
SERVER_APP = """
import json, os, time
from pathlib import Path
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    if not context.run_config["out"]:
        time.sleep(60)
    seen = {"user": os.geteuid()}
    for path in json.loads(context.run_config["paths"]):
        try:
            seen[path] = len(Path(path).read_bytes())
        except OSError as error:
            seen[path] = error.strerror
    Path(context.run_config["out"]).write_text(json.dumps(seen))
"""
PROJECT = """
[project]
name = "looking"
version = "1.0.0"
description = "says what a run may read on its server"
license = "Apache-2.0"
[tool.flwr.app]
publisher = "tests"
[tool.flwr.app.components]
serverapp = "looking.server:app"
clientapp = "looking.client:app"
[tool.flwr.app.config]
paths = "[]"
out = ""
"""


@dataclass
class Server:
    """One that is closed, and the home of an owner who has not logged in."""

    folder: Path
    address: str
    environment: dict
    key: Path

    @cached_property
    def client(self):
        return httpx.Client(base_url=f"https://{self.address}", verify=create_default_context(cafile=str(self.roots)))

    @property
    def roots(self):
        return self.folder / "ca.crt"

    def post(self, path, headers=None, method="POST"):
        # A stream would go on for ever: its status says enough.
        with self.client.stream(method, path, headers=[*PROTOBUF.items(), *(headers or [])]) as answer:
            return answer.status_code, "" if answer.status_code == 200 else answer.read().decode(errors="replace")

    def login(self, key=ANA, *, server=None, lasting=60):
        server = server_name(self.folder / "server.pem") if server is None else server
        return "authorization", "Bearer " + key.login(server, until=int(time.time()) + lasting)

    def flwr(self, *arguments, program="flwr", environment=None):
        command = [executable(program), *map(str, arguments)]
        environment = {**self.environment, "COLUMNS": "300", **(environment or {})}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, cwd=self.folder, timeout=300, check=False
        )
        return done.returncode, " ".join((done.stdout + done.stderr).split())

    def kept(self):
        """What an owner sees of runs and nodes, by calls of Flower's."""
        answers = [json.loads(self.flwr(*call, "ours", "--format", "json")[1].split("... ")[-1]) for call in LISTINGS]
        return [answer.get("runs", answer.get("nodes")) for answer in answers]


LISTINGS = (("ls",), ("supernode", "list"))


@contextmanager
def server(folder, *options, environment=None):
    """`murmurfl server` with TLS and node keys, and Ana's key."""
    folder.mkdir(exist_ok=True)
    made, port = make_server_certificates(folder), free_port()
    owners = folder / "owners"
    owners.write_text(f"{ANA.public.hex()} Ana\n")
    owners.chmod(0o600)
    write_owner_key(folder / "ana.key", ANA)
    environment = {**launch_environment(folder, {}), **(environment or {})}
    (folder / "config.toml").write_text(
        f'[superlink]\ndefault = "ours"\n[superlink.ours]\naddress = "127.0.0.1:{port}"\n'
        f"root-certificates = {json.dumps(str(made.authority))}\n"
    )
    command = [executable("murmurfl"), "server", "--owners", str(owners), "--enable-supernode-auth", *options]
    command += ["--host", "127.0.0.1", "--port", str(port), "--database", str(folder / "superlink.db")]
    command += ["--ssl-ca-certfile", str(made.authority), "--ssl-certfile", str(made.certificate)]
    command += ["--ssl-keyfile", str(made.key)]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        limit, context = time.monotonic() + 90, create_default_context(cafile=str(made.authority))
        while not is_healthy(port, context):
            assert time.monotonic() < limit, (folder / "server.log").read_text()
            assert process.poll() is None, (folder / "server.log").read_text()
            time.sleep(0.05)
        yield Server(folder, f"127.0.0.1:{port}", environment, folder / "ana.key")
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()
        process.wait(10)


@pytest.fixture(scope="module")
def closed(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in without_proxy(os.environ).items():
            patch.setenv(name, value)
        # Flower's second way to command, which an environment may ask for, is not taken.
        asked = {"FLWR_INTERNAL_GRPC_CONTROL_API": "1"}
        with server(tmp_path_factory.mktemp("closed"), environment=asked) as running:
            yield running


def app(folder, out, paths):
    (folder / "looking").mkdir()
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "looking" / "__init__.py").touch()
    (folder / "looking" / "server.py").write_text(SERVER_APP)
    (folder / "looking" / "client.py").write_text("from flwr.clientapp import ClientApp\napp = ClientApp()\n")
    (folder / "run.toml").write_text(f"out = {json.dumps(str(out))}\npaths = {json.dumps(json.dumps(paths))}\n")
    return folder


def seen_by(closed, folder, out, paths):
    """What a run that an owner submits says it could read."""
    code, said = closed.flwr("run", app(folder, out, paths), "ours", "--run-config", folder / "run.toml", "--stream")
    assert code == 0, said
    limit = time.monotonic() + 60
    while not out.exists() or not out.read_text():
        assert time.monotonic() < limit, (closed.folder / "server.log").read_text()
        time.sleep(0.2)
    return json.loads(out.read_text())


def test_participants_perform_none_of_the_calls(closed):
    public = make_node_key(closed.folder / "node")
    assert closed.flwr("owner", "login", closed.key, "ours", program="murmurfl")[0] == 0
    assert closed.flwr("supernode", "register", public, "ours")[0] == 0
    before = closed.kept()
    assert (len(before[0]), len(before[1])) == (0, 1)
    permit = ANA.permit(["night1"], not_before=0, until=2**40)
    node = public.read_text().split()[1]
    credentials = [
        [],
        [("flwr-public-key", node), ("flwr-signature", node)],
        [("authorization", f"Bearer {permit}")],
        [("authorization", f"Bearer {node}")],
        [closed.login(EVE)],
        [closed.login(server="ab" * 32)],
        [closed.login(server="")],
        [closed.login(lasting=0)],
        [closed.login(), closed.login()],
    ]
    assert len(CALLS) >= 40, CALLS
    for call in CALLS:
        for headers in credentials:
            status, said = closed.post(call, headers)
            assert (status, "Only owners command" in said) == (403, True), (call, headers, status, said)
    assert closed.kept() == before
    assert "Refused /v1/control/" in (closed.folder / "server.log").read_text()


def test_no_other_path_leads_past_the_gate(closed):
    name = "list-runs"
    paths = [f"/v1/control/{name}/", f"//v1/control/{name}", f"/V1/control/{name}", f"/v1/%63ontrol/{name}"]
    paths += [f"/v1/fleet/../control/{name}", f"/v1/fleet/%2e%2e/control/{name}", f"/v1/fleet//control/{name}"]
    paths += [f"/v1/control%2f{name}", f"/v1/fleet/..;/control/{name}", "/docs", "/openapi.json", "/"]
    for path in paths:
        for method in ("POST", "GET", "PUT", "HEAD"):
            assert closed.post(path, method=method)[0] in (401, 403, 404, 405), (path, method)
    tasks = [
        found.path for found in iter_route_contexts([*create_runtime_router("SuperLink").routes, *responses.routes])
    ]
    assert len(tasks) >= 20, tasks
    for path in tasks:
        status, said = closed.post(path)
        assert status in (401, 403), (path, status, said)
    log = (closed.folder / "server.log").read_text()
    assert "Traceback" not in log
    with socket.socket() as other:
        assert other.connect_ex(("127.0.0.1", int(CONTROL_API_DEFAULT_SERVER_ADDRESS.rpartition(":")[2])))


def test_an_owner_may_do_everything(closed):
    for call in CALLS:
        status, said = closed.post(call, [closed.login()])
        # To an empty request Flower's own call may well say no; the gate does not.
        assert status not in (403, 415), (call, status, said)


def test_an_owners_day(closed, tmp_path):
    credentials = closed.folder / "credentials.yaml"
    credentials.unlink(missing_ok=True)
    public, folder = make_node_key(closed.folder / "second"), app(tmp_path, tmp_path / "out.json", [])
    day = [("ls", "ours"), ("supernode", "list", "ours"), ("supernode", "register", public, "ours")]
    day += [("run", folder, "ours", "--run-config", folder / "run.toml"), ("stop", "1", "ours"), ("log", "1", "ours")]
    for command in day:
        code, said = closed.flwr(*command)
        assert code, (command, said)
        assert "`murmurfl owner login KEY CONNECTION`" in said, (command, said)
    code, said = closed.flwr("owner", "login", closed.key, "ours", program="murmurfl")
    assert code == 0, said
    assert credentials.stat().st_mode & 0o777 == 0o600
    assert closed.flwr("supernode", "register", public, "ours")[0] == 0
    nodes = closed.kept()[1]
    code, said = closed.flwr(*day[3], "--stream")
    assert code == 0, said
    (run,) = closed.kept()[0]
    assert run["status"] == "finished:completed", (run, (closed.folder / "server.log").read_text())
    assert json.loads((tmp_path / "out.json").read_text())["user"] == os.geteuid()
    assert closed.flwr("log", run["run-id"], "ours", "--show")[0] == 0
    code, said = closed.flwr("run", folder, "ours")
    assert code == 0, said
    (other,) = [one for one in closed.kept()[0] if one["run-id"] != run["run-id"]]
    code, said = closed.flwr("stop", other["run-id"], "ours")
    assert code == 0, said
    assert "finished:stopped" in [one["status"] for one in closed.kept()[0]]
    for node in nodes:
        assert closed.flwr("supernode", "unregister", node["node-id"], "ours")[0] == 0
    log = (closed.folder / "server.log").read_text()
    for call in ("start-run", "stop-run", "register-node", "unregister-node"):
        assert f"Command of Ana: {call}" in log
    assert "Command of Ana: list-" not in log


def test_who_is_taken_out_of_the_list_logs_in_no_more(closed):
    owners = closed.folder / "owners"
    kept = owners.read_text()
    try:
        owners.write_text(f"{EVE.public.hex()} Eve\n")
        assert closed.post("/v1/control/list-runs", [closed.login()])[0] == 403
        assert closed.post("/v1/control/list-runs", [closed.login(EVE)])[0] == 200
        code, said = closed.flwr("owner", "login", closed.key, "ours", program="murmurfl")
        assert code == 1
        assert "`murmurfl server --owners`" in said
    finally:
        owners.write_text(kept)


def test_a_node_sees_that_its_server_is_closed(closed):
    public = make_node_key(closed.folder / "third")
    assert closed.flwr("owner", "login", closed.key, "ours", program="murmurfl")[0] == 0
    assert closed.flwr("supernode", "register", public, "ours")[0] == 0
    found = diagnose(Connection(closed.address, closed.roots, closed.folder / "third"))
    assert (found.cause, found.takes_commands) == ("reached", False)


def another_user():
    """A user, and an interpreter that this user may run; None where the system does not allow it."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return None
    for python in (sys.executable, f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"):
        command = [python, "-c", "import murmurfl, flwr"]
        with suppress(OSError):
            if not subprocess.run(command, env=reading_here(), user=65534, group=65534, check=False).returncode:
                return python
    return None


def reading_here():
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONDONTWRITEBYTECODE": "1"}


def test_what_owners_submit_reads_neither_key_nor_database_where_another_user_starts_it(tmp_path):
    python = another_user()
    if python is None:
        pytest.skip("needs root, and an interpreter that another user may run")
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o011)
    home, shared = tmp_path / "apps", tmp_path / "shared"
    for folder in (home, shared):
        folder.mkdir(mode=0o700)
        os.chown(folder, 65534, 65534)
    secret = shared / "secret"
    secret.write_bytes(os.urandom(32))
    secret.chmod(0o440)
    os.chown(secret, 0, 65534)
    told = ["--superexec-auth-secret-file", str(secret)]
    with server(tmp_path / "server", "--isolation", "process", *told) as running:
        (tmp_path / "server").chmod(0o711)
        run = "import sys; from flwr.supercore.cli.flower_superexec import flower_superexec as f; sys.exit(f())"
        command = [python, "-c", run, "--root-certificates", str(running.roots), *told]
        program = home / "flwr-serverapp"  # of that interpreter, as an installation there has it
        program.write_text(f"#!{python}\nfrom flwr.superlink.cli.flwr_serverapp import flwr_serverapp as f\nf()\n")
        program.chmod(0o755)
        environment = {**launch_environment(home, reading_here()), "HOME": str(home)}
        environment["PATH"] = os.pathsep.join([str(home), environment["PATH"]])
        starter = subprocess.Popen(
            [*command, "--runtime-api-address", running.address], env=environment, user=65534, group=65534,
            extra_groups=[], cwd=home, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            assert running.flwr("owner", "login", running.key, "ours", program="murmurfl")[0] == 0
            names = ("server.key", "superlink.db", "ana.key", "credentials.yaml", "ca.crt")
            paths = {name: str(running.folder / name) for name in names}
            folder = tmp_path / "app"
            folder.mkdir()
            seen = seen_by(running, folder, shared / "out.json", list(paths.values()))
        finally:
            starter.terminate()
            starter.wait(20)
    assert seen.pop("user") == 65534
    assert isinstance(seen.pop(paths["ca.crt"]), int)
    assert set(seen.values()) == {"Permission denied"}
