"""Real machines: their operators' files, the SuperNodes that carry their messages, and a demonstration of both."""
