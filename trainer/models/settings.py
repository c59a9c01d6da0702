"""Headrace's own models, each as its section of the job file: settings, what it needs of the slots, and its module.

A section is checked without torch, so a module is a file beside this one, which `build` imports. To add a model: its
section and its name in `OWN` here, and a file with its module.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator
from typing_extensions import override

from headrace.config import Section
from headrace.errors import SpecError
from headrace.trainer.models.contract import Shape, SlotShape

if TYPE_CHECKING:
    from torch import nn


def _several(value: object) -> object:
    """One name stands for a list of one. A list becomes a tuple here, as behind this function none is accepted."""
    if isinstance(value, list):
        return tuple(value)
    return (value,) if isinstance(value, str) else value


Width = Annotated[int, Field(ge=1, le=65_536)]
Hidden = Annotated[tuple[Width, ...], Field(max_length=64)]
Layers = Annotated[int, Field(ge=1, le=64)]
Dropout = Annotated[float, Field(ge=0, lt=1)]
SlotName = Annotated[str, Field(min_length=1, max_length=128)]
"""Each section refuses a name that no slot has, so such a key holds no other text."""
SlotNames = Annotated[tuple[SlotName, ...], BeforeValidator(_several), Field(max_length=1024)]


Need = Callable[[Shape, str], None]
"""A requirement on the slots, called with the shape and the name of the model. Raises SpecError, which names the slot
or key and says how to change it."""


class ModelSettings(Section):
    """The section [model.settings] of a model that has a name, and what the model says of itself without torch."""

    module: ClassVar[str]
    """Its module, as "file:Class" in this folder, which is imported when it is built. A model of a package of others
    overrides `build` instead."""
    needs: ClassVar[tuple[Need, ...]] = ()
    """Its requirements on the slots."""
    has_tower: ClassVar[bool] = False
    """Whether its module has a `tower` (trainer.models.contract)."""
    of_classes: ClassVar[bool] = False
    """Whether it is for one task with loss "softmax", which says which of `classes` is the right one."""

    def check(self, shape: Shape, name: str) -> None:
        """Raise SpecError, with the key, if the slots do not fit. `name`: that of the model."""
        for need in self.needs:
            need(shape, name)

    def build(self, shape: Shape) -> "nn.Module":
        """The module, for slots that `check` took."""
        file, _, name = self.module.partition(":")
        module: nn.Module = getattr(import_module(f"{__package__}.{file}"), name)(shape, self)
        return module


# -- requirements of several models


def some_slot(shape: Shape, model: str) -> None:
    """Require a slot to learn from."""
    if not shape.pooled and not shape.sequences and not shape.dense_size:
        raise SpecError(f"{model} needs a sparse or dense slot to learn from", "slots")


def some_values(shape: Shape, model: str) -> None:
    """Require a vector or a dense value."""
    if not sum(slot.dim for slot in shape.pooled + shape.sequences) + shape.dense_size:
        raise SpecError(
            f"{model} needs vectors or dense values: there is no dense slot and every table has dim = 0", "model.name"
        )


def vectors_of_one_length(shape: Shape, model: str) -> None:
    """Require sparse slots whose vectors all have one length; a slot with dim = 0 has a first-order weight alone."""
    slots = shape.pooled + shape.sequences
    if not slots:
        raise SpecError(f"{model} needs at least one sparse slot", "model.name")
    first = next((slot for slot in slots if slot.dim), slots[0])
    if other := next((slot for slot in slots if slot.dim not in (0, first.dim)), None):
        raise SpecError(
            f"{model} needs vectors of one length: slot {first.name!r} has dim {first.dim}, slot {other.name!r} "
            f"{other.dim}; give their tables the same dim",
            "model.name",
        )
    if not first.dim:
        raise SpecError(
            f"{model} needs vectors: the table of slot {first.name!r} has dim = 0; use lr, or raise it", "model.name"
        )


def first_order(shape: Shape, model: str) -> None:
    """Require first-order weights for every sparse slot: a linear model reads nothing else."""
    missing = [repr(slot.name) for slot in shape.pooled + shape.sequences if not slot.first_order]
    if missing:
        raise SpecError(
            f"{model} reads first-order weights, and the tables of slots {', '.join(missing)} have none; "
            "set first_order = true",
            "model.name",
        )


def two_tasks(shape: Shape, model: str) -> None:
    """Require two tasks: the click, then the click with a conversion."""
    if len(shape.tasks) != 2:  # noqa: PLR2004
        raise SpecError(
            f"{model} needs two tasks, the click and then the click with a conversion; there are {len(shape.tasks)}",
            "model.name",
        )


# -- slots that settings name


def without(shape: Shape, sequences: Sequence[SlotShape]) -> Shape:
    """The shape without these sequences."""
    names = {slot.name for slot in sequences}
    return replace(shape, sequences=tuple(slot for slot in shape.sequences if slot.name not in names))


def width_of(shape: Shape) -> int:
    """Number of values of all slots, side by side."""
    return sum(slot.dim for slot in shape.pooled + shape.sequences) + shape.dense_size


def _part(shape: Shape, names: set[str], *, inside: bool) -> Shape:
    def pick(slots: tuple[SlotShape, ...]) -> tuple[SlotShape, ...]:
        return tuple(slot for slot in slots if (slot.name in names) == inside)

    dense = tuple((name, size) for name, size in shape.dense if (name in names) == inside)
    return replace(shape, pooled=pick(shape.pooled), sequences=pick(shape.sequences), dense=dense)


def _target(shape: Shape, model: str, name: str | None) -> SlotShape:
    if name is None:
        raise _refusal(f'{model} needs the slot of the item that is judged: target = "article"', "target")
    target = _named(shape.pooled, name, "target", "a sparse slot with pooling")
    _has_vector(target, model, "target")
    return target


def _sequences(shape: Shape, model: str) -> tuple[SlotShape, ...]:
    found = tuple(slot for slot in shape.sequences if slot.dim)
    if not found:
        raise _refusal(f'{model} needs a sequence: a slot with pooling = "none" and vectors', "sequence")
    return found


def _one_length(target: SlotShape, sequence: SlotShape, model: str) -> None:
    if target.dim != sequence.dim:
        raise _refusal(
            f"{model} needs vectors of one length: slot {target.name!r} has dim {target.dim}, slot {sequence.name!r} "
            f"{sequence.dim}; give their tables the same dim",
            "sequence",
        )


def _has_vector(slot: SlotShape, model: str, key: str) -> None:
    if not slot.dim:
        raise _refusal(f"{model} needs vectors: the table of slot {slot.name!r} has dim = 0", key)


def _named(slots: Sequence[SlotShape], name: str, key: str, kind: str) -> SlotShape:
    found = next((slot for slot in slots if slot.name == name), None)
    if found is None:
        raise _refusal(f"{name!r} is not {kind}; there are: {_listed(slots)}", key)
    return found


def _known(shape: Shape, names: Sequence[str], key: str) -> None:
    known = [slot.name for slot in shape.pooled + shape.sequences] + [name for name, _ in shape.dense]
    if missing := next((name for name in names if name not in known), None):
        raise _refusal(f"{missing!r} is no sparse or dense slot; there are: {', '.join(known)}", key)


def _listed(slots: Sequence[SlotShape]) -> str:
    return ", ".join(repr(slot.name) for slot in slots) or "none"


def _refusal(message: str, key: str) -> SpecError:
    return SpecError(message, f"model.settings.{key}")


# -- the models


class LrSettings(ModelSettings):
    """lr has none."""

    module = "fm:LogisticRegression"
    needs = (some_slot, first_order)


class FmSettings(ModelSettings):
    """fm has none."""

    module = "fm:FactorizationMachine"
    needs = (first_order, vectors_of_one_length)


class PerceptronSettings(ModelSettings):
    """Settings of every model with a multi-layer perceptron."""

    hidden: Hidden = (128, 64)
    """Widths of the layers, each followed by ReLU."""
    dropout: Dropout = 0.0
    """Share of each layer's outputs that is dropped in training, also in the predictions before learning."""


