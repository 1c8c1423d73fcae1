"""The store: RocksDB, on one partition of one read model."""
