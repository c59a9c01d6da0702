"""Blocks of a model: the modules that `dense.recompute` and `dense.offload` name, and parts of a sequence of layers.

A list of modules stands for each of them, since it is never called itself.
"""

import math
from collections.abc import Sequence
from typing import Literal

from torch import nn

from headrace.errors import SpecError
from headrace.trainer.models.layers import Mlp

MAX_NAMED = 40
"""Most names in a message."""


def blocks_of(model: nn.Module, names: Literal["all"] | Sequence[str], key: str) -> dict[str, nn.Module]:
    """The blocks by name, in the order of `names`; "all": every part of the model that has parameters.

    Raises SpecError, for this key of the spec, for a name that the model does not have, and for a block in another.
    """
    parts = dict(model.named_modules())
    found: dict[str, nn.Module] = {}
    if names == "all":
        names = [name for name, each in model.named_children() if any(True for _ in each.parameters())]
    for name in names:
        if not name or name not in parts:
            known = [each for each in parts if each]
            more = f" and {len(known) - MAX_NAMED} more" if len(known) > MAX_NAMED else ""
            raise SpecError(f'the model has no block "{name}"; known: {", ".join(known[:MAX_NAMED])}{more}', key)
        found |= _called(name, parts[name])
    owners: dict[nn.Module, str] = {}
    for name, block in found.items():
        for each in block.modules():
            if each in owners:
                raise SpecError(f'"{name}" and "{owners[each]}" have modules in common: remove one', key)
            owners[each] = name
    return found


def _called(name: str, module: nn.Module) -> dict[str, nn.Module]:
    """The module, or those that a list of modules holds."""
    if not isinstance(module, nn.ModuleList | nn.ModuleDict):
        return {name: module}
    found: dict[str, nn.Module] = {}
    for number, each in module.named_children():
        found |= _called(f"{name}.{number}", each)
    return found


def layers_of(block: nn.Module) -> list[nn.Module] | None:
    """The layers that a block runs one after another, also those of sequences in it; None for any other block."""
    if not isinstance(block, nn.Sequential) or type(block).forward not in (nn.Sequential.forward, Mlp.forward):
        return None
    return [layer for each in block for layer in layers_of(each) or [each]]


def parts_of(layers: Sequence[nn.Module], num_parts: int | None) -> list[Sequence[nn.Module]]:
    """Neighbouring layers in so many parts, or in fewer; a part begins with a layer that has parameters.

    None: as many as the root of the number of such layers, which keeps least (Chen et al. 2016).
    """
    begins = [at for at, each in enumerate(layers) if any(True for _ in each.parameters())]
    wanted = min(len(begins), num_parts or math.ceil(math.sqrt(len(begins)))) if begins else 1
    edges = [0, *(begins[len(begins) * number // wanted] for number in range(1, wanted)), len(layers)]
    return [layers[begin:end] for begin, end in zip(edges, edges[1:], strict=False)]
