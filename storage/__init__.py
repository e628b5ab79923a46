"""Storage remembers: records, object stores, the trajectory store, the ledger of policy versions, the channel."""
