"""Audits: what a run's machines or a real node leak, measured beside what they claim (``murmurfl audit``)."""
