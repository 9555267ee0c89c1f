"""Reading a table: queries, results, changes, explanations."""
