"""Somebody who follows docs/operations.md: each section's commands typed in order, on the clients they are for.

Folders stand for ``/etc`` and ``/var/lib`` of each client, processes for services of systemd. What needs root, a
package registry or systemd itself is left out; :data:`NOT_TYPED` says what.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import time
import urllib.request
from contextlib import suppress

from murmurfl.app.engines import superlink as launch
from murmurfl.app.engines.loopback import is_listening
from murmurfl.app.settings.run_config import run_keys
from murmurfl.privacy import read_ledger
from murmurfl.privacy.setting import by_key

from tests.deployment.test_walkthrough import AGREED, ROOT, Clients, blocks, log_in, samples_of, start_server
from tests.harness.schemas import write_table

PAGE = "operations.md"
NOT_TYPED = ("python3 -m venv", "/opt/murmurfl/bin/")
"""An installation is test_base_environment.py's."""
NUMBER = "1234567890123456789"
"""Stands on the page for the number that a registration printed."""
STOPS_WITHIN_S = 15
_PORTS = ("9464", "9465")
"""Of the units, for metrics and health."""


def sections():
    """The page's sections: title and text."""
    _, *parts = re.split(r"^## (.*)\n", (ROOT / "docs" / PAGE).read_text(), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def lines_of(section):
    """The commands of a section, a line each."""
    found = re.findall(r"^ *```sh\n(.*?)^ *```", sections()[section], flags=re.DOTALL | re.MULTILINE)
    return [line.strip() for block in found for line in block.replace("\\\n", " ").splitlines() if line.strip()]


class Fleet(Clients):
    """A server, and nodes that are enrolled, changed and stopped as the page says."""

    def __init__(self, folder):
        super().__init__(folder)
        self.numbers, self.started, self.ports = {}, {}, {}

    @property
    def server(self):
        return self.folder / "server"

    def begin(self):
        start_server(self)
        self.wait_for_the_server()
        log_in(self)

    def wait_for_the_server(self):
        wait(lambda: is_listening(self.port), "the SuperLink did not start")

    def start(self, line, folder):
        """As a reader starts it, but so that it can be stopped by itself."""
        self.logs.append(folder / "log")
        with self.logs[-1].open("ab") as log:
            process = subprocess.Popen(
                ["bash", "-euc", f"exec {line}"],
                cwd=folder,
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.started[folder] = line, process

    def halt(self, folder):
        """Stop what was started in a folder, as systemd would: politely, then by force."""
        _, process = self.started[folder]
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, sign)
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOPS_WITHIN_S)
                return

    def start_again(self, folder):
        self.start(self.started[folder][0], folder)

    def stop_server(self):
        self.halt(self.server)
        wait(lambda: not is_listening(self.port), "the SuperLink did not stop")

    def start_server(self):
        self.start_again(self.server)
        self.wait_for_the_server()

    def operator(self, number):
        return self.folder / f"operator-{number}"

    def ledger(self, number):
        return self.operator(number) / "lib" / "murmurfl" / "ledger.sqlite"

    def log(self, number):
        return (self.operator(number) / "log").read_text()

    def prepare(self, number):
        """What an operator has before enrolling: data, the operator's file, the authority's certificate."""
        operator = self.join(f"operator-{number}")
        (operator / "etc" / "ca.crt").write_bytes((self.server / "ca.crt").read_bytes())
        connection = re.search(r"```toml\n(.*?)```", sections()["Enrol a node"], flags=re.DOTALL).group(1)
        written = f"{blocks('deployment.md', 'toml')[1]}\n{connection}"
        path = operator / "etc" / "node.toml"
        path.write_text(re.sub(r"^ {3}", "", self.text(written, operator.name, number), flags=re.MULTILINE))
        path.chmod(0o600)
        write_table(operator / "lib" / "murmurfl", *samples_of(number))

    def follow(self, section, number):
        """Type the commands of a section on behalf of one node; what they said, a text each."""
        return [self.type(line, number) for line in lines_of(section)]

    def type(self, line, number):
        if line.startswith(NOT_TYPED):
            return ""
        operator = self.operator(number)
        words = shlex.split(line)
        if words[0] == "systemctl":
            return self.control(words[1:], number)
        if words[0] == "journalctl":
            return self.log(number)
        if words[0] == "curl":
            with urllib.request.urlopen(self.at_home(words[-1], number), timeout=30) as answer:
                return answer.read().decode()
        if words[0] in ("flwr", "openssl") or words[:3] == ["murmurfl", "federation", "exclude"]:
            return self.on_the_server(self.text(line, "server", number), operator, number)
        return self.run(self.text(line, operator.name, number), operator)

    def on_the_server(self, line, operator, number):
        for key in re.findall(r"\S+\.pub", line):
            (self.server / key).write_bytes((operator / "etc" / key).read_bytes())
        if NUMBER in line:
            line = line.replace(NUMBER, self.numbers[number].pop(0))
        said = self.run(line, self.server)
        self.numbers.setdefault(number, []).extend(re.findall(r"SuperNode (\d+) registered", said))
        return said

    def control(self, words, number):
        action, units = words[0], [word.removesuffix(".service") for word in words[1:] if not word.startswith("-")]
        stop, start = {
            "murmurfl-node": (lambda: self.stop_node(number), lambda: self.start_node(number)),
            "murmurfl-server": (self.stop_server, self.start_server),
        }.get(units[0], (lambda: None, lambda: None))  # the units of examples/fleet have a test of their own
        if action in ("stop", "disable", "restart"):
            stop()
        if action in ("start", "enable", "restart"):
            start()
        return ""

    def start_node(self, number):
        operator = self.operator(number)
        self.start(self.at_home(self.text(service("murmurfl-node"), operator.name, number), number), operator)

    def at_home(self, text, number):
        """The addresses of a unit, where each of this computer's nodes has its own."""
        ports = self.ports.setdefault(number, [str(launch.free_port()) for _ in _PORTS])
        for theirs, ours in zip(_PORTS, ports, strict=True):
            text = text.replace(f"127.0.0.1:{theirs}", f"127.0.0.1:{ours}")
        return text

    def stop_node(self, number):
        self.halt(self.operator(number))

    def hold(self, number):
        """Have a node answer nothing until it goes on; its SuperNode stays connected."""
        os.kill(self.started[self.operator(number)][1].pid, signal.SIGSTOP)

    def go_on(self, number):
        os.kill(self.started[self.operator(number)][1].pid, signal.SIGCONT)

    def is_running(self, number):
        return self.started[self.operator(number)][1].poll() is None

    def submit(self, name, **settings):
        """Begin a run; the process of ``flwr run``."""
        given = {**AGREED, "node-deadline-s": 60.0, **by_key(settings, run_keys())}
        said = " ".join(f"{key}={value}" for key, value in given.items())
        out = f'out-dir="{self.server}/lib/murmurfl" run-name="{name}"'
        command = [launch.executable("flwr"), "run", ".", "ours", "--stream", "-c", f"{said} {out}"]
        return subprocess.Popen(
            command, cwd=ROOT, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def result(self, name):
        return json.loads((self.server / "lib" / "murmurfl" / name / "result.json").read_text())

    def ended(self, process, name):
        """The result of a run, once it has ended."""
        said, _ = process.communicate(timeout=300)
        assert (self.server / "lib" / "murmurfl" / name / "result.json").exists(), said[-3000:]
        return self.result(name)


def service(name):
    """What a unit of examples/fleet starts."""
    unit = (ROOT / "examples" / "fleet" / f"{name}.service").read_text()
    (line,) = re.findall(r"^ExecStart=/opt/murmurfl/bin/(.*)$", unit.replace("\\\n", " "), flags=re.MULTILINE)
    return line


def releases_of(path):
    return sum(session.releases for session in read_ledger(path).sessions)


def wait(answers, what, seconds=300):
    limit = time.monotonic() + seconds
    while not answers():
        assert time.monotonic() < limit, what
        time.sleep(0.1)
