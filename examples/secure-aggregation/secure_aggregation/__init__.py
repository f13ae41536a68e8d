"""Three hospitals and an auditor: the server sees sums of three releases, and no single one."""
