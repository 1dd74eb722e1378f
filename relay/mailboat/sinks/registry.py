"""Lookup of the sink for a manifest's ``spec.sink``, by entry points of the group ``mailboat.sinks``.

Mailboat's own sinks are found the same way as third-party sinks. A sink whose client is not installed is thus
distinguished from an unknown sink, and a vendor's client is imported only if it is used.
"""

from importlib.metadata import entry_points
from typing import Any, Final, cast

from mailboat.errors import NoSuchSink
from mailboat.sinks.protocol import Sink, SinkContext
from mailboat_spec import CustomSink
from mailboat_spec import Sink as SinkSpec

GROUP: Final = "mailboat.sinks"
_EXTRAS: Final = {"kafka": "confluent_kafka", "pubsub": "google"}
"""Mailboat's sinks whose client is an extra, with the module whose absence means that it is not installed."""


def build_sink(spec: SinkSpec, context: SinkContext) -> Sink:
    """Build a sink without connecting. Raises ``ConfigError`` with a remedy, or ``NoSuchSink`` if no package has it."""
    kind, where = spec.kind, f"{context.subscription}: spec.sink"
    chosen: Any = spec.chosen
    if isinstance(chosen, CustomSink):
        return _load(chosen.type, f"{where}.custom.type").build(dict(chosen.config), context)
    return _load(kind, f"{where}.{kind}").build(chosen, context)


def _load(name: str, where: str) -> type[Sink]:
    found = next(iter(entry_points(group=GROUP, name=name)), None)
    if found is None:
        installed = ", ".join(sorted({point.name for point in entry_points(group=GROUP)})) or "none"
        raise NoSuchSink(
            f'{where}: no installed package offers a sink "{name}" (there are: {installed}); install the package that '
            f'registers it under the entry point group "{GROUP}", or correct the name'
        )
    try:
        return cast("type[Sink]", found.load())
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing == _EXTRAS.get(name, ""):
            raise NoSuchSink(
                f"{where}: the {name} sink's client is not installed: pip install 'mailboat[{name}]'"
            ) from error
        raise NoSuchSink(f'{where}: the sink "{name}" needs the module {error.name}, which is not installed') from error
    except (ImportError, AttributeError) as error:
        raise NoSuchSink(f'{where}: the sink "{name}" ({found.value}) can\'t be loaded: {error}') from error
