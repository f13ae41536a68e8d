"""Parts of messages in a SuperLink's database: what one member announces never binds the server or another member."""

import hashlib
import shutil
from contextlib import suppress

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.object_store import object_store_factory
from murmurfl.app.fleet.servers.objects import OwnObjects, keep_own_objects

REQUEST = RecordDict({"config": ConfigRecord({"client": "a"}), "arrays": ArrayRecord({"w": Array(np.zeros(3))})})
OTHER = RecordDict({"config": ConfigRecord({"client": "b"}), "arrays": ArrayRecord({"w": Array(np.zeros(3))})})
PARTS = [node.object_id for node in iterate_object_tree(get_object_tree(REQUEST))]
BELOW = [one for one in PARTS if one != get_object_tree(REQUEST).object_id]
"""Parts below the first one, which in a message names the time and cannot be worked out beforehand."""
RUN = 1


def made_up(*children, what="liar"):
    """An object that nobody has, above others."""
    return ObjectTree(object_id=hashlib.sha256(what.encode()).hexdigest(), children=children)


def lie(part):
    """A reply that announces a part of the request with another part below it."""
    return made_up(ObjectTree(object_id=part, children=[made_up(what="below")]))


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    path = tmp_path_factory.mktemp("objects") / "superlink.db"
    OwnObjects(str(path)).initialize()
    return path


@pytest.fixture
def store(tmp_path, empty):
    made = OwnObjects(str(shutil.copy(empty, tmp_path)))
    made.initialize()
    return made


def put(store, record):
    for object_id, one in get_all_nested_objects(record).items():
        store.put(object_id, one.deflate())


def whole(store, record):
    """Whether a record can be pulled: its tree is its own, and everything in it is there."""
    tree = get_object_tree(record)
    found = {node.object_id for node in iterate_object_tree(store.get_object_tree(tree.object_id))}
    return found == set(get_all_nested_objects(record)) and all(store.get(one) for one in found)


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_a_member_announced_falsely_is_taken_from_its_sender(part, store):
    store.preregister(RUN, lie(part))
    assert set(store.preregister(RUN, get_object_tree(REQUEST))) == set(PARTS)
    put(store, REQUEST)
    assert whole(store, REQUEST)


@pytest.mark.parametrize("part", PARTS)
def test_a_false_announcement_before_the_upload_is_undone_by_it(part, store):
    store.preregister(RUN, get_object_tree(REQUEST))
    store.preregister(RUN, lie(part))
    put(store, REQUEST)
    assert whole(store, REQUEST)


@pytest.mark.parametrize("part", PARTS)
def test_of_a_part_that_is_there_nothing_else_is_believed(part, store):
    store.preregister(RUN, get_object_tree(REQUEST))
    put(store, REQUEST)
    with pytest.raises(ValueError, match="different children"):
        store.preregister(RUN, lie(part))
    assert whole(store, REQUEST)


@pytest.mark.parametrize("part", BELOW)
def test_a_liar_that_confirms_its_reply_takes_nothing_of_others_away(part, store):
    store.preregister(RUN, lie(part))
    store.preregister(RUN, get_object_tree(REQUEST))
    put(store, REQUEST)
    store.preregister(RUN, get_object_tree(OTHER))
    put(store, OTHER)
    with suppress(ValueError):
        store.preregister(RUN, lie(part))
    store.delete(lie(part).object_id)
    store.delete(get_object_tree(OTHER).object_id)
    assert whole(store, REQUEST)
    store.delete(get_object_tree(REQUEST).object_id)
    assert not any(one in store for one in PARTS)


def test_messages_go_in_and_out_as_in_flowers_own_store(store):
    for record in (REQUEST, OTHER):
        store.preregister(RUN, get_object_tree(record))
        put(store, record)
    assert whole(store, REQUEST)
    assert whole(store, OTHER)
    store.delete_objects_in_run(RUN)
    assert len(store) == 0


def test_a_superlink_with_a_database_has_this_store(tmp_path, monkeypatch):
    monkeypatch.setattr(object_store_factory, "SqlObjectStore", object_store_factory.SqlObjectStore)
    keep_own_objects()
    made = object_store_factory.ObjectStoreFactory(str(tmp_path / "superlink.db")).store()
    assert isinstance(made, OwnObjects)
