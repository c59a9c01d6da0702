"""Traces the dense part of a model as ONNX, once per job; also the frozen copy that makes golden predictions.

The traced model has named inputs for each slot and one output per task:

    "<slot>"        pooled slot: float32 (B, W), its pooled row; a sequence: float32 (B, L, W), zeros after its end
    "<slot>.mask"   of a sequence: bool (B, L), true where there is a sign
    "<slot>"        dense slot: float32 (B, size)
    "<task>"        output: (B,), a probability for loss "bce", a value for "mse", that of the best class for "softmax"
    "<output>"      further outputs that the model names in `served`: (B, ...)

A trace is accepted only if it equals the module also with other weights and another number of samples.

Shapes: B samples, W weights of a row (the first-order weight, if any, then the vector), L max_len of a sequence.
"""

import copy
import io
import warnings
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from headrace.errors import BadInput, HeadraceError
from headrace.trainer.config import TaskSection
from headrace.trainer.exports.onnx_model import F32, PREFIX, OnnxModel, first_line, with_weights
from headrace.trainer.models.calibration import Calibration
from headrace.trainer.models.contract import Declared, Inputs, SequenceInput, Shape, SlotShape
from headrace.trainer.models.linear import NO_TABLE, use_table
from headrace.trainer.models.module_checks import check_outputs

OPSET = 18
"""Of ONNX, from December 2022, so that older runtimes accept it, too."""
SAMPLES_TRACED, SAMPLES_TRIED = 3, 5
TOLERANCE = 1e-4
"""Largest allowed difference of trace and module for random weights, relative for values above 1."""


class TraceFailed(HeadraceError):
    """The module cannot be converted to ONNX; exports do without it."""


def input_names(shape: Shape) -> list[str]:
    """Names of the inputs, in order."""
    sequences = [name for slot in shape.sequences for name in (slot.name, f"{slot.name}.mask")]
    return [slot.name for slot in shape.pooled] + sequences + [name for name, _ in shape.dense]


class ServedModel(nn.Module):
    """A model as a server calls it: one tensor per input, in the order of `input_names`."""

    def __init__(self, model: nn.Module, shape: Shape, tasks: Sequence[TaskSection]) -> None:
        super().__init__()
        self.model = model
        assert PREFIX == "model.", "the name of this attribute is part of the initializers' names"
        self._shape, self._tasks = shape, tasks

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Predictions, in the order of tasks, then what else is served."""
        named = dict(zip(input_names(self._shape), tensors, strict=True))
        inputs = _inputs(self._shape, named, tensors[0])
        outputs = self.model(inputs)
        predictions = predictions_of(self.model, outputs, self._tasks, inputs)
        return (*predictions.values(), *(outputs[name] for name in served(self.model)))


def _inputs(shape: Shape, named: Mapping[str, Tensor], any_input: Tensor) -> Inputs:
    """The model's inputs, as trainer.features.model_inputs makes them from a batch."""
    num_samples = any_input.shape[0]  # a traced number: it must not become an int

    def nothing(*sizes: int) -> Tensor:
        return torch.zeros((num_samples, *sizes))

    vectors = {slot.name: named[slot.name][:, int(slot.first_order) :] for slot in shape.pooled}
    first = [named[slot.name][:, 0] for slot in shape.pooled if slot.first_order]
    with_vectors = [vectors[slot.name] for slot in shape.pooled if slot.dim]
    same = len({slot.dim for slot in shape.pooled if slot.dim}) <= 1
    stacked = torch.stack(with_vectors, 1) if with_vectors and same else None if with_vectors else nothing(0, 0)
    sequences = {slot.name: _sequence(slot, named) for slot in shape.sequences}
    dense = [named[name] for name, _ in shape.dense]
    return Inputs(
        vectors,
        stacked,
        torch.stack(first, 1) if first else nothing(0),
        sequences,
        torch.cat(dense, 1) if dense else nothing(0),
    )


def _sequence(slot: SlotShape, named: Mapping[str, Tensor]) -> SequenceInput:
    rows_BLW, mask_BL = named[slot.name], named[f"{slot.name}.mask"]
    first_order_BL = rows_BLW[:, :, 0] if slot.first_order else torch.zeros_like(mask_BL, dtype=torch.float32)
    return SequenceInput(rows_BLW[:, :, int(slot.first_order) :], first_order_BL, mask_BL)


def predictions_of(
    model: nn.Module, outputs: object, tasks: Sequence[TaskSection], inputs: Inputs
) -> dict[str, Tensor]:
    """(B,) probabilities or values by task, from what `model` returned."""
    calibration = Calibration.of(model)
    given = check_outputs(outputs, [task.name for task in tasks], inputs.num_samples)
    return {
        task.name: torch.sigmoid(calibration(task.name, given[task.name].float()))
        if task.loss == "bce"
        else given[task.name].float()
        for task in tasks
    }


