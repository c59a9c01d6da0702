"""Settings of Headrace's own models: the keys of [model.settings].

This module does not import torch, so that a spec is checked without it. Each model is a file beside this one.
"""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from headrace.config import Section


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
"""trainer.models.slot_settings refuses a name that no slot has, so such a key holds no other text."""
SlotNames = Annotated[tuple[SlotName, ...], BeforeValidator(_several), Field(max_length=1024)]


class LrSettings(Section):
    """lr has none."""


class FmSettings(Section):
    """fm has none."""


class PerceptronSettings(Section):
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


class DeepFmSettings(DeepSettings):
    """deepfm."""


class DeepCrossingSettings(DeepSettings):
    """deep_crossing."""

    hidden: Hidden = (128, 128)
    """Inner widths of the residual units, one unit each."""


class DcnSettings(DeepSettings):
    """dcn."""

    cross_layers: Layers = 2
    """Number of cross layers: the highest degree of interactions minus one."""


class DcnV2Settings(DcnSettings):
    """dcn_v2."""

    low_rank: Width | None = None
    """Rank of each cross layer's matrix; full unless set."""
    structure: Literal["parallel", "stacked"] = "parallel"
    """"parallel": cross and deep part side by side; "stacked": the deep part reads the output of the cross part."""


class DlrmSettings(DeepSettings):
    """dlrm."""

    bottom: Hidden = (64,)
    """Widths of the layers for dense values, without the last one, which has the length of the vectors."""


class DinSettings(DeepSettings):
    """din."""

    target: SlotName | None = None
    """Sparse slot with the item that is judged: it is compared with each item of the sequences. Required."""
    sequence: SlotNames = ()
    """Sequence slots that are compared with it; all of them unless set. The others enter as their mean."""
    attention: Hidden = (36,)
    """Widths of the layers of the activation unit, each followed by PReLU."""
    softmax: bool = False
    """Whether the weights of a sequence sum to 1. The paper leaves them as they are: many similar items weigh more."""


class SasrecSettings(DeepSettings):
    """sasrec."""

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


class TwoTowerSettings(PerceptronSettings):
    """two_tower."""

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
    cached: Annotated[int, Field(ge=0, le=1 << 20)] = 0
    """Items of the samples before a batch that are candidates of the softmax, too; 0: those of the batch alone."""
    recall_at: Annotated[tuple[Annotated[int, Field(ge=1, le=65_536)], ...], Field(max_length=8)] = (10,)
    """Recall is measured in the batch: the share of clicks whose item is among the so many best items of the batch."""


class NextItemSettings(Section):
    """next_item."""

    hidden: Hidden = (128, 64)
    """Widths of the hidden layers of the user's perceptron."""
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


class MmoeSettings(DeepSettings):
    """mmoe."""

    experts: Annotated[int, Field(ge=1, le=256)] = 4
    """Number of perceptrons; each has the layers `hidden`."""


class EsmmSettings(PerceptronSettings):
    """esmm."""


class FinalMlpSettings(PerceptronSettings):
    """finalmlp."""

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
