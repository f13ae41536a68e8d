"""Audits: what a run's clients or a real node leak, measured beside what they claim (``murmurfl audit``)."""
