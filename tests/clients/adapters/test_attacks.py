"""Models made to carry one record to the next through PyTorch itself, and ordinary ones that must work.

The kinds of memory that Python offers are in ``tests/harness/memories.py``.
"""

import contextlib
import ctypes
import gc
import io
import os

import numpy as np
import pytest
from murmurfl.clients.adapters.replay_process import ReplayProcess
from murmurfl.privacy import ConfigurationError
from murmurfl.privacy.errors import InvalidRecordError

torch = pytest.importorskip("torch")
from murmurfl.clients.adapters.torch_checks import SampleTrials  # noqa: E402
from murmurfl.clients.adapters.torch_graph import mapped  # noqa: E402
from murmurfl.clients.adapters.torch_model import ModuleGradients, ModuleMeasure  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from tests.harness.trials import made_up_like  # noqa: E402

nn, F, aten = torch.nn, torch.nn.functional, torch.ops.aten
CROSS_ENTROPY = F.cross_entropy
SEEN = {"last": torch.zeros(4)}
"""What attacks keep where they can."""


class Attack(nn.Module):
    """A linear model of four inputs after what an attack makes of them."""

    def __init__(self, change):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.change = change
        self.register_buffer("buffer", torch.zeros(4))
        self.plain = torch.zeros(4)

    def forward(self, inputs):
        return self.layer(self.change(self, inputs))


def keep(kept):
    """Keep the last record where ``kept`` says, and add the one before."""

    def change(self, inputs):
        holder = kept(self)
        before = holder.clone()
        holder.copy_(inputs[0])
        return inputs + before

    return change


def keep_object(self, inputs):
    """Keep the tensor itself."""
    before, SEEN["last"] = SEEN["last"], inputs[0].detach()
    return inputs + (before if before.shape == inputs[0].shape else 0.0)


class Straight(torch.autograd.Function):
    kept: list = []  # noqa: RUF012 - what is tried

    @staticmethod
    def forward(inputs):
        return inputs * (2.0 if Straight.kept else 1.0)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, slope):
        Straight.kept.append(slope)
        return slope


class Noting(TorchDispatchMode):
    """Keeps every tensor that passes."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(args)
        return func(*args, **(kwargs or {}))


class NotingFunctions(TorchFunctionMode):
    seen: list = []  # noqa: RUF012 - what is tried

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(args)
        return func(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        SEEN["last"] = args
        return func(*(a.as_subclass(torch.Tensor) if isinstance(a, Subclass) else a for a in args), **(kwargs or {}))


@torch.library.custom_op("attacks::remember", mutates_args=())
def remember(values: torch.Tensor) -> torch.Tensor:
    before = SEEN["last"].clone()
    SEEN["last"] = values.detach().clone()
    return values + before


remember.register_fake(torch.empty_like)


def within(mode):
    def change(self, inputs):
        with mode():
            return torch.relu(inputs) + 1.0

    return change


def swallowed(self, inputs):
    try:
        if bool(inputs.sum() > 100.0):
            self.flag = True
    except Exception:
        pass
    return -inputs if getattr(self, "flag", False) else inputs


def to_a_file(self, inputs):
    with contextlib.suppress(Exception):
        torch.save(inputs, os.devnull)
    return inputs


def pool_of_another(self, inputs):
    """Indices of a larger pooling, which lie outside of the smaller one's input."""
    _, indices = aten.max_pool2d_with_indices(torch.ones(1, 1, 64, 64), [2, 2], [2, 2])
    small = inputs.reshape(1, 1, 2, 2)
    slope = aten.max_pool2d_with_indices_backward(
        indices[:, :, -1:, -1:] * 1.0, small, [2, 2], [2, 2], [0, 0], [1, 1], False, indices[:, :, -1:, -1:]
    )
    return inputs + slope.reshape(1, 4)


def norm_of_less(self, inputs):
    """Statistics of fewer rows than there are: the others would be read from behind them."""
    wide = inputs.expand(64, 4).contiguous()
    one = torch.ones(1, 1)
    slope, _, _ = aten.native_layer_norm_backward(wide, wide, [4], one, one, None, None, [True, False, False])
    return inputs + slope[-1:]


