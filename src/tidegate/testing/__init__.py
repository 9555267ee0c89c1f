"""What tests of Tidegate, and of programs that use it, are built from.

| module | holds |
|---|---|
| `fixtures` | pytest plugin: `manual_clock`, `tidegate_log` (loaded by itself, imports nothing heavy) |
| `faults` | watchers that fail, tear, crash and record file effects |
| `crash_states`, `recording` | what a power cut may leave of a recorded run |
| `building` | record batches byte by byte in plain Python; the canary workload |
"""
