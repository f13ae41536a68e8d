"""What a module remembers, and how it forgets it: every sample of a real machine meets the module as it was.

A module that writes to a buffer, or to an attribute of its own, carries one sample's data to the next one's gradient.
What such a sample's own gradient becomes matters little. That the gradients after it are another matters much: one
sample would move all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class ModuleState:
    """The tensors, containers and attributes of a module and of its loss, and the way back to them.

    Parameters
    ----------
    module : torch.nn.Module
    loss : Any
        A function, or an object, which may remember something as well.

    Notes
    -----
    **Formal guarantees.** None of its own. After :meth:`restore` everything is as it was when it was called first:
    which buffers and frozen parameters there are, attributes, and what is in those that are lists, sets and mappings;
    with ``values`` what is in tensors as well. What PyTorch draws at random is drawn anew from where it was, for how
    much a sample draws may depend on it. What is behind them deeper than that, or outside of module and loss, is not
    looked at.
    """

    def __init__(self, module: torch.nn.Module, loss: Any) -> None:
        import torch

        self._module, self._loss = module, loss
        self._written = self._versions()
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] | None = None
        self._contents: list[tuple[Any, Any]] = []
        self._tensors: list[torch.Tensor] = []
        self._drawn_from = torch.default_generator.get_state()  # before a sample was read, which may draw as well
        self._copies: list[tuple[torch.Tensor, torch.Tensor, int]] | None = None

    def changed(self) -> list[str] | None:
        """The names of buffers and frozen parameters that were written to or exchanged; None if none were."""
        now = self._versions()
        if now == self._written:
            return None
        return [name for name, state in self._written.items() if now.get(name) != state]

    def restore(self, *, values: bool) -> None:
        """Put everything back as it was at the first call.

        Parameters
        ----------
        values : bool
            Whether what is in tensors may have changed, of which a copy is then kept. Within ``torch.func.grad`` nobody
            can write to a tensor that was there before.
        """
        import torch

        for now, before in self._kept_attributes():
            if len(now) != len(before) or any(now.get(name, now) is not value for name, value in before.items()):
                now.clear()
                now.update(before)
        for container, content in self._contents:
            if isinstance(container, list):
                container[:] = content
            else:
                container.clear()
                container.update(content)
        torch.default_generator.set_state(self._drawn_from)
        if values:
            self._restore_values()
        self._written = self._versions()

    def _kept_attributes(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """All attributes, as they are and as they were when this was called first."""
        import torch

        if self._attributes is None:
            self._attributes = [(vars(holder), dict(vars(holder))) for holder in self._holders()]
            found = [
                value for _, before in self._attributes for value in [*before.values(), *self._contents_of(before)]
            ]
            # What is trained is handed in anew for every sample, and tensors of inference cannot be written to.
            tensors = (value for value in found if isinstance(value, torch.Tensor))
            self._tensors = [one for one in tensors if not (one.requires_grad or one.is_inference())]
        return self._attributes

    def _restore_values(self) -> None:
        import torch

        if self._copies is None:
            unique = {id(one): one for one in self._tensors}.values()
            self._copies = [(one, one.detach().clone(), one._version) for one in unique]
        for number, (tensor, copy, version) in enumerate(self._copies):
            if tensor._version != version:
                with torch.no_grad():
                    tensor.copy_(copy)
                self._copies[number] = tensor, copy, tensor._version

    def _contents_of(self, attributes: dict[str, Any]) -> Iterator[Any]:
        """What is in the containers among some attributes, which are kept: a module's parameters and buffers too."""
        for container in attributes.values():
            if type(container) in (list, set):
                self._contents.append((container, type(container)(container)))
                yield from container
            elif isinstance(container, dict):
                self._contents.append((container, dict(container)))
                yield from container.values()

    def _holders(self) -> Iterator[Any]:
        """Whatever has attributes: the layers of the module, and the loss or its layers."""
        import torch

        seen: set[int] = set()
        for root in (self._module, getattr(self._loss, "__self__", self._loss)):
            for holder in root.modules() if isinstance(root, torch.nn.Module) else [root]:
                if isinstance(getattr(holder, "__dict__", None), dict) and id(holder) not in seen:
                    seen.add(id(holder))
                    yield holder

    def _versions(self) -> dict[str, tuple[int, int]]:
        """What is not trained: which tensor it is, and how often it was written to."""
        frozen = {name: values for name, values in self._module.named_parameters() if not values.requires_grad}
        return {
            name: (id(values), values._version)  # PyTorch's own count of writes, which autograd relies on
            for name, values in {**frozen, **dict(self._module.named_buffers())}.items()
        }
