"""How records leave: retention, compaction, and whoever runs them."""
