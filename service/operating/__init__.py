"""What is done to a running job: settings, days, rows that go; and what it knows of one key."""
