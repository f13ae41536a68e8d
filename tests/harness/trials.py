"""Examples to try a module on, of the shapes and types that a test's batch has."""

import torch
from murmurfl.clients.adapters.torch_checks import ORDINARY
from murmurfl.clients.adapters.torch_model import as_tensor, mapped


def made_up_like(inputs, targets, classes=2):
    """Ordinary ones; no value of the batch is looked at."""
    generator = torch.Generator().manual_seed(29)

    def made_up(number, like, is_target):
        values = as_tensor(like)
        shape = (1, *values.shape[1:])
        if values.is_floating_point():
            draw = torch.rand if is_target else torch.randn
            return draw(shape, generator=generator).to(values.dtype)
        if is_target:
            return torch.full(shape, number % classes).to(values.dtype)
        made = torch.randint(0, 2, shape, generator=generator)
        made.view(1, -1)[:, :1] = 1  # so that no mask hides all of a sample
        return made.to(values.dtype)

    return [
        (
            mapped(inputs, lambda part, i=i: made_up(i, part, False)),
            mapped(targets, lambda part, i=i: made_up(i, part, True)),
        )
        for i in range(ORDINARY)
    ]


class Held:
    """Samples in memory: a batch for a slice."""

    def __init__(self, inputs, targets):
        self.inputs, self.targets = inputs, targets

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, chosen):
        return self.inputs[chosen], self.targets[chosen]