class DeepSettings(PerceptronSettings):
    """Settings of models whose tasks share a perceptron."""

    towers: Hidden = ()
    """Widths of each task's own layers, on top of the shared ones."""


class WideDeepSettings(DeepSettings):
    """wide_deep."""

    module = "wide_deep:WideDeep"
    needs = (some_values,)
    has_tower = True


class DeepFmSettings(DeepSettings):
    """deepfm."""

    module = "fm:DeepFm"
    needs = (vectors_of_one_length,)
    has_tower = True


class DeepCrossingSettings(DeepSettings):
    """deep_crossing."""

    module = "deep_crossing:DeepCrossing"
    needs = (some_values,)
    has_tower = True
    hidden: Hidden = (128, 128)
    """Inner widths of the residual units, one unit each."""


class DcnSettings(DeepSettings):
    """dcn."""

    module = "dcn:Dcn"
    needs = (some_values,)
    cross_layers: Layers = 2
    """Number of cross layers: the highest degree of interactions minus one."""


class DcnV2Settings(DcnSettings):
    """dcn_v2."""

    module = "dcn:DcnV2"
    low_rank: Width | None = None
    """Rank of each cross layer's matrix; full unless set."""
    structure: Literal["parallel", "stacked"] = "parallel"
    """"parallel": cross and deep part side by side; "stacked": the deep part reads the output of the cross part."""


