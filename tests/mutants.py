"""Mutants of privacy/: small bugs that would make a printed epsilon untrue, each of which a test must notice.

``make mutants`` (or ``python tests/mutants.py [WORDS]``, those whose names contain the words) puts one after the other
into a copy of the tree and runs the tests that should notice it. A mutant that survives is a promise nobody tests:
write the test. One whose text is not found exactly once was overtaken by the code: give it the text the code has now,
such that it is still the bug it is called.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parent.parent
NOT_COPIED = {".git", ".venv", ".hypothesis", ".pytest_cache", ".ruff_cache", "build", "dist", "runs"}
"""Folders of the root alone: app/runs is code."""
WORKERS = 2
LONGEST_S = 240.0
PASSED, FAILED = 0, 1

NORMALS = "tests/privacy/noise/test_normals.py"
OWNERS = "tests/privacy/machine/test_owners.py"
OWNED = "tests/clients/test_owners.py"
OWNER_PLACES = "tests/proofs/test_owner_places.py"
PERSONS = "tests/proofs/test_owners.py"
OWNER_RUNS = "tests/app/runs/test_owners.py"
GATE = "tests/app/nodes/servers/test_gate.py"
PERMITS = "tests/privacy/test_permits.py"
TAKEN_RUNS = "tests/app/nodes/test_runs.py"
CENTRING = "tests/privacy/side/test_centring.py"
CENTRED = "tests/clients/side/test_centring.py"
EVALUATION = "tests/privacy/side/test_evaluation.py"
STATISTICS = "tests/privacy/side/test_statistics.py"
EVALUATED = "tests/clients/side/test_evaluation.py"
RECORDS = "tests/clients/records/test_records.py"
SCHEMA = "tests/clients/records/test_schema.py"
REMEMBERING = "tests/clients/adapters/test_torch_state.py"
TRIALS = "tests/clients/adapters/test_model_trials.py"
PRIVATE_EVALUATION = "tests/strategies/side/test_private_evaluation.py"
EVALUATED_RUNS = "tests/app/runs/test_private_evaluation.py"
CENTRED_RUNS = "tests/app/runs/test_centring.py"
MEAN_OF_FEATURES = "tests/strategies/side/test_mean_of_features.py"
ADMISSION = "tests/privacy/machine/test_admission.py"
ALLOCATION = "tests/privacy/accounting/test_allocation.py"
ALONE = "tests/app/runs/test_alone.py"
AMPLIFICATION = "tests/privacy/accounting/test_amplification.py"
ASKED = "tests/privacy/accounting/test_asked.py"
BLOCK = "tests/privacy/machine/test_machine_block.py"
BLOCK_LEDGER = "tests/privacy/ledger/test_block.py"
COMPILED = "tests/app/engines/test_compiled.py"
WORKERS_RUNS = "tests/app/engines/test_workers.py"
MACHINE = "tests/privacy/machine/test_machine.py"
MASKING = "tests/privacy/sums/test_masking.py"
FULL_BATCH = "tests/strategies/test_full_batch.py"
INDEPENDENT = "tests/privacy/mechanisms/test_independent.py"
MECHANISMS = "tests/privacy/mechanisms/test_mechanisms.py"
MOMENTS = "tests/privacy/machine/test_moments.py"
QUANTILE = "tests/privacy/side/test_quantile.py"
COUNTED = "tests/clients/side/test_counted_gradients.py"
COUNTED_RUNS = "tests/app/methods/test_quantile.py"
OUTER_PRODUCTS = "tests/clients/adapters/test_outer_products.py"
OPENING = "tests/privacy/sums/test_opening.py"
FORMATS = "tests/privacy/ledger/test_format.py"
OPENING_RECORD = "tests/privacy/sums/test_opening_record.py"
ROSTER = "tests/privacy/sums/test_roster.py"
PLANNING = "tests/privacy/accounting/test_planning.py"
PRIVATE_APP = "tests/clients/adapters/test_private_app.py"
SAMPLE_NODES = "tests/app/nodes/test_sample_nodes.py"
TORCH_MODEL = "tests/clients/adapters/test_torch_model.py"
SUMS = "tests/privacy/ledger/test_sums.py"
ROTATION = "tests/privacy/ledger/test_rotation.py"
ROW_BOUND = "tests/privacy/machine/test_row_bound.py"
SECRET_ORDER = "tests/privacy/machine/test_secret_order.py"
RELEASE = "tests/privacy/machine/test_release.py"
CARRIED_OVER = f"{RELEASE}::test_what_was_lost_is_carried_over_to_the_last_bit"
MASKED = "tests/clients/messages/test_masked.py"
MASKED_UPDATES = "tests/clients/adapters/test_masked_updates.py"
SLOW = (
    f"{RELEASE}::test_two_neighbouring_data_sets_are_as_far_apart_as_mu_says",  # measures what others compute
    f"{RELEASE}::test_releases_add_up_to_the_dense_noisy_prefixes",
    CARRIED_OVER,
)
"""Left out of their file where they are not asked for by name."""


@dataclass(frozen=True)
class Mutant:
    """One bug.

    Parameters
    ----------
    name : str
        What is wrong with it.
    file : str
        Where, from the root.
    old, new : str
        A text that is there once, as short as it can be, and what stands in its place.
    tests : tuple of str
        The files, or single tests, that should notice it.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def found(self, root: Path) -> int:
        """How often its text is there."""
        path = root / self.file
        return path.read_text(encoding="utf-8").count(self.old) if path.is_file() else 0


