"""The test kit for programs that use Tidegate; docs/guides/test-your-own-code.md shows how to use it.

| module | holds |
|---|---|
| `fixtures` | pytest plugin: `manual_clock`, `tidegate_log` (pytest loads it; it imports nothing heavy) |
| `faults` | watchers that make file operations fail, tear writes or kill the process |
| `crash_states` | a recording of file operations, and the folder trees that a power cut may leave |
| `batches` | record batches byte by byte in plain Python; the canary workload |
"""