def statistics_of_less(self, inputs):
    less = torch.ones(1)
    return aten.native_batch_norm(inputs, None, None, less, less, False, 0.1, 1e-5)[0]


def pointer(self, inputs):
    address = inputs.data_ptr()
    return inputs + (ctypes.string_at(address, 1)[0] if address else 0.0)


def found_by_the_collector(self, inputs):
    others = [one for one in gc.get_objects() if type(one) is torch.Tensor and one.shape == (4,)]
    return inputs + sum(float(one.sum()) for one in others[:1])


def compiled(self, inputs):
    if not hasattr(Attack, "compiled"):
        Attack.compiled = torch.compile(lambda x: x + SEEN["last"].to(x.dtype), backend="eager")
    return Attack.compiled(inputs)


def hooked(self, inputs):
    inputs = inputs * 1.0
    if inputs.requires_grad:
        inputs.register_hook(lambda slope: SEEN.update(last=slope))
    return inputs


REFUSED = {
    "a buffer, written to": keep(lambda self: self.buffer),
    "a tensor that is no buffer": keep(lambda self: self.plain),
    "a global tensor": keep(lambda self: SEEN["last"]),
    "a view of a buffer": keep(lambda self: self.buffer.view(2, 2).view(4)),
    "an alias by detach": keep(lambda self: self.buffer.detach()),
    "an alias by data": keep(lambda self: self.buffer.data),
    "a storage under another tensor": lambda self, x: x + torch.empty(0).set_(self.buffer.untyped_storage(), 0, (4,)),
    "its own weights": keep(lambda self: self.layer.weight[0]),
    "the record": lambda self, x: x.mul_(2.0),
    "an operator with a Python kernel": lambda self, x: remember(x),
    "a dispatch subclass": lambda self, x: x + torch.zeros(4).as_subclass(Subclass),
    "dropout": lambda self, x: F.dropout(x, 0.5, training=True),
    "a draw": lambda self, x: x + torch.randn(4),
    "a draw like the record": lambda self, x: x + torch.rand_like(x),
    "a permutation": lambda self, x: x[:, torch.randperm(4)],
    "a draw by Python": lambda self, x: x * os.urandom(1)[0],
    "memory by strides": lambda self, x: torch.as_strided(self.plain, (4,), (1,), 64) + x,
    "memory by strides of the record": lambda self, x: torch.as_strided(x, (1, 4), (4, 1), 64),
    "a resized tensor": lambda self, x: x + torch.zeros(1).resize_(4),
    "an index without a check": lambda self, x: x + aten._unsafe_index(self.plain, [torch.tensor([64])]),
    "indices of another pooling": pool_of_another,
    "statistics of fewer rows": norm_of_less,
    "statistics of fewer channels": statistics_of_less,
    "batch statistics that are written": lambda self, x: F.batch_norm(
        x.expand(2, 4), self.buffer, self.plain, training=True
    )[:1],
    "a branch on values": lambda self, x: -x if x.sum() > 100.0 else x,
    "item": lambda self, x: x * x.sum().item(),
    "a list": lambda self, x: x + torch.tensor(x.tolist()),
    "NumPy": lambda self, x: x + torch.from_numpy(x.numpy()),
    "a mask as an index": lambda self, x: x + x[x > 0.0].sum(),
    "places that are not zero": lambda self, x: x + torch.nonzero(x).sum(),
    "branches of an operator": lambda self, x: torch.cond(x.sum() > 100.0, lambda v: -v, lambda v: v + 0.0, (x,)),
    "a bag of embeddings": lambda self, x: x + F.embedding_bag(torch.tensor([[0, 1]]), torch.ones(2, 4)).sum(),
    "a sparse tensor": lambda self, x: x + torch.sparse.mm(torch.eye(4).to_sparse(), x.T).T,
    "a saved file of the record": lambda self, x: (torch.save(x, io.BytesIO()), x.numpy(), x)[2],
}
HARMLESS = {
    "an assertion": lambda self, x: (torch._assert_async((x.sum() < 100.0).all()), x)[1],
    "the tensor itself": keep_object,
    "a buffer, exchanged": lambda self, x: (x + self.buffer, setattr(self, "buffer", x[0].detach()))[0],
    "an attribute": lambda self, x: (setattr(self, "kept", x), x)[1],
    "the class of a module": lambda self, x: (setattr(Attack, "kept", x), x)[1],
    "a hidden branch": swallowed,
    "a file": to_a_file,
    "a function of its own for gradients": lambda self, x: Straight.apply(x),
    "a dispatch mode": within(Noting),
    "a function mode": within(NotingFunctions),
    "a hook of a tensor": hooked,
    "a cache of the compiler": compiled,
    "memory that nobody wrote to": lambda self, x: x + torch.empty(4),
    "memory like the record": lambda self, x: (
        x + torch.empty_like(x) + x.new_empty(4) + torch.empty_strided((4,), (1,))
    ),
    "the names of a tensor": lambda self, x: (SEEN.update(names=repr(x)), x)[1],
    "its address": pointer,
}
EITHER = {
    *("the tensor itself", "a buffer, exchanged"),
    *("memory that nobody wrote to", "memory like the record", "its address"),
}
"""Those that the trial may refuse, because their own code gives something else on made-up records."""


