"""Whether a model predicts otherwise in inference mode than in training: dropout, BatchNorm, code that asks for it."""

from types import CodeType, FunctionType

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

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
