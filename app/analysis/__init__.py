"""What a policy would mean before a run (``plan``), and what a run's machines leak (``audit``)."""
