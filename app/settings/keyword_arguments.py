"""Run-config keys as keyword arguments, for type checkers and editors; a test compares them with the declarations."""

from __future__ import annotations

from typing import TypedDict


class FitSettings(TypedDict, total=False):
    """Keyword arguments of :func:`~murmurfl.app.fit` that are run-config keys; ``murmurfl keys`` describes each."""

    strategy: object
    partition: object
    dirichlet_alpha: float
    classes_per_client: int
    model: object
    feature_bound: float
    knots: int
    knots_share: float
    rank_share: float
    augmentations: int
    learning_rate: float
    preset: str
    projection_radius: float
    steps: str
    window: int
    class_weight: float
    ridge: float
    global_learning_rate: float
    momentum: float
    average: str
    l2: float
    alpha: float
    regularizer: str
    regularizer_strength: float
    gradient_memory_mib: float
    variant: str
    order: str
    private_share: float
    accounting: str
    release_rule: str
    features: object
    data_root: str
    download: bool
    public_samples: int
    synthetic_samples: int
    synthetic_features: int
    synthetic_alpha: float
    synthetic_beta: float
    validation_samples: int
    training_samples: int
    stream: bool
    sample_uses: str
    batch_size: int
    samples_per_owner: int
    passes: int
    max_participations: int
    batch_selection: str
    quorum: float
    min_available_nodes: int
    over_selection: float
    num_rounds: int
    allow_exhaustion: bool
    sampling: str
    lost_replies: float
    seed: int
    round_timeout_s: float
    node_deadline_s: float
    give_up_after: int
    permit: str
    centring: str
    centring_share: float
    private_evaluation: float
    held_out: float
    score_bins: int
    mu: float
    delta: float
    clip_norm: float
    clipping: str
    clip_stability: float
    quantile_share: float
    clip_unit: str
    quantile: float
    mechanism: str
    schedule: str
    decay: float
    workload: str
    decoder: str
    bands: int
    buffers: int
    shares: str
    noise_quality: str
    min_cohort: int
    helpers: int
    colluders: int
    max_byzantine: int
    max_failed_aggregations: int
    max_noise: float
    gradient_norm: bool
    evaluate_every: int
    checkpoint: bool
    out_dir: str
    run_name: str
    track: str


class RunSettings(FitSettings, total=False):
    """All run-config keys as keyword arguments, such as those of :func:`~murmurfl.app.simulate`."""

    task: object
    num_clients: int
    clients_per_round: int
    schema: str
    epsilon: float
    trust: str
