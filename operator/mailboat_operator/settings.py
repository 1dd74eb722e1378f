"""Settings of ``mailboat-operator run``: flags, environment variables and validation.

Each setting is declared once; flags, environment variables, help and validation are derived from it. All errors are
reported together, by flag name, without a traceback. Nothing is read at import time.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, get_args, get_origin

import click
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, model_validator

from mailboat_spec.formats import DnsLabel, DnsSubdomain, Form
from mailboat_spec.scalars import Duration, between
from mailboat_spec.structured_logs import LogFormat

ENVIRONMENT_PREFIX: Final = "MAILBOAT_"
_FLAGS: Final = {"namespaces": "--namespace", "webhook_hosts": "--webhook-host"}
"""Flags that are not derived from the name of the field: one value each time."""
_POD_VARIABLES: Final = {
    "operator_namespace": ("POD_NAMESPACE",),
    "identity": ("POD_NAME",),
    "kubeconfig": ("KUBECONFIG",),
}
"""Additional variables, read after the settings' own ones."""


class SettingsError(ValueError):
    """Invalid settings; the message lists all problems."""


@dataclass(frozen=True, slots=True)
class Address:
    """Listen address. Without a host: all interfaces."""

    host: str | None
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        host, colon, port = text.rpartition(":")
        if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise ValueError('is no address to listen on: write ":9443" or "127.0.0.1:9443"')
        return cls(host.removeprefix("[").removesuffix("]") or None, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if self.host and ":" in self.host else f"{self.host or ''}:{self.port}"


ListenAddress = Annotated[Address, PlainValidator(Address.parse)]
Host = Annotated[
    str, Form(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|[0-9A-Fa-f:.]+", "is neither a host name nor an IP address")
]
Image = Annotated[str, Form(r"\S+", "is no image: write it like mailboat-relay:0.1.0", max_length=4096)]
Identity = Annotated[
    str, Form(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", "is no identity: use letters, digits, . _ -")
]


class Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, use_attribute_docstrings=True)

    namespaces: tuple[DnsLabel, ...] = ()
    """Namespace to watch; may be given again. Default: all namespaces."""
    operator_namespace: DnsLabel
    """Namespace of the operator itself, for its Lease and its two Secrets."""
    identity: Identity | None = None
    """Name of this process among the operators. Default: host name and random digits."""
    relay_image: Image
    """Image of the relays, like mailboat-relay:0.1.0."""
    relay_image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """When nodes fetch it: Always, IfNotPresent or Never."""
    status_interval: Annotated[Duration, between("1s", "1h")] = Duration.parse("5s")
    """Time between two polls of the relays, between 1s and 1h."""
    lease_name: DnsSubdomain = "mailboat-operator"
    """Lease by which one operator leads."""
    lease_duration: Annotated[Duration, between("3s", "5m")] = Duration.parse("15s")
    """Time without a renewal after which another operator leads, in whole seconds between 3s and 5m."""
    signing_secret: DnsSubdomain = "mailboat-signing-keys"
    """Secret with the keys that calls to relays are signed with."""
    webhook_certs: Literal["self", "external", "off"] = Field(
        default="self",
        description="Certificate of the injection webhook: self (made and renewed here), external (files in "
        "--cert-dir) or off (no webhook).",
    )
    webhook_config_name: DnsSubdomain = "mailboat"
    """MutatingWebhookConfiguration whose caBundle is kept up to date."""
    webhook_service: DnsLabel = "mailboat-webhook"
    """Service that the API server calls the webhook by."""
    webhook_secret: DnsSubdomain = "mailboat-webhook-cert"
    """Secret that the operators share the certificate in."""
    webhook_hosts: tuple[Host, ...] = ()
    """Further host name or IP address in the certificate; may be given again. Default: none."""
    webhook_listen: ListenAddress = Address(None, 9443)
    """Address of the webhook (HTTPS)."""
    health_listen: ListenAddress = Address(None, 8080)
    """Address of /livez, /readyz, /metrics (HTTP)."""
    cert_dir: Path | None = None
    """Folder with tls.crt and tls.key, for --webhook-certs external."""
    shutdown_delay: Annotated[Duration, between("0s", "5m")] = Duration.parse("5s")
    """How long the webhook still answers after SIGTERM, until the API server knows the others."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is logged: debug, info, warning or error."""
    log_format: LogFormat = LogFormat.AUTO
    """auto (readable on a terminal, JSON elsewhere), json or text."""
    kubeconfig: Path | None = None
    """Kubeconfig file. Default: the pod's service account."""

    @model_validator(mode="after")
    def _check_cert_dir(self) -> Self:
        if self.webhook_certs == "external" and self.cert_dir is None:
            raise ValueError("--webhook-certs external needs --cert-dir: the folder that holds tls.crt and tls.key")
        if self.webhook_certs != "external" and self.cert_dir is not None:
            raise ValueError("--cert-dir has no effect without --webhook-certs external: add that or remove it")
        return self

    @property
    def certificate_names(self) -> tuple[str, ...]:
        """Host names by which the API server may call the webhook, most usual first."""
        service = f"{self.webhook_service}.{self.operator_namespace}"
        return (f"{service}.svc", f"{service}.svc.cluster.local", service, self.webhook_service, *self.webhook_hosts)


def options() -> list[click.Option]:
    """Return the option of every setting, in order of declaration. No value is validated before ``read_settings``."""
    made = []
    for name, info in Settings.model_fields.items():
        text = info.description or ""
        if info.is_required():
            text = f"{text} Required."
        elif info.default is not None and "Default:" not in text:
            text = f"{text} Default: {info.default}."
        flag = _FLAGS.get(name, f"--{name.replace('_', '-')}")
        variables = [ENVIRONMENT_PREFIX + name.upper(), *_POD_VARIABLES.get(name, ())]
        option = click.Option(
            [flag, name],
            multiple=get_origin(info.annotation) is tuple,
            envvar=variables,
            metavar="|".join(_choices(name)) or "TEXT",
            help=f"{text} [{', '.join(f'${each}' for each in variables)}]",
        )
        made.append(option)
    return made


def read_settings(given: Mapping[str, Any]) -> Settings:
    """Validate the given values, by field. Raises ``SettingsError`` with all problems, each by its flag."""
    try:
        return Settings.model_validate({name: value for name, value in given.items() if value not in (None, ())})
    except ValidationError as error:
        flags = {option.name: option for option in options()}
        lines = []
        for problem in error.errors(include_url=False, include_input=False):
            message = problem["msg"].removeprefix("Value error, ")
            if problem["loc"]:
                name = str(problem["loc"][0])
                if problem["type"] == "missing":
                    variables = " or ".join(f"${each}" for each in flags[name].envvar or ())
                    message = f"is required: {Settings.model_fields[name].description} Set it here or by {variables}"
                elif choices := _choices(name):
                    message = f"must be one of {', '.join(choices)}"
                message = f"{flags[name].opts[0]}: {message}"
            lines.append(message)
        raise SettingsError("\n".join(lines)) from None


def _choices(name: str) -> tuple[str, ...]:
    annotation = Settings.model_fields[name].annotation
    if annotation is LogFormat:
        return tuple(LogFormat)
    return get_args(annotation) if get_origin(annotation) is Literal else ()