def examples(count=4):
    return made_up_like(torch.zeros(count, 4), torch.arange(count) % 2)


def made(change):
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(5)
        return ModuleGradients(Attack(change), CROSS_ENTROPY)


@pytest.fixture(scope="module")
def harmless():
    """Gradients of the attacks that were captured, which share a process."""
    process, found = ReplayProcess(), {}
    with torch.library._scoped_library("aten", "IMPL") as library:
        # A kernel of the project's for one of PyTorch's own operators: the other process does not have it.
        library.impl("add.Tensor", lambda a, b, alpha=1: SEEN.update(last=a) or torch.sub(a, b, alpha=-alpha), "CPU")
    for name, change in HARMLESS.items():
        SEEN["last"] = torch.zeros(4)
        gradients = made(change)
        try:
            SampleTrials(gradients)(examples())
        except ConfigurationError as error:
            found[name] = error
            continue
        for program in gradients.captured.programs:
            process.add(program)
        gradients.process = process
        found[name] = gradients
    yield found
    process.close()


POINT = [np.full((2, 4), 0.1, np.float32), np.full(2, 0.1, np.float32)]
ORDINARY = np.full((1, 4), 0.5, np.float32), np.zeros(1, np.int64)
STRANGE = np.full((1, 4), 1e4, np.float32), np.ones(1, np.int64)
NOT_A_NUMBER = np.full((1, 4), np.nan, np.float32), np.ones(1, np.int64)


@pytest.mark.parametrize("name", [*REFUSED, *HARMLESS])
def test_attack_is_refused_or_leaves_the_next_record_alone(name, harmless):
    if name in REFUSED:
        with pytest.raises(ConfigurationError) as refusal:
            SampleTrials(made(REFUSED[name]))(examples())
        assert refusal.value.kind in ("unsupported", "failed")
        return
    gradients = harmless[name]
    if name in EITHER and isinstance(gradients, ConfigurationError):
        assert gradients.kind in ("unsupported", "failed")
        return
    assert isinstance(gradients, ModuleGradients), gradients
    before = gradients(POINT, ORDINARY)
    assert before.any()
    for other in (STRANGE, NOT_A_NUMBER):
        gradients(POINT, other)
        assert gradients(POINT, ORDINARY).tobytes() == before.tobytes()


def padded(inner):
    """A gradient of fewer planes than the padded values have: the others would be read from behind it."""
    operator = getattr(aten, f"reflection_pad{inner}d_backward")
    return lambda self, x: (
        x + operator(x.new_ones(1, 1, *[4] * inner), x.new_ones(1, 64, *[2] * inner), [1, 1] * inner).sum()
    )


