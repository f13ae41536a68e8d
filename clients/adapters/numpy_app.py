"""A Message-API ClientApp from a ``NumPyClient``.

Flower's own ``ClientApp(client_fn)`` knows only the legacy record keys, so a Message-API strategy gets a ``KeyError``
from every node. Errors here are the fixed text of a refusal, or one fixed sentence, because Flower forwards the texts
of exceptions, which can carry data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.client import Client, NumPyClient
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod

from ...privacy import ConfigurationError, RefusedError, protocol
from ...privacy.protocol import read_array
from ..messages.answers import answer, array_record, entry_records, reply_content
from ..private_client import PrivateClient

ClientFunction = Callable[[Context], NumPyClient | Client]


def numpy_client_app(client_fn: ClientFunction, mods: list[Mod] | None = None) -> ClientApp:
    """A Message-API ``ClientApp`` from a function that makes a ``NumPyClient``.

    Parameters
    ----------
    client_fn : callable
        ``client_fn(context) -> NumPyClient`` (or its ``.to_client()``), as in Flower's legacy API.
    mods : list of Mod, optional
        Flower mods around every message.

    Returns
    -------
    ClientApp
        Train messages call ``fit``, evaluate messages ``evaluate`` and queries ``get_properties``, with the arrays of
        the message and its config. A reply has one ArrayRecord ``arrays``, under the message's names where there are
        as many, and one MetricRecord ``metrics`` with ``num-examples``; entries that are no numbers go to a
        ConfigRecord ``config``.

    Notes
    -----
    What leaves is what the client returns, as it returns it. With this package's clients that is private. An exception
    never leaves the machine: a refusal sends its fixed text, anything else one fixed sentence, with the details in the
    machine's own log.
    """
    return serving(ClientApp(mods=mods or []), client_fn)


def serving(app: ClientApp, client_fn: ClientFunction) -> ClientApp:
    """The app, with the functions of :func:`numpy_client_app` for its messages."""
    for kind, register in (("train", app.train), ("evaluate", app.evaluate), ("query", app.query)):
        register()(_handler(client_fn, kind))
    return app


def handled(client_fn: ClientFunction, kind: str, content: RecordDict, context: Context) -> RecordDict:
    """The content of a reply to a message of a kind: train, evaluate or query; raises what the client refuses with."""
    return {"train": _train, "evaluate": _evaluate, "query": _query}[kind](_client(client_fn, context), content)


def _handler(client_fn: ClientFunction, kind: str) -> Callable[[Message, Context], Message]:
    def handle(message: Message, context: Context) -> Message:
        return answer(message, lambda: handled(client_fn, kind, message.content, context))

    return handle


def _client(client_fn: ClientFunction, context: Context) -> NumPyClient:
    client = client_fn(context)
    # `NumPyClient.to_client()` keeps the client it wraps; the wrapper itself speaks the legacy messages only.
    inner = getattr(client, "numpy_client", client)
    if not isinstance(inner, NumPyClient):
        raise ConfigurationError(f"Expected client_fn to return a NumPyClient, got {type(client).__name__}.")
    return inner


def _request(content: RecordDict) -> tuple[list[Any], dict[str, Any]]:
    arrays: list[Any] = []
    for key in (protocol.ARRAYS, protocol.PREVIOUS_ARRAYS):
        record = content.get(key, None)
        if isinstance(record, ArrayRecord):
            try:
                arrays += [read_array(array.dtype, array.shape, array.data) for array in record.values()]
            except (TypeError, ValueError) as error:
                raise RefusedError(
                    protocol.MALFORMED_REQUEST, "malformed request: the arrays cannot be read"
                ) from error
    config = content.get(protocol.CONFIG, None)
    return arrays, dict(config.items()) if isinstance(config, ConfigRecord) else {}


def _train(client: NumPyClient, content: RecordDict) -> RecordDict:
    arrays, config = _request(content)
    if config.get(protocol.ASK) == protocol.ASK_HELLO and not isinstance(client, PrivateClient):
        return RecordDict()  # no mod is around this client: who greets it finds that out from an answer without a name
    results, num_examples, metrics = client.fit(arrays, config)
    records = entry_records({**metrics, protocol.NUM_EXAMPLES: num_examples})
    names = list(content[protocol.ARRAYS]) if isinstance(content.get(protocol.ARRAYS, None), ArrayRecord) else []
    names = names if len(names) == len(results) else [str(i) for i in range(len(results))]
    return reply_content({**records, protocol.ARRAYS: array_record(names, results)})


def _evaluate(client: NumPyClient, content: RecordDict) -> RecordDict:
    arrays, config = _request(content)
    loss, num_examples, metrics = client.evaluate(arrays, config)
    return RecordDict(entry_records({**metrics, "loss": float(loss), protocol.NUM_EXAMPLES: num_examples}))


def _query(client: NumPyClient, content: RecordDict) -> RecordDict:
    _, config = _request(content)
    return RecordDict({protocol.CONFIG: ConfigRecord(dict(client.get_properties(config)))})