class DlrmSettings(DeepSettings):
    """dlrm."""

    module = "dlrm:Dlrm"
    needs = (vectors_of_one_length,)
    bottom: Hidden = (64,)
    """Widths of the layers for dense values, without the last one, which has the length of the vectors."""


class DinSettings(DeepSettings):
    """din."""

    module = "din:Din"
    needs = (some_values,)
    target: SlotName | None = None
    """Sparse slot with the item that is judged: it is compared with each item of the sequences. Required."""
    sequence: SlotNames = ()
    """Sequence slots that are compared with it; all of them unless set. The others enter as their mean."""
    attention: Hidden = (36,)
    """Widths of the layers of the activation unit, each followed by PReLU."""
    softmax: bool = False
    """Whether the weights of a sequence sum to 1. The paper leaves them as they are: many similar items weigh more."""

    @override
    def check(self, shape: Shape, name: str) -> None:
        super().check(shape, name)
        self.slots(shape)

    def slots(self, shape: Shape) -> tuple[SlotShape, tuple[SlotShape, ...]]:
        """The target, and the sequences it is compared with."""
        target, sequences = _target(shape, "din", self.target), _sequences(shape, "din")
        names = self.sequence or tuple(slot.name for slot in sequences)
        attended = tuple(_named(sequences, name, "sequence", 'a slot with pooling = "none"') for name in names)
        for slot in attended:
            _one_length(target, slot, "din")
        return target, attended


class SasrecSettings(DeepSettings):
    """sasrec."""

    module = "sasrec:Sasrec"
    needs = (some_values,)
    target: SlotName | None = None
    """Sparse slot with the item that is judged. Required."""
    sequence: SlotName | None = None
    """Sequence slot that the blocks read; the only one unless set. Others enter as their mean."""
    newest: Literal["last", "first"] = "last"
    """At which end of the sequence the newest item is."""
    block: Literal["sasrec", "hstu"] = "sasrec"
    """"sasrec": softmax attention, then a perceptron; "hstu": attention without softmax, and a gate."""
    blocks: Annotated[int, Field(ge=1, le=32)] = 2
    """Number of blocks, one after another."""
    attention_heads: Annotated[int, Field(ge=1, le=64)] = 1
    """Parts of the vectors that attend by themselves; it must divide their length."""

    @override
    def check(self, shape: Shape, name: str) -> None:
        super().check(shape, name)
        self.slots(shape)

    def slots(self, shape: Shape) -> tuple[SlotShape, SlotShape]:
        """The target, and the sequence that the blocks read."""
        target, sequences = _target(shape, "sasrec", self.target), _sequences(shape, "sasrec")
        if self.sequence is None and len(sequences) > 1:
            raise _refusal(f"sasrec reads one sequence: name it, as {_listed(sequences)} are there", "sequence")
        name = self.sequence or sequences[0].name
        sequence = _named(sequences, name, "sequence", 'a slot with pooling = "none"')
        _one_length(target, sequence, "sasrec")
        if sequence.dim % self.attention_heads:
            heads = self.attention_heads
            raise _refusal(f"{heads} does not divide {sequence.dim}, the dim of slot {name!r}", "attention_heads")
        return target, sequence


