"""`mqks serve`: its flags are derived from the fields of `Settings`."""

import os
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from mqks.settings import RENAMED, SETTINGS, Setting, load

_METAVARS: dict[Any, str] = {
    Path: "PATH",
    int: "NUMBER",
    float: "NUMBER",
    bool: " ",
}


class Serve(TyperCommand):
    """Passes on what the flags say as it was typed: `load` reads it. A validator by Typer for each
    flag would cost the server 7 MiB for as long as it runs."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given, others, _ = self.make_parser(ctx).parse_args([*args])
        if others or "help" in given:
            return super().parse_args(ctx, args)
        ctx.params = {str(each.name): given.get(str(each.name)) for each in self.params}
        return []


def serve(config: Path | None, **flags: object) -> None:
    """Run the broker until SIGTERM or SIGINT.

    Settings can also be set in mqks.toml (port = 25000) and in the environment (MQKS_PORT=25000).
    A flag takes precedence over the environment, and the environment over the file.
    """
    settings = load(flags, os.environ, None if config is None else Path(config))
    from mqks.server.running import run  # here, so that --help does not load the broker

    try:
        code = run(settings)
    except (
        OSError
    ) as error:  # An internal error: shown with its traceback, unlike those of other commands.
        raise RuntimeError("the server has failed") from error
    raise typer.Exit(code)


def _flag(setting: Setting) -> Parameter:
    """The option for one setting: None when not given, or else what `Setting.parse` takes."""
    switch = setting.type is bool
    option: Any = typer.Option(
        f"{setting.flag}/--no-{setting.flag[2:]}" if switch else setting.flag,
        help=_help(setting),
        metavar=_METAVARS.get(setting.kind, "WORD"),
        rich_help_panel=setting.about.group,
    )
    kind: Any = bool if switch else str
    return _parameter(setting.name, Annotated[kind | None, option])


def _help(setting: Setting) -> str:
    """The text, then the default in brackets with its unit or the other choices."""
    default, unit = setting.default_text, setting.about.unit
    if setting.choices:
        default += ", or " + ", ".join(word for word in setting.choices if word != default)
    if unit not in ("", "bytes"):
        default += f" {unit}"
    return f"{setting.about.why} \\[{default}]" if default else setting.about.why


def _parameter(name: str, annotation: object) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


_config: Any = typer.Option(help=r"Settings file. \[default: ./mqks.toml]", metavar="PATH")
_old: Any = typer.Option(hidden=True)
FLAGS = [
    _parameter("config", Annotated[Path | None, _config]),
    *map(_flag, SETTINGS.values()),
    # Accepted so that `load` can refuse them with the new name.
    *(_parameter(name, Annotated[str | None, _old]) for name in RENAMED),
]
serve.__signature__ = Signature(FLAGS, return_annotation=None)  # type: ignore[attr-defined]
