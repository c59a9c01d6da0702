"""Checks the outputs of a model against the contract, above all those of a user's own module."""

from collections.abc import Mapping, Sequence

from torch import Tensor

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
