"""What the page shows and the HTTP API answers: one module for each subject, from public objects to documents."""
