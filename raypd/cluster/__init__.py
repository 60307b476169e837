"""Ray, and nothing that works without it: the driver, its workers, the ledger."""
