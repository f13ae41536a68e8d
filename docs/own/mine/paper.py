"""A paper of our own: the cells of its table."""

from murmurfl.app.papers import Cell, Paper
from murmurfl.app.papers.accuracy import AccuracyTable


class Mine(Paper):
    """Averaged SGD beside noisy SGD, on data of our own."""

    name = "mine-2026"
    sentence = "averaged SGD beside noisy SGD on tumours"
    seeds = 2
    table = AccuracyTable()

    def cells(self):
        settings = {"task": "mine.task:make_task", "num-clients": 4, "clients-per-round": 4, "num-rounds": 5}
        algorithms = {
            "averaged": {"strategy": "mine.strategy:Averaged", "mechanism": "mine.mechanism:HalfCancelling"},
            "noisy SGD": {"strategy": "noisy-sgd"},
        }
        printed = {"averaged": {"accuracy": 90.0}}  # in percent, as our paper has it
        return [Cell("tumours", {**settings, "mu": mu}, algorithms, printed) for mu in (2.0, 8.0)]
