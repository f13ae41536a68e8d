"""What a member may send in place of a reply: types x truncations x sizes x values, in a fixed order.

Every case is a name and a function from an honest reply (:class:`tests.harness.wire.Wire`) to what is sent instead.
"""

import copy
import io
import json
import pickle
from functools import partial

import numpy as np
from flwr.app import ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.message_pb2 import ObjectTree
from murmurfl.privacy import derived_seed

from tests.harness.wire import MIB, body_of, json_body, wire_of, with_head

KINDS = ("Message", "RecordDict", "ArrayRecord", "Array", "ArrayChunk", "MetricRecord", "ConfigRecord")
ODD_NUMBERS = (
    2**62,
    -(2**63),
    0,
    -1,
    float("nan"),
    float("inf"),
    -float("inf"),
    1e308,
    5e-324,
    True,
    [1],
    [],
    [float("nan")],
)
LONG, MANY = b"x" * 10_000_000, b"\x0a\x00" * 200_000
ODD_ENTRIES = (*ODD_NUMBERS, "", "x" * 5000, "\x1b[2J\n\0", "ü" * 300, b"", b"\xff" * 99, ["a"], [b""], [2**62] * 300)


def objects_damaged(kinds, seed=0):
    """Cases that change the first object of a kind, or how it is announced."""
    for kind in kinds:
        more = {"Array": _arrays, "ArrayRecord": _named, "RecordDict": _named, "ArrayChunk": _chunks}.get(kind)
        for name, change in [*_contents(seed), *(more() if more else [])]:
            yield f"{kind}: {name}", partial(_put, kind=kind, change=change)
        yield f"{kind}: announced only", partial(_put, kind=kind, change=lambda content: None)
        yield f"{kind}: gone", partial(_gone, kind=kind)
        yield f"{kind}: 600 MiB", partial(_endless, kind=kind, size=600 * MIB)


def _contents(seed):
    def noise(*what):
        return np.random.Generator(np.random.Philox(key=derived_seed("damage", seed, *map(str, what))))

    def flipped(content, number):
        changed, drawn = bytearray(content), noise("flip", number)
        for at in drawn.integers(0, len(changed), 4):
            changed[at] ^= int(drawn.integers(1, 256))
        return bytes(changed)

    def below(content):
        return content.partition(b"\0")[0].decode().split(" ")[1].split(",")

    for share in (0.0, 0.01, 0.25, 0.5, 0.75):
        yield f"cut at {share:.0%}", lambda content, share=share: content[: int(share * len(content))]
    yield "one byte short", lambda content: content[:-1]
    yield "one byte more", lambda content: content + b"x"
    for name, other in (("a divider alone", b"\0"), ("zeros", bytes(1000)), ("noise", noise("all").bytes(200))):
        yield name, lambda content, other=other: other
    for number in range(3):
        yield f"bits flipped {number}", partial(flipped, number=number)
    for kind in (*KINDS, "Evil", "", "Message Message"):
        yield f"of kind {kind!r}", partial(with_head, kind=kind)
    for size in (0, -1, 2**70, "x"):
        yield f"of size {size}", partial(with_head, size=size)
    for name, ids in (("nothing", []), ("what is missing", ["0" * 64]), ("what is no id", ["x"])):
        yield f"above {name}", partial(with_head, below=ids)
    yield "above everything twice", lambda content: with_head(content, below=below(content) * 2)
    yield "above one more", lambda content: with_head(content, below=[*below(content), "0" * 64])
    for body in (b"", b"{}", b"[]", b"null", b"1e999", b"\xff\xfe", b'"x"', b"[" * 5000, b'{"a":' * 5000):
        yield f"with body {body[:8]!r}", partial(with_head, body=body)
    for size in (10, 300):
        yield f"with {size} bytes of noise", partial(with_head, body=noise("body", size).bytes(size))
    yield "with 10 MB of text", partial(with_head, body=LONG)
    yield "with many empty fields", partial(with_head, body=MANY)
    yield "with many numbers", partial(with_head, body=b"\x0a\x80\x80\x20" + b"\x7f" * 2**19)


