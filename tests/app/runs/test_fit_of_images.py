"""``fit`` of a folder of images and of a column of texts."""

import json
from io import BytesIO

import numpy as np
import pytest
from murmurfl.app import load_model
from murmurfl.app.data.features import FEATURES
from murmurfl.app.data.table_task import folder_schema
from murmurfl.app.runs.fit_summary import summary_of_fit
from murmurfl.clients.records.client_records import table_rows
from murmurfl.clients.records.drafting import document, draft, draft_of_rows
from murmurfl.clients.records.encoders import TEXT_DIMENSION
from murmurfl.clients.records.image_folders import ImageFolder
from murmurfl.privacy import ConfigurationError
from murmurfl.privacy.errors import MurmurflError

from murmurfl import fit
from tests.harness.errors import raises

Image = pytest.importorskip("PIL.Image")

SEED = 11
SETTINGS = {"seed": SEED, "strategy": "full-batch", "num_rounds": 3}


def packed(pixels):
    out = BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def photos(folder, per_class=30, sites=("",)):
    """Bright stripes across for cats, and down for dogs."""
    random = np.random.Generator(np.random.Philox(key=6))
    for site in sites:
        for kind in ("cat", "dog"):
            where = folder / site / kind
            where.mkdir(parents=True)
            for number in range(per_class):
                stripes = np.sin(np.arange(24) * random.uniform(1.2, 1.8)) * 80
                pixels = 120 + (stripes[:, None, None] if kind == "cat" else stripes[None, :, None])
                noisy = pixels + random.normal(0, 10, (24, 24, 3))
                (where / f"{number:03}.png").write_bytes(packed(np.clip(noisy, 0, 255).astype(np.uint8)))
    return folder


def test_folder_is_fitted_as_a_table_and_predicts_a_folder(tmp_path):
    folder = photos(tmp_path / "photos", sites=("north", "south"))
    result = fit(folder, site="site", epsilon=8, trust="secure-aggregation", **SETTINGS)
    assert result.table.rows == 120
    assert result.outcome.accuracy > 0.85  # guessing has 0.85 of 24 in one of 4,000 cases
    assert result.guarantee.epsilon == pytest.approx(8, abs=0.01)
    where = result.save(tmp_path / "model")
    assert 'kind = "image"' in (where / "schema.toml").read_text()
    predicted = load_model(where).predict(folder / "north")
    assert np.mean(predicted == np.repeat(["cat", "dog"], 30)) > 0.85
    assert "one with centring" in json.dumps(json.loads((where / "card.json").read_text())["pipeline"])


def test_features_of_a_folder_follow_from_epsilon_and_its_public_size(tmp_path):
    folder = photos(tmp_path / "photos")
    (folder / "cat" / "notes.txt").write_text("no image")
    encoders = []
    for epsilon in (1, 80):
        result = fit(folder, epsilon=epsilon, clients=2, trust="secure-aggregation", **SETTINGS)
        encoders.append(result.table.schema.columns["image"].encoder)
        assert (result.outcome.centring is not None) == (epsilon == 80)  # a mean of 60 rows is noise at epsilon 1
    assert encoders == ["colour-24", "colour"]
    with_image = photos(tmp_path / "other", per_class=31)
    (with_image / "dog" / "030.png").unlink()
    assert folder_schema(ImageFolder(folder), mu=1.0) == folder_schema(ImageFolder(with_image), mu=1.0)


def test_real_fit_of_a_folder_treats_a_strange_file_as_zero(tmp_path, capfd):
    """The whole way from the file on: what is printed, counted and booked is the same, whatever the file holds."""
    seen = []
    for number, content in enumerate((None, b"no image")):
        folder = photos(tmp_path / f"{number}" / "photos")
        if content is not None:
            (folder / "cat" / "007.png").write_bytes(content)
        schema = tmp_path / "schema.toml"
        if not number:
            drafted = fit(folder, epsilon=8, clients=2, **SETTINGS).table.schema
            schema.write_text(document(drafted.model_copy(update={"reviewed": True})))
            capfd.readouterr()
        result = fit(folder, schema=schema, real=True, epsilon=8, strategy="trusted-full-batch", num_rounds=3)
        assert (tmp_path / f"{number}" / "photos.ledger").exists()
        assert result.table.rows == 60
        seen.append((str(result).replace(f"{tmp_path}/{number}", ""), capfd.readouterr(), result.guarantee.epsilon))
    assert seen[0][1:] == seen[1][1:]
    assert "no image" not in seen[1][0]


