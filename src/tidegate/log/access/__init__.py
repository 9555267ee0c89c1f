"""A folder of topics as users meet it: `Log`, writers, readers, locks and what other processes see."""
