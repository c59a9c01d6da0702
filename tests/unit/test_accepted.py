"""Forms of an answer that a client accepts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.openmetrics import exposition as openmetrics

from headrace.http.accepted import best_coding, metrics_encoder

OPEN, TEXT = openmetrics.CONTENT_TYPE_LATEST, CONTENT_TYPE_LATEST
OF_PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", TEXT), ("*/*", TEXT), ("text/plain", TEXT), (OF_PROMETHEUS_3, OPEN),
        ("application/openmetrics-text", OPEN), ("text/plain,application/openmetrics-text", OPEN),
        ("Application/OpenMetrics-Text ; Version=1.0.0", OPEN), ("application/openmetrics-text;version=0.0.1", TEXT),
        ("application/openmetrics-text;version=2.0.0", TEXT), ("application/openmetrics-text;version=x", TEXT),
        ("application/openmetrics-text;q=0", TEXT), ("application/openmetrics-text;q=x", TEXT),
        ("application/openmetrics-text;q=0.1,text/plain;q=0.2", TEXT),
        ("text/html,*/*;q=0.8", TEXT),
    ],
)  # fmt: skip
def test_figures_are_in_openmetrics_where_a_client_prefers_it(accept, content_type):
    assert metrics_encoder(accept)[1] == content_type


@given(st.text(max_size=40))
def test_whatever_a_client_says_it_accepts_gets_an_answer(header):
    assert metrics_encoder(header)[1] in (OPEN, TEXT)
    assert best_coding(header, ("gzip", "deflate")) in (None, "gzip", "deflate")
