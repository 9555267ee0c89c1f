"""What an app has committed, read by any process: windows as tables, late records, dead letters."""
