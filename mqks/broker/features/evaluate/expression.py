"""The read-only Python expressions of `_eval`, to inspect a running broker.

The one rule: everything is paid for before it is done. An expression has a budget of steps. A node
visited, an item taken and 16 characters of text read or built cost a step each, so one number
limits time and memory. Only `range` is lazy: generator expressions, `zip`, `enumerate` and
`reversed` return lists. Only what is named in this file exists.
"""

import ast
import builtins
import json
import operator
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, MappingView
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from mqks.broker.spine.base.turns import GOES_ON, Work
from mqks.errors import BadRequest


class Items(int):
    """A value with methods: a number of waiting things, without the things themselves."""

    def __len__(self) -> int:
        return int(self)

    def qsize(self) -> int:
        return int(self)


class BooleanView(int):
    """A value with a method: a boolean."""

    def __repr__(self) -> str:
        return str(bool(self))

    def is_set(self) -> bool:
        return bool(self)


class ExpressionError(BadRequest):
    """The expression is malformed, not allowed, too costly, or failed; the message says which."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one expression."""

    source_bytes_max: int = 4096  # Python's parser recurses in C: this much is safe on 1 MiB.
    nodes_max: int = 2000
    depth_max: int = 100
    steps_max: int = 200_000
    int_bits_max: int = 1024  # As wide as the widest float, and still quick to multiply.


Scope = dict[str, Any]
Function = Callable[[Any], Work[Any]]
LIMITS = Limits()
RESULT_BYTES_MAX = 64 * 1024
STEP = 2000
"""Steps after which the time is checked: a millisecond or two."""
PARSE_STEPS = 2000
"""Approximate steps that parsing an expression takes."""


def evaluate(
    source: str, names: Mapping[str, object], budget: "Allowance", limits: Limits = LIMITS
) -> Work[object]:
    """The value of `source`, a Python expression over `names`; raises only ExpressionError.

    Several expressions may share a `budget` of steps. An object in `names` shows its public
    attributes that are data. Each is read once per expression, because a property may have to copy.
    Nothing is ever written. The values of names may change between two steps of the work.
    """
    with _refusals():
        budget.spend(PARSE_STEPS)
        work = _Evaluation(budget, limits).visit(_parse(source, limits), dict(names))
    while True:
        with _refusals():
            try:
                next(work)
            except StopIteration as end:
                return end.value
        yield GOES_ON


def render(value: object, *, bytes_max: int = RESULT_BYTES_MAX) -> bytes:
    """`value` as one line, without its end: text unchanged, anything else as JSON.

    Control characters are escaped as in JSON. Sets become sorted lists, bytes become text.
    Raises ExpressionError for what JSON cannot hold and for a line of more than `bytes_max`.
    """
    with _refusals():
        # An item or a character takes at least a byte: out of steps means out of bytes.
        plain = _plain(value, Allowance(bytes_max, "the result is too long"))
        text = plain if isinstance(value, str) else _json(plain)
        line = text.translate(_ESCAPES).encode("utf-8", "surrogateescape")
        if len(line) > bytes_max:
            raise ExpressionError("the result is too long")
        return line


