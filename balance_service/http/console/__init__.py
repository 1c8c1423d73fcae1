"""The console: a page in a browser that shows the service to people. `page` holds its files, unchanged."""