class TwoTowerSettings(PerceptronSettings):
    """two_tower."""

    module = "two_tower:TwoTower"
    needs = (some_values,)
    item: SlotNames = ()
    """Slots of the item; the first one, a sparse slot, tells items apart. All other slots are the user's. Required."""
    dim: Width = 32
    """Length of the vectors of users and items."""
    temperature: Annotated[float, Field(gt=0, le=100)] = 0.1
    """Cosines of the two vectors are divided by it."""
    softmax: Annotated[float, Field(ge=0, le=1e6)] = 1.0
    """Weight of the in-batch softmax over items, beside the loss of the first task; 0: no such loss."""
    correct_frequency: bool = True
    """Whether the softmax is corrected for items that come often, by the logarithm of their share of the stream."""
    frequency_buckets: Annotated[int, Field(ge=16, le=1 << 24)] = 1 << 16
    """Counters of that share. Items that fall into one counter count as one; each counter is 4 bytes of the model."""
    frequency_memory: Annotated[int, Field(ge=1000, le=10**7)] = 10**6
    """Number of samples over which the share is taken: a sample weighs less with each one after it."""
    popularity: Annotated[int, Field(ge=10, le=10**7)] | None = None
    """Number of positive samples over which the popularity of items is taken: its logarithm is added to their scores
    where items are retrieved. A sample weighs less with each one after it. The softmax is then not corrected for items
    that come often. Unset: the vectors of items are all there is."""
    popularity_weight: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Weight of that logarithm. 1 is right for towers that have learnt all there is; of young or noisy ones, more."""
    cached: Annotated[int, Field(ge=0, le=1 << 20)] = 0
    """Items of the samples before a batch that are candidates of the softmax, too; 0: those of the batch alone."""
    recall_at: Annotated[tuple[Annotated[int, Field(ge=1, le=65_536)], ...], Field(max_length=8)] = (10,)
    """Recall is measured in the batch: the share of clicks whose item is among the so many best items of the batch."""

    @override
    def check(self, shape: Shape, name: str) -> None:
        super().check(shape, name)
        self.sides(shape)
        if self.popularity is not None and not self.softmax:
            raise SpecError("popularity belongs to the softmax over items: set softmax above 0", "popularity")

    def sides(self, shape: Shape) -> tuple[Shape, Shape]:
        """The slots of the user, and those of the item in the order of the spec."""
        if not self.item:
            raise _refusal('two_tower needs the slots of the item: item = ["article"]', "item")
        _known(shape, self.item, "item")
        first = _named(shape.pooled, self.item[0], "item", "a sparse slot with pooling: it tells items apart")
        _has_vector(first, "two_tower", "item")
        item = set(self.item)
        user, items = _part(shape, item, inside=False), _part(shape, item, inside=True)
        if not width_of(user):
            raise SpecError(
                "two_tower needs slots of the user: vectors or dense values beside those of the item", "slots"
            )
        return user, items


class SkipGramSettings(ModelSettings):
    """skip_gram."""

    module = "skip_gram:SkipGram"
    needs = (vectors_of_one_length,)
    context: SlotName | None = None
    """Sparse slot with a word near the word that all other slots are of. Required."""
    negatives: Annotated[int, Field(ge=1, le=1024)] = 5
    """Number of negatives of a positive sample, drawn from the words near others in its batch."""
    power: Annotated[float, Field(ge=0, le=1)] = 0.75
    """A word is drawn in proportion to its share of the stream to this power."""
    frequency_buckets: Annotated[int, Field(ge=16, le=1 << 24)] = 1 << 16
    """Counters of that share. Words that fall into one counter count as one; each counter is 4 bytes of the model."""
    frequency_memory: Annotated[int, Field(ge=1000, le=10**7)] = 10**6
    """Number of samples over which the share is taken: a sample weighs less with each one after it."""

    @override
    def check(self, shape: Shape, name: str) -> None:
        super().check(shape, name)
        self.word(shape)

    def word(self, shape: Shape) -> Shape:
        """The slots of the word."""
        if self.context is None:
            raise _refusal('skip_gram needs the slot of a word near the word: context = "near"', "context")
        _named(shape.pooled, self.context, "context", "a sparse slot with pooling")
        word = _part(shape, {self.context}, inside=False)
        if shape.dense:
            raise SpecError(f"skip_gram reads no dense values: remove slot {shape.dense[0][0]!r}", "slots")
        if weights := [repr(slot.name) for slot in shape.pooled + shape.sequences if slot.first_order]:
            raise SpecError(
                f"skip_gram reads no first-order weights, and the tables of slots {', '.join(weights)} have some; set "
                "first_order = false",
                "model.name",
            )
        if not width_of(word):
            raise SpecError(f"skip_gram needs a slot of the word beside {self.context!r}", "slots")
        return word


class NextItemSettings(ModelSettings):
    """next_item."""

    module = "next_item:NextItem"
    needs = (some_values,)
    of_classes = True
    hidden: Hidden = (128, 64)
    """Widths of the hidden layers of the user's perceptron."""
    towers: Hidden = ()
    """Widths of the layers that each task but the first has for itself, after the hidden ones; none: a linear map."""
    classes: Annotated[int, Field(ge=2, le=1 << 24)]
    """Number of items. Labels are their numbers, from 0; an event with another label is rejected. Required."""
    dim: Width = 64
    """Length of the vectors of users and items."""
    mode: Literal["full", "divided", "sampled"] = "full"
    """"full": every trainer has all items, and gradients of all are summed. "divided": each trainer has an equal part
    of the items, with their state of the optimizer; the result is the same. "sampled": as "divided", and a step scores
    only the items of its samples and `samples` others."""
    samples: Annotated[int, Field(ge=1, le=1 << 24)] | None = None
    """With mode = "sampled", which needs it: number of items drawn for a step, on average, over all trainers."""
    sampler: Literal["uniform", "log_uniform"] = "uniform"
    """With mode = "sampled": how items are drawn. "uniform": all alike. "log_uniform": an item j in proportion to
    log((j + 2) / (j + 1)), for items that are numbered from the most common one on. Scores are corrected for it."""
    scale: Annotated[float, Field(gt=0, le=1000)] = 20.0
    """Cosines of users and items are multiplied by it."""
    margin1: Annotated[float, Field(ge=1, le=10)] = 1.0
    """The right item scores scale * (cos(margin1 * angle + margin2) - margin3): SphereFace's factor,"""
    margin2: Annotated[float, Field(ge=0, le=3)] = 0.0
    """ArcFace's angle, in radians,"""
    margin3: Annotated[float, Field(ge=0, le=2)] = 0.0
    """and CosFace's cosine."""
    recall_at: Annotated[tuple[Annotated[int, Field(ge=1, le=65_536)], ...], Field(max_length=8)] = (10,)
    """Numbers k: measure the share of samples whose item is among the k best of all items, before it is learnt."""
    without: SlotNames = ()
    """Slots that the model does not read, such as one with the item itself, which a history of the user needs."""
    top: Annotated[int, Field(ge=1, le=1000)] = 10
    """Number of items that exports and prediction jobs can tell for each sample."""

    @model_validator(mode="after")
    def _fits(self) -> "NextItemSettings":
        if (self.mode == "sampled") != (self.samples is not None):
            raise ValueError(
                'mode = "sampled" needs samples, the number of items drawn for a step'
                if self.samples is None
                else f'samples is for mode = "sampled", not for "{self.mode}": remove it'
            )
        if self.mode != "sampled" and self.sampler != "uniform":
            raise ValueError(f'sampler is for mode = "sampled", not for "{self.mode}": remove it')
        if self.mode == "sampled" and self.recall_at:
            raise ValueError('recall_at needs the scores of all items, and mode = "sampled" has a few: recall_at = []')
        if self.top > self.classes:
            raise ValueError(f"top = {self.top} is more than the {self.classes} items: lower it")
        return self

    @override
    def check(self, shape: Shape, name: str) -> None:
        super().check(shape, name)
        self.user(shape)

    def user(self, shape: Shape) -> Shape:
        """The slots that the model reads."""
        _known(shape, self.without, "without")
        user = _part(shape, set(self.without), inside=False)
        if not width_of(user):
            raise _refusal("the slots that are left have neither vectors nor dense values", "without")
        return user