def pooled(inner):
    ones, operator = [1] * inner, getattr(aten, f"avg_pool{inner}d_backward")
    return lambda self, x: (
        x
        + operator(x.new_ones(1, 1, *ones), x.new_ones(64, 1, *ones), ones, ones, [0] * inner, False, True, None).sum()
    )


def adaptive(inner):
    operator = getattr(aten, f"_adaptive_avg_pool{inner}d_backward")
    return lambda self, x: x + operator(x.new_ones(1, 64, *[1] * inner), x.new_ones(1, 1, *[2] * inner)).sum()


def label_of_no_loss(self, inputs):
    """A gradient at a class that no loss has checked, so that memory elsewhere is written to."""
    far = inputs[:1, :1].reshape(1, 1, 1).long() + 4000
    slope = inputs.new_ones(1, 1, 1)
    total = inputs.new_ones(())
    return inputs + aten.nll_loss2d_backward(slope, inputs.reshape(1, 4, 1, 1), far, None, 0, -100, total).reshape(1, 4)


FRESH_EYES = {
    "reflections of fewer rows": ("reflection_pad1d_backward", padded(1)),
    "reflections of fewer planes": ("reflection_pad2d_backward", padded(2)),
    "reflections of fewer volumes": ("reflection_pad3d_backward", padded(3)),
    "means of fewer planes": ("avg_pool2d_backward", pooled(2)),
    "means of fewer volumes": ("avg_pool3d_backward", pooled(3)),
    "adaptive means of more planes": ("_adaptive_avg_pool2d_backward", adaptive(2)),
    "adaptive means of more volumes": ("_adaptive_avg_pool3d_backward", adaptive(3)),
    "windows of another count": (
        "unfold_backward",
        lambda self, x: x + aten.unfold_backward(x.new_ones(1, 50), [100], 0, 50, 1).sum(),
    ),
    "probabilities of fewer rows": (
        "_log_softmax_backward_data",
        lambda self, x: x + aten._log_softmax_backward_data(x.new_ones(64, 4), x, 1, torch.float32).sum(),
    ),
    "fewer lengths than weights": (
        "_weight_norm_interface",
        lambda self, x: x + aten._weight_norm_interface(x.reshape(4, 1), x.new_ones(1, 1), 0)[1].sum(),
    ),
    "more lengths than weights": (
        "_weight_norm_interface",
        lambda self, x: x + aten._weight_norm_interface(x.reshape(1, 4), x.new_ones(1, 4), 0)[1].sum(),
    ),
    "a label that no loss saw": ("nll_loss2d_backward", label_of_no_loss),
    "counts at any index": (
        "embedding_dense_backward",
        lambda self, x: x + aten.embedding_dense_backward(x, x[0, :1].long() + 4000, 3, -1, True).sum(),
    ),
}
"""Operators whose sizes or indices PyTorch does not check; of attacks written without having seen the others."""


@pytest.mark.parametrize("name", FRESH_EYES)
def test_attack_of_fresh_eyes_is_refused_by_its_operator(name):
    operator, change = FRESH_EYES[name]
    with pytest.raises(ConfigurationError, match=rf"the operator {operator} with"):
        made(change).program(torch.zeros(4), torch.zeros((), dtype=torch.int64))


def test_attacks_are_many_enough():
    from tests.harness import memories

    assert len(REFUSED) + len(HARMLESS) >= 40
    assert len(memories.EVERY_NAME) >= 60


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.inner, self.output = kind(3, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, series):
        return self.output(self.inner(series)[0][:, -1])


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.embedding, self.inner = nn.Embedding(9, 8), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.positions = nn.Parameter(torch.zeros(6, 8))
        self.output = nn.Linear(8, 3)

    def forward(self, tokens):
        hidden = self.inner(self.embedding(tokens) + self.positions, src_key_padding_mask=tokens == 0)
        return self.output(hidden.mean(1))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.output = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, series):
        causal = nn.Transformer.generate_square_subsequent_mask(series.shape[1])
        return self.output(self.inner(series, series, series, attn_mask=causal, need_weights=False)[0][:, -1])


