"""Small Flower projects as they are and with privacy; writes docs/results/foreign.json.

``python -m benchmarks.foreign [APP...]`` measures the apps of tests/harness/apps, each by ``murmurfl try``. An argument
``FOLDER=ORIGIN`` measures somebody else's project in a folder, with 15 rounds, and notes where it comes from.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

from murmurfl.app.projects.trial import Trial, try_project

APPS = ("logistic", "stochastic", "table", "regression", "texts", "images", "sequences", "plain_numpy")
REFUSED = ("batch_norm", "trees")
FILE = Path(__file__).resolve().parent.parent / "docs" / "results" / "foreign.json"
ROUNDS = 15
"""Rounds of projects that are somebody else's."""


def row(app: str, trial: Trial, seconds: float) -> dict[str, Any]:
    """Return what the table shows of a trial."""
    scores = {way.trust: round(way.score, 4) for way in trial.ways}
    return {
        "app": app,
        "protects": trial.kind,
        "lines": trial.lines_changed,
        "without": None if trial.without is None else round(trial.without, 4),
        "guessing": round(trial.guessing, 4),
        "untrusted": scores.get("untrusted-server"),
        "sums": scores.get("secure-aggregation"),
        "verdict": trial.verdict,
        "reason": trial.reason if trial.kind == "refused" else "",
        "seconds": round(seconds, 1),
    }


def foreign_row(place: str, origin: str) -> dict[str, Any]:
    """Measure somebody else's project."""
    project = tomllib.loads((Path(place) / "pyproject.toml").read_text())["project"]
    started = time.monotonic()
    trial = try_project(place, rounds=ROUNDS)
    found = row(project["name"], trial, time.monotonic() - started)
    return {**found, "version": project.get("version", ""), "origin": origin, "reason": found["reason"] or trial.reason}


def main() -> None:
    """Measure the apps that are named, or all, and write them next to those that are there."""
    logging.disable(logging.WARNING)
    found = json.loads(FILE.read_text()) if FILE.exists() else {"epsilon": 4.0, "clients": 10, "rows": []}
    rows = {one["app"]: one for one in found["rows"]}
    theirs = {one["app"]: one for one in found.get("foreign", [])}
    for app in sys.argv[1:] or (*APPS, *REFUSED):
        place, _, origin = app.partition("=")
        if origin:
            made = foreign_row(place, origin)
            theirs[made["app"]] = made
        else:
            started = time.monotonic()
            trial = try_project(f"tests.harness.apps.{app}")
            made = rows[app] = row(app, trial, time.monotonic() - started)
        found["rows"] = [rows[name] for name in (*APPS, *REFUSED) if name in rows]
        found |= {"foreign": list(theirs.values()), "rounds_of_foreign": ROUNDS} if theirs else {}
        FILE.write_text(json.dumps(found, indent=1) + "\n")
        sys.stdout.write(f"{made}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
