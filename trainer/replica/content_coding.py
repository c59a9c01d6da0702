"""Content codings of HTTP bodies: gzip and deflate, as RFC 9110 has them (8.4.1 and 12.5.3)."""

import gzip
import zlib
from http import HTTPStatus

from headrace.http.accepted import best_coding

GZIP, DEFLATE = "gzip", "deflate"
CODINGS = (GZIP, DEFLATE)
MIN_BYTES = 1024
"""Shorter answers are sent as they are: to compress them costs more than to send them."""
LEVEL = 1


class BodyRefused(ValueError):
    """A body that cannot be decoded; `status` is the status of the answer."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


def decoded(body: bytes, coding: str, max_bytes: int) -> bytes:
    """A body without its coding, such as "gzip"; never longer than `max_bytes`. Raises BodyRefused."""
    coding = coding.strip().lower()
    if coding in ("", "identity"):
        return body
    if coding not in CODINGS:
        known = " or ".join(CODINGS)
        raise BodyRefused(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"the content coding {coding!r:.100} is not read here; send {known}"
        )
    reader = zlib.decompressobj(zlib.MAX_WBITS | 16 if coding == GZIP else zlib.MAX_WBITS)
    try:
        found = reader.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise BodyRefused(HTTPStatus.BAD_REQUEST, f"the body is not {coding}: {error}") from None
    if len(found) > max_bytes:
        raise BodyRefused(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"a request is at most {max_bytes:,} bytes long, also once it is decompressed",
        )
    if not reader.eof:
        raise BodyRefused(HTTPStatus.BAD_REQUEST, f"the body ends before its {coding} does")
    if reader.unused_data:
        raise BodyRefused(HTTPStatus.BAD_REQUEST, f"the body goes on after its {coding}; send one member")
    return found


def encoded(body: bytes, accepted: str) -> tuple[bytes, str | None]:
    """A body in a coding that the header Accept-Encoding allows, and this coding; None for a body as it was."""
    coding = best_coding(accepted, CODINGS) if accepted and len(body) >= MIN_BYTES else None
    if coding is None:
        return body, None
    return (gzip.compress(body, LEVEL, mtime=0) if coding == GZIP else zlib.compress(body, LEVEL)), coding
