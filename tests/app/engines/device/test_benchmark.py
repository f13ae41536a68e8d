"""The table of speeds says of a GPU what was measured on one, and nothing else."""

from benchmarks import device

ROW = {"machines": 20, "parameters": 1_000_000, "device": 30.0, "one_core": 60.0}


def test_the_device_table_names_the_cpu_without_a_gpu():
    table = device.table({"gpu": "", "backend": "torch-cpu", "rows": [ROW]})
    assert "| 1,000,000 | 20 | not measured: no GPU was found | 60 | |" in table
    assert "PyTorch's CPU backend on one core, the same path without a GPU: 30 at d = 1,000,000 updates/s." in table
    assert "0.5" not in table


def test_with_a_gpu_the_table_has_its_name_and_the_ratio():
    table = device.table({"gpu": "Some GPU", "backend": "cuda", "rows": [{**ROW, "device": 1_800.0}]})
    assert "Some GPU, updates/s" in table
    assert "| 1,000,000 | 20 | 1,800 | 60 | 30.0 |" in table
    assert "not measured" not in table
