"""The ledger: what a client must remember so that it never spends the same privacy twice.

Spend before you speak: a release, its nonce, the samples it used up and what has not been acknowledged are committed
before the reply leaves. A crash in between wastes a release; it never repeats one.

Read :mod:`.ledger_records` first, then :mod:`.sqlite`, the ledger of a real node, whose file is :mod:`.ledger_file`.
What an operator does to it is in :mod:`.repair`, what one reads from it in :mod:`.ledger_history`.
"""
