"""Records: groups of numbers, arrays and other records, which compiled functions read through a pointer.

Numba passes a named tuple field by field, and an array as seven values. The tables of a problem would be 400 arguments
of every function, and their code takes minutes to compile. A record is a single argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from hashlib import sha256
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.typing.templates import AttributeTemplate
from numba.extending import (
    NativeValue,
    infer_getattr,
    lower_getattr_generic,
    models,
    register_model,
    typeof_impl,
    unbox,
)
from numba.np.arrayobj import make_array, populate_array

from prefect_rlhf.placement.search.compiled import Ints

WORD = ir.IntType(64)
WORD_BYTES = 8


METHODS: dict[str, Mapping[str, Any]] = {}
"""The static methods of records, by class name. Types are stored with compiled code, but without these."""


class Record:
    """The base of dataclasses of integers, arrays of integers and records.

    Elements of the arrays may change, but no array is replaced. Raises TypeError for an array that is not contiguous or
    not int64: compiled code is specific to a layout, so another layout would compile all functions again.

    Compiled code may call a record's static methods, which are compiled; the record's type determines which code runs.
    """

    __slots__ = ("_kind", "_words", "address")
    _kind: RecordType
    _words: Ints
    address: int

    def __init_subclass__(cls) -> None:
        """Keep the static methods for the compiler."""
        METHODS[cls.__name__] = {
            name: each.__func__ for name, each in vars(cls).items() if isinstance(each, staticmethod)
        }

    def __post_init__(self) -> None:
        """Write all integers, and the addresses and shapes of all arrays, into `_words`; its address is passed."""
        words: list[int] = []
        kinds: list[tuple[str, Any]] = []
        for field in fields(self):  # type: ignore[arg-type]  # a subclass is a dataclass
            kind, stored = _stored(f"{type(self).__name__}.{field.name}", getattr(self, field.name))
            kinds.append((field.name, kind))
            words += stored
        block = np.array(words, dtype=np.int64)
        object.__setattr__(self, "_words", block)
        object.__setattr__(self, "address", _address(block))
        object.__setattr__(self, "_kind", _record_type(type(self).__name__, tuple(kinds)))


def _stored(name: str, value: Any) -> tuple[Any, list[int]]:
    """The type of a field for the compiler, and the words that represent the field."""
    if isinstance(value, Record):
        return value._kind, [value.address]
    if isinstance(value, int):
        return types.int64, [value]
    if value.dtype != np.int64 or not value.flags.c_contiguous:
        raise TypeError(f"{name}: not a contiguous array of int64")
    return _array_type(value.ndim), [_address(value), *value.shape]


def _address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


@cache
def _array_type(ndim: int) -> Any:
    return types.Array(types.int64, ndim, "C")


class RecordType(types.Type):  # type: ignore[misc]  # numba has no types
    """A record's type for the compiler: each field's place in the words, and its type."""

    def __init__(self, name: str, members: Sequence[tuple[str, Any]]) -> None:
        self.record = name
        self.places: dict[str, tuple[int, Any]] = {}
        place = 0
        for member, kind in members:
            self.places[member] = place, kind
            place += 1 + (kind.ndim if isinstance(kind, types.Array) else 0)
        digest = sha256("".join(f"{member}:{kind};" for member, kind in members).encode()).hexdigest()[:12]
        # The linker knows a compiled function by its name and the names of its types. If tables of two rules had equal
        # names, a process that loads the search for both could run the first one's code for both.
        super().__init__(name=f"{name}{place}_{digest}")

    @property
    def key(self) -> tuple[Any, ...]:
        """Types with the same fields are equal."""
        return self.name, *self.places.items()


@cache
def _record_type(name: str, members: tuple[tuple[str, Any], ...]) -> RecordType:
    return RecordType(name, members)


@register_model(RecordType)
class _Pointer(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: RecordType) -> None:
        super().__init__(manager, kind, WORD.as_pointer())


@typeof_impl.register(Record)  # type: ignore[untyped-decorator]
def _type_of(record: Record, context: Any) -> RecordType:
    return record._kind


@unbox(RecordType)  # type: ignore[untyped-decorator]
def _pointer_from(kind: RecordType, record: Any, c: Any) -> Any:
    address = c.pyapi.object_getattr_string(record, "address")
    pointer = c.builder.bitcast(c.pyapi.long_as_voidptr(address), WORD.as_pointer())
    c.pyapi.decref(address)
    return NativeValue(pointer)


@infer_getattr
class _FieldTypes(AttributeTemplate):  # type: ignore[misc]
    key = RecordType

    def generic_resolve(self, kind: RecordType, name: str) -> Any:
        if name in kind.places:
            return kind.places[name][1]
        return types.Dispatcher(METHODS[kind.record][name]) if name in METHODS[kind.record] else None


@lower_getattr_generic(RecordType)  # type: ignore[untyped-decorator]
def _read_field(context: Any, builder: Any, kind: RecordType, pointer: Any, name: str) -> Any:
    if name not in kind.places:
        return context.get_dummy_value()  # a method: its type says which
    place, member = kind.places[name]
    if member == types.int64:
        return _read_word(builder, pointer, place, WORD)
    data = _read_word(builder, pointer, place, WORD.as_pointer())
    if isinstance(member, RecordType):
        return data
    shape = [_read_word(builder, pointer, place + 1 + axis, WORD) for axis in range(member.ndim)]
    strides = [ir.Constant(WORD, WORD_BYTES)]
    for length in reversed(shape[1:]):
        strides.insert(0, builder.mul(strides[0], length))
    array = make_array(member)(context, builder)
    populate_array(array, data=data, shape=shape, strides=strides, itemsize=WORD_BYTES, meminfo=None)
    return array._getvalue()


def _read_word(builder: Any, pointer: Any, place: int, kind: Any) -> Any:
    """Load a word of a record. The words never change, so the optimizer may load a word once for all its uses."""
    at = builder.gep(pointer, [ir.Constant(WORD, place)])
    value = builder.load(builder.bitcast(at, kind.as_pointer()))
    value.set_metadata("invariant.load", builder.module.add_metadata([]))
    return value
