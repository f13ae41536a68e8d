"""Mechanisms, accounting, clipping, keyed noise, the ledger and the release rule; knows nothing of Flower or torch."""

from .accounting.allocation import allocation_delta, allocation_epsilon
from .accounting.amplification import Amplification, amplification_of
from .accounting.gdp import compose_gdp, gdp_best_guess, gdp_delta, gdp_epsilon, gdp_mu
from .accounting.guarantee import (
    FAST_NOISE,
    NOT_PRIVATE,
    RELATIONS,
    SIMULATED,
    UNITS,
    Guarantee,
    Relation,
    Unit,
    caption,
    mechanism_words,
    policy_guarantee,
    rounded_up,
    server_guarantee,
)
from .accounting.noise_forecast import Forecast, forecast_of
from .accounting.noise_plan import NoisePlan
from .accounting.noise_words import NO_NOISE_WORDS, epoch_words, noise_words, server_noise_words, stated_words
from .accounting.rdp import rdp_epsilon, rdp_mu
from .accounting.stated_noise import StatedNoise, stated_noise
from .errors import ConfigurationError, LedgerError, MurmurflError, RefusedError, UnsupportedFlowerError
from .ledger import (
    Account,
    Ledger,
    LedgerPage,
    LedgerSummary,
    MemoryLedger,
    SessionSummary,
    SQLiteLedger,
    StreamRecord,
    accept_rollback,
    new_mark,
    read_ledger,
    rotate_key,
    set_local_budget,
)
from .machine.clipping import clip_per_sample
from .machine.data_digest import RowBytes, any_data, row_bytes
from .machine.ledgered_machine import LedgeredMachine
from .machine.outgoing import PrivacyStatement, Release
from .machine.policy import CLIP_UNITS, NO_NOISE, RELEASE_RULES, TRUST_MODELS, ClipUnit, PrivacyPolicy, Trust
from .machine.prefix_sums import PrivateMachine
from .machine.record_owners import Owners, person_mu
from .machine.shuffled_machine import ACCOUNTINGS, ORDERS, ShuffledMachine, ShuffledPolicy, epoch_mu
from .mechanisms import (
    MECHANISMS,
    SCHEDULES,
    SHARES,
    Mechanism,
    check_mechanism,
    make_mechanism,
    register_mechanism,
)
from .noise.grid import Grid
from .noise.keyed_noise import NOISE_QUALITIES, row_key, standard_normals
from .noise.noise_keys import NoiseKeys, SimulatedKeys, SystemKeys, derived_seed
from .noise.noise_stream import RowCache
from .side.centring_query import CENTRING_CONSTANT, CENTRING_SHARE, centred, centring_policy, divided_mu
from .side.evaluation_query import (
    EVALUATION_SHARE,
    EvaluationRows,
    Measured,
    evaluation_policy,
)
from .sums.masking import Header, MaskedRelease, MaskedReleaseError, Masking, Sealed, add_mask, checked_header
from .sums.opening_file import SQLiteOpeningRecord
from .sums.opening_record import MemoryOpeningRecord, OpeningPage, OpeningRecord, OpeningRecordError
from .sums.opening_rule import Opener, Opening, OpeningRefusedError, is_opening, set_digest
from .sums.roster import HelperEntry, HelperKey, MachineKey, Roster

__all__ = [
    "ACCOUNTINGS",
    "CENTRING_CONSTANT",
    "CENTRING_SHARE",
    "CLIP_UNITS",
    "EVALUATION_SHARE",
    "FAST_NOISE",
    "MECHANISMS",
    "NOISE_QUALITIES",
    "NOT_PRIVATE",
    "NO_NOISE",
    "NO_NOISE_WORDS",
    "ORDERS",
    "RELATIONS",
    "RELEASE_RULES",
    "SCHEDULES",
    "SHARES",
    "SIMULATED",
    "TRUST_MODELS",
    "UNITS",
    "Account",
    "Amplification",
    "ClipUnit",
    "ConfigurationError",
    "EvaluationRows",
    "Forecast",
    "Grid",
    "Guarantee",
    "Header",
    "HelperEntry",
    "HelperKey",
    "Ledger",
    "LedgerError",
    "LedgerPage",
    "LedgerSummary",
    "LedgeredMachine",
    "MachineKey",
    "MaskedRelease",
    "MaskedReleaseError",
    "Masking",
    "Measured",
    "Mechanism",
    "MemoryLedger",
    "MemoryOpeningRecord",
    "MurmurflError",
    "NoiseKeys",
    "NoisePlan",
    "Opener",
    "Opening",
    "OpeningPage",
    "OpeningRecord",
    "OpeningRecordError",
    "OpeningRefusedError",
    "Owners",
    "PrivacyPolicy",
    "PrivacyStatement",
    "PrivateMachine",
    "RefusedError",
    "Relation",
    "Release",
    "Roster",
    "RowBytes",
    "RowCache",
    "SQLiteLedger",
    "SQLiteOpeningRecord",
    "Sealed",
    "SessionSummary",
    "ShuffledMachine",
    "ShuffledPolicy",
    "SimulatedKeys",
    "StatedNoise",
    "StreamRecord",
    "SystemKeys",
    "Trust",
    "Unit",
    "UnsupportedFlowerError",
    "accept_rollback",
    "add_mask",
    "allocation_delta",
    "allocation_epsilon",
    "amplification_of",
    "any_data",
    "caption",
    "centred",
    "centring_policy",
    "check_mechanism",
    "checked_header",
    "clip_per_sample",
    "compose_gdp",
    "derived_seed",
    "divided_mu",
    "epoch_mu",
    "epoch_words",
    "evaluation_policy",
    "forecast_of",
    "gdp_best_guess",
    "gdp_delta",
    "gdp_epsilon",
    "gdp_mu",
    "is_opening",
    "make_mechanism",
    "mechanism_words",
    "new_mark",
    "noise_words",
    "person_mu",
    "policy_guarantee",
    "rdp_epsilon",
    "rdp_mu",
    "read_ledger",
    "register_mechanism",
    "rotate_key",
    "rounded_up",
    "row_bytes",
    "row_key",
    "server_guarantee",
    "server_noise_words",
    "set_digest",
    "set_local_budget",
    "standard_normals",
    "stated_noise",
    "stated_words",
]
