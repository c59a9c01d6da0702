"""Online learners of other projects, on the samples that our models learn; they come with the extra `bench`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from tests.bench.linear import Flat, Learnt

NAMESPACES = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
"""Of Vowpal Wabbit, which tells them apart by their first letter: one for each field."""


@dataclass(frozen=True)
class River:
    """Logistic regression of river, by an optimizer with the settings it comes with."""

    optimizer: str
    module: str = "river"

    def learn(self, flat: Flat) -> Learnt:
        """Predict and learn all samples."""
        optimizer = getattr(import_module("river.optim"), self.optimizer)()
        model = import_module("river.linear_model").LogisticRegression(optimizer)
        features = [
            dict(zip(flat.id_N[begin:end].tolist(), flat.value_N[begin:end].tolist(), strict=True))
            for begin, end in zip(flat.offset_B1[:-1], flat.offset_B1[1:], strict=True)
        ]
        learnt = by_event(
            flat,
            lambda b: float(model.predict_proba_one(features[b])[True]),
            lambda b: model.learn_one(features[b], bool(flat.label_B[b])),
        )
        return Learnt(learnt, len(model.weights))


@dataclass(frozen=True)
class VowpalWabbit:
    """Logistic regression of Vowpal Wabbit: adaptive, normalised, invariant steps."""

    options: str = ""
    module: str = "vowpalwabbit"

    def learn(self, flat: Flat) -> Learnt:
        """Predict and learn all samples."""
        fixed = "--loss_function logistic --link logistic -b 22 --quiet"
        workspace = import_module("vowpalwabbit").Workspace(f"{fixed} {self.options}")
        ids = [
            f"|{NAMESPACES[field]} {key}:{value:g}"
            for key, value, field in zip(flat.id_N >> np.uint64(20), flat.value_N, flat.field_N, strict=True)
        ]
        lines = [" ".join(ids[b:e]) for b, e in zip(flat.offset_B1[:-1], flat.offset_B1[1:], strict=True)]
        learnt = by_event(
            flat,
            lambda b: float(workspace.predict(lines[b])),
            lambda b: workspace.learn(f"{'1' if flat.label_B[b] else '-1'} {lines[b]}"),
        )
        workspace.finish()
        return Learnt(learnt)


def by_event(flat: Flat, predict: Callable[[int], float], learn: Callable[[int], Any]) -> np.ndarray:
    """(B,) predictions; a sample is predicted before any one of its event is learnt."""
    predictions = []
    for begin, end in zip(flat.event_E1[:-1].tolist(), flat.event_E1[1:].tolist(), strict=True):
        predictions += [predict(b) for b in range(begin, end)]
        for b in range(begin, end):
            learn(b)
    return np.array(predictions)


PEERS: Mapping[str, River | VowpalWabbit] = {
    "river, logistic regression (SGD)": River("SGD"),
    "river, logistic regression (FTRL)": River("FTRLProximal"),
    "Vowpal Wabbit": VowpalWabbit(),
    "Vowpal Wabbit, all crosses": VowpalWabbit("-q ::"),
}


def is_installed(peer: River | VowpalWabbit) -> bool:
    """Whether the peer's package can be imported."""
    return find_spec(peer.module) is not None