class Adapted(nn.Module):
    """A frozen layer with a small one that is trained, as LoRA has them."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(6, 3).requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 3, bias=False)

    def forward(self, features):
        return self.frozen(features) + 0.5 * self.up(self.down(features))


class Named(nn.Module):
    """Inputs by name, as Hugging Face's models have them; the output is an object."""

    def __init__(self):
        super().__init__()
        self.embedding, self.output = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, input_ids, attention_mask):
        mask = attention_mask.unsqueeze(-1).float()
        hidden = (self.embedding(input_ids) * mask).sum(1) / mask.sum(1).clamp(min=1.0)
        return {"logits": self.output(hidden)}


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(6, 3), nn.Embedding(9, 3)

    def forward(self, features, tokens):
        return self.left(features) + self.right(tokens).sum(1)


def network(*layers):
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), *layers, nn.Flatten(), nn.LazyLinear(3))


DRAW = torch.Generator().manual_seed(7)
FEATURES, SERIES = torch.randn(9, 6, generator=DRAW), torch.randn(9, 5, 3, generator=DRAW)
IMAGES, TOKENS = torch.randn(9, 2, 8, 8, generator=DRAW), torch.randint(0, 9, (9, 6), generator=DRAW)
CLASSES, PIXELS = torch.arange(9) % 3, torch.randint(0, 3, (9, 8, 8), generator=DRAW)
BY_NAME = {"input_ids": TOKENS, "attention_mask": (TOKENS > 0).long()}
WORDS = Transformer, TOKENS, CLASSES
MODELS = {
    "linear": (lambda: nn.Linear(6, 3), FEATURES, CLASSES),
    "perceptron": (lambda: nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3)), FEATURES, CLASSES),
    "plain convolution": (lambda: network(nn.ReLU(inplace=True), nn.MaxPool2d(2)), IMAGES, CLASSES),
    "group norm": (lambda: network(nn.GroupNorm(2, 4), nn.SiLU(), nn.AvgPool2d(2)), IMAGES, CLASSES),
    "layer norm": (lambda: network(nn.LayerNorm([4, 8, 8]), nn.LeakyReLU()), IMAGES, CLASSES),
    "instance norm": (lambda: network(nn.InstanceNorm2d(4, affine=True), nn.ELU()), IMAGES, CLASSES),
    "frozen batch norm": (lambda: network(nn.BatchNorm2d(4)).eval(), IMAGES, CLASSES),
    "root mean square norm": (lambda: nn.Sequential(nn.RMSNorm(6), nn.Linear(6, 3)), FEATURES, CLASSES),
    "adaptive pooling": (lambda: network(nn.AdaptiveAvgPool2d(2), nn.AdaptiveMaxPool2d(1)), IMAGES, CLASSES),
    "reflections and means": (
        lambda: nn.Sequential(
            nn.ReflectionPad2d(1),
            nn.utils.parametrizations.weight_norm(nn.Conv2d(2, 4, 3)),
            nn.Softmax(1),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(64, 3),
        ),
        IMAGES,
        CLASSES,
    ),
    "upsampling": (lambda: network(nn.Upsample(scale_factor=2, mode="bilinear"), nn.MaxPool2d(4)), IMAGES, CLASSES),
    "recurrence": (lambda: Recurrent(nn.RNN), SERIES, CLASSES),
    "gated recurrence": (lambda: Recurrent(nn.GRU), SERIES, CLASSES),
    "long memory": (lambda: Recurrent(nn.LSTM), SERIES, CLASSES),
    "attention": (lambda: nn.Sequential(nn.Linear(3, 4), Attention()), SERIES, CLASSES),
    "transformer": WORDS,
    "transformer that was set to evaluate": (lambda: Transformer().eval(), TOKENS, CLASSES),
    "adapter": (Adapted, FEATURES, CLASSES),
    "several inputs": (Several, (FEATURES, TOKENS), CLASSES),
    "inputs by name": (Named, BY_NAME, CLASSES),
    "segmentation": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1)),
        IMAGES,
        PIXELS,
    ),
    "one of each class": (lambda: nn.Linear(6, 3), FEATURES, CLASSES),
    "regression": (lambda: nn.Linear(6, 2), FEATURES, FEATURES[:, :2] * 1.0),
    "float64": (lambda: nn.Linear(6, 3).double(), FEATURES, CLASSES),
    "bfloat16": (lambda: nn.Linear(6, 3).bfloat16(), FEATURES, CLASSES),
}
LOSSES = {
    "inputs by name": lambda output, target: CROSS_ENTROPY(output["logits"], target, label_smoothing=0.1),
    "one of each class": lambda output, target: (output - F.one_hot(target, num_classes=3)).square().sum(),
    "reflections and means": nn.CrossEntropyLoss(weight=torch.ones(3), reduction="sum"),
    "regression": F.smooth_l1_loss,
}
RIGHT = {
    "inputs by name": lambda output, target: (output["logits"].argmax(1) == target).float(),
    "segmentation": lambda output, target: (output.argmax(1) == target).float().mean((1, 2)),
    "regression": lambda output, target: ((output - target).abs() < 1.0).float().mean(1),
}
BY_ANOTHER_ROUTE = {"root mean square norm", "long memory"}


