"""Small Flower projects as they are and with privacy; writes docs/results/foreign.json.

``python -m benchmarks.foreign [APP...]`` measures the apps of tests/harness/apps, each by ``murmurfl try``.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

from murmurfl.app.projects.trial import Trial, try_project

APPS = ("logistic", "stochastic", "table", "regression", "texts", "images", "sequences", "plain_numpy")
REFUSED = ("batch_norm", "trees")
FILE = Path(__file__).resolve().parent.parent / "docs" / "results" / "foreign.json"
_REASON = 120


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


def main() -> None:
    """Measure the apps that are named, or all, and write them next to those that are there."""
    logging.disable(logging.WARNING)
    found = json.loads(FILE.read_text()) if FILE.exists() else {"epsilon": 4.0, "clients": 10, "rows": []}
    rows = {one["app"]: one for one in found["rows"]}
    for app in sys.argv[1:] or (*APPS, *REFUSED):
        started = time.monotonic()
        trial = try_project(f"tests.harness.apps.{app}")
        rows[app] = row(app, trial, time.monotonic() - started)
        found["rows"] = [rows[name] for name in (*APPS, *REFUSED) if name in rows]
        FILE.write_text(json.dumps(found, indent=1) + "\n")
        sys.stdout.write(f"{rows[app]}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
