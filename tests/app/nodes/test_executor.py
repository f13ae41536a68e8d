"""How often a node asks its SuperNode for messages."""

import pytest
from murmurfl.app.nodes.executor import pause_s


def test_a_node_asks_often_while_messages_come_and_seldom_when_none_does():
    assert pause_s(0.0) == pause_s(5.0) == 0.1
    assert pause_s(3600.0) == 1.0


@pytest.mark.parametrize("idle_s", [5.0, 20.0, 60.0, 600.0])
def test_a_message_waits_at_most_a_fiftieth_of_the_time_before_it(idle_s):
    assert pause_s(idle_s) <= idle_s / 50