@pytest.mark.parametrize("columns", [("note",), ("note", "age")])
def test_real_fit_of_texts_shows_nothing_of_a_strange_one(tmp_path, capfd, columns):
    seen = []
    schema = tmp_path / "schema.toml"
    for number, note in enumerate((b"fever", b"", b"\xff\xfe", b"x" * 300_000, b"\xed\xa0\x80", b"1e999", b'a"b')):
        file = tmp_path / f"{number}" / "notes.csv"
        file.parent.mkdir()
        rows = [[row["note"].replace(",", "").encode(), b"%d" % row["age"], row["ill"].encode()] for row in visits(60)]
        rows[7][0] = note
        lines = [b"note,age,ill", *map(b",".join, rows)]
        if len(columns) == 1:
            lines = [b"note,ill", *(b",".join(row[::2]) for row in rows)]
        file.write_bytes(b"\n".join(lines) + b"\n")
        if not number:
            drafted = fit(file, label="ill", text="note", epsilon=8, clients=2, **SETTINGS).table.schema
            schema.write_text(document(drafted.model_copy(update={"reviewed": True})))
        capfd.readouterr()
        own = {
            "strategy": "trusted-full-batch",
            "num_rounds": 3,
            **({"centring": "private"} if len(columns) == 1 else {}),
        }
        result = fit(file, schema=schema, real=True, epsilon=8, **own)
        assert (result.outcome.centring is not None) == (len(columns) == 1)
        seen.append((str(result).replace(f"{tmp_path}/{number}", ""), capfd.readouterr(), result.guarantee.epsilon))
    assert all(one[1:] == seen[0][1:] for one in seen)


def test_folder_that_a_ledger_knows_may_not_change(tmp_path, monkeypatch):
    secrets = []

    def noted(rows, secret):
        secrets.append(secret)
        return in_secret_order(rows, secret)

    in_secret_order = ImageFolder.in_secret_order
    monkeypatch.setattr(ImageFolder, "in_secret_order", noted)
    folder = photos(tmp_path / "photos")
    schema = fit(folder, epsilon=8, clients=2, **SETTINGS).table.schema.model_copy(update={"reviewed": True})
    own = {"schema": schema, "real": True, "strategy": "trusted-full-batch", "num_rounds": 2}
    fit(folder, epsilon=1, budget=4, **own)
    fit(folder, epsilon=1, **own)
    (folder / "cat" / "008.png").write_bytes(packed(np.zeros((24, 24, 3), np.uint8)))
    with pytest.raises(MurmurflError, match="rows"):
        fit(folder, epsilon=1, **own)
    assert len(secrets) == 3
    assert len(set(secrets)) == 1  # each fit with one ledger puts files into the same places
    assert len(secrets[0]) >= 32


NOTES = {
    "no": ("routine check, no complaints", "feels well today", "vaccination, all fine"),
    "yes": ("high fever since monday", "fever and a bad cough", "cough at night, fever"),
}


def visits(count=240):
    random = np.random.Generator(np.random.Philox(key=7))
    labels = ["yes" if one else "no" for one in random.random(count) < 0.5]
    return [
        {"note": str(random.choice(NOTES[label])), "age": float(random.integers(20, 80)), "ill": label}
        for label in labels
    ]


@pytest.mark.parametrize("columns", [("note",), ("note", "age")])
def test_text_is_learnt_alone_and_next_to_other_columns(tmp_path, columns):
    table = [{name: row[name] for name in (*columns, "ill")} for row in visits()]
    result = fit(table, label="ill", text="note", epsilon=8, clients=2, trust="secure-aggregation", **SETTINGS)
    assert list(result.table.schema.columns) == (["note"] if len(columns) == 1 else ["age", "note"])
    assert result.outcome.accuracy > 0.9
    where = result.save(tmp_path / "model")
    assert (result.outcome.centring is not None) == (len(columns) == 1)
    refused = "one with centring" if len(columns) == 1 else "one of texts or images"
    assert refused in json.dumps(json.loads((where / "card.json").read_text())["pipeline"])
    model = load_model(where)
    rest = {"age": 50.0} if "age" in columns else {}
    assert model.predict([{"note": "fever, cough", **rest}, {"note": "all well", **rest}]).tolist() == ["yes", "no"]


