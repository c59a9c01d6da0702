"""The form of an answer that a client accepts, by its headers Accept and Accept-Encoding (RFC 9110, 12.5)."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

OPENMETRICS, OPENMETRICS_VERSION = "application/openmetrics-text", "1.0.0"

Encoder = Callable[[Collector], bytes]


def metrics_encoder(accept: str) -> tuple[Encoder, str]:
    """The function that writes figures, and its content type: OpenMetrics where Accept has it, else Prometheus' text.

    prometheus_client's choose_encoder takes any version, fails at those that are no numbers, and reads no weights.
    """
    weights = {OPENMETRICS: 0.0, "text/plain": 0.0}
    for kind, parameters, weight in _parts(accept):
        version = parameters.get("version", OPENMETRICS_VERSION)
        if kind in weights and (kind != OPENMETRICS or version == OPENMETRICS_VERSION):
            weights[kind] = max(weights[kind], weight)
    if 0 < weights[OPENMETRICS] >= weights["text/plain"]:
        return openmetrics.generate_latest, openmetrics.CONTENT_TYPE_LATEST
    return generate_latest, CONTENT_TYPE_LATEST


def best_coding(accept_encoding: str, codings: Sequence[str]) -> str | None:
    """The one of `codings` with the largest weight, the first of equal ones; None where none is accepted."""
    weights = {coding: weight for coding, _, weight in _parts(accept_encoding)}
    best = max(codings, key=lambda coding: weights.get(coding, 0.0))
    return best if weights.get(best, 0.0) > 0 else None


def _parts(header: str) -> Iterator[tuple[str, Mapping[str, str], float]]:
    """Names, parameters and weights of a header's list. Those with a weight that is no number are left out."""
    for each in header.lower().split(","):
        name, *rest = (part.strip() for part in each.split(";"))
        parameters = {key.strip(): value.strip() for key, _, value in (part.partition("=") for part in rest)}
        try:
            yield name, parameters, float(parameters.get("q", 1))
        except ValueError:
            continue
