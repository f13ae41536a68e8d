"""A net of one's own from a file: read without running anything, and no image sees another."""

import pickle

import numpy as np
import pytest
from murmurfl.app.data.features import FEATURES, save_features
from murmurfl.app.runs.experiment import prepare
from murmurfl.app.settings.run_config import RunConfig
from murmurfl.privacy import ConfigurationError

from tests.harness.errors import raises

torch = pytest.importorskip("torch")
nn = torch.nn
IMAGES = np.random.Generator(np.random.Philox(key=3)).integers(0, 17, size=(6, 8, 8), dtype=np.uint8)


def net():
    module = nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(64, 10),
        nn.Tanh(),
    )
    with torch.no_grad():  # no default weight, and no draw from the global generator that a test could rest on
        for number, values in enumerate(module.parameters()):
            values.copy_(torch.linspace(-0.2, 0.2 + 0.1 * number, values.numel()).reshape(values.shape))
        module[0][1].running_mean.copy_(torch.tensor([0.1, -0.2, 0.3, 0.4]))
    return module


@pytest.fixture
def path(tmp_path):
    save_features(net(), tmp_path / "net.pt")
    return tmp_path / "net.pt"


def test_a_file_gives_what_its_module_gives_in_rows_of_norm_one(path):
    rows = FEATURES[str(path)](IMAGES, 16)
    with torch.no_grad():
        expected = net().eval()(torch.from_numpy(IMAGES / np.float32(16))[:, None]).numpy()
    assert rows == pytest.approx(expected / np.linalg.norm(expected, axis=1, keepdims=True), abs=1e-5)
    assert FEATURES[str(path)].norm_bound == 1.0


def test_batch_normalisation_is_frozen_so_that_no_image_sees_another(path):
    rows = FEATURES[str(path)](IMAGES, 16)
    others = IMAGES[::-1].copy() // 2
    others[4] = IMAGES[2]
    assert FEATURES[str(path)](others, 16)[4] == pytest.approx(rows[2], abs=1e-6)


def test_the_check_would_see_normalisation_over_the_batch(path):
    """The planted bug: the same module as it is in training."""
    features = type(FEATURES[str(path)])(str(path))
    features._module.train()
    rows, others = features(IMAGES, 16), IMAGES[::-1].copy() // 2
    others[4] = IMAGES[2]
    assert np.abs(features(others, 16)[4] - rows[2]).max() > 1e-3


def test_a_run_is_made_on_them(path):
    data = prepare(RunConfig.from_mapping({"features": str(path)})).data
    assert data.num_features == 10


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ([nn.LayerNorm(4)], "got LayerNorm"),
        ([nn.BatchNorm2d(4, track_running_stats=False)], "would mix samples"),
        ([nn.Flatten(0)], "start_dim = 1"),
        ([nn.Conv2d(1, 2, 3), nn.Identity(), nn.LSTM(2, 2)], "got LSTM"),
        ([nn.Flatten(), nn.AdaptiveAvgPool2d(1)], "would mix images"),
    ],
)
def test_other_layers_are_refused_by_name(layers, said, tmp_path):
    with raises(ConfigurationError, "unsupported", match=said):
        save_features(nn.Sequential(*layers), tmp_path / "net.pt")
    assert not (tmp_path / "net.pt").exists()


class Bad:
    ran = False

    def __reduce__(self):
        return (exec, ("from pathlib import Path; Path('ran').touch()",))


@pytest.mark.parametrize(
    "held",
    [
        None,
        b"nonsense",
        Bad(),
        {"layers": [["Bad", {}]], "state": [{}]},
        {"layers": [["Linear", {"in_features": 2, "out_features": 2, "device": "meta"}]], "state": [{}]},
        {"layers": [["Linear", {"in_features": 2, "out_features": 2}]], "state": [{}]},
        {"layers": [["ReLU", {}]], "state": []},
        [1],
    ],
)
def test_a_file_that_is_none_is_refused_and_never_run(held, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if isinstance(held, bytes):
        (tmp_path / "net.pt").write_bytes(held)
    elif isinstance(held, Bad):
        (tmp_path / "net.pt").write_bytes(pickle.dumps(held, protocol=2))
    elif held is not None:
        torch.save(held, tmp_path / "net.pt")
    with pytest.raises(ConfigurationError, match=r"Expected (features = 'net\.pt'|a layer)"):
        RunConfig(features="net.pt")
    assert not (tmp_path / "ran").exists()


def test_a_layer_of_maps_behind_one_that_makes_rows_is_refused_because_it_mixes_images(tmp_path):
    """Pooled to one value, PyTorch takes the rows of all images for one map, and says nothing."""
    pooled = nn.Sequential(nn.Flatten(), nn.AdaptiveAvgPool2d(1))(torch.from_numpy(IMAGES / np.float32(16)))
    assert pooled.numel() == 1, "of six images"
    torch.save(
        {"layers": [["Flatten", {}], ["AdaptiveAvgPool2d", {"output_size": 1}]], "state": [{}, {}]}, tmp_path / "n.pt"
    )
    with raises(ConfigurationError, "unsupported", match="behind Flatten"):
        RunConfig(features=str(tmp_path / "n.pt"))


def test_images_that_do_not_fit_are_refused(path):
    with raises(ConfigurationError, "failed", "features", match="to take images of 5 x 5"):
        FEATURES[str(path)](np.zeros((2, 5, 5), np.uint8), 16)
