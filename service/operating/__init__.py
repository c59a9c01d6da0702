"""Changes and shows the rows and tables of a job: settings, days, shrinks, deletions, explanations."""
