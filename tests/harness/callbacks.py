"""Functions as callbacks of a training."""

from murmurfl.strategies import Callback


class AfterRound(Callback):
    """Call a function with the report and the metrics of every round."""

    def __init__(self, function):
        self._function = function

    def after_round(self, training, report, metrics):
        self._function(report, metrics)


class Excluding(Callback):
    """Exclude the clients that a function names, given the number of rounds that are over."""

    def __init__(self, function):
        self._function = function

    def exclude(self, training):
        return self._function(len(training.history))