class MmoeSettings(DeepSettings):
    """mmoe."""

    module = "mmoe:Mmoe"
    needs = (some_values,)
    experts: Annotated[int, Field(ge=1, le=256)] = 4
    """Number of perceptrons; each has the layers `hidden`."""


class EsmmSettings(PerceptronSettings):
    """esmm."""

    module = "esmm:Esmm"
    needs = (some_values, two_tasks)


class FinalMlpSettings(PerceptronSettings):
    """finalmlp."""

    module = "finalmlp:FinalMlp"
    needs = (some_values,)
    second_hidden: Hidden = (128, 64)
    """Widths of the layers of the second perceptron; `hidden` has those of the first."""
    bilinear_heads: Annotated[int, Field(ge=1, le=64)] = 1
    """Parts of the two outputs that are multiplied with each other; it must divide both widths."""
    gates: bool = True
    """Whether each perceptron weighs its inputs by gates of its own."""
    first_context: SlotNames = ()
    """Slots from which the gates of the first perceptron are computed; without any, all samples have the same gates."""
    second_context: SlotNames = ()
    """The same for the second perceptron."""
    gate_hidden: Hidden = (32,)
    """Widths of the layers between these slots and the gates."""

    @override
    def check(self, shape: Shape, name: str) -> None:
        super().check(shape, name)
        self.contexts(shape)

    def contexts(self, shape: Shape) -> tuple[Shape, Shape]:
        """The slots of the contexts of both perceptrons."""
        found = []
        for key, names in (("first_context", self.first_context), ("second_context", self.second_context)):
            if names and not self.gates:
                raise _refusal("it is of no use with gates = false", key)
            _known(shape, names, key)
            context = _part(shape, set(names), inside=True)
            if names and not width_of(context):
                raise _refusal("its slots have neither vectors nor dense values", key)
            found.append(context)
        for hidden in (self.hidden, self.second_hidden):
            width = hidden[-1] if hidden else width_of(shape)
            if width % self.bilinear_heads:
                raise _refusal(f"{self.bilinear_heads} does not divide {width}, the last width", "bilinear_heads")
        return found[0], found[1]


OWN: Mapping[str, type[ModelSettings]] = {
    "lr": LrSettings,
    "fm": FmSettings,
    "deepfm": DeepFmSettings,
    "wide_deep": WideDeepSettings,
    "deep_crossing": DeepCrossingSettings,
    "dcn": DcnSettings,
    "dcn_v2": DcnV2Settings,
    "dlrm": DlrmSettings,
    "finalmlp": FinalMlpSettings,
    "din": DinSettings,
    "sasrec": SasrecSettings,
    "two_tower": TwoTowerSettings,
    "skip_gram": SkipGramSettings,
    "mmoe": MmoeSettings,
    "esmm": EsmmSettings,
    "next_item": NextItemSettings,
}
"""Headrace's models, by the name that a job file gives."""