MUTANTS = (
    Mutant(
        "an owner's empty places are another owner's rows",
        "privacy/machine/record_owners.py",
        "number % counts",
        "np.minimum(number, len(self.rows) - 1 - starts[:, None])",
        (OWNERS, OWNED),
    ),
    Mutant(
        "an owner's samples beyond the cap are used",
        "privacy/machine/record_owners.py",
        "counts, number = (ends - starts)[:, None], np.arange(self.most)",
        "counts, number = (ends - starts)[:, None], np.arange(self.most + 1)",
        (OWNERS, OWNED),
    ),
    Mutant(
        "owners by first row",
        "privacy/machine/record_owners.py",
        "order = np.lexsort((marks[:, 1], marks[:, 0], marks[:, 0] % np.uint64(places)))",
        "order = np.arange(len(marks)); marks = order[:, None].astype(np.uint64) * np.ones((1, 2), np.uint64)",
        (OWNERS, OWNER_PLACES),
    ),
    Mutant(
        "the place of an owner depends on the number of owners before it",
        "privacy/machine/record_owners.py",
        "        marks = _marks(texts, secret)\n        order = np.lexsort((marks[:, 1]",
        "        marks = _marks(texts, secret) + np.arange(len(texts), dtype=np.uint64)[:, None]\n"
        "        order = np.lexsort((marks[:, 1]",
        (OWNERS, OWNER_PLACES),
    ),
    Mutant(
        "the place of an owner depends on how many owners there are",
        "privacy/machine/record_owners.py",
        "places = max(len(texts), 1) if places is None else places",
        "places = max(len(texts), 1)",
        (OWNERS, OWNED, OWNER_PLACES),
    ),
    Mutant(
        "the place of an owner depends on the name alone",
        "privacy/machine/record_owners.py",
        'hashlib.blake2b(key=secret, digest_size=16, person=b"murmurfl owner")',
        'hashlib.blake2b(digest_size=16, person=b"murmurfl owner")',
        (OWNERS,),
    ),
    Mutant(
        "a cap on owners of a batch that depends on others",
        "privacy/machine/record_owners.py",
        "return slice(first, behind)",
        "return slice(first, min(behind, first + places.stop - places.start))",
        (OWNERS, OWNED),
    ),
    Mutant(
        "rows without an owner are one owner's",
        "privacy/machine/record_owners.py",
        "if t else -1 for t in texts)",
        "for t in texts)",
        (OWNERS,),
    ),
    Mutant(
        "a release is divided by the number of owners in it",
        "privacy/machine/prefix_sums.py",
        "            del counts  # before the next row is made\n        return total",
        "            del counts  # before the next row is made\n"
        "        return total * self.policy.rows_per_release // max(samples.stop - samples.start, 1)",
        (OWNED, OWNER_PLACES),
    ),
    Mutant(
        "numbers of places are taken for numbers of owners",
        "privacy/machine/prefix_sums.py",
        "samples = self._owners.in_places(samples)",
        "samples = slice(*samples.indices(len(self._owners)))",
        (OWNED, OWNER_PLACES),
    ),
    Mutant(
        "owners have their places in a secret order by their numbers",
        "privacy/machine/secret_order.py",
        "key=key, digest_size=8).digest() for mark in marks)",
        "key=key, digest_size=8).digest() for mark in map(b'%d'.__mod__, range(len(marks))))",
        (OWNERS,),
    ),
    Mutant(
        "owners move with the noise key",
        "privacy/ledger/sqlite.py",
        "return hmac.digest(bytes.fromhex(self._header.name), b",
        "return hmac.digest(keys.secret_key, b",
        (OWNERS,),
    ),
    Mutant(
        "owners who were used may have other names",
        "privacy/machine/data_digest.py",
        "if used > available or (digest and (gone or not digest.startswith(self._kind))):",
        "if used > available or (digest and not digest.startswith(self._kind)):",
        (OWNERS, OWNED),
    ),
    Mutant(
        "a ledger does not know how many places owners had",
        "privacy/machine/data_digest.py",
        'return f"owners {self.rows.num_places} {self.rows.most} "',
        'return f"owners {self.rows.most} "',
        (OWNERS,),
    ),
    Mutant(
        "real machines take owners in an order of their own",
        "privacy/machine/ledgered_machine.py",
        "if policy.samples_per_owner and not (isinstance(data, Owners) and data.marks is not None):",
        "if policy.samples_per_owner and not isinstance(data, Owners):",
        (OWNERS,),
    ),
    Mutant(
        "samples of an owner that do not fit are used",
        "clients/records/owner_rows.py",
        "present = present & self._fits[rows]",
        "present = present | self._fits[rows]",
        (OWNED,),
    ),
    Mutant(
        "repetitions of an owner's samples count as samples",
        "clients/records/owner_rows.py",
        "chosen = present[:, number]",
        "chosen = np.ones(owners, dtype=bool)",
        (OWNED,),
    ),
    Mutant(
        "samples by themselves are taken for owners",
        "privacy/machine/record_owners.py",
        "if policy.samples_per_owner != held:",
        "if False:",
        (OWNED,),
    ),
    Mutant(
        "machines that share noise are counted as if each had its own",
        "privacy/machine/record_owners.py",
        "return min(samples * machines * mu, ",
        "return min(samples * math.sqrt(machines) * mu, ",
        (PERSONS,),
    ),
    Mutant(
        "samples of one machine add in squares",
        "privacy/machine/record_owners.py",
        "        return samples * math.sqrt(machines) * mu\n",
        "        return math.sqrt(samples * machines) * mu\n",
        (PERSONS,),
    ),
    Mutant(
        "a session goes on with another number of samples an owner",
        "privacy/machine/policy.py",
        "for name, usual in _YOUNGER_FIELDS.items():\n        if fields[name] == usual:",
        'for name, usual in _YOUNGER_FIELDS.items():\n        if name == "samples_per_owner" or fields[name] == usual:',
        (OWNERS,),
    ),
    Mutant(
        "real machines are said to protect owners if one of them does",
        "app/runs/run_guarantees.py",
        'and all(one.get("unit") == "owner" for one in said)',
        'and any(one.get("unit") == "owner" for one in said)',
        (OWNER_RUNS,),
    ),
    Mutant(
        "a module's gradients are taken for half as long as they are, so that they are clipped to twice the norm",
        "clients/adapters/torch_model.py",
        "return abs(self._weight) * np.sqrt(squares)",
        "return 0.5 * abs(self._weight) * np.sqrt(squares)",
        (TORCH_MODEL, PRIVATE_APP),
    ),
    Mutant(
        "a module that writes to its buffers goes on, and one sample's data reach the next",
        "clients/adapters/torch_model.py",
        "if changed is not None:",
        "if False:",
        (TORCH_MODEL,),
    ),
    Mutant(
        "a node believes any permit, whoever signed it",
        "privacy/permits.py",
        "if is_signed(owner, signature, _LABEL + payload):",
        "if True:",
        (PERMITS, TAKEN_RUNS),
    ),
    Mutant(
        "a permit is for all sessions",
        "app/nodes/taken_runs.py",
        "if any(session not in permit.sessions for session in named):",
        "if False:",
        (TAKEN_RUNS,),
    ),
    Mutant(
        "a permit lasts for ever",
        "privacy/permits.py",
        "return self.not_before <= now < self.until",
        "return self.not_before <= now",
        (PERMITS, TAKEN_RUNS),
    ),
    Mutant(
        "a server believes any login, whoever signed it",
        "privacy/permits.py",
        "if owner is None or not is_signed(owner, signature, _LOGIN_LABEL + payload):",
        "if owner is None:",
        (PERMITS,),
    ),
    Mutant(
        "a login to one server is one to every server",
        "privacy/permits.py",
        "if where != server:",
        "if False:",
        (PERMITS, GATE),
    ),
    Mutant(
        "a login lasts for ever",
        "privacy/permits.py",
        "if until <= now or until > now + LONGEST_LOGIN_S + _CLOCKS_DIFFER_S:",
        "if False:",
        (PERMITS, GATE),
    ),
    Mutant(
        "a signature of a permit makes a login",
        "privacy/permits.py",
        '_LOGIN_LABEL = b"murmurfl login 1\\x00"',
        "_LOGIN_LABEL = _LABEL",
        (PERMITS,),
    ),
    Mutant(
        "whatever has the port may say what runs on the server",
        "app/nodes/servers/server_health.py",
        "ours = hmac.compare_digest(shown.encode(), proof_of(proof, nonce.encode()))",
        "ours = True",
        ("tests/app/nodes/servers/test_server.py",),
    ),
    Mutant(
        "the gate is open",
        "app/nodes/servers/gate.py",
        "if path != HEALTH and not path.startswith(OPEN_PATHS):",
        "if False:",
        (GATE,),
    ),
    Mutant(
        "a request's permit is part of the request, so that a renewed one makes a round a new round",
        "app/nodes/taken_runs.py",
        "        _take_permits_out(message)\n",
        "",
        (TAKEN_RUNS,),
    ),
    Mutant(
        "a real node of a private_client_app takes its policy from the code",
        "clients/adapters/private_app.py",
        "policy = node.policy(ledger)",
        "policy = self.policy",
        (SAMPLE_NODES,),
    ),
    Mutant(
        "a real node computes with what stands in for a record that does not fit",
        "clients/adapters/private_app.py",
        "else Records(found, schema, count=count)",
        "else Records(found, schema, count=count, together=True)",
        (SAMPLE_NODES,),
    ),
    Mutant(
        "updates from per-sample gradients are said to protect all data of a machine",
        "clients/adapters/gradient_updates.py",
        "protocol.CLIENT_LEVEL: 0",
        "protocol.CLIENT_LEVEL: 1",
        (SAMPLE_NODES,),
    ),
    Mutant(
        "updates beside an evaluation are said to be all that a machine releases",
        "clients/adapters/gradient_updates.py",
        "plans = [self.machine.plan, *(machine.plan for machine in self.parts.machines)]",
        "plans = [self.machine.plan]",
        (SAMPLE_NODES, "tests/clients/side/test_evaluation_share.py"),
    ),
    Mutant(
        "a penalty's pull is left out of the length by which a sample's gradient is clipped",
        "clients/adapters/outer_products.py",
        "squares = own * own + 2.0 * crossed + of_pull * of_pull",
        "squares = own * own",
        (OUTER_PRODUCTS, "tests/clients/adapters/test_private_estimator.py"),
    ),
    Mutant(
        "gradients that a server's pull cancels are measured by what rounding leaves",
        "clients/adapters/outer_products.py",
        "_CANCELLING = 4.0",
        "_CANCELLING = 4e30",
        (OUTER_PRODUCTS,),
    ),
    Mutant(
        "an epsilon is taken for a mu",
        "privacy/accounting/asked.py",
        "return gdp_mu(epsilon, delta)",
        "return float(epsilon)",
        (ASKED,),
    ),
    Mutant(
        "a mu beside an epsilon is passed over",
        "privacy/accounting/asked.py",
        "    if mu != 0:",
        "    if False:",
        (ASKED,),
    ),
    Mutant(
        "a node's epsilon is one at a delta that is not its ledger's",
        "clients/nodes/machine_file.py",
        "gdp_mu(epsilon, delta) if epsilon",
        "gdp_mu(epsilon, 1e-3) if epsilon",
        ("tests/app/nodes/test_own_app.py",),
    ),
    Mutant(
        "a trusted server that charged batches takes sums over all samples",
        "strategies/trust/server_trust.py",
        "not policy.sums_samples and reply.samples not in (0, policy.batch_size)",
        "False",
        ("tests/strategies/trust/test_trusted_server.py",),
    ),
    Mutant(
        "a file's layers of maps may stand behind one that makes rows",
        "app/data/features/features_file.py",
        "    if behind:\n",
        "    if False:\n",
        ("tests/app/data/features/test_file.py",),
    ),
    Mutant(
        "a plan of what comes after the mean of the features speaks for the run",
        "app/planning/noise_plans.py",
        "after_mean=experiment.is_centred",
        "after_mean=False",
        ("tests/app/planning/test_plan.py",),
    ),
    Mutant(
        "rows that others used since join a secret order",
        "privacy/machine/admission.py",
        "reserved.keys() != {streams.session}",
        "False",
        (SECRET_ORDER,),
    ),
    Mutant(
        "automatic clipping with a stability that norms are not precise to",
        "privacy/machine/clipping.py",
        "LEAST_STABILITY = 1e-100",
        "LEAST_STABILITY = 1e-300",
        (ROW_BOUND,),
    ),
    Mutant(
        "a search prints the mu that was asked for where its ledgers know of none",
        "app/planning/private_search.py",
        "config.mu if math.isfinite(spent) else math.inf",
        "config.mu",
        ("tests/app/planning/test_search.py",),
    ),
    Mutant(
        "features that may be negative are charged as if they were not",
        "privacy/side/centring_query.py",
        'clip_unit="nonnegative" if nonnegative else "sample"',
        'clip_unit="nonnegative"',
        (CENTRING,),
    ),
    Mutant(
        "features without negative values are not made so",
        "privacy/machine/clipping.py",
        "np.maximum(np.asarray(rows, dtype=np.float64), 0.0)",
        "np.asarray(rows, dtype=np.float64)",
        (CENTRING,),
    ),
    Mutant(
        "the mean is released as often as a server likes",
        "privacy/side/centring_query.py",
        "max_participations=1,",
        "max_participations=1000,",
        (CENTRING,),
    ),
    Mutant(
        "the mean's mu is not taken from the rest",
        "privacy/side/centring_query.py",
        "return mean, math.sqrt((mu - mean) * (mu + mean))",
        "return mean, mu",
        (CENTRING,),
    ),
    Mutant(
        "samples are seen from the mean of their batch",
        "privacy/side/centring_query.py",
        "rows = rows - np.asarray(centre, dtype=np.float64)",
        "rows = rows - np.asarray(centre, dtype=np.float64) - rows.mean(axis=0)",
        (CENTRING,),
    ),
    Mutant(
        "an evaluation's rows may be negative",
        "privacy/side/evaluation_query.py",
        '"clip_unit": "nonnegative"',
        '"clip_unit": "sample"',
        (EVALUATION,),
    ),
    Mutant(
        "an evaluation is charged as if its rows were half as long",
        "privacy/side/evaluation_query.py",
        '"clip_norm": 1.0',
        '"clip_norm": 0.5',
        (EVALUATION,),
    ),
    Mutant(
        "a model is evaluated as often as a server likes",
        "privacy/side/evaluation_query.py",
        '    "max_participations": 1,\n',
        '    "max_participations": 1000,\n',
        (EVALUATION,),
    ),
    Mutant(
        "scores have all of mu, and what is right has all of it too",
        "privacy/side/evaluation_query.py",
        "return math.sqrt(self.scores_share) if self.bins else 0.0",
        "return 1.0 if self.bins else 0.0",
        (EVALUATION,),
    ),
    Mutant(
        "statistics are twice as loud as is charged",
        "privacy/side/statistics_query.py",
        "return evaluation_policy(mu, mechanism=mechanism, **fields)",
        "return evaluation_policy(2 * mu, mechanism=mechanism, **fields)",
        (STATISTICS,),
    ),
    Mutant(
        "each column of statistics has all of a row's length",
        "privacy/side/statistics_query.py",
        "return 1.0 / math.sqrt(len(self.columns))",
        "return 1.0",
        (STATISTICS,),
    ),
    Mutant(
        "a cell without a value is nowhere",
        "privacy/side/statistics_query.py",
        "found[none, part.stop - 1] = self.weight",
        "found[none, part.stop - 1] = 0.0",
        (STATISTICS,),
    ),
    Mutant(
        "samples that could not be evaluated are not counted",
        "privacy/side/evaluation_query.py",
        "return samples - float(total[0] + total[1]) / self.right_weight",
        "return 0.0 * samples",
        (PRIVATE_EVALUATION,),
    ),
    Mutant(
        "an evaluation without the noise that it was promised",
        "clients/side/evaluation_client.py",
        "PrivateMachine(self.policy, self.rows.width",
        'PrivateMachine(replace(self.policy, mechanism="none"), self.rows.width',
        (EVALUATED,),
    ),
    Mutant(
        "a module remembers one sample when it computes the next",
        "clients/adapters/torch_state.py",
        "if not (as_long and all(map(operator.is_, itertools.chain.from_iterable(self._live), self._before))):",
        "if False:",
        (REMEMBERING, TRIALS),
    ),
    Mutant(
        "a tensor that an evaluation has written to stays as it was written",
        "clients/adapters/torch_state.py",
        "if versions == self._tensor_versions and not values:",
        "if True:",
        (REMEMBERING,),
    ),
    Mutant(
        "how much one sample draws at random decides what the next ones draw",
        "clients/adapters/torch_state.py",
        "            generator.set_state(state)\n",
        "            pass\n",
        (REMEMBERING,),
    ),
    Mutant(
        "how much one sample draws from Python's generator decides what the next ones draw",
        "clients/adapters/torch_state.py",
        "        random.setstate(self._python_drawn)\n",
        "",
        (TRIALS,),
    ),
    Mutant(
        "how much one sample draws from NumPy's generator decides what the next ones draw",
        "clients/adapters/torch_state.py",
        "            np.random.set_state(self._numpy_drawn)  # noqa: NPY002\n\n    def _restore",
        "            pass\n\n    def _restore",
        (TRIALS,),
    ),
    Mutant(
        "what a closure remembers of a sample meets the next one",
        "clients/adapters/torch_state.py",
        'yield cell, f"{place}.<closure {name}>"',
        "pass",
        (REMEMBERING, TRIALS),
    ),
    Mutant(
        "what a global remembers of a sample meets the next one",
        "clients/adapters/torch_state.py",
        "        yield from self._keep_names(scope, names, place)\n",
        "",
        (TRIALS,),
    ),
    Mutant(
        "what a class remembers of a sample meets the next one",
        "clients/adapters/torch_state.py",
        "if attributes.get(name, _MISSING) is not value:",
        "if False:",
        (TRIALS,),
    ),
    Mutant(
        "containers within containers are not put back",
        "clients/adapters/torch_state.py",
        "        yield from ((value, _at(place, key)) for key, value in zip(keys, values, strict=True))\n",
        "",
        (REMEMBERING, TRIALS),
    ),
    Mutant(
        "arrays that a sample has written to stay as they were written",
        "clients/adapters/torch_state.py",
        "                value.put_back()\n",
        "                pass\n",
        (TRIALS,),
    ),
    Mutant(
        "a cache keeps what it computed of a sample",
        "clients/adapters/torch_state.py",
        "                function.cache_clear()\n",
        "                pass\n",
        (TRIALS,),
    ),
    Mutant(
        "a model with an iterator that nobody can put back is taken",
        "clients/adapters/torch_state.py",
        'hasattr(kind, "__next__")',
        "False",
        (TRIALS,),
    ),
    Mutant(
        "a trial does not look at what a model remembers",
        "clients/adapters/model_checks.py",
        "        if place is not None:\n",
        "        if False:\n",
        (TRIALS,),
    ),
    Mutant(
        "a trial does not look at what a model draws",
        "clients/adapters/model_checks.py",
        "        if self._gradients.state.has_drawn():\n",
        "        if False:\n",
        (TRIALS,),
    ),
    Mutant(
        "an evaluation's own function remembers a sample",
        "clients/adapters/torch_measure.py",
        'gradients.state.add("right", right)',
        "pass",
        (TRIALS,),
    ),
    Mutant(
        "a record that does not fit makes the whole machine refuse",
        "clients/records/machine_records.py",
        "                record = None\n",
        "                raise ConfigurationError(str(error)) from None\n",
        (RECORDS, SAMPLE_NODES),
    ),
    Mutant(
        "whether a machine answers depends on what its records are like",
        "clients/adapters/private_app.py",
        "        self.model.check_schema(schema, self._measure if evaluated else None)\n        found = items_of",
        "        self.model.check_schema(inferred(items_of(self._given(context))), None)\n        found = items_of",
        (SAMPLE_NODES,),
    ),
    Mutant(
        "what a record is follows from all records",
        "clients/adapters/private_app.py",
        "Records(found, schema, count=count)",
        "Records(found, inferred(found), count=count)",
        (SAMPLE_NODES,),
    ),
    Mutant(
        "the type of a label is its column's",
        "clients/records/schema.py",
        "        found = array_of(value)\n        if found.shape != self.shape:\n",
        "        found = array_of(value)\n        if found.dtype.kind == 'f' or found.shape != self.shape:\n",
        (RECORDS,),
    ),
    Mutant(
        "a carriage return ends a row",
        "clients/records/sources.py",
        'content.split(b"\\n")',
        "content.splitlines()",
        (RECORDS,),
    ),
    Mutant(
        "as many records as there are rows, whatever the operator says",
        "clients/records/machine_records.py",
        "self._length = self._available if count is None else count",
        "self._length = self._available",
        (RECORDS,),
    ),
    Mutant(
        "a loader's own function sees all records",
        "clients/records/sources.py",
        "batch = self._collate([self._items[number]])",
        "batch = [part[number : number + 1] for part in self._collate([*self._items])]",
        (RECORDS,),
    ),
    Mutant(
        "a real node takes a schema that nobody has reviewed",
        "clients/records/schema.py",
        "        if not self.reviewed:\n",
        "        if False:\n",
        (SCHEMA,),
    ),
    Mutant(
        "the digest of a schema leaves its label out",
        "clients/records/schema.py",
        '"label": {"majority"}}',
        '"label": True}',
        (SCHEMA,),
    ),
    Mutant(
        "a record longer than the declared norm stays as it is",
        "clients/records/schema.py",
        "if length <= self.norm:",
        "if length:",
        (SCHEMA,),
    ),
    Mutant(
        "a node's own model is not tried",
        "clients/adapters/per_sample_gradients.py",
        "    if not all(map(alike, alone, again)):\n",
        "    if False:\n",
        ("tests/clients/records/test_on_machines.py",),
    ),
    Mutant(
        "a record of a simulation that does not fit counts as what stands in for it",
        "clients/private_client.py",
        "                    machine.fits = fits\n",
        "                    machine.fits = None\n",
        (PRIVATE_APP,),
    ),
    Mutant(
        "samples that were set aside are trained on",
        "clients/private_client.py",
        "count = min((one.trained_on(held) for one in sides), default=held)",
        "count = len(samples)",
        (EVALUATED,),
    ),
    Mutant(
        "an evaluation of what was set aside is of everything",
        "clients/side/evaluation_client.py",
        "machine.num_samples - evaluation.held_out if evaluation.held_out else 0",
        "0",
        (EVALUATED,),
    ),
    Mutant(
        "an evaluation is not in what a machine says that it guarantees",
        "clients/side/side_parts.py",
        "for part in self.known.values()",
        'for of, part in self.known.items() if of != "evaluation"',
        (EVALUATED,),
    ),
    Mutant(
        "an evaluation costs a run nothing",
        "app/settings/side_settings.py",
        "shares += config.private_evaluation",
        "shares += 0.0",
        (EVALUATED_RUNS,),
    ),
    Mutant(
        "a run's mu leaves its evaluation out",
        "app/runs/experiment.py",
        "beside = [side.mu for side in self.sides]",
        "beside = [side.mu for side in self.sides if side.of == 'mean']",
        (EVALUATED_RUNS,),
    ),
    Mutant(
        "the mean leaves without masks",
        "clients/private_client.py",
        "machine, shapes = (self.machine, self._shapes) if part is None else (part.machine, part.shapes)",
        "machine, shapes = self.machine, self._shapes\n        if part: return [release.values], release.samples, {}",
        (CENTRED, EVALUATED),
    ),
    Mutant(
        "a machine without centring takes a centre",
        "clients/messages/release_of.py",
        "if content is not None:\n            raise RefusedError(",
        "if False:\n            raise RefusedError(",
        (CENTRED,),
    ),
    Mutant(
        "a machine with centring does without a centre",
        "clients/messages/release_of.py",
        "raise RefusedError(protocol.NOT_CONFIGURED, _NEEDS_CENTRE)",
        "return of, None",
        (CENTRED,),
    ),
    Mutant(
        "a centre may be anything",
        "clients/messages/release_of.py",
        "if not np.isfinite(centre).all():",
        "if False:",
        (CENTRED,),
    ),
    Mutant(
        "the mean and the rest need not share a budget",
        "clients/side/side_parts.py",
        "if ours != theirs:",
        "if False:",
        (CENTRED, EVALUATED),
    ),
    Mutant(
        "a statement leaves out the mean",
        "clients/messages/answers.py",
        "mu_guaranteed=math.hypot(statement.mu_guaranteed, other.plan.mu)",
        "mu_guaranteed=statement.mu_guaranteed",
        (CENTRED,),
    ),
    Mutant(
        "a run's mu leaves out the mean",
        "app/runs/experiment.py",
        "return math.hypot(*beside, max(plan.mu for plan in self.plans()))",
        "return max(plan.mu for plan in self.plans())",
        (CENTRED_RUNS, EVALUATED_RUNS),
    ),
    Mutant(
        "a killed server has the mean made a second time",
        "strategies/side/one_answer.py",
        "        if not self.trust.before_asking(self._save):\n            self._save()\n",
        "        self.trust.before_asking(self._save)\n",
        (MEAN_OF_FEATURES, PRIVATE_EVALUATION),
    ),
    Mutant(
        "a trusted server publishes the mean without noise",
        "strategies/trust/server_trust.py",
        "return self.rounded(total, self.fresh_normals(server_round, len(total)) * std)",
        "return total",
        (MEAN_OF_FEATURES, PRIVATE_EVALUATION),
    ),
    Mutant(
        "rows that may be negative are charged as if they were not",
        "privacy/machine/clipping.py",
        "return clip(np.maximum(np.asarray(rows, dtype=np.float64), 0.0), self.clip_norm)",
        "return clip(rows, self.clip_norm)",
        (ROW_BOUND,),
    ),
    Mutant(
        "automatic clipping divides by the stability alone",
        "privacy/machine/clipping.py",
        "bound / (norms + stability)",
        "bound / stability + 0 * norms",
        (ROW_BOUND,),
    ),
    Mutant(
        "every sample of a full batch is charged as if it were in one release",
        "privacy/machine/policy.py",
        'object.__setattr__(self, "sample_participations", self.max_participations)',
        "pass",
        (ROW_BOUND,),
    ),
    Mutant(
        "shares of the budget are charged as if all were the same",
        "privacy/mechanisms/independent.py",
        'if self.shares != "uniform":',
        "if False:",
        (MECHANISMS, INDEPENDENT),
    ),
    Mutant(
        "noise by shares is the larger the larger the share",
        "privacy/mechanisms/independent.py",
        "return float(1.0 / self._entries[self._check_release(release) - 1])",
        "return float(self._entries[self._check_release(release) - 1])",
        (MECHANISMS, INDEPENDENT),
    ),
    Mutant(
        "a sum counts on shares of machines that are at other releases",
        "privacy/machine/policy.py",
        'if shares != "uniform":',
        "if False:",
        (INDEPENDENT,),
    ),
    Mutant(
        "a trusted server's noise is for one of the rounds",
        "strategies/trust/server_trust.py",
        "return self.rounds_noise.sensitivity(self.num_rounds, 1)",
        "return 1.0",
        (FULL_BATCH,),
    ),
    Mutant(
        "a trusted server's noise is for a mean over machines",
        "strategies/trust/server_trust.py",
        "return change / self._over * often / ideal * self.rounds_noise",
        "return change / self.clients_per_round * often / ideal * self.rounds_noise",
        (FULL_BATCH,),
    ),
    Mutant(
        "a client of full batches takes policies whose releases build on each other",
        "clients/full_batch_client.py",
        '("release_rule", "paper")',
        '("release_rule", policy.release_rule)',
        ("tests/clients/test_full_batch.py",),
    ),
    Mutant(
        "a release of all samples is unclipped in closed form",
        "privacy/machine/clipping.py",
        "return scaled_sum(scales if weights is None else scales * weights)",
        "return scaled_sum(np.ones(len(scales)))",
        (ROW_BOUND,),
    ),
    Mutant(
        "what float64 errors of a sum add is not charged",
        "privacy/machine/policy.py",
        "delta *= 1.0 + SUMMING_ERROR",
        "pass",
        (ROW_BOUND,),
    ),
    Mutant(
        "marks of a class are believed as they come",
        "privacy/machine/second_moments.py",
        "return (chosen & clear[:, None]).astype(np.float64)",
        "return np.nan_to_num(np.asarray(marks, dtype=np.float64))",
        (MOMENTS,),
    ),
    Mutant(
        "features of moments are not cut",
        "privacy/machine/clipping.py",
        "return self.moments.sum(self.rows(features), marks, self.clip_norm, weights)",
        "return self.moments.sum(np.nan_to_num(features), marks, self.clip_norm, weights)",
        (MOMENTS,),
    ),
    Mutant(
        "moments are charged for one of their two parts' moves at a time",
        "privacy/machine/second_moments.py",
        "math.sqrt(2.0 + 2.0 * squared + squared**2 / 2.0)",
        "math.sqrt(2.0 + 2.0 * squared)",
        (MOMENTS,),
    ),
    Mutant(
        "products off the diagonal count once",
        "privacy/machine/second_moments.py",
        "return np.where(rows == columns, 1.0, math.sqrt(2.0))",
        "return np.where(rows == columns, 1.0, 2.0)",
        (MOMENTS,),
    ),
    Mutant(
        "moments of samples may be in several releases",
        "privacy/machine/policy.py",
        "    Moments(policy.classes, policy.class_weight)\n    if policy.order",
        "    Moments(policy.classes, policy.class_weight)\n    if False and policy.order",
        (MOMENTS,),
    ),
    Mutant(
        "gradients beside marks leave them no room",
        "privacy/side/clipped_share.py",
        "return math.sqrt(1.0 - self.share) * bounded",
        "return bounded",
        (QUANTILE,),
    ),
    Mutant(
        "marks take more than their share",
        "privacy/side/clipped_share.py",
        "return math.sqrt(self.share) * np.where",
        "return self.share**0.25 * np.where",
        (QUANTILE,),
    ),
    Mutant(
        "a clip may be shorter than lengths can be told",
        "privacy/side/clipped_share.py",
        "max(clip, LEAST_STABILITY)",
        "clip",
        (COUNTED,),
    ),
    Mutant(
        "gradients of counted rows are not scaled in closed form",
        "clients/full_batch_client.py",
        "gradients.scaled_sum(scales * self._scales)",
        "gradients.scaled_sum(scales)",
        (COUNTED,),
    ),
    Mutant(
        "the sentence says a share of mu where it is one of mu^2",
        "app/runs/run_guarantees.py",
        "* math.sqrt(config.quantile_share)",
        "* config.quantile_share",
        (COUNTED_RUNS,),
    ),
    Mutant(
        "a secret order from its nonce alone",
        "privacy/machine/secret_order.py",
        "hmac.digest(secret_key, b",
        "hmac.digest(bytes(KEY_BYTES), b",
        (SECRET_ORDER,),
    ),
    Mutant(
        "every sample in every release of a secret order",
        "privacy/machine/prefix_sums.py",
        "admission.samples, self._weights(admission))",
        "admission.samples, None)",
        (SECRET_ORDER,),
    ),
    Mutant(
        "a secret order is drawn again for what was computed for another",
        "privacy/machine/ledgered_machine.py",
        "if session not in self._orders:",
        "if True:",
        (SECRET_ORDER,),
    ),
    Mutant(
        "samples of a secret order are used again, and used ones hide in it",
        "privacy/machine/admission.py",
        "self._check_alone(machines, row, account)",
        "pass",
        (SECRET_ORDER,),
    ),
    Mutant(
        "a ledger forgets secret orders",
        "privacy/ledger/ledger_file.py",
        "    if stream.order:\n        yield",
        "    if False:\n        yield",
        (SECRET_ORDER,),
    ),
    Mutant(
        "a release of a secret order says all samples",
        "privacy/machine/outgoing.py",
        'if policy.order == "all" else',
        "if policy.sums_samples else",
        (SECRET_ORDER,),
    ),
    Mutant(
        "a sample is zeroed out at half of what it moves",
        "privacy/accounting/amplification.py",
        "return (length + charge) *",
        "return (length / 2 + charge) *",
        (AMPLIFICATION,),
    ),
    Mutant(
        "an estimate of a secret order is called proved",
        "privacy/accounting/amplification.py",
        "slots, proved=False, error=error)",
        "slots, proved=True, error=error)",
        (AMPLIFICATION,),
    ),
    Mutant(
        "an estimate of a secret order is said to be the epsilon",
        "privacy/accounting/guarantee.py",
        "said = IN_HIDING if self.amplified.proved else ESTIMATED",
        "said = IN_HIDING",
        (AMPLIFICATION,),
    ),
    Mutant(
        "of several secret orders that of the most releases counts",
        "privacy/accounting/amplification.py",
        "min(machines, key=lambda",
        "max(machines, key=lambda",
        (AMPLIFICATION,),
    ),
    Mutant(
        "releases that build on each other hide in sums as those that stand alone",
        "privacy/accounting/amplification.py",
        " and (plan.sums is None or plan.sums.stands_alone)",
        "",
        (AMPLIFICATION,),
    ),
    Mutant(
        "replacing a sample in a secret order counts as taking one away",
        "privacy/accounting/allocation.py",
        "with_it[:_SPLITS] + np.exp(first) * without_it[_SPLITS:]",
        "with_it[:_SPLITS]",
        (ALLOCATION,),
    ),
    Mutant(
        "what the normals' resolution tells is hidden by a secret order",
        "privacy/accounting/allocation.py",
        "high + resolved + EPSILON_ROUNDING",
        "high + EPSILON_ROUNDING",
        (ALLOCATION,),
    ),
    Mutant(
        "sums of likelihood ratios are rounded down",
        "privacy/accounting/likelihood_sums.py",
        "upper = weights * (sums - points[cells]) / (points[cells + 1] - points[cells])",
        "upper = 0.0 * weights",
        (ALLOCATION,),
    ),
    Mutant(
        "zeroing a sample out by half of the shift",
        "privacy/accounting/allocation.py",
        "likelihood_sum(shift, slots), np.minimum",
        "likelihood_sum(shift / 2, slots), np.minimum",
        (ALLOCATION,),
    ),
    Mutant(
        "a count's rows are not centred",
        "privacy/side/evaluation_query.py",
        "dtype=np.float64)[:, None] - 0.5",
        "dtype=np.float64)[:, None]",
        ("tests/privacy/side/test_counting.py",),
    ),
    Mutant(
        "a count is charged half of what a sample moves it",
        "privacy/side/evaluation_query.py",
        '{"clip_norm": 0.5, "mechanism"',
        '{"clip_norm": 0.25, "batch_size"',
        ("tests/privacy/side/test_counting.py",),
    ),
    Mutant(
        "exact noise from 44-bit uniforms",
        "privacy/noise/normals.py",
        "logs = radius_words.astype(np.float64)",
        "logs = (radius_words >> np.uint64(20) << np.uint64(20)).astype(np.float64)",
        (NORMALS,),
    ),
    Mutant(
        "the tail ends at 53 bits",
        "privacy/noise/normals.py",
        "share = (left_over.astype(np.float64) + below) * 2.0**-11",
        "share = np.full(below.shape, 2.0**-12)",
        (NORMALS,),
    ),
    Mutant(
        "the grid may be as fine as it likes",
        "privacy/noise/normals.py",
        "FINEST_GRID = 2.0**-25",
        "FINEST_GRID = 2.0**-36",
        (NORMALS,),
    ),
    Mutant(
        "used rows may change",
        "privacy/machine/data_digest.py",
        "if digest and not hmac.compare_digest(self.of(used), digest):",
        "if False:",
        ("tests/privacy/machine/test_data_digest.py",),
    ),
    Mutant(
        "used rows may be exchanged",
        "privacy/machine/data_digest.py",
        "digest = hashlib.blake2b(known, key=self._key, digest_size=_DIGEST_BYTES)",
        "digest = hashlib.blake2b(b'', key=self._key, digest_size=_DIGEST_BYTES)",
        ("tests/privacy/machine/test_data_digest.py",),
    ),
    Mutant(
        "a release is never committed",
        "privacy/machine/ledgered_machine.py",
        "admission.page.commit(admission.session, streams.record(0), accounts.record(0))",
        "pass",
        (MACHINE,),
    ),
    Mutant(
        "one admission makes two releases",
        "privacy/machine/machine_block.py",
        "        self.close()\n        index",
        "        index",
        (BLOCK,),
    ),
    Mutant(
        "a caller computes what real machines release",
        "privacy/machine/machine_block.py",
        "            _refuse_real(keys.simulated)",
        "            pass",
        (BLOCK,),
    ),
    Mutant(
        "who is refused in a block gives another machine its samples",
        "privacy/machine/admission.py",
        "start[rows], stop[rows]",
        "start[: len(rows)], stop[: len(rows)]",
        (BLOCK,),
    ),
    Mutant(
        "what a block refuses is recorded",
        "privacy/machine/admission.py",
        "        if refused:\n            rows",
        "        if False:\n            rows",
        (BLOCK,),
    ),
    Mutant(
        "a block records a release as that of a machine it refused",
        "privacy/machine/machine_block.py",
        "self._index[admitted.rows], [_ELSEWHERE]",
        "self._index[: len(self.places)], [_ELSEWHERE]",
        (BLOCK,),
    ),
    Mutant(
        "all releases of a block's machine have one nonce",
        "privacy/machine/machine_block.py",
        "key.nonce(streams.session, release + 1)",
        "key.nonce(streams.session, 1)",
        (BLOCK,),
    ),
    Mutant(
        "a block computes what is computed elsewhere",
        "privacy/machine/machine_block.py",
        "computed = np.flatnonzero(self.here)",
        "computed = np.arange(len(self.here))",
        (BLOCK,),
    ),
    Mutant(
        "a worker computes with the machines of another",
        "clients/simulation/cohort_machines.py",
        "np.repeat(here & (number == part), share)",
        "np.repeat(number == part, share)",
        (WORKERS_RUNS,),
    ),
    Mutant(
        "releases that a worker added up are told by the order of the question",
        "app/engines/workers.py",
        "np.array_equal(part.positions, np.arange(len(names)))",
        "len(part.positions) == len(names)",
        (f"{WORKERS_RUNS}::test_every_release_is_its_own_machines_where_kinds_differ",),
    ),
    Mutant(
        "a worker knows no notes of machines that others compute",
        "clients/simulation/cohort_machines.py",
        "self.all_answer and client.together.__func__ is PrivateClient.together.__func__",
        "self.all_answer",
        (f"{WORKERS_RUNS}::test_gradients_that_follow_from_what_all_machines_noted_are_the_same",),
    ),
    Mutant(
        "a gradient's tiny factor is measured by squares that are lost",
        "clients/adapters/outer_products.py",
        "squares.min(initial=1.0) < LEAST_SQUARES",
        "False",
        (OUTER_PRODUCTS,),
    ),
    Mutant(
        "a block names a machine twice",
        "privacy/ledger/ledger_block.py",
        "len(np.unique(rows)) < len(rows) or any(",
        "any(",
        (BLOCK,),
    ),
    Mutant(
        "a machine of a block is in two transactions of one thread",
        "privacy/ledger/ledger_block.py",
        "self._entered.append(rows)",
        "pass",
        (BLOCK,),
    ),
    Mutant(
        "machines of a block share a place in its ledger",
        "privacy/ledger/ledger_block.py",
        "np.arange(self._used, needed, dtype=np.int32)",
        "np.full(len(new), self._used, dtype=np.int32)",
        (
            BLOCK_LEDGER,
            BLOCK,
        ),
    ),
    Mutant(
        "who gets a block's release can change what its ledger remembers",
        "privacy/machine/machine_block.py",
        "counts.setflags(write=False)",
        "pass",
        (BLOCK,),
    ),
    Mutant(
        "what was sent is not remembered, and is not carried over",
        "privacy/machine/prefix_sums.py",
        "pending[release + 1] = counts",
        "pending[release + 1] = 0 * counts",
        (CARRIED_OVER,),
    ),
    Mutant(
        "a machine of a block is clipped as if its rows were finite",
        "privacy/noise/block_values.py",
        "np.isfinite(scales).all(axis=1)",
        "np.isfinite(scales).any(axis=1)",
        (BLOCK,),
    ),
    Mutant(
        "compiled loops round what is not finite",
        "app/engines/compiled.py",
        "if not np.isfinite(scales).all():",
        "if not np.isfinite(scales).any():",
        (COMPILED,),
    ),
    Mutant(
        "compiled loops leave the last row of noise in",
        "app/engines/compiled.py",
        "last is not None",
        "False",
        (COMPILED,),
    ),
    Mutant(
        "a sum of compiled loops leaves out what was carried over",
        "app/engines/compiled.py",
        "nothing_carried and len(places)",
        "len(places)",
        (COMPILED,),
    ),
    Mutant(
        "a sender's word is taken for an array's header",
        "privacy/arrays.py",
        " and data.startswith(header):",
        ":",
        ("tests/privacy/test_arrays_quick.py",),
    ),
    Mutant(
        "the cap is off by one",
        "privacy/machine/admission.py",
        "streams.release >= self.policy.max_participations",
        "streams.release > self.policy.max_participations",
        (ADMISSION,),
    ),
    Mutant(
        "the budget is not checked",
        "privacy/machine/admission.py",
        "reserved.reserved_mu > budget",
        "reserved.reserved_mu > 1e300 * budget",
        (ADMISSION,),
    ),
    Mutant(
        "a session is not charged",
        "privacy/ledger/ledger_records.py",
        "reserved={**self.reserved, session: -mu if trusted else mu}",
        "reserved={**self.reserved, session: 0.0}",
        (ADMISSION,),
    ),
    Mutant(
        "a plain meaning rounds percentages down",
        "privacy/accounting/guarantee.py",
        "math.ceil(1000 * gdp_best_guess(mu) - 1e-9)",
        "math.floor(1000 * gdp_best_guess(mu))",
        ("tests/privacy/accounting/test_plain_words.py",),
    ),
    Mutant(
        "a plain meaning of sums leaves out what holds without anybody's honesty",
        "privacy/accounting/guarantee.py",
        'f"at most {right_at_most(mu_local)}" if math.isfinite(mu_local)',
        'f"at most {right_at_most(mu)}" if math.isfinite(mu_local)',
        ("tests/privacy/accounting/test_plain_words.py",),
    ),
    Mutant(
        "an attacker's best guess is said to be worse than it is",
        "privacy/accounting/gdp.py",
        'return float(ndtr(_not_negative("mu", mu) / 2))',
        'return float(ndtr(_not_negative("mu", mu) / 4))',
        ("tests/privacy/accounting/test_gdp.py",),
    ),
    Mutant(
        "mus of sessions do not add up",
        "privacy/accounting/gdp.py",
        "return math.sqrt(math.fsum(",
        "return math.sqrt(max(",
        ("tests/privacy/accounting/test_gdp.py", ADMISSION),
    ),
    Mutant(
        "samples are forgotten in a second session that notes something",
        "privacy/machine/admission.py",
        "return np.maximum(self.accounts.samples_used, self.stop)",
        "return self.stop - (bool(self.streams.noted[0]) and len(self.accounts.reserved[0]) > 1)",
        (ADMISSION,),
    ),
    Mutant(
        "the last sample is used once more",
        "privacy/machine/admission.py",
        "_refuse(stop > machines.num_samples,",
        "_refuse(stop > machines.num_samples + self.policy.batch_size,",
        (ADMISSION,),
    ),
    Mutant(
        "samples return one release too early",
        "privacy/machine/admission.py",
        "streams.release % self.policy.min_separation * batch",
        "streams.release % max(self.policy.min_separation - 1, 1) * batch",
        (ADMISSION,),
    ),
    Mutant(
        "acknowledgements go backwards under the papers' rule",
        "privacy/machine/admission.py",
        "valid = before < ack <= release",
        "valid = ack <= release",
        (ADMISSION,),
    ),
    Mutant(
        "a release that was given up can be acknowledged",
        "privacy/machine/admission.py",
        "valid = ack > before and ack in pending",
        "valid = ack > before",
        (ADMISSION,),
    ),
    Mutant(
        "a stream goes on under another policy or key",
        "privacy/machine/admission.py",
        "if theirs != ours and row not in refused:",
        "if not ours and row not in refused:",
        (ADMISSION,),
    ),
    Mutant(
        "a real machine shows that a sample failed",
        "privacy/machine/prefix_sums.py",
        'logger.exception("A contribution could not be computed; it counts as zero.", extra=OF_DATA)',
        "raise",
        ("tests/clients/test_failures.py", RELEASE),
    ),
    Mutant(
        "half the noise",
        "privacy/noise/noise_stream.py",
        "self.plan.grid.factor(self.plan.noise_std)",
        "self.plan.grid.factor(0.5 * self.plan.noise_std)",
        (f"{RELEASE}::test_releases_add_up_to_the_dense_noisy_prefixes",),
    ),
    Mutant(
        "noise that should cancel does not",
        "privacy/noise/noise_stream.py",
        "counts -= MARK if removed is None else removed",
        "counts -= MARK",
        (RELEASE,),
    ),
    Mutant(
        "what a lost reply carried is not carried over",
        "privacy/machine/prefix_sums.py",
        "counts += streams.pending[row][release]",
        "counts += 0",
        (CARRIED_OVER,),
    ),
    Mutant(
        "a mechanism's own arrays are overwritten",
        "privacy/noise/noise_stream.py",
        "in_place=self._in_place",
        "in_place=True",
        ("tests/privacy/mechanisms/test_own_mechanisms.py",),
    ),
    Mutant(
        "fast noise on a real machine",
        "privacy/machine/ledgered_machine.py",
        'if policy.noise_quality != "exact":',
        "if policy.noise_quality is None:",
        (MACHINE,),
    ),
    Mutant(
        "a real machine may forget",
        "privacy/machine/ledgered_machine.py",
        "if not ledger.durable:",
        "if not ledger:",
        (MACHINE,),
    ),
    Mutant(
        "nonces of a real machine repeat",
        "privacy/noise/noise_keys.py",
        "return secrets.token_bytes(NONCE_BYTES)",
        "return _simulated_nonce(session, release)",
        (RELEASE,),
    ),
    Mutant(
        "all rows have one key",
        "privacy/noise/keyed_noise.py",
        r'b"murmurfl noise row\x00" + nonce',
        r'b"murmurfl noise row\x00"',
        ("tests/privacy/noise/test_noise.py", RELEASE),
    ),
    Mutant(
        "the sensitivity of a batch of one row fewer",
        "privacy/machine/policy.py",
        "delta = self.bound.distance / self.batch_size",
        "delta = self.bound.distance / (self.batch_size + 1)",
        ("tests/privacy/machine/test_policy.py", RELEASE),
    ),
    Mutant(
        "an update is charged by half",
        "privacy/machine/policy.py",
        "return 2.0 * self.clip_norm\n",
        "return self.clip_norm\n",
        ("tests/privacy/machine/test_policy.py", RELEASE),
    ),
    Mutant(
        "rounding to the grid is not charged",
        "privacy/noise/grid.py",
        "return self.spacing * math.sqrt(num_parameters)",
        "return 0.0",
        ("tests/privacy/noise/test_grid.py", "tests/privacy/machine/test_policy.py"),
    ),
    Mutant(
        "what is too long is not clipped",
        "privacy/machine/clipping.py",
        "within = unit_norms <= bound / scale_free",
        "within = unit_norms <= 2 * bound / scale_free",
        ("tests/privacy/machine/test_clipping.py",),
    ),
    Mutant(
        "what is not finite is clipped to its full length",
        "privacy/machine/clipping.py",
        "rows[~finite] = 0.0",
        "rows[~finite] = 1.0",
        ("tests/privacy/machine/test_clipping.py",),
    ),
    Mutant(
        "decay's columns are taken to fall twice as fast",
        "privacy/mechanisms/banded_stream.py",
        "ratios = np.full(self.num_releases, self.decay)",
        "ratios = np.full(self.num_releases, self.decay**2)",
        ("tests/privacy/mechanisms/test_recent.py", "tests/privacy/mechanisms/test_check_mechanism.py"),
    ),
    Mutant(
        "decay is charged for one release only",
        "privacy/mechanisms/banded_stream.py",
        "        return np.cumprod(ratios, dtype=np.float64)\n",
        "        return np.cumprod(ratios, dtype=np.float64) * (np.arange(len(ratios)) < 1)\n",
        ("tests/privacy/mechanisms/test_recent.py", "tests/privacy/mechanisms/test_check_mechanism.py"),
    ),
    Mutant(
        "bisr's encoder has only as many entries as its inverse",
        "privacy/mechanisms/banded_stream.py",
        "return np.asarray(lfilter([1.0], self.diagonals, impulse))",
        "return np.asarray(lfilter([1.0], self.diagonals, impulse)) * (np.arange(len(impulse)) < len(self.diagonals))",
        ("tests/privacy/mechanisms/test_mechanisms.py",),
    ),
    Mutant(
        "a state is made from one nonce too few",
        "privacy/noise/noise_stream.py",
        "nonces[-NONCE_BYTES * self._mechanism.remembered :]",
        "nonces[-NONCE_BYTES * max(1, self._mechanism.remembered - 1) :]",
        ("tests/privacy/mechanisms/test_recent.py", RELEASE),
    ),
    Mutant(
        "columns of the normalised root count as if they fell",
        "privacy/mechanisms/sqrt_normalised.py",
        "return float((self._norms[self.num_releases - n :] / self._norms[:n]).max())",
        "return float((self._norms[self.num_releases - n :] / self._norms[:n]).min())",
        ("tests/privacy/mechanisms/test_sqrt_normalised.py",),
    ),
    Mutant(
        "samples that return cost the normalised root one participation",
        "privacy/mechanisms/sqrt_normalised.py",
        "if num_participations > 1:",
        "if num_participations > n:",
        ("tests/privacy/mechanisms/test_mechanisms.py",),
    ),
    Mutant(
        "the normalised root's noise is that of columns without norm one",
        "privacy/mechanisms/sqrt_normalised.py",
        "return self._norms[np.array(rows) - 1, None] * by_lag(",
        "return by_lag(",
        ("tests/privacy/mechanisms/test_mechanisms.py",),
    ),
    Mutant(
        "a mechanism stands alone if its parent does",
        "privacy/mechanisms/__init__.py",
        'bool(vars(kind).get("stands_alone", False))',
        "kind.stands_alone",
        ("tests/privacy/mechanisms/test_check_mechanism.py",),
    ),
    Mutant(
        "one participation fewer of cancelling noise",
        "privacy/mechanisms/cancelling.py",
        "(2 * rank + 1) * tails[column]",
        "2 * rank * tails[column] + (rank == 0) * tails[column]",
        ("tests/privacy/mechanisms/test_mechanisms.py",),
    ),
    Mutant(
        "one participation fewer of independent noise",
        "privacy/mechanisms/independent.py",
        "(n - 1) // min_separation + 1",
        "max((n - 1) // min_separation, 1)",
        ("tests/privacy/mechanisms/test_mechanisms.py",),
    ),
    Mutant(
        "participations from the second release on",
        "privacy/mechanisms/sensitivity.py",
        "gram(np.arange(start, n, min_separation)[:num_participations])",
        "gram(np.arange(start, n, min_separation)[: max(num_participations - 1, 1)])",
        ("tests/privacy/mechanisms/test_mechanisms.py", "tests/privacy/mechanisms/test_toeplitz.py", ADMISSION),
    ),
    Mutant(
        "an epoch is amplified by one step too many",
        "privacy/machine/shuffled_machine.py",
        "steps = public_steps + 1 if",
        "steps = public_steps + 2 if",
        ("tests/privacy/machine/test_shuffled.py",),
    ),
    Mutant(
        "a ledger that was copied back is believed",
        "privacy/ledger/sqlite.py",
        "check_mark(page.state, mark, self.path)",
        "mark = page.state",
        ("tests/privacy/ledger/test_sqlite.py",),
    ),
    Mutant(
        "a commit may forget what was spent",
        "privacy/ledger/ledger_page.py",
        "account.samples_used < self.state.samples_used",
        "account.samples_used < 0",
        ("tests/privacy/ledger/test_sqlite.py",),
    ),
    Mutant(
        "the mark stays behind the ledger",
        "privacy/ledger/ledger_page.py",
        "        self.state.write_mark(self.header.mark)\n",
        "",
        ("tests/privacy/ledger/test_sqlite.py", "tests/privacy/ledger/test_killed_nodes.py"),
    ),
    Mutant(
        "a session stays open under another noise key",
        "privacy/ledger/ledger_page.py",
        "            for name, _, releases in streams:\n                self._close(name, releases)\n",
        "",
        (ROTATION,),
    ),
    Mutant(
        "data are not compared before they are known under another noise key",
        "privacy/ledger/key_rotation.py",
        "    make_digest(old_key, rows).check(used, digest, num_rows)\n",
        "",
        (ROTATION,),
    ),
    Mutant(
        "a ledger of another format is read",
        "privacy/ledger/ledger_file.py",
        "if version not in self.formats:",
        "if False:",
        (FORMATS,),
    ),
    Mutant(
        "a ledger of another format is opened before it is refused, and its log written into it",
        "privacy/ledger/ledger_file.py",
        "            if application_id == self.application_id:\n                self._check_version(version, path)\n",
        "",
        (FORMATS,),
    ),
    Mutant(
        "a ledger that cannot be believed is changed",
        "privacy/ledger/ledger_file.py",
        "                    believe(connection)\n",
        "",
        (FORMATS,),
    ),
    Mutant(
        "a ledger's mark of another format may be replaced",
        "privacy/ledger/mark.py",
        'raise LedgerError(\n                f"Expected a high-water mark of',
        'raise ValueError(\n                f"Expected a high-water mark of',
        (FORMATS,),
    ),
    Mutant(
        "a helper's record of another format is opened before it is refused",
        "privacy/ledger/ledger_file.py",
        "            application_id, version = first_numbers(path)\n",
        "            application_id, version = 0, 0\n",
        (OPENING_RECORD,),
    ),
    Mutant(
        "a local budget is decided twice",
        "privacy/ledger/repair.py",
        "if page.header.budget_local_mu is not None:",
        "if False:",
        (SUMS,),
    ),
    Mutant(
        "a rollback forgets the local budget that was decided",
        "privacy/ledger/ledger_page.py",
        "            self._decide(mark.budget_local_mu)",
        "            self._decide(None)",
        (SUMS,),
    ),
    Mutant(
        "an older noise key comes back with a copy of the ledger",
        "privacy/ledger/repair.py",
        "if page.state.key != mark.key:",
        "if False:",
        (ROTATION,),
    ),
    Mutant(
        "the old noise key stays in its file",
        "privacy/ledger/key_rotation.py",
        "        old_file.unlink()\n",
        "        pass\n",
        (ROTATION,),
    ),
    Mutant(
        "others in a sum are thought to have released as little",
        "privacy/accounting/noise_plan.py",
        "(self.honest - 1) * (own / others) ** 2",
        "(self.honest - 1)",
        (PLANNING,),
    ),
    Mutant(
        "turns of a returning sample are not added up in sums",
        "privacy/accounting/noise_plan.py",
        "return min(alone, _turns(pattern, mechanism.num_releases if n is None else n) * turn)",
        "return alone / math.sqrt(self.honest)",
        (PLANNING,),
    ),
    Mutant(
        "releases that build on each other pass for ones that stand alone",
        "privacy/machine/policy.py",
        'stands_alone=policy.builds_on == "nothing"',
        "stands_alone=True",
        (PLANNING,),
    ),
    Mutant(
        "a sum is charged for one machine's normals",
        "privacy/machine/policy.py",
        "resolution_mu(values * MOST_SUMMED,",
        "resolution_mu(values,",
        (PLANNING,),
    ),
    Mutant(
        "what the normals of machines in other sums miss is not charged",
        "privacy/machine/policy.py",
        "summed_range_problem(values * MOST_MACHINES,",
        "summed_range_problem(values * MOST_SUMMED,",
        (PLANNING,),
    ),
    Mutant(
        "samples return in chains of federations of any size",
        "privacy/sums/masking.py",
        "        check_federation(policy, len(self.roster.machines))\n",
        "",
        (MASKING,),
    ),
    Mutant(
        "what one machine reaches alone is computed beside a result of real machines",
        "app/runs/without_noise.py",
        "if outcome.engine not in ENGINES or outcome.alone",
        "if outcome.alone",
        (ALONE,),
    ),
    Mutant(
        "what one machine reaches alone is computed on a server of real machines",
        "app/runs/result.py",
        "return None if self.deployed else alone(",
        "return alone(",
        (ALONE,),
    ),
    Mutant(
        "what the normals of a sum miss is not charged",
        "privacy/noise/normals.py",
        "if gdp_epsilon(mu, delta) > allowed:",
        "if math.isnan(allowed):",
        (PLANNING,),
    ),
    Mutant(
        "the local figure is that of sums",
        "privacy/machine/policy.py",
        "local = mu if plan.sums is None else local",
        "local = mu",
        (PLANNING,),
    ),
    Mutant(
        "machines of two noises share a sum",
        "privacy/machine/policy.py",
        "(plan.sensitivity, plan.grid.spacing, plan.noise_std)",
        "(plan.sensitivity, plan.grid.spacing)",
        (PLANNING,),
    ),
    Mutant(
        "the local budget is not checked",
        "privacy/machine/admission.py",
        "reserved.reserved_local_mu > self.local_budget",
        "reserved.reserved_local_mu > 1e300 * self.local_budget",
        (SUMS,),
    ),
    Mutant(
        "the local figure is not reserved",
        "privacy/ledger/ledger_records.py",
        "else {**self.reserved_local, session: local}",
        "else {**self.reserved_local, session: mu}",
        (SUMS,),
    ),
    Mutant(
        "a ledger without a local budget has none",
        "privacy/ledger/sqlite.py",
        "self.budget_mu if decided is None else decided",
        "math.inf if decided is None else decided",
        (SUMS,),
    ),
    Mutant(
        "a commit may forget a local figure",
        "privacy/ledger/ledger_page.py",
        "local.get(name, -1.0) < state.reserved_local",
        "local.get(name, -1.0) < -1.0",
        (SUMS,),
    ),
    Mutant(
        "a rollback forgets the local figure",
        "privacy/ledger/ledger_page.py",
        "max(s.reserved_local for s in both)",
        "min(s.reserved_local for s in both)",
        (SUMS,),
    ),
    Mutant(
        "a release is built on one without a name",
        "privacy/machine/admission.py",
        "- set(streams.ids[row]))",
        "- {ack, *streams.pending[row]})",
        (SUMS,),
    ),
    Mutant(
        "all releases have one name",
        "privacy/machine/outgoing.py",
        "release: secrets.token_bytes(_ID_BYTES)",
        "release: _NO_ID",
        (SUMS,),
    ),
    Mutant(
        "what was begun with more honest machines is stated by today's",
        "privacy/machine/ledgered_machine.py",
        "spent = guaranteed = local = account.local_bound_of(session)",
        "spent = guaranteed = local = account.bound_of(session)",
        (SUMS,),
    ),
    Mutant(
        "a ClientApp that answers with no model is refused",
        "clients/adapters/foreign_app.py",
        "        values = error\n",
        "        raise\n",
        ("tests/clients/adapters/test_noise_mod.py::test_a_nodes_malformed_answer_counts_as_a_zero_update",),
    ),
    Mutant(
        "under secure aggregation a release is sent as it is",
        "clients/messages/answers.py",
        "    if policy.trust != _TRUST:\n        return unflatten",
        "    if masking is not None:\n        return unflatten",
        (MASKED, MASKED_UPDATES),
    ),
    Mutant(
        "a machine without masks sends its release as it is",
        "clients/messages/answers.py",
        "    if policy.trust != _TRUST:\n        return unflatten",
        "    if policy.trust != _TRUST or masking is None:\n        return unflatten",
        (MASKED,),
    ),
    Mutant(
        "a real machine under secure aggregation needs no masks",
        "clients/messages/answers.py",
        "        if not simulated:\n            raise _without_masks()\n",
        "",
        (MASKED,),
    ),
    Mutant(
        "a machine spends a release that it cannot send",
        "clients/private_client.py",
        "        check_can_send(policy, self.masking)\n",
        "",
        (MASKED,),
    ),
    Mutant(
        "a machine masks what another machine released",
        "clients/messages/answers.py",
        "    if masking.name != name:",
        "    if False:",
        (MASKED,),
    ),
    Mutant(
        "every kind of machine serves secure aggregation that descends from one that does",
        "clients/private_client.py",
        'vars(type(self)).get("summable", False)',
        "type(self).summable",
        (MASKED,),
    ),
    Mutant(
        "whatever roster lies there is the pinned one",
        "clients/nodes/roster_files.py",
        "    if digest is not None and roster.digest != pinned_digest(digest):",
        "    if False:",
        ("tests/clients/nodes/test_roster_files.py", MASKED_UPDATES),
    ),
    Mutant(
        "a private key that others can read is taken",
        "clients/nodes/roster_files.py",
        "    check_private(path, what, missing=_MAKE_ONE, error=ConfigurationError)\n",
        "",
        ("tests/clients/nodes/test_roster_files.py",),
    ),
    Mutant(
        "the noise mod trusts a server that its policy trusts",
        "clients/adapters/update_policy.py",
        '_TRUSTS: tuple[Trust, ...] = ("untrusted-server", "secure-aggregation")',
        '_TRUSTS: tuple[Trust, ...] = ("untrusted-server", "secure-aggregation", "trusted-server")',
        (MASKED_UPDATES,),
    ),
    Mutant(
        "a helper does not look at acks",
        "privacy/sums/opening_rule.py",
        'if header.builds_on == "last-opened" and header.ack_id != expected:',
        "if False:",
        (OPENING,),
    ),
    Mutant(
        "a helper opens a release twice",
        "privacy/sums/opening_rule.py",
        "if last is not None and header.release <= last.release:",
        "if last is not None and header.release < last.release:",
        (OPENING,),
    ),
    Mutant(
        "a helper opens sums of one less",
        "privacy/sums/opening_rule.py",
        "if len(headers) < needed.min_cohort:",
        "if len(headers) + 1 < needed.min_cohort:",
        (OPENING,),
    ),
    Mutant(
        "a helper asks the least careful machine for min_cohort",
        "privacy/sums/opening_rule.py",
        "needed = max(headers,",
        "needed = min(headers,",
        (OPENING,),
    ),
    Mutant(
        "a helper counts a machine twice",
        "privacy/sums/opening_rule.py",
        "if len({header.machine for header in headers}) < len(headers):",
        "if False:",
        (OPENING,),
    ),
    Mutant(
        "a helper mixes sessions",
        "privacy/sums/opening_rule.py",
        "if any(header.session != session for header in headers):",
        "if False:",
        (OPENING,),
    ),
    Mutant(
        "a helper mixes noise of several terms",
        "privacy/sums/opening_rule.py",
        "if len({SessionTerms.of(header) for header in headers}) > 1:",
        "if False:",
        (OPENING,),
    ),
    Mutant(
        "a helper lets a session change its terms",
        "privacy/sums/opening_rule.py",
        "if page.terms(first.session) not in (None, terms):",
        "if False:",
        (OPENING,),
    ),
    Mutant(
        "a helper knows sets by their names",
        "privacy/sums/opening_rule.py",
        "if known == digest:",
        "if known is not None:",
        (OPENING,),
    ),
    Mutant(
        "a helper records before it looks at seals",
        "privacy/sums/opening_rule.py",
        "        seeds = [self._seed(sealed, header) for sealed, header in zip(releases, headers, strict=True)]\n"
        "        total = np.zeros(headers[0].size, np.uint64)\n"
        "        with self._record.exclusive() as page:\n"
        "            self._record_set(page, opening, digest, headers)\n",
        "        total = np.zeros(headers[0].size, np.uint64)\n"
        "        with self._record.exclusive() as page:\n"
        "            self._record_set(page, opening, digest, headers)\n"
        "        seeds = [self._seed(sealed, header) for sealed, header in zip(releases, headers, strict=True)]\n",
        (OPENING,),
    ),
    Mutant(
        "a helper opens what it never records",
        "privacy/sums/opening_rule.py",
        "        page.commit(OpenedSet(first.session, opening, digest, terms, machines))",
        "        OpenedSet(first.session, opening, digest, terms, machines)",
        (OPENING,),
    ),
    Mutant(
        "a helper's mark is never moved",
        "privacy/sums/opening_file.py",
        "            _place(self._connection, self._identity, self._path).write_mark(self._identity.mark)",
        "            pass",
        (OPENING_RECORD,),
    ),
    Mutant(
        "a helper's record may be older than its mark",
        "privacy/sums/opening_file.py",
        "if mark.number > place.number:",
        "if False:",
        (OPENING_RECORD,),
    ),
    Mutant(
        "a helper's record may have another history",
        "privacy/sums/opening_file.py",
        "row[0].hex() != mark.link",
        "not row[0]",
        (OPENING_RECORD,),
    ),
    Mutant(
        "a helper's record is not compared with its lines",
        "privacy/sums/opening_file.py",
        "if (found_terms, found) != (terms, machines):",
        "if False:",
        (OPENING_RECORD,),
    ),
    Mutant(
        "a helper's record is read outside of the transaction that writes",
        "privacy/sums/opening_file.py",
        '                connection.execute("BEGIN IMMEDIATE")\n                if _read_identity',
        '                connection.execute("BEGIN")\n                if _read_identity',
        (OPENING_RECORD,),
    ),
    Mutant(
        "a helper's record serves other keys",
        "privacy/sums/opening_file.py",
        "if self._identity.key != key_digest(helper):",
        "if False:",
        (OPENING_RECORD,),
    ),
    Mutant(
        "a helper believes a name without its signature",
        "privacy/sums/masking.py",
        "if public is None or not is_signed(public, sealed.signature, sealed.signed):",
        "if public is None:",
        (MASKING, OPENING),
    ),
    Mutant(
        "a helper's seals are not bound to their header",
        "privacy/sums/masking.py",
        'len(name).to_bytes(8, "big") + name + header',
        'len(name).to_bytes(8, "big") + name',
        (MASKING, OPENING),
    ),
    Mutant(
        "a helper's seed is used for all helpers",
        "privacy/sums/masking.py",
        "            seed = secrets.token_bytes(SEED_BYTES)\n",
        "            seed = seed if seals else secrets.token_bytes(SEED_BYTES)\n",
        (MASKING,),
    ),
    Mutant(
        "a signature for a helper does not cover the seals",
        "privacy/sums/masking.py",
        "parts = (self.header, *self.seals)",
        "parts = (self.header,)",
        (MASKING,),
    ),
    Mutant(
        "a header for helpers may be written in two ways",
        "privacy/sums/masking.py",
        "if header.to_bytes() != content:",
        "if False:",
        (MASKING,),
    ),
    Mutant(
        "anybody can sign for a machine or a helper of the roster",
        "privacy/sums/roster.py",
        "return not small_order and",
        "return",
        (ROSTER,),
    ),
    Mutant(
        "a session outlives the helpers of its roster",
        "privacy/machine/outgoing.py",
        'terms = plan.fingerprint.encode() + (b"\\x00" + roster.encode() if roster else b"")',
        "terms = plan.fingerprint.encode()",
        (OPENING,),
    ),
    Mutant(
        "a machine that had sums states a budget against any server that rests on others",
        "privacy/machine/ledgered_machine.py",
        "        if account.reserved_local and not summed:",
        "        if False:",
        (SUMS,),
    ),
    Mutant(
        "a mu for many honest machines is said of the few of another",
        "privacy/accounting/stated.py",
        "mu * math.sqrt(max(honest / fewest, 1.0))",
        "mu * math.sqrt(max(honest / honest, 1.0))",
        ("tests/app/runs/test_guarantees.py",),
    ),
    Mutant(
        "a run says the honest machines of its configuration, whatever its policies rest on",
        "app/runs/run_guarantees.py",
        "max(p.min_honest for p in policies), min(p.min_cohort for p in policies))",
        "experiment.config.min_honest, experiment.config.cohort_floor)",
        ("tests/app/runs/test_guarantees.py",),
    ),
    Mutant(
        "a strategy judges single releases where masks are left out",
        "strategies/rounds/strategy.py",
        "seen = reply if self._secure is None else reply.hidden",
        "seen = reply",
        (
            "tests/strategies/sums/test_secure_aggregation.py::test_no_strategy_looks_at_single_releases_of_sums_and_in_no_simulation",
        ),
    ),
)


