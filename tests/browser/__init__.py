"""The console in a real browser, against real instances."""
