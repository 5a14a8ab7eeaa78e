"""How a function becomes a command.

    def trim(server: ServerOptions, queue: Queue, seq: Annotated[int, "SEQ", "The first one."])

Its options are its parameters. One that is named `server` or `source` stands for the options that
say which, and is what they say. An option is its type and, as texts: its names, unless they follow
from that of the parameter; what to write behind it; and a line of help. What that does not express
is an Option or Argument of Typer. `**given: Unpack[T]` are the options in the TypedDict T, and
`**given: Annotated[Any, options]` are these.

The one rule: what all commands have is added here. What a command returns is printed here.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from inspect import Parameter, signature
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo

from mqks.commands.connection import ServerOptions, Timeout, source_of
from mqks.commands.options import AsJson, Database, Told, Url, tell
from mqks.protocol.durations import in_seconds

Run = Callable[..., Told | None]


def option(name: str, annotation: object, default: object = None) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


URL, TIMEOUT = option("url", Url), option("timeout", Timeout, 30.0)
CONTEXT = option("context", typer.Context, Parameter.empty)
DATABASE, AS_JSON = option("db", Database), option("as_json", AsJson, False)


def seconds(text: str | float) -> float:
    """A number of seconds, or a duration with units."""
    try:
        number = float(in_seconds(str(text)))
    except ValueError:
        number = -1
    if not number >= 0:
        raise typer.BadParameter(f"{text!r} is not a number of seconds, or a duration as in 1h30m")
    return number


def declare(
    app: typer.Typer, run: Run, example: str, *, panel: str | None = None, cls: Any = None
) -> None:
    """Add a command by the name of the function, with its example below its help."""
    told = signature(run)
    prints = told.return_annotation is not None
    options = [*_options(told.parameters.values()), *([AS_JSON] if prints else ())]

    def called(**given: Any) -> None:
        as_json = given.pop("as_json") if prints else False
        with ExitStack() as opened:
            if "server" in told.parameters:
                given["server"] = ServerOptions(given.pop("url"), given.pop("timeout"))
            if "source" in told.parameters:
                where = (given.pop(each) for each in ("context", "url", "db", "timeout"))
                given["source"] = opened.enter_context(source_of(*where))
            result = run(**given)
        if result is not None:
            tell(result[0], as_json, result[1])

    called.__signature__ = told.replace(parameters=options)  # type: ignore[attr-defined]
    called.__name__, called.__doc__ = run.__name__, run.__doc__
    name = run.__name__.rstrip("_").replace("_", "-")
    app.command(name, cls=cls, rich_help_panel=panel, epilog=f"Example: {example}")(called)


def _options(parameters: Iterable[Parameter]) -> Iterator[Parameter]:
    for each in parameters:
        if each.name == "server":
            yield from (URL, TIMEOUT)
        elif each.name == "source":
            yield from (CONTEXT, URL, DATABASE, TIMEOUT)
        elif each.kind is Parameter.VAR_KEYWORD:
            [many] = get_args(each.annotation)[-1:]
            yield from many if isinstance(many, list) else _fields(many)
        else:
            yield _read(each.replace(kind=Parameter.KEYWORD_ONLY))


def _fields(many: Any) -> Iterator[Parameter]:
    for name, annotation in get_type_hints(many, include_extras=True).items():
        is_flag = get_args(annotation)[0] is bool
        yield _read(option(name, annotation, False if is_flag else None))


def _read(parameter: Parameter) -> Parameter:
    """A parameter with an Option or an Argument of Typer, if texts stand for it. Options in
    seconds are durations."""
    if get_origin(parameter.annotation) is not Annotated:
        return parameter
    kind, *texts = get_args(parameter.annotation)
    if not all(isinstance(each, str) for each in texts):
        if isinstance(texts[0], OptionInfo) and texts[0].metavar == "SECONDS":
            texts[0].parser, texts[0].min = seconds, None
        return parameter
    *names, help_text = texts
    metavar = names.pop() if names and names[-1][0] != "-" else None
    if parameter.default is Parameter.empty:
        read: Any = typer.Argument(metavar=metavar, help=help_text)
    else:
        # Typer would add --no-… to a flag.
        names = names or [f"--{parameter.name.replace('_', '-')}"]
        parser = seconds if metavar == "SECONDS" else None
        read = typer.Option(*names, metavar=metavar, help=help_text, parser=parser)
    return parameter.replace(annotation=Annotated[kind, read])
