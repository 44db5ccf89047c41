"""The types of options: whether a value fits an annotation, and how a message describes the values that fit."""

import math
import operator
from collections.abc import Callable
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text", NoneType: "null"}


class Rule(NamedTuple):
    """What Annotated adds to a type. text: describes both, with {} in place of the type."""

    text: str
    holds: Callable[[Any], Any] = lambda value: True


def limit(words: str, holds: Callable) -> Callable[[float], Rule]:
    return lambda number: Rule(f"{{}} {words} {number}", lambda value: holds(value, number))


at_least, above = limit("of at least", operator.ge), limit("above", operator.gt)
at_most, below = limit("and at most", operator.le), limit("and below", operator.lt)


def fits(value, kind) -> bool:
    """Whether a value fits a type. Here whole numbers are no floats, and true and false are no numbers."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return fits(value, parts[0]) and all(rule.holds(value) for rule in parts[1:])
    if origin in (Union, UnionType):
        return any(fits(value, part) for part in parts)
    if origin is Literal:
        return value in parts
    if origin is list:
        return isinstance(value, list) and all(fits(entry, parts[0]) for entry in value)
    return kind is Any or (type(value) is kind and value != "" and (kind is not float or math.isfinite(value)))


def describe(kind) -> str:
    """The values that fit a type, as text."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        text = describe(parts[0])
        for rule in parts[1:]:
            text = rule.text.format(text)
        return text
    if origin is list:
        return "a list"
    if origin is Literal:
        return f"one of {', '.join(parts)}" if len(parts) > 1 else parts[0]
    return NAMES.get(kind) or ", or ".join(describe(part) for part in parts)


def choices(kind) -> list[str]:
    """The words that fit a type."""
    parts = get_args(kind)
    return [*parts] if get_origin(kind) is Literal else [word for part in parts for word in choices(part)]
