"""Broken frames between routers: messages, or the end of the connection, and never more memory than a frame."""

import msgspec

from penstock.router.picker import messages
from penstock.router.picker.messages import MAX_FRAME_BYTES, FrameReader, ProtocolError, frames

TOKENS = [
    b"\x90", b"\x91" * 3000, b"\xc0", b"\xc3", b"\xa1\xff", b"\xcf" + b"\xff" * 8, b"\xd3" + b"\xff" * 8,
    b"\xcb\x7f\xf8" + bytes(6), b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", bytes(4), b"\xff" * 4, b"\0\0\0\1",
]  # fmt: skip


def _samples():
    """Return a message of every kind, filled by the types of its fields."""
    inspect = msgspec.inspect
    samples = {
        inspect.IntType: lambda _: 1,
        inspect.FloatType: lambda _: 0.5,
        inspect.StrType: lambda _: "a",
        inspect.BytesType: lambda _: b"12345678",
        inspect.BoolType: lambda _: True,
        inspect.NoneType: lambda _: None,
        inspect.EnumType: lambda kind: next(iter(kind.cls)),
        inspect.UnionType: lambda kind: value(kind.types[0]),
        inspect.StructType: lambda kind: kind.cls(*(value(field.type) for field in kind.fields)),
        inspect.NamedTupleType: lambda kind: kind.cls(*(value(field.type) for field in kind.fields)),
        inspect.VarTupleType: lambda kind: (value(kind.item_type),),
        inspect.TupleType: lambda kind: tuple(map(value, kind.item_types)),
        inspect.ListType: lambda kind: [value(kind.item_type)],
        inspect.DictType: lambda kind: {value(kind.key_type): value(kind.value_type)},
    }

    def value(kind):
        return samples[type(kind)](kind)

    kinds = msgspec.inspect.type_info(messages.Message)
    return [value(kind) for kind in kinds.types]


def test_any_bytes_are_messages_or_end_the_connection(rounds, mutate, pieces):
    """No byte raises anything else, and what is held between reads stays within a frame."""
    corpus = [frames([each]) for each in _samples()] + [frames(_samples())]
    for name, rng in rounds:
        data = mutate(rng, corpus, TOKENS, longest=20_000)
        reader = FrameReader()
        try:
            for piece in pieces(rng, data):
                list(reader.feed(piece))
        except ProtocolError:
            continue
        except BaseException as exc:
            exc.add_note(f"{name} data={data[:400]!r}")
            raise
        assert len(data) <= MAX_FRAME_BYTES
