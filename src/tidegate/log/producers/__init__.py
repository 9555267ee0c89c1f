"""Who wrote what: idempotent sequences, transactions, and their snapshots."""
