"""Flower's records in tests: all that is in them, and all that could be changed in them."""

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord


def shown(records):
    """Everything that is in records, as text."""
    return {
        key: [(name, type(value).__name__, repr(value)) for name, value in record.items()]
        for key, record in records.items()
    }


def changed_in_every_way(records):
    """Change records in every way a ClientApp could: values in them, entries of them, and which there are."""
    for record in records.values():
        for name, value in list(record.items()):
            if isinstance(value, list):
                value.append(value[0])
            elif isinstance(value, Array):
                value.data, value.shape = b"", (7,)
            elif isinstance(value, str):
                record[name] = "changed"
        if isinstance(record, ArrayRecord):
            record["new"] = Array(np.ones(1))
        else:
            record["new"] = 1
        del record[next(iter(record))]
    records["new"] = MetricRecord({"a": 1})
    del records[next(iter(records))]
