"""Settings of the service about access: who may call it, how it is encrypted, what job specs may name."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from headrace.blob.store_address import parse as parse_store_address
from headrace.config import Section

RoleWord = Literal["viewer", "operator", "admin"]
ANY_MORE = "..."
"""Last word of an allowed command: any arguments may follow."""
SCRIPTS = (".py", ".sh", ".js", ".pl", ".rb")
"""Suffixes by which a word of a command is taken for a script."""
CommandWords = Annotated[tuple[str, ...], Field(min_length=1)]


class TlsSection(Section):
    """TLS of the API; both keys, or neither."""

    cert: Path | None = None
    """PEM file with the certificate chain, without the root."""
    key: Path | None = None
    """PEM file with its private key, without a password; others must not be able to read it."""

    @model_validator(mode="after")
    def _both(self) -> "TlsSection":
        if (self.cert is None) != (self.key is None):
            raise ValueError("needs both cert and key, or neither")
        return self


class AccessSection(Section):
    """Access to the API."""

    anonymous: RoleWord | Literal["none"] = "none"
    """The role of callers without a token."""
    unprotected: bool = False
    """Listen on other addresses than loopback without TLS, or although callers without a token have a role: a proxy in
    front must encrypt and authenticate."""
    hosts: tuple[str, ...] = ()
    """Host names under which clients reach the service. It answers under these and its local names only."""
    max_failures: int = Field(default=20, ge=1, le=100_000)
    """Wrong tokens that one address may try in a row before it must wait."""
    failures_per_s: float = Field(default=0.5, gt=0, le=1000)
    """Further tries a second."""


class AllowSection(Section):
    """Limits on what job specs may name. Everything else is refused."""

    pipe_commands: tuple[CommandWords, ...] = ()
    """Commands for `pipe.command`, word for word; a last word "..." lets any arguments follow."""
    models: tuple[str, ...] | None = None
    """Models for `model.name`, and classes "package.module:Class" for `model.class`. Default: Headrace's own."""
    metrics: tuple[str, ...] = ()
    """More for `metrics.own` than Headrace's: names of those of packages, and classes "package.module:Class"."""
    export_commands: tuple[CommandWords, ...] = ()
    """Commands for `exports.<s>.command`, in the same form."""
    roots: tuple[str, ...] = ()
    """Folders and addresses in object stores below which specs may read and write. A job's own folder is always
    allowed."""
    interfaces: tuple[str, ...] = ()
    """Network interfaces that specs may name in `cluster.interface`, and addresses HOST:PORT for `cluster.listen`: jobs
    open ports there, for other machines."""
    bootstrap_servers: tuple[str, ...] | None = None
    """Brokers that Kafka sources may name, "host:port". Default: any. A prediction that is requested over the API may
    name the brokers of its job, and others only if they are listed here."""
    registries: tuple[str, ...] = ()
    """Schema registries that specs may name in `pipe.registry`, word for word. The service's machine asks them, and
    sends them the secrets that a spec names for them."""
    ray_addresses: tuple[str, ...] = ()
    """Ray clusters that jobs may run on, "host:port" as in `cluster.ray_address`. Workers there run as the user of the
    cluster."""
    secret_env: tuple[str, ...] = ()
    """Environment variables of the service that specs may name as secrets: { env = "NAME" }."""
    secret_files: tuple[str, ...] = ()
    """Files that specs may name as secrets: { file = "/path" }; no input or output may reach them."""

    def relative_scripts(self) -> list[str]:
        """Words of allowed commands that name a file below a spec's base, where other users may be able to write."""
        words = (word for command in (*self.pipe_commands, *self.export_commands) for word in command[1:])
        named = (word for word in words if word != ANY_MORE and not word.startswith(("-", "/")))
        return sorted({word for word in named if "/" in word or Path(word).suffix in SCRIPTS})

    @field_validator("roots")
    @classmethod
    def _are_places(cls, roots: tuple[str, ...]) -> tuple[str, ...]:
        for root in roots:
            if parse_store_address(root).root == "/":
                raise ValueError("'/' would allow everything; name folders")
        return roots

    @model_validator(mode="after")
    def _more_is_last(self) -> "AllowSection":
        for command in (*self.pipe_commands, *self.export_commands):
            if ANY_MORE in command[:-1] or command[0] == ANY_MORE:
                raise ValueError(f'"{ANY_MORE}" may only be the last word of a command')
        return self