@contextmanager
def _refusals() -> Iterator[None]:
    """Turns all errors into ExpressionError, and silences Python's warnings."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except ExpressionError:
        raise
    except Exception as error:  # RecursionError and MemoryError among them.
        raise ExpressionError(f"{type(error).__name__}: {error}"[:200]) from error


def _parse(source: str, limits: Limits) -> ast.AST:
    if len(source.encode()) > limits.source_bytes_max:
        raise ExpressionError("the expression is too long")
    tree = ast.parse(source.strip(), mode="eval").body
    level: list[ast.AST] = [tree]
    nodes = depth = 0
    while level:
        nodes, depth = nodes + len(level), depth + 1
        if nodes > limits.nodes_max or depth > limits.depth_max:
            raise ExpressionError("the expression is too complex")
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    return tree


class Allowance:
    """The steps left. Every method pays for what its caller does next, or raises."""

    def __init__(
        self, steps: int = LIMITS.steps_max, refusal: str = "the expression takes too many steps"
    ) -> None:
        self.steps = steps
        self.refusal = refusal

    def spend(self, steps: int) -> None:
        self.steps -= steps
        if self.steps < 0:
            raise ExpressionError(self.refusal)

    def items(self, value: Any) -> Any:
        """Pays for one iteration over `value`, and returns it."""
        if not isinstance(value, _ITERABLE):
            raise ExpressionError(f"{type(value).__name__} has no items")
        self.spend(len(value))
        return value

    def weigh(self, value: Any, times: int = 1) -> None:
        """Pays for reading all of `value`, as comparing, hashing and printing do.

        Shared parts count each time they occur: ten small lists can spell out 10**20 items.
        """
        self.spend(_size(value) * times)
        if isinstance(value, _ITERABLE) and not isinstance(value, str | bytes):
            inner: Any = value.items() if isinstance(value, Mapping) else [value]
            for items in inner:
                kinds = {*map(type, items)}
                if kinds == {int}:  # About the same in one step: there may be many.
                    bits = sum(map(int.bit_length, items))
                    self.spend((len(items) + bits // 64) * times)
                elif kinds == {str}:
                    self.spend((len(items) + sum(map(len, items)) // 16) * times)
                else:
                    for item in items:
                        self.weigh(item, times)

    def search(self, text: str | bytes, needles: Iterable[Any]) -> None:
        """Pays for searching `text`; in the worst case each needle is compared at each place."""
        width = sum(len(needle) for needle in needles if isinstance(needle, str | bytes))
        self.spend(1 + len(text) * (16 + width) // 256)


class _Evaluation:
    """One evaluation of one expression."""

    def __init__(self, budget: Allowance, limits: Limits) -> None:
        self.budget = budget
        self.spend, self.items = budget.spend, budget.items
        self.weigh, self.search = budget.weigh, budget.search
        self.bits_max = limits.int_bits_max
        self.step_end = budget.steps - STEP
        self.attributes: dict[tuple[int, str], tuple[Any, Any]] = {}

    def visit(self, node: Any, scope: Scope) -> Work[Any]:
        self.spend(1)
        value = yield from self.value(node, scope)
        if isinstance(value, int) and value.bit_length() > self.bits_max:
            raise ExpressionError("the number is too large")
        return value

    def each(self, nodes: Iterable[Any], scope: Scope) -> Work[list[Any]]:
        values = []
        for node in nodes:
            values.append(node and (yield from self.visit(node, scope)))
        return values

    def value(self, node: Any, scope: Scope) -> Work[Any]:
        """The whole language: a case for each kind of node."""
        visit = self.visit
        match node:
            case ast.Constant(None | int() | float() | str() | bytes() as value):
                return value
            case ast.Name(name) if name in scope and not name.startswith("_"):
                return scope[name]
            case ast.Attribute(owner, name):
                return (yield from self.attribute((yield from visit(owner, scope)), name))
            case ast.Subscript(owner, index):
                owner, index = yield from self.each((owner, index), scope)
                return self.subscript(owner, index)
            case ast.Slice(start, stop, step):
                return slice(*(yield from self.each((start, stop, step), scope)))
            case ast.Call(ast.Name(name), args, keywords) if not keywords or name in _KEYWORDED:
                options: dict[str, Any] = {}
                for keyword in keywords:
                    options[str(keyword.arg)] = yield from self.option(keyword, scope)
                return (yield from self.call(name, (yield from self.each(args, scope)), options))
            case ast.Call(ast.Attribute(owner, name), args, []):
                owner, *values = yield from self.each((owner, *args), scope)
                return (yield from self.method(owner, name, values))
            case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
                left, right = yield from self.each((left, right), scope)
                return (yield from self.binary(op, left, right))
            case ast.UnaryOp(op, operand):
                return _OPERATORS[type(op)]((yield from visit(operand, scope)))
            case ast.Compare(first, ops, others):
                left = yield from visit(first, scope)
                for relation, other in zip(ops, others, strict=True):
                    right = yield from visit(other, scope)
                    if not self.compare(relation, left, right):
                        return False
                    left = right
                return True
            case ast.BoolOp(op, [*operands, last]):
                for operand in operands:
                    value = yield from visit(operand, scope)
                    if bool(value) is isinstance(op, ast.Or):
                        return value
                return (yield from visit(last, scope))
            case ast.IfExp(test, body, orelse):
                branch = body if (yield from visit(test, scope)) else orelse
                return (yield from visit(branch, scope))
            case ast.List(parts) | ast.Tuple(parts) | ast.Set(parts):
                found = yield from self.each(parts, scope)
            case ast.Dict(keys, values) if None not in keys:
                pairs = zip(keys, values, strict=True)
                found = yield from self.each(chain.from_iterable(pairs), scope)
            case (
                ast.ListComp(part, loops) | ast.GeneratorExp(part, loops) | ast.SetComp(part, loops)
            ):
                found = yield from self.loop(loops, {**scope}, (part,), [])
            case ast.DictComp(key, value, loops):
                found = yield from self.loop(loops, {**scope}, (key, value), [])
            case _:
                raise ExpressionError(f"unknown or not allowed: {ast.unparse(node)}"[:200])
        if isinstance(node, ast.Set | ast.SetComp):
            return (yield from self.set(found))
        if isinstance(node, ast.Dict | ast.DictComp):
            return (yield from self.mapping(zip(found[::2], found[1::2], strict=True)))
        return tuple(found) if isinstance(node, ast.Tuple) else found

    def mapping(self, pairs: Iterable[Any]) -> Work[dict[Any, Any]]:
        """A dict of `pairs`. Keys with one hash are compared in turn: each pays for the others."""
        result: dict[Any, Any] = {}
        alike: dict[int, int] = {}
        for key, value in pairs:
            self.weigh(key)
            if others := alike.get(hash(key), 0):
                self.weigh(key, others)
            if key not in result:
                alike[hash(key)] = others + 1
            result[key] = value
            if self.is_step_over:
                yield GOES_ON
        return result

    def set(self, items: Iterable[Any]) -> Work[set[Any]]:
        return {*(yield from self.mapping((item, None) for item in items))}

    def attribute(self, owner: Any, name: str) -> Work[Any]:
        # Python's own objects (frames, code, modules) have public names that lead out of here.
        if name.startswith("_") or type(owner).__module__ == "builtins":
            raise ExpressionError(f"{type(owner).__name__} has no attribute {name}")
        key = id(owner), name
        if key not in self.attributes:  # The owner is stored too, so that its id is not reused.
            value = getattr(owner, name)
            if isinstance(value, Generator):  # Large values are made in steps.
                value = yield from value
            self.attributes[key] = owner, value
        value = self.attributes[key][1]
        if callable(value):
            raise ExpressionError(f"{name} is not data")
        return value

    def subscript(self, owner: Any, index: Any) -> Any:
        match owner:
            case Mapping():
                self.weigh(index)
                if index not in owner:  # A defaultdict would add it.
                    raise KeyError(index)
            case str() | bytes() | list() | tuple() | range():
                if isinstance(index, slice):
                    self.spend(len(range(*index.indices(len(owner)))))
            case _:
                raise ExpressionError(f"{type(owner).__name__} has no items")
        return owner[index]

    def loop(
        self,
        loops: list[ast.comprehension],
        scope: Scope,
        parts: tuple[ast.expr, ...],
        values: list[Any],
        depth: int = 0,
    ) -> Work[list[Any]]:
        """Add the values of `parts` for each iteration of the `for` and `if` clauses; each binds
        its names in the same `scope`."""
        if depth == len(loops):
            self.spend(depth)  # Each iteration passes all the loops around it.
            for part in parts:
                values.append((yield from self.visit(part, scope)))
            return values
        loop = loops[depth]
        if loop.is_async:
            raise ExpressionError("async is not allowed")
        for item in self.items((yield from self.visit(loop.iter, scope))):
            self.bind(loop.target, item, scope)
            for test in loop.ifs:
                if not (yield from self.visit(test, scope)):
                    break
            else:
                yield from self.loop(loops, scope, parts, values, depth + 1)
            if self.is_step_over:
                yield GOES_ON
        return values

    @property
    def is_step_over(self) -> bool:
        if self.budget.steps > self.step_end:
            return False
        self.step_end = self.budget.steps - STEP
        return True

    def bind(self, target: ast.expr, value: Any, scope: Scope) -> None:
        match target:
            case ast.Name(name) if not name.startswith("_"):
                scope[name] = value
            case ast.Tuple(parts) | ast.List(parts):
                for part, item in zip(parts, self.items(value), strict=True):
                    self.bind(part, item, scope)
            case _:
                raise ExpressionError(f"cannot be bound: {ast.unparse(target)}"[:200])

    def binary(self, op: ast.operator, left: Any, right: Any) -> Work[Any]:
        if isinstance(left, MappingView) or isinstance(right, MappingView):
            left = yield from self.set(self.items(left))
            right = yield from self.set(self.items(right))
        self.weigh(left)
        self.weigh(right)
        match op, left, right:
            case (ast.Mult(), sequence, int(times)) | (ast.Mult(), int(times), sequence):
                if not isinstance(sequence, int | float):
                    self.spend(_size(sequence) * max(times, 0))
            case ast.Pow(), int(), int() if (left.bit_length() - 1) * right >= self.bits_max:
                raise ExpressionError("the number is too large")
            case ast.LShift(), _, int() if right > self.bits_max:
                raise ExpressionError("the number is too large")
            case ast.Mod(), str() | bytes(), _:
                raise ExpressionError("% does not format text here")
        return _OPERATORS[type(op)](left, right)

    def compare(self, op: ast.cmpop, left: Any, right: Any) -> Any:
        match op, right:
            case ((ast.Is() | ast.IsNot()), _):
                pass
            case ((ast.In() | ast.NotIn()), str() | bytes()):
                self.search(right, [left])
            case ((ast.In() | ast.NotIn()), Mapping() | AbstractSet()):
                self.weigh(left)
            case ((ast.In() | ast.NotIn()), range()) if type(left) in (int, bool):
                pass  # Other values are compared with each number.
            case _:
                self.weigh(left)
                self.weigh(right)
        return _OPERATORS[type(op)](left, right)

    def option(self, keyword: ast.keyword, scope: Scope) -> Work[Any]:
        """The value of a keyword. A lambda has one argument, and its body is paid for at each call;
        it has no name, so it never calls itself."""
        match keyword:
            case ast.keyword("key", ast.Name(name)):
                return lambda item: self.call(name, [item], {})
            case ast.keyword("key", ast.Lambda(arguments, body)):
                match arguments:
                    case ast.arguments([], [ast.arg(name)], None, [], [], None, []):
                        if name[0] != "_":
                            return lambda item: self.visit(body, {**scope, name: item})
                raise ExpressionError("a lambda takes one plain argument here")
            case ast.keyword("default" | "reverse" | "start", value):
                return (yield from self.visit(value, scope))
        raise ExpressionError(f"not allowed: {ast.unparse(keyword)}"[:200])

    def call(self, name: str, args: list[Any], options: dict[str, Any]) -> Work[Any]:
        match name, args:
            case (("bool" | "dict" | "float" | "int" | "list" | "set" | "str" | "tuple"), []):
                pass
            case (("abs" | "bool" | "len"), [_]):
                pass
            case "range", _:
                pass
            case (("all" | "any" | "enumerate" | "list" | "reversed" | "tuple"), [items, *_]):
                self.items(items)
            case "set", [items]:
                return (yield from self.set(self.items(items)))
            case "dict", [items]:
                self.items(items)
                pairs = items.items() if isinstance(items, Mapping) else items
                return (yield from self.mapping(pairs))
            case (("max" | "min" | "sorted"), [first, *rest]):
                items = self.items(args if rest else first)
                # A comparison is an eighth of a step, or less, and is done this often per item.
                times = 1 + len(items).bit_length() // 8 if name == "sorted" else 1
                items = [*items]
                keys = yield from self.keys(items, options.get("key"), times)
                args, options = [items], {**options, "key": lambda _: next(keys)}
            case "sum", [items, *start]:  # For lists it would take quadratic time.
                numbers = (*self.items(items), *start, *options.values())
                if not all(issubclass(kind, int | float) for kind in {*map(type, numbers)}):
                    raise ExpressionError("sum adds numbers only")
            case "zip", _:
                self.spend(len(args) * min(map(len, args), default=0))
            case "str", [value]:
                self.weigh(value)
            case "float", [value]:
                self.spend(_size(value))
            case "int", [value, *_]:  # Reading decimals takes quadratic time.
                if isinstance(value, str | bytes) and len(value) > self.bits_max:
                    raise ExpressionError("the number is too large")
            case "round", [_, *digits] if all(abs(n) <= self.bits_max for n in digits if n):
                pass  # round(n, -digits) computes 10**digits.
            case _:
                raise ExpressionError(f"{name} is not a function of these arguments")
        result = getattr(builtins, name)(*args, **options)  # Only the names above get here.
        return [*result] if isinstance(result, Iterator) else result

    def keys(self, items: list[Any], key: Function | None, times: int) -> Work[Iterator[Any]]:
        """The value to compare for each item, in order; pays for this many comparisons."""
        values = []
        for item in items:
            value = item if key is None else (yield from key(item))
            self.weigh(value, times)
            values.append(value)
            if self.is_step_over:
                yield GOES_ON
        return iter(values)

    def method(self, owner: Any, name: str, args: list[Any]) -> Work[Any]:
        if not any(isinstance(owner, of) and name in names.split() for of, names in _METHODS):
            raise ExpressionError(f"{type(owner).__name__} has no method {name}")
        for arg in args:
            self.weigh(arg)
        match owner:
            case Mapping():
                name = name.removeprefix("iter")
            case list() | tuple():
                self.weigh(owner)
            case set() | frozenset():
                self.weigh(owner)
                sets = []
                for arg in args:
                    is_set = isinstance(arg, set | frozenset)
                    sets.append(arg if is_set else (yield from self.set(arg)))
                args = sets
            case str() | bytes():
                self.search(owner, args)
        match name, args:
            case (("split" | "rsplit"), _):
                self.spend(len(owner))  # Each character may become a piece.
            case "replace", [old, new, *_]:
                self.spend(owner.count(old) * len(new) // 16)
            case "join", [items]:
                self.spend(len(owner) * len(self.items(items)) // 16)
            case "decode", [codec, *repair] if not (
                codec in _CODECS and _REPAIRS.issuperset(repair)
            ):
                raise ExpressionError("unknown codec")
        return getattr(owner, name)(*args)


_ITERABLE = (str, bytes, list, tuple, AbstractSet, Mapping, MappingView, range)
_KEYWORDED = frozenset({"enumerate", "max", "min", "sorted", "sum"})
_METHODS = (
    (str | bytes, "lower upper strip lstrip rstrip split rsplit startswith endswith replace join"),
    (str | bytes, "find count isdigit isalpha title partition decode"),
    (Mapping, "get keys values items iterkeys itervalues iteritems"),
    (Items, "qsize"),
    (BooleanView, "is_set"),
    (list | tuple, "count index"),
    (set | frozenset, "union intersection difference issubset issuperset"),
)
_CODECS = frozenset({"utf-8", "ascii", "latin-1"})  # Others may import a module.
_REPAIRS = frozenset({"strict", "ignore", "replace", "backslashreplace", "surrogateescape"})
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Invert: operator.invert,
    ast.Not: operator.not_,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda item, items: item in items,
    ast.NotIn: lambda item, items: item not in items,
}


def _size(value: Any) -> int:
    """The steps of a shallow copy. This also refuses whatever is not plain data."""
    match value:
        case None | float():
            return 1
        case int():
            return 1 + value.bit_length() // 64
        case str() | bytes():
            return 1 + len(value) // 16
    if isinstance(value, _ITERABLE):
        return 1 + len(value)
    raise ExpressionError(f"{type(value).__name__} is not plain data")


def _plain(value: Any, budget: Allowance) -> Any:
    """`value` as JSON values."""

    def plain(items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            budget.spend(1)
            yield _plain(item, budget)

    match value:
        case BooleanView():
            return bool(value)
        case None | int() | float():
            return value
        case str():
            budget.spend(len(value))
            return value
        case bytes():
            budget.spend(len(value))
            return value.decode("utf-8", "backslashreplace")
        case Mapping():
            names = [name if isinstance(name, str) else _json(name) for name in plain(value)]
            if len({*names}) < len(names):
                raise ExpressionError("two keys look the same as text")
            return dict(zip(names, plain(value.values()), strict=True))
        case list() | tuple() | range() | MappingView() | Iterator():
            items: Any = value
            return [*plain(items)]
        case AbstractSet():
            items = [*plain(value)]
            try:
                return sorted(items)
            except TypeError:
                return sorted(items, key=_json)
    raise ExpressionError(
        f"{type(value).__name__} cannot be shown: it is not text, a number, a list or a dict"
    )


_json = partial(json.dumps, ensure_ascii=False, allow_nan=False)
_ESCAPES = {code: json.dumps(chr(code))[1:-1] for code in (*range(0x20), *range(0x7F, 0xA0))}