def test_dimension_and_centring_of_texts_follow_from_epsilon_and_public_sizes(tmp_path):
    table = [{"note": row["note"], "ill": row["ill"]} for row in visits()]
    found = []
    for trust, epsilon, clients in (("secure-aggregation", 1, 5), ("secure-aggregation", 8, 5), ("", 8, 20)):
        asked = {"epsilon": epsilon, "clients": clients, "trust": trust}
        result = fit(table, label="ill", text="note", **asked, **SETTINGS)
        found.append((result.table.schema.columns["note"].dimension, result.outcome.centring is not None))
    assert found == [(256, False), (512, True), (256, False)]
    other = [{**row, "note": "another text"} for row in table]
    drafts = [draft_of_rows(table_rows(rows), "", label="ill", text=["note"], mu=1.0) for rows in (table, other)]
    assert drafts[0].schema.columns["note"] == drafts[1].schema.columns["note"]
    page = tmp_path / "notes.csv"
    page.write_text("note,ill\n" + "".join(f"{row['note'].replace(',', '')},{row['ill']}\n" for row in table))
    assert draft(page, label="ill", text=["note"]).schema.columns["note"].dimension == TEXT_DIMENSION


@pytest.mark.parametrize(
    "settings", [{"strategy": "trusted-sgd", "batch_selection": "poisson"}, {"strategy": "online"}]
)
def test_methods_without_centring_train_on_texts_as_they_are(settings):
    trust = "trusted-server" if "batch_selection" in settings else ""
    table = [{"note": row["note"], "ill": row["ill"]} for row in visits(60)]
    result = fit(table, label="ill", text="note", epsilon=8, clients=2, trust=trust, seed=SEED, **settings)
    assert result.outcome.centring is None


def test_text_that_a_schema_reads_otherwise_is_refused():
    table = visits(40)
    schema = fit(table, label="ill", text=["note"], epsilon=8, clients=2, **SETTINGS).table.schema
    with raises(ConfigurationError, "mismatch", "text", got="age"):
        fit(table, schema=schema, text="age")
    with raises(ConfigurationError, "conflict", "text", got="ill"):
        fit(table, label="ill", text="ill")
    with raises(ConfigurationError, "conflict", "model"):
        fit(table, label="ill", text="note", model="additive")


def test_folder_is_encoded_by_features_that_are_named(tmp_path):
    folder = photos(tmp_path / "photos", per_class=12)
    result = fit(folder, features="soft-gradients", epsilon=8, clients=2, **SETTINGS)
    column = result.table.schema.columns["image"]
    assert column.encoder == "soft-gradients"
    assert column.dimension == FEATURES["soft-gradients"](np.zeros((1, 32, 32), np.uint8), 255).shape[1]


@pytest.mark.parametrize(("outer", "setting"), [(("train", "test"), None), (("animals",), "path")])
def test_classes_one_level_deeper_are_refused_with_what_to_do(tmp_path, outer, setting):
    folder = photos(tmp_path / "photos", per_class=12, sites=outer)
    with raises(ConfigurationError, "out-of-range", setting, match="--site site"):
        fit(folder, epsilon=8, clients=2, **SETTINGS)
    assert fit(folder / outer[0], epsilon=8, clients=2, **SETTINGS).table.rows == 24


def test_odd_names_hidden_files_and_a_class_of_one_image_are_read(tmp_path):
    folder = photos(tmp_path / "my photos", per_class=12)
    for number, file in enumerate(sorted((folder / "cat").iterdir())):
        file.rename(file.with_name(f"cat {number}.PNG"))
    (folder / "a fish").mkdir()
    (folder / "a fish" / "only one.JPG").write_bytes((folder / "dog" / "000.png").read_bytes())
    (folder / ".git").mkdir()
    for name in (".DS_Store", "Thumbs.db"):
        (folder / name).touch()
        (folder / "dog" / name).touch()
    result = fit(folder, epsilon=8, clients=2, **SETTINGS)
    assert result.table.schema.label.classes == ("a fish", "cat", "dog")
    assert result.table.rows == 27  # the two files among the dogs are rows that do not fit
    assert sum(result.table.invalid_records.values()) == 2
    _, lines = summary_of_fit(result, result.table, result.save(tmp_path / "a model"))
    assert f"`murmurfl predict '{tmp_path}/a model' FOLDER`" in dict(lines)["saved"]


def test_site_without_a_class_and_a_class_without_images_are_trained_with(tmp_path):
    folder = photos(tmp_path / "photos", per_class=12, sites=("north", "south"))
    for file in (folder / "south" / "cat").iterdir():
        file.unlink()
    (folder / "south" / "cat").rmdir()
    (folder / "north" / "fish").mkdir()
    result = fit(folder, site="site", epsilon=8, **SETTINGS)
    assert result.table.schema.label.classes == ("cat", "dog", "fish")
    assert (result.table.rows, result.outcome.num_clients) == (36, 2)
