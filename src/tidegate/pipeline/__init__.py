"""Stream processing: define an app, plan and execute its rounds, commit and deliver the results."""