def misplaced(mutants: Iterable[Mutant]) -> list[str]:
    """What is wrong with the texts of mutants, a line each; they are there once in code that they fit."""
    return [
        f"{mutant.file}: expected once, got {count} times, the text of the mutant {mutant.name!r}: {mutant.old!r}"
        for mutant in mutants
        if (count := mutant.found(ROOT)) != 1
    ]


def tested(root: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Run tests in a copy; pytest's exit code, and the test that failed or the last lines."""
    left_out = [f"--deselect={test}" for test in SLOW if test not in tests]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *left_out, *tests]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=LONGEST_S, check=False
        )
    except subprocess.TimeoutExpired:
        return FAILED, "it never ended"
    failed = re.search(r"^FAILED \S*?::(.*?)( - .*)?$", done.stdout, flags=re.MULTILINE)
    return done.returncode, failed[1] if failed else "\n".join((done.stdout + done.stderr).splitlines()[-15:])


def put_in(root: Path, mutant: Mutant) -> tuple[int, str]:
    """Run a mutant's tests with it."""
    path = root / mutant.file
    before = path.read_text(encoding="utf-8")
    path.write_text(before.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        return tested(root, mutant.tests)
    finally:
        path.write_text(before, encoding="utf-8")


def not_copied(folder: str, names: Sequence[str]) -> set[str]:
    """Names in a folder of the tree that a copy does without."""
    return {name for name in names if name == "__pycache__" or (Path(folder) == ROOT and name in NOT_COPIED)}


def each(jobs: Sequence[Callable[[Path], str]], folder: Path) -> Iterable[str]:
    """What every job returns for a copy of the tree that is its own while it runs, in their order."""
    copies: SimpleQueue[Path] = SimpleQueue()
    for number in range(WORKERS):
        copy = folder / str(number)
        if not copy.exists():
            shutil.copytree(ROOT, copy, ignore=not_copied, symlinks=True)
        copies.put(copy)

    def run(job: Callable[[Path], str]) -> str:
        copy = copies.get()
        try:
            return job(copy)
        finally:
            copies.put(copy)

    with ThreadPoolExecutor(WORKERS) as pool:
        yield from pool.map(run, jobs)


def main(words: Sequence[str]) -> int:
    """Try all mutants, or those with the words in their names; the exit code, not 0 if one survived."""
    chosen = [mutant for mutant in MUTANTS if " ".join(words) in mutant.name]
    if lost := misplaced(chosen):
        print(*lost, "Give each the text the code has now, such that it is still the bug it is called.", sep="\n")
        return 2
    started, survivors = time.monotonic(), 0

    def without(tests: tuple[str, ...]) -> Callable[[Path], str]:
        def run(root: Path) -> str:
            code, said = tested(root, tests)
            return "" if code == PASSED else f"Without any mutant `pytest {' '.join(tests)}` ends with {code}: {said}"

        return run

    def attempt(mutant: Mutant) -> Callable[[Path], str]:
        def run(root: Path) -> str:
            since = time.monotonic()
            code, said = put_in(root, mutant)
            word = {PASSED: "SURVIVED", FAILED: "killed"}.get(code, f"BROKEN ({code})")
            return f"{word:<9} {time.monotonic() - since:5.1f} s  {mutant.name} ({mutant.file}): {said}"

        return run

    with tempfile.TemporaryDirectory(prefix="murmurfl-mutants-") as name:
        folder = Path(name)
        tests = sorted({test for mutant in chosen for test in mutant.tests})
        halves = [half for half in (tuple(tests[0::2]), tuple(tests[1::2])) if half]
        if broken := [said for said in each([without(half) for half in halves], folder) if said]:
            print(*broken, sep="\n")
            return 2
        print(f"All tests pass without a mutant ({time.monotonic() - started:.0f} s).", flush=True)
        for line in each([attempt(mutant) for mutant in chosen], folder):
            survivors += not line.startswith("killed")
            print(line, flush=True)
    print(f"{len(chosen)} mutants, {survivors} not killed, {time.monotonic() - started:.0f} s.")
    return 1 if survivors or not chosen else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
