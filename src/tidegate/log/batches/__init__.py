"""Record batches: bytes to Arrow and back, one codec for readers, writers, compaction and the tools."""
