"""Models of transformers and peft: captured with PyTorch's programs, with the loss that they compute themselves."""

import numpy as np
import pytest
from murmurfl.clients import Label, Part, Schema, private_client_app, trainable_arrays
from murmurfl.clients.adapters.per_sample_gradients import CarefulGradients
from murmurfl.clients.records.client_records import Records, items_of
from murmurfl.privacy import ConfigurationError

from tests.harness.errors import raises

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
WORDS, LONG = 50, 8
GENERATOR = np.random.Generator(np.random.Philox(key=40))
LENGTHS = np.array([8, 5, 3, 8])
MASKS = (np.arange(LONG) < LENGTHS[:, None]).astype(np.int64)
TOKENS = GENERATOR.integers(1, WORDS, size=(4, LONG)) * MASKS
TEXT = Part(kind="sequence", length=LONG, vocabulary=WORDS, padding=0, name="input_ids")
MASK = Part(kind="sequence", length=LONG, vocabulary=2, padding=0, name="attention_mask")
CLASSES = Schema(inputs=(TEXT, MASK), label=Label(classes=2))
NEXT_WORD = Schema(inputs=(TEXT, MASK), label=Label(kind="integer", bounds=(0, WORDS - 1), shape=(LONG,)))


def bert(**changes):
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=LONG,
        **changes,
    )
    return transformers.BertForSequenceClassification(config)


def distilbert(**changes):
    config = transformers.DistilBertConfig(
        vocab_size=WORDS, dim=16, n_layers=1, n_heads=2, hidden_dim=16, max_position_embeddings=LONG, **changes
    )
    return transformers.DistilBertForSequenceClassification(config)


def gpt2(**changes):
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=16, n_layer=1, n_head=2, n_positions=LONG, bos_token_id=1, eos_token_id=1, **changes
    )
    return transformers.GPT2LMHeadModel(config)


