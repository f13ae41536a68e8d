"""Shell lines of a page that submit a run, typed as a user types them when the connection to its log may break."""

import re

MOST_BREAKS = 3
_BROKEN = "Connection to the SuperLink is unavailable"


def submitted(ended, block, before=""):
    """Type a block with one ``flwr run``; if the log breaks, follow it as the page says, then type what is left.

    ``ended`` runs shell lines and returns what ``subprocess.run`` returns; the lines ``before`` the one that follows
    the log are those that it needs. Flower's SuperLink may end a stream of lines on a busy computer, while the run goes
    on.
    """
    done = ended(block)
    said = done.stdout
    for _ in range(MOST_BREAKS):
        if done.returncode == 0:
            return said
        started = re.search(r"Successfully started run (\d+)", said)
        assert started, f"{block}: {said[-2000:]} {done.stderr[-2000:]}"
        assert _BROKEN in done.stderr, f"{block}: {said[-2000:]} {done.stderr[-2000:]}"
        _, left = re.split(r"(?m)^flwr run (?:.*\\\n)*.*\n?", block, maxsplit=1)
        done = ended(f"{before}\nflwr log {started.group(1)} ours\n{left}")
        said += done.stdout
    raise AssertionError(f"The log broke {MOST_BREAKS} times: {said[-2000:]} {done.stderr[-2000:]}")
