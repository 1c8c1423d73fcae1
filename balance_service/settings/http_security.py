"""Security settings of HTTP: TLS, authorisation, rate limits. Part of `Settings`."""

from __future__ import annotations

import math
import re
from pathlib import Path  # noqa: TC003  # pydantic reads the annotations
from typing import Annotated, Any, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode

from balance_service.settings.network import checked_list, is_network

_P = "BALANCE_"
_ORIGIN = re.compile(r"https?://[a-z0-9.-]+(?::[0-9]{1,5})?|https?://\[[0-9a-f:.]+\](?::[0-9]{1,5})?")  # RFC 6454
_HOST = re.compile(r"(?:\*\.)?(?:[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\.)*[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_BEARER_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")  # RFC 6750, section 2.1


class HttpSecuritySettings(BaseSettings):
    """Everything is off unless set. A setting without another one that it needs is refused by both names."""

    tls_certificate: Path | None = Field(
        None,
        description="PEM file of the server's certificate and its chain. If set, the port speaks HTTPS, and so do the "
        "queries to peers.",
    )
    tls_key: Path | None = Field(None, description="PEM file of the certificate's private key.")
    tls_key_password: SecretStr | None = Field(None, description="Password of the private key, if it is encrypted.")
    tls_ca: Path | None = Field(
        None,
        description="PEM file of the CAs that sign the certificates of instances, for queries to peers and for "
        "commands; the system's when unset.",
    )
    tls_client_ca: Path | None = Field(
        None,
        description="PEM file of the CAs that sign clients' certificates; a client without such a certificate is "
        "refused in the handshake.",
    )
    health_port: int | None = Field(
        None, ge=0, le=65_535, description="Additional port for probes, which answers only `/health/*`, without TLS."
    )
    health_host: str | None = Field(
        None,
        description="Address that the port for probes listens on; `BALANCE_HTTP_HOST` when unset. Other machines may "
        "reach it even if the service itself is behind a proxy on this machine.",
    )
    tokens_file: Path | None = Field(
        None, description="JSON file of the hashes of bearer tokens and their permissions."
    )
    jwks_file: Path | None = Field(None, description="JWKS file of an identity provider's public keys.")
    jwt_issuer: str | None = Field(None, min_length=1, description="The issuer that JWTs must name.")
    jwt_audience: str | None = Field(None, min_length=1, description="The audience that JWTs must name.")
    rate_limit: float | None = Field(
        None,
        gt=0,
        le=1_000_000,
        allow_inf_nan=False,
        description="Requests per second that one client may make, such as `50` or `0.5`.",
    )
    rate_limit_burst: int | None = Field(
        None,
        ge=1,
        le=1_000_000,
        description="Requests that one client may make at once; the requests of one second, at least 1, when unset.",
    )
    allow_anonymous: bool = Field(
        False,
        description="Listen beyond loopback without tokens, JWTs or client certificates: every client may read and "
        "write everything.",
    )
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Comma-separated host names, or `*.domains`, that clients may use for this instance, in addition "
        "to IP addresses, `localhost` and its own name; needed only without tokens and JWTs.",
    )
    allowed_origins: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Comma-separated origins, such as `https://ops.example.com`, whose pages may send requests and "
        "read the answers (CORS); also needed for the console if a proxy changes the header `Host`.",
    )
    trusted_proxies: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Comma-separated addresses and networks of proxies and ingresses. Their number of connections is "
        "not limited per address.",
    )
    token: SecretStr | None = Field(None, description="Bearer token that commands send to an instance.")

    @property
    def speaks_tls(self) -> bool:
        """Whether instances serve HTTPS."""
        return self.tls_certificate is not None

    @property
    def admits_anonymous(self) -> bool:
        """Whether clients need neither a token nor a certificate."""
        return self.tokens_file is None and self.jwks_file is None and self.tls_client_ca is None

    @property
    def burst(self) -> int:
        """Requests that one client may make at once."""
        return self.rate_limit_burst or math.ceil(self.rate_limit or 1)

    @field_validator("allowed_hosts", "allowed_origins", "trusted_proxies", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        return tuple(filter(None, (entry.strip().lower() for entry in value.split(","))))

    @field_validator("allowed_hosts")
    @classmethod
    def _host_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return checked_list(value, _HOST.fullmatch, "no host name or *.domain; list such, without ports")

    @field_validator("allowed_origins")
    @classmethod
    def _origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        wanted = "no origin; list such as https://ops.example.com, without paths"
        return checked_list(value, _ORIGIN.fullmatch, wanted)

    @field_validator("trusted_proxies")
    @classmethod
    def _networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return checked_list(value, is_network, "no IP address or network; list such, without ports")

    @field_validator("token")
    @classmethod
    def _can_be_sent(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not _BEARER_TOKEN.fullmatch(value.get_secret_value()):
            raise ValueError("is no bearer token; use letters, digits and ._~+/- without spaces or line ends")
        return value

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError(f"{_P}TLS_CERTIFICATE and {_P}TLS_KEY go together; set both or none")
        for name, value in (("TLS_KEY_PASSWORD", self.tls_key_password), ("TLS_CLIENT_CA", self.tls_client_ca)):
            if value is not None and self.tls_certificate is None:
                raise ValueError(f"{_P}{name} has no effect without {_P}TLS_CERTIFICATE and {_P}TLS_KEY; set them too")
        return self

    @model_validator(mode="after")
    def _authorisation_is_whole(self) -> Self:
        of_jwts = {"JWKS_FILE": self.jwks_file, "JWT_ISSUER": self.jwt_issuer, "JWT_AUDIENCE": self.jwt_audience}
        missing = [name for name, value in of_jwts.items() if value is None]
        if missing and len(missing) < len(of_jwts):
            raise ValueError(
                f"{_P}JWKS_FILE, {_P}JWT_ISSUER and {_P}JWT_AUDIENCE go together; "
                f"{' and '.join(_P + name for name in missing)} must be set too"
            )
        if self.rate_limit_burst is not None and self.rate_limit is None:
            raise ValueError(f"{_P}RATE_LIMIT_BURST has no effect without {_P}RATE_LIMIT; set that too")
        return self
