"""Values that keep their hash, because plans of many devices have long device orders and are keys of many caches."""

from __future__ import annotations

from typing import TypeVar

Value = TypeVar("Value", bound="HashedOnce")


class HashedOnce:
    """A base for frozen dataclasses that stores the hash outside of their fields, so copies and pickles lack it."""

    __slots__ = ("_hash",)
    _hash: int


def hashed_once(cls: type[Value]) -> type[Value]:
    """Make a frozen dataclass compute its hash only once, at the first request.

    >>> from dataclasses import dataclass
    >>> @hashed_once
    ... @dataclass(frozen=True, slots=True)
    ... class Order(HashedOnce):
    ...     devices: tuple[int, ...]
    >>> hash(Order((0, 1))) == hash(Order((0, 1)))
    True
    """
    compute = cls.__hash__

    def __hash__(self: Value) -> int:
        try:
            return self._hash
        except AttributeError:
            found = compute(self)
            object.__setattr__(self, "_hash", found)
            return found

    cls.__hash__ = __hash__  # type: ignore[assignment]
    return cls
