"""Checks of a model's module, above all of a user's own: its outputs, and whether it predicts otherwise in inference
mode than in training: dropout, BatchNorm, code that asks for the mode."""

from collections.abc import Mapping, Sequence
from types import CodeType, FunctionType

from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from headrace.errors import SpecError


def check_outputs(outputs: object, tasks: Sequence[str], num_samples: int) -> Mapping[str, Tensor]:
    """`outputs`, checked to hold a (B,) tensor for each task. Raises SpecError. Cheap enough for each step."""
    if not isinstance(outputs, Mapping):
        raise SpecError(f"the model returned a {type(outputs).__name__}; expected is {{task: logits}}", "model")
    for task in tasks:
        output = outputs.get(task)
        if not isinstance(output, Tensor):
            named = ", ".join(map(repr, outputs)) or "nothing"
            raise SpecError(f"the model returned no tensor for task {task!r}, but {named}", "model")
        if tuple(output.shape) != (num_samples,):
            raise SpecError(
                f"the model's {task!r} has shape {tuple(output.shape)}; expected is one value for each sample, "
                f"({num_samples},)",
                "model",
            )
    return outputs


FLAG = "training"
"""Attribute of a module that tells the mode."""


def depends_on_mode(model: nn.Module) -> bool:
    """Whether a module of `model`, or code of its class, reads the mode. Dropout with probability 0 does not count."""
    return any(_reads_mode(type(each)) for each in model.modules() if not _drops_nothing(each))


def _drops_nothing(module: nn.Module) -> bool:
    return isinstance(module, _DropoutNd) and module.p == 0


def _reads_mode(kind: type[nn.Module]) -> bool:
    own = kind.__mro__[: kind.__mro__.index(nn.Module)]
    functions = [each for cls in own for each in vars(cls).values() if isinstance(each, FunctionType)]
    return any(_names(function.__code__) for function in functions)


def _names(code: CodeType) -> bool:
    """Whether code, or a function within it, names the flag."""
    return FLAG in code.co_names or any(_names(each) for each in code.co_consts if isinstance(each, CodeType))
