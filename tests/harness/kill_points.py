"""Named points of SQLite's statements and of methods, at one of which a process is killed as by ``kill -9``."""

import os
import signal

from murmurfl.privacy.ledger import store


def lethal(point, statements, methods, armed=lambda: True):
    """Install the kill in this process, and return what to call at further points.

    Parameters
    ----------
    statements : dict of str
        How the statement of a point begins; ``committed`` is the first transaction after a commit.
    methods : list of tuple
        Owner, name of the method, and the points before and after it.
    armed : callable
        Whether a point that is passed now kills.
    """

    def here(passed):
        if passed is not None and passed == point and armed():
            os.kill(os.getpid(), signal.SIGKILL)

    real_connect = store.connect

    def connect(*arguments):
        connection, committed = real_connect(*arguments), []

        def trace(statement):
            if point in statements and statement.startswith(statements[point]):
                here(point)
            if committed and statement == "BEGIN IMMEDIATE":
                here("committed")
            committed.extend([statement] if statement == "COMMIT" else [])

        connection.set_trace_callback(trace)
        return connection

    def around(real, before, after):
        def wrapped(*arguments, **options):
            here(before)
            result = real(*arguments, **options)
            here(after)
            return result

        return wrapped

    if point is not None:
        store.connect = connect
        for owner, name, before, after in methods:
            setattr(owner, name, around(getattr(owner, name), before, after))
    return here
