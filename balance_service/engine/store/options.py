"""How RocksDB is set up, and what all stores of one process share of it."""

from __future__ import annotations

from rocksdict import BlockBasedOptions, Cache, DBCompressionType, Options, WriteBufferManager

_CACHE_BYTES = 64 << 20
_WRITE_BUFFERS_BYTES = 64 << 20
_BLOOM_BITS_PER_KEY = 10
# One cache and one budget for all stores of the process, so that memory does not grow with partitions.
_CACHE = Cache(_CACHE_BYTES)
_WRITE_BUFFERS = WriteBufferManager(_WRITE_BUFFERS_BYTES, allow_stall=False)
_open_files = 512


def limit_open_files(most: int) -> None:
    """How many files each store that is opened from now on may keep open."""
    global _open_files  # of the process, as the cache is
    _open_files = most


def rocksdb_options() -> Options:
    """Of a store."""
    table = BlockBasedOptions()
    table.set_block_cache(_CACHE)
    table.set_bloom_filter(_BLOOM_BITS_PER_KEY, block_based=False)
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_block_based_table_factory(table)
    options.set_write_buffer_manager(_WRITE_BUFFERS)
    options.set_compression_type(DBCompressionType.lz4())
    options.set_max_open_files(_open_files)
    options.set_keep_log_file_num(2)
    return options


def block_cache_bytes() -> int:
    """What the block cache of all stores of this process holds now."""
    return int(_CACHE.get_usage())