def _arrays():
    for ids in ([0] * 100_000, [], [-1], [1], [0.5], "0", None, [[0]], [True], [0] * 3):
        yield f"chunks {str(ids)[:12]}", partial(json_body, arraychunk_ids=ids)
    for shape in ([2**62], [-5], ["a"], 5, None, [0], [10**6] * 20, [[1]]):
        yield f"shape {str(shape)[:12]}", partial(json_body, shape=shape)
    for dtype in ("object", "float16", "complex128", "U5", "x" * 5000, 5, None):
        yield f"dtype {str(dtype)[:12]}", partial(json_body, dtype=dtype)
    for stype in ("torch", 5, None):
        yield f"stype {stype}", partial(json_body, stype=stype)


def _named():
    def renamed(content, names):
        ids = list(json.loads(body_of(content)).values())
        return with_head(content, body=json.dumps(names(ids)).encode())

    for name, names in (
        ("one object often", lambda ids: {str(place): ids[0] for place in range(10_000)}),
        ("other names", lambda ids: {f"\0{place}": one for place, one in enumerate(ids)}),
        ("shuffled", lambda ids: dict(zip(("config", "arrays", "metrics"), ids, strict=False))),
        ("lists", lambda ids: {"config": ids}),
        ("too few", lambda ids: {}),
    ):
        yield f"names {name}", partial(renamed, names=names)


