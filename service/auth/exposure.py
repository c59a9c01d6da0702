"""Decides where the API may listen: freely on loopback; elsewhere only with TLS and tokens, unless the owner insists.

No socket is opened here.
"""

from dataclasses import dataclass
from pathlib import Path

from headrace.address import LOCAL_NAMES, LOOPBACK, format_address, is_loopback, parse_address
from headrace.errors import SpecError
from headrace.http.listening import check_tls
from headrace.service.auth.config import AccessSection, TlsSection


@dataclass(frozen=True, slots=True)
class Exposure:
    """The address of the API, its names and its certificate."""

    host: str
    port: int
    names: tuple[str, ...]
    """Host names that requests may use."""
    cert: Path | None = None
    key: Path | None = None

    @property
    def url(self) -> str:
        """The address as a URL."""
        return f"{'http' if self.cert is None else 'https'}://{format_address(self.host, self.port)}"


def exposure_of(listen: str, access: AccessSection, tls: TlsSection, *, any_token: bool) -> Exposure:
    """The exposure at `listen`, "host:port". Raises SpecError where that would be unprotected."""
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
            message = (
                f"{host} is not this machine's loopback, and {'; '.join(missing)}; or set access.unprotected = true"
            )
            raise SpecError(f"{message} if a proxy in front encrypts and authenticates", "listen")
    names = (*LOCAL_NAMES, *access.hosts)
    if host not in ("0.0.0.0", "::"):
        names = (*names, host)
    elif not access.hosts:
        raise SpecError(f"{host} is no host name: list the names under which clients reach the service", "access.hosts")
    return Exposure(LOOPBACK if host == "localhost" else host, port, tuple(dict.fromkeys(names)), tls.cert, tls.key)


def _missing(access: AccessSection, tls: TlsSection, *, any_token: bool) -> list[str]:
    missing = []
    if tls.cert is None:
        missing.append("the traffic would not be encrypted: set tls.cert and tls.key")
    if not any_token:
        missing.append("there are no tokens: `headrace token create`")
    if access.anonymous != "none":
        missing.append(f'callers without a token would be {access.anonymous}: set access.anonymous = "none"')
    return missing
