"""A SuperLink's store of objects, in which no member settles what belongs to another's object.

Flower keeps the parts of messages by their digest, and believes whoever announces one first which parts lie below it.
Most requests can be worked out beforehand (a first model of zeros; round, name and acknowledgement). A member that
announced such a part with others below it made Flower refuse the server's own request, and that ended the training.

Here an announcement binds nobody: the last one counts until the part itself is there, whose bytes say what is below.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import (
    get_object_head_values_from_object_content,
    is_valid_sha256_hash,
    iterate_object_tree,
)
from flwr.supercore.object_store import object_store_factory
from flwr.supercore.object_store.sql_object_store import SqlObjectStore
from flwr.supercore.state.schema.objectstore_models import ObjectChild, StoredObject
from sqlalchemy import delete, insert, select, update


class OwnObjects(SqlObjectStore):
    """Flower's store in a database; an object's children are those that its content names, whoever announced others."""

    def preregister(self, run_id: int, object_tree: ObjectTree) -> list[str]:
        with self._mutation_session():
            for node in iterate_object_tree(object_tree):  # children come before what they belong to
                if is_valid_sha256_hash(node.object_id):
                    self._add(node.object_id)
                    self._settle(node.object_id, [child.object_id for child in node.children])
            return super().preregister(run_id, object_tree)

    def put(self, object_id: str, object_content: bytes) -> None:
        with self._mutation_session():
            if self._awaited(object_id) and self.verify:
                super().put(object_id, object_content)  # checks the digest and that the head can be read
                children = get_object_head_values_from_object_content(object_content)[1]
                for child in children:
                    self._add(child)
                self._replace(object_id, children)
            else:
                super().put(object_id, object_content)

    def _awaited(self, object_id: str) -> bool:
        with self.session() as session:
            query = select(StoredObject.is_available).where(StoredObject.object_id == object_id)
            return session.scalar(query) == 0

    def _add(self, object_id: str) -> None:
        """Announce an object that is not known."""
        statement: Any = self.dialect_insert(StoredObject)
        values = statement.values(object_id=object_id, content=b"", is_available=0, ref_count=0)
        with self.session() as session:
            session.execute(values.on_conflict_do_nothing(index_elements=[StoredObject.object_id]))

    def _settle(self, object_id: str, children: list[str]) -> None:
        """Take an announcement of an object that is not there yet; of another one Flower compares it."""
        if self._awaited(object_id) and len(children) == len(set(children)):
            self._replace(object_id, children)

    def _replace(self, object_id: str, children: Iterable[str]) -> None:
        """Have exactly these objects below another one."""
        own = ObjectChild.parent_id == object_id
        with self.session() as session:
            before, now = set(session.scalars(select(ObjectChild.child_id).where(own))), set(children)
            for child in before - now:
                session.execute(delete(ObjectChild).where(own, ObjectChild.child_id == child))
                self._count(child, -1)
            for child in now - before:
                session.execute(insert(ObjectChild).values(parent_id=object_id, child_id=child))
                self._count(child, 1)

    def _count(self, object_id: str, change: int) -> None:
        """Count how many objects one lies below."""
        row = update(StoredObject).where(StoredObject.object_id == object_id)
        with self.session() as session:
            session.execute(row.values(ref_count=StoredObject.ref_count + change))


def keep_own_objects() -> None:
    """Have a SuperLink of this process keep its objects so."""
    object_store_factory.SqlObjectStore = OwnObjects  # type: ignore[misc]
