"""The page of messages: enum, structs, codec and docstrings agree, one to one."""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec
import pytest
from msgspec import inspect

from zmqgrad.wire import messages
from zmqgrad.wire.messages import BY_TYPE, REQUEST, RESPONSE, Message, MessageType

STRUCTS = [
    c for c in vars(messages).values() if isinstance(c, type) and issubclass(c, Message) and c is not Message
]


def test_each_type_has_one_struct_and_each_struct_one_type() -> None:
    assert sorted(c.TYPE for c in STRUCTS) == sorted(MessageType)
    assert {t: c.__name__ for t, c in BY_TYPE.items()} == {c.TYPE: c.__name__ for c in STRUCTS}


def test_message_types_have_distinct_numbers() -> None:
    assert len(MessageType.__members__) == len(MessageType)


class Row(NamedTuple):
    """One line of the page: a message, what it says, and what it is answered with."""

    family: str
    name: str
    says: str
    answer: str | None


def page() -> list[Row]:
    """The lines of the package's docstring, each under the module that its heading names first."""
    assert messages.__doc__ is not None
    rows: list[Row] = []
    family = ""
    for line in messages.__doc__.splitlines():
        if heading := re.match(r"[A-Z][a-z ]+ \(:mod:`~(zmqgrad\.wire\.messages\.[a-z]+)`.*::$", line):
            family = heading[1]
        elif row := re.match(r"    ([A-Z_]+) +(\S.*?)(?: -> ([A-Z_]+))?$", line):
            rows.append(Row(family, *row.groups()))
    return rows


def test_the_page_has_one_line_a_message_under_its_family() -> None:
    assert sorted(row.name for row in page()) == sorted(MessageType.__members__)
    assert {row.name: row.family for row in page()} == {c.TYPE.name: c.__module__ for c in STRUCTS}


def test_the_page_names_the_reply_of_each_request() -> None:
    for row in page():
        kind = MessageType[row.name]
        assert (row.answer is not None) == bool(kind & REQUEST and kind is not MessageType.CANCEL), row
        assert row.answer is None or MessageType[row.answer] & RESPONSE, row
        said = re.findall(r"Reply: ([A-Z_]+)", BY_TYPE[kind].__doc__ or "")
        assert said in ([], [row.answer]), row


def test_each_response_is_the_reply_of_a_request_on_the_page() -> None:
    answers = {row.answer for row in page()}
    anything = {"EXCEPTION", "STORE_REFUSED"}  # whatever was asked
    assert {t.name for t in MessageType if t & RESPONSE} == (answers - {None}) | anything


@pytest.mark.parametrize("cls", STRUCTS, ids=lambda c: c.__name__)
def test_a_struct_is_named_as_its_type(cls: type[Message]) -> None:
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).upper().replace("RREF_", "RREF_")
    words = re.sub(r"^R_?REF_?", "RREF_", words)
    expected = {"EXCEPTION_REPLY": "EXCEPTION", "STORE_GET_NUM_KEYS": "STORE_GETNUMKEYS"}
    assert cls.TYPE.name == expected.get(words, words)


@pytest.mark.parametrize("cls", STRUCTS, ids=lambda c: c.__name__)
def test_a_struct_is_frozen_and_documented(cls: type[Message]) -> None:
    assert cls.__struct_config__.frozen
    assert cls.__struct_config__.array_like
    assert cls.__struct_config__.forbid_unknown_fields
    doc = cls.__dict__.get("__doc__")
    assert doc
    assert re.search(r"[.?)]$", doc.strip().splitlines()[0]), "the first line is a sentence"


@pytest.mark.parametrize("cls", STRUCTS, ids=lambda c: c.__name__)
def test_names_in_docstrings_exist(cls: type[Message]) -> None:
    """Docstrings name messages in capitals (``Reply: STORE_VALUE``) and fields in double backquotes."""
    assert cls.__doc__ is not None
    for name in re.findall(r"\b[A-Z]{2,}(?:_[A-Z]+)+\b", cls.__doc__):
        assert name in MessageType.__members__, name
    fields = {f.name for f in msgspec.structs.fields(cls)}
    for name in re.findall(r"``([a-z_]+)``", cls.__doc__):
        assert name in fields, name


@pytest.mark.parametrize(
    "cls", [c for c in STRUCTS if c.__name__.startswith("Store")], ids=lambda c: c.__name__
)
def test_a_store_query_names_its_reply_which_is_a_response(cls: type[Message]) -> None:
    assert cls.__doc__ is not None
    answers = re.findall(r"Reply: ([A-Z_]+)", cls.__doc__)
    if cls.TYPE & REQUEST:
        assert len(answers) == 1
        assert MessageType[answers[0]] & RESPONSE
    else:
        assert cls.TYPE & RESPONSE
        assert not answers


def test_requests_and_responses_are_distinguished_by_their_bits() -> None:
    neither = {t.name for t in MessageType if not t & (REQUEST | RESPONSE)}
    assert neither == {
        "ARENA_OFFER",
        "LARGE_MESSAGE",
        "KEY_CREATED",
        "KEY_UPDATED",
        "KEY_DELETED",
        "PREFIX_CHANGED",
        "HELLO",
        "GOODBYE",
        "CREDIT",
        "CREDIT_WANTED",
        "CHUNK",
        "ACK",
        "BULK_ACK",
        "RELEASE",
    }
    assert not [t for t in MessageType if t & REQUEST and t & RESPONSE]


def test_message_types_use_the_numbers_of_torch() -> None:
    """Messages that torch's RPC has as well use its numbers."""
    assert MessageType.FORWARD_AUTOGRAD_REQ == 0x0F | 0x100
    assert MessageType.FORWARD_AUTOGRAD_RESP == 0x10 | 0x200
    assert MessageType.BACKWARD_AUTOGRAD_REQ == 0x11 | 0x100
    assert MessageType.BACKWARD_AUTOGRAD_RESP == 0x12 | 0x200
    assert MessageType.CLEANUP_AUTOGRAD_CONTEXT_REQ == 0x13 | 0x100
    assert MessageType.CLEANUP_AUTOGRAD_CONTEXT_RESP == 0x14 | 0x200


@pytest.mark.parametrize("cls", STRUCTS, ids=lambda c: c.__name__)
def test_every_sequence_and_text_has_a_bound(cls: type[Message]) -> None:
    """Sizes are bounded before anything is allocated (docs/guarantees.md, P5)."""
    unbounded: list[str] = []
    seen: set[type] = set()

    def walk(kind: inspect.Type, where: str) -> None:
        if isinstance(kind, inspect.StructType):
            if kind.cls not in seen:
                seen.add(kind.cls)
                for f in kind.fields:
                    walk(f.type, f"{kind.cls.__name__}.{f.name}")
        elif isinstance(kind, inspect.UnionType):
            for k in kind.types:
                walk(k, where)
        elif isinstance(kind, inspect.TupleType):
            for k in kind.item_types:
                walk(k, where)
        elif isinstance(kind, inspect.VarTupleType):
            walk(kind.item_type, where)
            if kind.max_length is None:
                unbounded.append(where)
        elif isinstance(kind, (inspect.StrType, inspect.BytesType)) and kind.max_length is None:
            unbounded.append(where)

    walk(inspect.type_info(cls), cls.__name__)
    # Bounded by the frame alone, on purpose: what user code raised, and what was small enough to go inline.
    assert set(unbounded) <= {
        "Blob.data",
        "Chunk.data",
        "ExceptionReply.text",
        "ExceptionReply.traceback",
        "ExceptionReply.pickled",
    }
