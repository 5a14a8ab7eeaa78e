"""Keywords that a function does not have: old ones are renamed, and the TypeError for others names
the nearest one that it has.

The one rule: what is called for each message is not wrapped.
"""

import warnings
from collections.abc import Callable, Iterable
from functools import cache, wraps
from inspect import CO_VARKEYWORDS, Parameter, iscoroutinefunction, signature
from types import FunctionType
from typing import Any, TypeVar, cast, get_args

from mqks.errors import did_you_mean

T = TypeVar("T", bound=type)
Function = Callable[..., Any]
F = TypeVar("F", bound=Function)


RENAMED = {"add": "events", "add_mask": "masks", "dead_letters": "dead_letter_queue"}
"""Deprecated keywords of functions that have the new ones instead."""


def renamed(old: str, new: str, stacklevel: int) -> None:
    warnings.warn(f"{old} is now {new}", DeprecationWarning, stacklevel=stacklevel)


def _with_new_words(function: Function, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
    """The positional arguments; deprecated keywords are replaced in the others."""
    known = keywords(function)
    for old in [*given]:
        if old in RENAMED and old not in known and (new := RENAMED[old]) in known:
            renamed(old, new, 4)
            value = given.pop(old)
            if old == "add" and len(args) > 2:  # self, queue, events
                args = *args[:2], [*args[2], *value], *args[3:]
            else:
                given[new] = [*given[new], *value] if new in given else value
    return args


def check(given: Iterable[str], function: Function) -> None:
    """Raises TypeError at a keyword that the function does not have."""
    known = keywords(function)
    for word in given:
        if word not in known:
            wrong = f"{function.__qualname__}() got an unexpected keyword argument {word!r}"
            raise TypeError(wrong + did_you_mean(word, known))


@cache
def keywords(function: Function) -> frozenset[str]:
    """Of its own, and of the TypedDict that it unpacks."""
    words = set[str]()
    for name, parameter in signature(function).parameters.items():
        if parameter.kind is Parameter.VAR_KEYWORD:
            words.update(get_args(parameter.annotation)[0].__optional_keys__)
        elif parameter.kind is not Parameter.VAR_POSITIONAL and name != "self":
            words.add(name)
    return frozenset(words)


def strict(*unwrapped: str) -> Callable[[T], T]:
    """Makes the public functions of a class check their keywords, except those that do so
    themselves."""

    def wrap(kind: T) -> T:
        for name, function in list(vars(kind).items()):
            is_public = name == "__init__" or name[0] != "_"
            if is_public and name not in unwrapped and _has_options(function):
                setattr(kind, name, checking(function))
        return kind

    return wrap


def _has_options(function: object) -> bool:
    if not isinstance(function, FunctionType):
        return False
    has_more = function.__code__.co_flags & CO_VARKEYWORDS
    return bool(has_more or function.__kwdefaults__ or function.__defaults__)


def checking(function: F) -> F:
    """A function that checks its keywords."""

    @wraps(function)
    def checked(*args: Any, **given: Any) -> Any:
        args = _with_new_words(function, args, given)
        check(given, function)
        return function(*args, **given)

    @wraps(function)
    async def checked_later(*args: Any, **given: Any) -> Any:
        args = _with_new_words(function, args, given)
        check(given, function)
        return await function(*args, **given)

    return cast(F, checked_later if iscoroutinefunction(function) else checked)