def lora():
    return peft.get_peft_model(bert(), peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"]))


def made(make, schema, targets, **settings):
    """An app of a model that is made from a seed, in inference."""
    batch = [({"input_ids": t, "attention_mask": m}, y) for t, m, y in zip(TOKENS, MASKS, targets, strict=True)]
    settings = {"epsilon": 4.0, "rounds": 2, "schema": schema, **settings}
    return private_client_app(lambda: make().eval(), samples=batch, **settings)


def own_gradients(module, targets):
    """By autograd, with the loss that the model computes."""
    rows = []
    for tokens, mask, target in zip(*map(torch.as_tensor, (TOKENS, MASKS, targets)), strict=True):
        target = target if target.ndim == 0 else torch.where(mask == 1, target, -100)
        loss = module(input_ids=tokens[None], attention_mask=mask[None], labels=target[None]).loss
        trained = [one for one in module.parameters() if one.requires_grad]
        parts = torch.autograd.grad(loss, trained, allow_unused=True)
        rows.append(
            torch.cat([(torch.zeros_like(p) if g is None else g).ravel() for p, g in zip(trained, parts, strict=True)])
        )
    return torch.stack(rows).numpy()


MODELS = {
    "bert": (bert, CLASSES),
    "gpt2": (gpt2, NEXT_WORD),
    "lora": (lora, CLASSES),
    "distilbert": (distilbert, CLASSES),
    "bert with eager attention": (lambda: bert(attn_implementation="eager"), CLASSES),
    "gpt2 with eager attention": (lambda: gpt2(attn_implementation="eager"), NEXT_WORD),
}


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("kind", MODELS)
def test_a_clients_gradients_are_those_of_the_models_own_loss(kind):
    make, schema = MODELS[kind]
    targets = np.arange(4) % 2 if schema is CLASSES else TOKENS
    gradients = made(make, schema, targets).model.gradients
    start = [array.numpy() for array in trainable_arrays(gradients.module).values()]
    batch = {"input_ids": TOKENS, "attention_mask": MASKS}, targets
    expected = own_gradients(gradients.module, targets)
    assert gradients(start, batch) == pytest.approx(expected, abs=2e-5)
    gradients.isolate()
    assert gradients(start, batch) == pytest.approx(expected, abs=2e-5)
    assert np.abs(expected).max() > 1e-3
    gradients.process.close()


def test_adapters_alone_are_trained_and_sent_and_what_is_frozen_is_a_constant():
    app = made(lora, CLASSES, np.arange(4) % 2)
    assert all("lora_" in name or "classifier" in name for name in app.model.names)
    (program,) = app.model.gradients.captured.programs
    names = [name for name, one in app.model.gradients.module.named_parameters() if not one.requires_grad]
    assert len(program.constants) >= len(names) > 10


def test_padding_changes_no_gradient_where_a_mask_hides_it():
    app = made(bert, CLASSES, np.arange(4) % 2)
    start = [array.numpy() for array in trainable_arrays(app.model.gradients.module).values()]
    other = np.where(MASKS == 1, TOKENS, 7)
    rows = [
        app.model.gradients(start, ({"input_ids": tokens, "attention_mask": MASKS}, np.arange(4) % 2))
        for tokens in (TOKENS, other)
    ]
    # All but the gradient of the words that are hidden, whose embeddings have none in either.
    assert rows[0] == pytest.approx(rows[1], abs=1e-6)


def test_a_measure_reads_the_logits():
    app = made(bert, CLASSES, np.arange(4) % 2, evaluation=0.1)
    module = app.model.gradients.module
    start = [array.numpy() for array in trainable_arrays(module).values()]
    found = app.model.measure(None)(start, ({"input_ids": TOKENS, "attention_mask": MASKS}, np.arange(4) % 2))
    with torch.no_grad():
        logits = module(input_ids=torch.as_tensor(TOKENS), attention_mask=torch.as_tensor(MASKS)).logits
    assert found.right.tolist() == (logits.argmax(1).numpy() == np.arange(4) % 2).astype(float).tolist()


def test_what_draws_at_random_is_refused_and_the_remedies_work():
    samples = [({"input_ids": t, "attention_mask": m}, 0) for t, m in zip(TOKENS, MASKS, strict=True)]
    with raises(ConfigurationError, "unsupported", "module", match=r"Dropout.*p=0, or \.eval\(\)"):
        private_client_app(bert, samples=samples, mu=1.0, rounds=1, schema=CLASSES)
    without = lambda: bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # noqa: E731
    private_client_app(without, samples=samples, mu=1.0, rounds=1, schema=CLASSES)


STRANGE = {
    "a token out of range": ([WORDS] * LONG, MASKS[0]),
    "a negative token": ([-1] * LONG, MASKS[0]),
    "too long": ([1] * (LONG + 1), [1] * (LONG + 1)),
    "fractions": ([0.5] * LONG, MASKS[0]),
    "a text": ("x" * 1_000_000, MASKS[0]),
    "no mask": ([1] * LONG, None),
    "all hidden": ([1] * LONG, [0] * LONG),
}


def test_a_strange_text_changes_its_own_contribution_alone():
    targets = np.arange(4) % 2
    gradients = made(bert, CLASSES, targets).model.gradients
    gradients.isolate()
    start = [array.numpy() for array in trainable_arrays(gradients.module).values()]

    def rows(strange=None):
        items = [({"input_ids": t, "attention_mask": m}, y) for t, m, y in zip(TOKENS, MASKS, targets, strict=True)]
        if strange is not None:
            items[2] = ({"input_ids": strange[0], "attention_mask": strange[1]}, 1)
        samples = Records(items_of(items), CLASSES, count=len(items))
        return CarefulGradients(gradients, samples)(start, np.arange(4))

    expected = rows()
    for name, strange in STRANGE.items():
        found = rows(strange)
        assert np.array_equal(np.delete(found, 2, 0), np.delete(expected, 2, 0)), name
        assert not np.array_equal(found[2], expected[2]), name
    gradients.process.close()
