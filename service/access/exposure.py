"""Where the API may listen: on loopback as it likes, elsewhere encrypted and with tokens, unless its owner insists.

Nothing is bound here.
"""

from dataclasses import dataclass
from pathlib import Path

from millrace.address import LOCAL_NAMES, LOOPBACK, format_address, is_loopback, parse_address
from millrace.errors import SpecError
from millrace.tls import check_tls
from service.access.config import AccessSection, TlsSection


@dataclass(frozen=True, slots=True)
class Exposure:
    """How the API is reached."""

    host: str
    port: int
    names: tuple[str, ...]
    """The names that requests may call it by."""
    cert: Path | None = None
    key: Path | None = None

    @property
    def url(self) -> str:
        """Its address, for people."""
        return f"{'http' if self.cert is None else 'https'}://{format_address(self.host, self.port)}"


def exposure_of(listen: str, access: AccessSection, tls: TlsSection, *, any_token: bool) -> Exposure:
    """How the API is reached at `listen`, "host:port". Raises SpecError where that would let in who should not be."""
    try:
        host, port = parse_address(listen)
    except ValueError as error:
        raise SpecError(str(error), "listen") from None
    if tls.cert is not None and tls.key is not None:
        check_tls(tls.cert, tls.key)
    loopback = is_loopback(host)
    if not loopback and not access.unprotected:
        missing = _missing(access, tls, any_token=any_token)
        if missing:
            told = f"{host} is not this machine's loopback, and {'; '.join(missing)}; or say access.unprotected = true"
            raise SpecError(f"{told} where something in front of it encrypts and asks who is calling", "listen")
    names = (*LOCAL_NAMES, *access.hosts)
    if host not in ("0.0.0.0", "::"):
        names = (*names, host)
    elif not access.hosts:
        raise SpecError(f"{host} has no name of its own: say under which ones others reach the service", "access.hosts")
    return Exposure(LOOPBACK if host == "localhost" else host, port, tuple(dict.fromkeys(names)), tls.cert, tls.key)


def _missing(access: AccessSection, tls: TlsSection, *, any_token: bool) -> list[str]:
    missing = []
    if tls.cert is None:
        missing.append("what is said there could be read on the way: set tls.cert and tls.key")
    if not any_token:
        missing.append("nobody has a token: `millrace token create`")
    if access.anonymous != "none":
        missing.append(f'callers without a token would be {access.anonymous}: set access.anonymous = "none"')
    return missing
