"""Which parts of a model train: flags that no state_dict has, and that a training may set after any step.

frozen      parameters without gradients
evaluated   modules in evaluation mode, such as norms whose statistics stay
"""

from collections.abc import Mapping, Sequence

from torch import nn


def read(model: nn.Module) -> dict[str, list[str]]:
    """Return what `put_back` takes: names alone."""
    return {
        "frozen": [name for name, one in model.named_parameters() if not one.requires_grad],
        "evaluated": [name for name, one in model.named_modules() if not one.training],
    }


def put_back(model: nn.Module, saved: Mapping[str, Sequence[str]]) -> None:
    """Set the flags of all parameters and modules."""
    frozen, evaluated = set(saved["frozen"]), set(saved["evaluated"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    for name, module in model.named_modules():
        # Not train(), which would set all that is in it.
        module.training = name not in evaluated