def ordinary(name):
    make, inputs, targets = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        module = make()
        if any(isinstance(one, nn.LazyLinear) for one in module.modules()):
            module(inputs[:1])
    gradients = ModuleGradients(module, LOSSES.get(name, CROSS_ENTROPY))
    measure = ModuleMeasure(gradients, RIGHT.get(name))
    SampleTrials(gradients)(made_up_like(inputs, targets, classes=3), measure=measure)
    return gradients, measure, inputs, targets


def picked(values, chosen):
    return mapped(values, lambda part: part[chosen])


@pytest.mark.few_cases(8)
@pytest.mark.parametrize("name", MODELS)
def test_ordinary_model_gives_the_bits_of_its_own_code(name):
    gradients, measure, inputs, targets = ordinary(name)
    point = [p.detach().float().numpy() for p in gradients.module.parameters() if p.requires_grad]
    point = [p.astype(np.float64) for p in point] if name == "float64" else point
    trained = gradients.trained(point)
    rows, measured = gradients(point, (inputs, targets)), measure(point, (inputs, targets))
    for i in range(3):
        one = picked(inputs, slice(i, i + 1)), targets[i : i + 1]
        row = gradients(point, one)[0]
        converted = picked(inputs, i), targets[i]
        if name in ("float64", "bfloat16"):
            converted = converted[0].to(gradients.dtype), converted[1]
        own = gradients.eager(trained, *mapped(converted, torch.clone))
        own = torch.cat([values.flatten().to(torch.float64) for values in own.values()]).numpy()
        assert row.astype(np.float64) == pytest.approx(own, rel=1e-4, abs=2e-2 if name == "bfloat16" else 1e-6)
        if name not in BY_ANOTHER_ROUTE:
            assert row.astype(np.float64).tobytes() == own.tobytes()
        assert rows[i] == pytest.approx(row, rel=1e-4, abs=2e-2 if name == "bfloat16" else 1e-5)
        assert measure(point, one).right[0] == pytest.approx(measured.right[i], abs=1e-6)


def test_ordinary_models_give_the_same_bits_in_a_process_of_their_own():
    process, checked = ReplayProcess(), []
    for name in ("group norm", "gated recurrence", "transformer", "inputs by name", "segmentation", "bfloat16"):
        gradients, measure, inputs, targets = ordinary(name)
        point = [p.detach().float().numpy() for p in gradients.module.parameters() if p.requires_grad]
        one = picked(inputs, slice(2, 3)), targets[2:3]
        checked.append((gradients, measure, point, one, gradients(point, one), measure(point, one)))
        for programs in gradients.of_records:
            for program in programs.programs:
                process.add(program)
    for gradients, measure, point, one, row, measured in checked:
        gradients.process = process
        assert gradients(point, one).tobytes() == row.tobytes()
        assert measure(point, one).right.tobytes() == measured.right.tobytes()
        with pytest.raises(InvalidRecordError):
            gradients(point, (picked(one[0], (slice(None), slice(0, 1))), one[1]))
    process.close()