class FrozenModel:
    """A copy of a model on the CPU, in inference mode. The job's own model is not touched."""

    def __init__(self, model: nn.Module, tasks: Sequence[TaskSection]) -> None:
        """Raises TraceFailed where the module cannot be copied."""
        try:
            self.model = copy.deepcopy(whole_of(model)).cpu().eval()
        except Exception as error:  # noqa: BLE001  # a user's module may raise anything
            raise TraceFailed(f"the module cannot be copied: {first_line(error)}") from error
        use_table(self.model, NO_TABLE)  # what is exported depends on weights alone
        self._tasks = tasks

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load weights and buffers, by their names in the module's state."""
        for name, value in self.model.state_dict(keep_vars=True).items():
            value.detach().copy_(tensors[name])

    def predict(self, inputs: Inputs) -> dict[str, F32]:
        """(B,) predictions by task. Raises TraceFailed where the module fails."""
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                found = predictions_of(self.model, self.model(inputs), self._tasks, inputs)
        except Exception as error:  # noqa: BLE001  # likewise
            raise TraceFailed(f"the module cannot predict in inference mode: {first_line(error)}") from error
        return {name: value.numpy() for name, value in found.items()}


def served(model: nn.Module) -> tuple[str, ...]:
    """Names of the outputs of an export beside the tasks."""
    return tuple(Declared.of(model).served)


def whole_of(model: nn.Module) -> nn.Module:
    """A model with all of its parameters, where it has divided them over ranks; else itself."""
    declared = Declared.of(model)
    return model if declared.class_rows is None or declared.whole is None else declared.whole()


def trace(model: nn.Module, shape: Shape, tasks: Sequence[TaskSection]) -> bytes:
    """A template for trainer.exports.onnx_model.with_weights; its weights mean nothing. Raises TraceFailed with the
    reason."""
    outputs = [*(task.name for task in tasks), *served(model)]
    names = [*input_names(shape), *outputs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise TraceFailed(f"two inputs or outputs would be named {twice[0]!r}; give the slot or the task another name")
    module = ServedModel(FrozenModel(model, tasks).model, shape, tasks).eval()
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the check below covers what the tracer warns of
            _disturb(module, 1)
            template = _traced(module, shape, outputs)
            _disturb(module, 2)
            _check(template, module, shape, outputs)
    except HeadraceError as error:
        raise TraceFailed(str(error)) from error
    except Exception as error:  # noqa: BLE001  # a user's module, or the tracer, may raise anything
        raise TraceFailed(f"the module cannot be traced: {first_line(error)}") from error
    return template


def _traced(served: ServedModel, shape: Shape, outputs: Sequence[str]) -> bytes:
    """Trace with torch's older exporter: the newer one needs onnxscript and folds weights into constants."""
    inputs, file = input_names(shape), io.BytesIO()
    torch.onnx.export(
        served,
        tuple(_examples(shape, SAMPLES_TRACED).values()),
        file,  # type: ignore[arg-type]  # it accepts any writable object
        input_names=inputs,
        output_names=list(outputs),
        dynamic_axes={name: {0: "B"} for name in (*inputs, *outputs)},
        opset_version=OPSET,
        do_constant_folding=False,
        training=torch.onnx.TrainingMode.PRESERVE,  # the model is frozen; EVAL would also fuse layers
        dynamo=False,
    )
    return file.getvalue()


def _check(template: bytes, served: ServedModel, shape: Shape, outputs: Sequence[str]) -> None:
    """Raise TraceFailed unless the template with the module's present weights predicts as the module does."""
    tensors = {name: value.numpy() for name, value in served.model.state_dict().items()}
    examples = _examples(shape, SAMPLES_TRIED)
    wanted = served(*examples.values())
    try:
        found = OnnxModel(with_weights(template, tensors)).run(
            {name: value.numpy() for name, value in examples.items()}
        )
    except BadInput as error:
        raise TraceFailed(f"the trace does not run on another number of samples: {error}") from error
    for name, value in zip(outputs, wanted, strict=True):
        allowed = TOLERANCE * np.maximum(1, np.abs(value.numpy()))
        if found[name].shape != tuple(value.shape) or not (np.abs(found[name] - value.numpy()) <= allowed).all():
            raise TraceFailed(
                f"the trace and the module predict {name!r} differently: its forward depends on values or on the "
                "number of samples, or changes weights before it uses them; use torch operations only"
            )


def _disturb(served: ServedModel, seed: int) -> None:
    """Change all weights so that no two tensors are equal: the tracer would merge equal ones. Weights that are with
    other ranks (trainer.dense.block_buffers) are no numbers here."""
    generator = torch.Generator().manual_seed(seed)
    parameters = {name for name, _ in served.model.named_parameters(remove_duplicate=False)}
    for name, value in served.model.state_dict().items():
        if value.is_floating_point():  # buffers only grow: those of normalization must stay above 0
            draw = torch.randn if name in parameters else torch.rand
            value.nan_to_num_().add_(0.1 * draw(value.shape, generator=generator).to(value.dtype))


def _examples(shape: Shape, num_samples: int) -> dict[str, Tensor]:
    """Random inputs."""
    generator = torch.Generator().manual_seed(num_samples)

    def uniform(*sizes: int) -> Tensor:
        return torch.rand((num_samples, *sizes), generator=generator) - 0.5

    found = {slot.name: uniform(int(slot.first_order) + slot.dim) for slot in shape.pooled}
    for slot in shape.sequences:
        mask_BL = torch.arange(slot.max_len)[None, :] < 1 + torch.arange(num_samples)[:, None] % slot.max_len
        found[slot.name] = uniform(slot.max_len, int(slot.first_order) + slot.dim) * mask_BL.unsqueeze(2)
        found[f"{slot.name}.mask"] = mask_BL
    return found | {name: uniform(size) for name, size in shape.dense}
