"""Takes a message from a SuperNode in its parts, so that a large model is in memory once and not three times.

Flower cuts an array into chunks of 5 MiB, each an object of its own below the array's. Its own executor pulls all
chunks of a message, and keeps them until the last array is put together. Here an array is put together as soon as its
chunks are there, and they are forgotten before the next array's are pulled.
"""

from __future__ import annotations

from collections.abc import Callable

from flwr.app import Message
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import InflatableObject
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects

_FIRST_BACKOFF_S = 0.1
_LONGEST_BACKOFF_S = 1.0


def pulled_message(tree: ObjectTree, pull: Callable[[str], bytes]) -> Message:
    """The message of an object tree.

    Parameters
    ----------
    tree : ObjectTree
        Of the message, from a server that is not trusted.
    pull : callable
        The content of an object, by its id.

    Raises
    ------
    TypeError, ValueError, KeyError
        If the objects are not those of a message.
    """
    message = _made(tree, pull, {})
    if not isinstance(message, Message):
        raise TypeError(f"Expected the objects of a message, got those of a {type(message).__name__}.")
    return message


def _made(tree: ObjectTree, pull: Callable[[str], bytes], whole: dict[str, InflatableObject]) -> InflatableObject:
    """An object from its content and its children; ``whole`` are those with children that were made before."""
    if tree.object_id in whole:
        return whole[tree.object_id]  # the same array twice travels once
    children = {child.object_id: _made(child, pull, whole) for child in tree.children if child.children}
    leaves = {child.object_id for child in tree.children if not child.children}
    contents = pull_objects(
        [tree.object_id, *sorted(leaves - {tree.object_id})],
        pull,
        max_tries_per_object=None,
        initial_backoff=_FIRST_BACKOFF_S,
        backoff_cap=_LONGEST_BACKOFF_S,
    )
    made = inflate_object_from_contents(tree.object_id, contents, objects=children)
    if tree.children:
        whole[tree.object_id] = made
    return made