def _chunks():
    def saved(values, **options):
        buffer = io.BytesIO()
        np.save(buffer, values, **options)
        return buffer.getvalue()

    def shaped(shape):
        buffer = io.BytesIO()
        header = {"descr": "<f8", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(buffer, header)
        return buffer.getvalue() + bytes(24)

    for name, body in (
        ("a pickle", pickle.dumps([1])),
        ("objects", saved(np.array([None, {}]), allow_pickle=True)),
        ("integers", saved(np.zeros(3, np.int64))),
        ("text", saved(np.array(["x" * 99]))),
        ("a huge shape", shaped((10**11,))),
        ("a shape beyond all", shaped((2**60, 2**60))),
        ("not finite", saved(np.full(3, np.nan))),
        ("an archive", b"PK\x03\x04" + bytes(60)),
    ):
        yield name, partial(with_head, body=body)


def _first(wire, kind):
    """The first object of a kind; None where the reply has none."""
    return next((one for one, known in wire.kinds().items() if known == kind), None)


def _put(wire, kind, change):
    one = _first(wire, kind)
    return wire if one is None else _changed(wire, objects={**wire.objects, one: change(wire.objects[one])})


def _gone(wire, kind):
    return _changed(wire, gone={_first(wire, kind)})


def _endless(wire, kind, size):
    return _changed(wire, endless={_first(wire, kind): size})


def _changed(wire, **values):
    changed = copy.copy(wire)
    changed.__dict__.update(values)
    return changed


def headers_damaged():
    """Cases that change the header that the SuperLink hands out, or the tree of objects."""

    def of(header=lambda header: None, tree=lambda tree: None):
        def damage(wire):
            made = ProtoMessage.FromString(wire.header.SerializeToString())
            grown = ObjectTree.FromString(wire.tree.SerializeToString())
            header(made)
            tree(grown)
            return _changed(wire, header=made, tree=grown)

        return damage

    def deep(tree):
        for _ in range(60):
            tree = tree.children.add(object_id="1" * 64)

    yield "header: answers nothing", of(lambda header: setattr(header.metadata, "reply_to_message_id", ""))
    yield "header: answers another", of(lambda header: setattr(header.metadata, "reply_to_message_id", "f" * 64))
    yield "header: another root", of(lambda header: setattr(header.metadata, "message_id", "f" * 64))
    yield "header: no metadata", of(lambda header: header.ClearField("metadata"))
    yield "header: 3 MB of text", of(lambda header: setattr(header.error, "reason", "x" * 3_000_000))
    yield "tree: another root", of(tree=lambda tree: setattr(tree, "object_id", "f" * 64))
    yield "tree: nothing", of(tree=lambda tree: tree.Clear())
    yield "tree: root alone", of(tree=lambda tree: tree.ClearField("children"))
    yield "tree: 9,000 objects", of(tree=lambda tree: [tree.children.add(object_id=f"{n:064x}") for n in range(9000)])
    yield "tree: 60 deep", of(tree=deep)


def messages_damaged(others=(2**40, 77)):
    """Cases in which a reply is well-formed and says of itself what is not true."""

    def sent(change):
        def damage(wire, message):
            change(message.metadata.__dict__)
            made = wire_of(message)
            made.header.metadata.CopyFrom(wire.header.metadata)
            made.header.metadata.message_id = made.root
            return made

        return damage

    for other in others:
        yield f"sender {other}", sent(lambda metadata, other=other: metadata.update(_src_node_id=other))
    for name, value in (
        ("_reply_to_message_id", ""),
        ("_reply_to_message_id", "f" * 64),
        ("_run_id", 99),
        ("_dst_node_id", 99),
        ("_ttl", float("nan")),
        ("_ttl", -1.0),
        ("_created_at", float("inf")),
        ("_message_type", "x" * 100_000),
        ("_group_id", "\x1b[2J" * 1000),
    ):
        yield f"{name} {str(value)[:9]!r}", sent(lambda metadata, n=name, v=value: metadata.update({n: v}))


def errors():
    """Cases in which the answer is an error."""

    def sent(error):
        def damage(wire, message):
            asked = Message(RecordDict(), message.metadata.src_node_id, message.metadata.message_type)
            asked.metadata.__dict__["_message_id"] = message.metadata.reply_to_message_id
            return wire_of(Message(error, reply_to=asked))

        return damage

    for code in (-(2**31), -1, 0, 2, 4, 5, 6, 7, 1001, 1009, 1013, 1015, 5555, 2**31 - 1):
        yield f"error {code}", sent(Error(code, "\x1b[2J fitins. protocol version 999999999"))
    for reason in ("x" * 900_000, "x" * 10_000_000, "", "\n" * 1000, "\0"):
        yield f"reason of {len(reason)}", sent(Error(1001, reason))


def values_damaged(message):
    """Cases that change one entry of one record, or a whole record."""

    def sent(change):
        def damage(wire, message):
            content = RecordDict({key: message.content[key].copy() for key in message.content})
            change(content)
            made = Message(content, 1, message.metadata.message_type)
            made.__dict__["_metadata"] = message.metadata
            return wire_of(made)

        return damage

    for key, record in message.content.items():
        yield f"{key}: missing", sent(lambda content, key=key: content.pop(key))
        odd = ODD_NUMBERS if isinstance(record, MetricRecord) else ODD_ENTRIES
        if not isinstance(record, ConfigRecord | MetricRecord):
            yield f"{key}: a config", sent(lambda content, key=key: content.update({key: ConfigRecord({"a": 1})}))
            yield f"{key}: metrics", sent(lambda content, key=key: content.update({key: MetricRecord({"a": 1})}))
            continue
        for entry in record:
            yield f"{key}.{entry}: missing", sent(lambda content, key=key, entry=entry: content[key].pop(entry))
            for value in odd:
                if isinstance(record, MetricRecord) and isinstance(value, bool):
                    continue
                yield (
                    f"{key}.{entry}: {str(value)[:9]!r}",
                    sent(lambda content, key=key, entry=entry, value=value: content[key].update({entry: value})),
                )
        many = {str(number): number for number in range(5000)}
        yield f"{key}: many entries", sent(lambda content, key=key, many=many: content[key].update(many))


def cases(message, seed=0):
    """All cases of an honest reply: pairs of a name and ``damage(wire, message)``, for any reply like it."""
    kinds = sorted(set(wire_of(message).kinds().values()), key=KINDS.index)
    for name, damage in [*objects_damaged(kinds, seed), *headers_damaged()]:
        yield name, lambda wire, message, damage=damage: damage(wire)
    yield from messages_damaged()
    yield from errors()
    yield from values_damaged(message)
