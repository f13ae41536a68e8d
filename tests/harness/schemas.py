"""An operator's samples in a file, with the reviewed schema that a real node reads them by."""

import numpy as np
from murmurfl.clients import Column, Label, Part, Schema
from murmurfl.clients.records.drafting import document


def array_schema(shape, *, bounds=(-10, 10), classes=2, **more):
    """What a record is whose inputs are one array."""
    return Schema(
        inputs=(Part(shape=tuple(shape), bounds=bounds),), label=Label(classes=classes), reviewed=True, **more
    )


def write_schema(path, shape, **said):
    """A reviewed schema of arrays in a file."""
    path.write_text(document(array_schema(shape, **said)))
    path.chmod(0o644)


def write_samples(folder, features, labels, *, samples="samples.npz", **said):
    """Samples and their schema in a folder, and what an operator's file there says of them."""
    np.savez(folder / samples, features=features, labels=labels)
    write_schema(folder / "schema.toml", np.shape(features)[1:], **said)
    return {"samples": str(folder / samples), "schema": str(folder / "schema.toml"), "num-records": len(features)}


def write_table(folder, features, labels):
    """``patients.csv`` and its reviewed ``schema.toml`` in a folder, by which its numbers stay as they are."""
    names = [f"x{i}" for i in range(features.shape[1])]
    table = np.column_stack([features, labels])
    header = ",".join([*names, "label"])
    np.savetxt(folder / "patients.csv", table, delimiter=",", header=header, comments="", fmt="%.17g")
    schema = Schema(
        columns={name: Column(kind="number", bounds=(-1, 1)) for name in names},
        label=Label(column="label", classes=tuple(str(label) for label in range(int(labels.max()) + 1))),
        reviewed=True,
    )
    (folder / "schema.toml").write_text(document(schema))
    for name in ("patients.csv", "schema.toml"):
        (folder / name).chmod(0o600)
