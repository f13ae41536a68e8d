"""Side releases, the machine's half."""

from .centring_client import Centring
from .evaluation_client import Evaluation
from .side_parts import SideRelease
from .statistics_client import Counting

SIDE_RELEASES: tuple[type[SideRelease], ...] = (Centring, Counting, Evaluation)
"""All kinds, in the order in which a machine makes them."""
