"""A console exporter: prints each span when it ends, with its trace and its parent.

In production, the SDK sends spans to a collector instead: `BatchSpanProcessor(OTLPSpanExporter())`,
from the package opentelemetry-exporter-otlp.
"""

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor


def line(span: ReadableSpan) -> str:
    assert span.context is not None
    parent = f"{span.parent.span_id:016x}" if span.parent else "none"
    ids = f"trace={span.context.trace_id:032x} span={span.context.span_id:016x} parent={parent}"
    return f"{span.name}: {ids}\n"


def export(service: str) -> None:
    """Print the spans of this program."""
    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(formatter=line)))
    trace.set_tracer_provider(provider)
